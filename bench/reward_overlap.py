"""Step time with a judge as slow as sampling: serial scoring against overlapped scoring, with the update.

    python bench/reward_overlap.py                                           # an artificial judge, on any machine
    python bench/reward_overlap.py --device cuda --judges hps --batch-size 64 --steps 2   # a ViT-H/14 on the same GPU
    python bench/reward_overlap.py --device cuda --judges vlm --batch-size 16 --steps 2   # a 7B judge on the same GPU
    python bench/reward_overlap.py --tiny                                    # small networks, for tests

The artificial judge is on the host and takes as long for a rollout batch as the sampler, as a remote judge would. `hps`
is a CLIP ViT-H/14 and `vlm` a judge of 7B parameters, both with random weights on the sampler's device, where they
compete with it. For them the number of sampling steps is raised until sampling takes about as long as judging, and both
times are those of the serial step that warms up, in which the judge's calls are timed.

Two ratios to the longer one of sampling and judging are printed: that of the rollout, which is the step without its
update, and that of the whole step. With n rollout batches no schedule has a rollout below (n + 1) / n, because the last
batch is judged when nothing is left to sample. The update needs all scores, so the whole step is within 1.15 only if
the update takes at most 1.15 - (n + 1) / n of the longer one: 0.07 of it with 12 batches, 0.11 with 24.

`serial` is the time of a step without overlap. Two networks that each fill the GPU cannot be faster together, whatever
the schedule; `hidden` says which part of the shorter one of sampling and judging the overlap has saved.

Other steps, which are not timed, compare weights to the bit: those of overlapped steps and those of two serial runs.
They use `engine.deterministic`, because on a GPU some kernels add up in any order, so that not even two serial runs end
with the same weights. Sections that would begin after --minutes are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from device import device_name, peak_gib, reset_memory, synchronize  # beside this file
from rewards import JUDGE_BATCH_SIZE, build_clip_scorer, build_judge  # beside this file
from torch import Tensor

from tastemaker.config.build import build
from tastemaker.config.load import load
from tastemaker.config.schema import RewardConfig, RunConfig
from tastemaker.core.reward import Reward, RewardCard, RewardSpec
from tastemaker.core.types import Metadata, Placement, Prompts
from tastemaker.training.loop import train_step
from tastemaker.training.run import Run
from tastemaker.vlm.judge import VlmJudge

JUDGES = ("artificial", "hps", "vlm")
ALLOWED = 1.15  # of the longer one of sampling and judging
MAX_SAMPLING_STEPS = 400
MAX_COMPARED_PROMPTS = 40  # of the steps whose weights are compared
COLUMNS = (
    *("sampling", "judging", "update", "serial", "overlapped", "hidden", "rollout serial", "rollout overlapped"),
    *("step serial", "step overlapped", "best possible rollout"),
)
CHECKS = ("rollout within", "step within", "equal weights", "serial repeats", "weights change")


@dataclass(frozen=True)
class SleepingJudge(RewardSpec, Reward):
    """The mean brightness, after as many seconds as a remote judge would need."""

    seconds: float = 0.0  # per sample
    batch_size: int = 1024
    card: ClassVar[RewardCard] = RewardCard(range="0 to 1", failure_modes="bright images")
    runs_on: ClassVar[Literal["host"]] = "host"

    def load(self, placement: Placement) -> SleepingJudge:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        time.sleep(self.seconds * len(pixels))
        return pixels.mean((1, 2, 3, 4))


@dataclass(frozen=True)
class RandomNetwork(RewardSpec):
    """A ViT-H/14 or a 7B judge with random weights, on the device of the sampler."""

    network: Literal["hps", "vlm"]
    small: bool = False
    batch_size: int = JUDGE_BATCH_SIZE
    card: ClassVar[RewardCard] = RewardCard(range="0 to 1", failure_modes="none: its weights are random")

    def load(self, placement: Placement) -> Reward:
        dtype = torch.bfloat16 if placement.device.type == "cuda" else torch.float32
        placement = replace(placement, dtype=dtype)
        if self.network == "hps":
            return TimedJudge(build_clip_scorer("ViT-H/14", placement, self.small))
        return TimedJudge(JudgeScorer(build_judge(placement, self.small)))


@dataclass(frozen=True)
class JudgeScorer(Reward):
    judge: VlmJudge

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        return self.judge.judge_finished(pixels[:, 0], prompts, "orm").score.float()


@dataclass
class TimedJudge(Reward):
    """A judge whose calls can be timed, which makes the host wait for the GPU."""

    judge: Reward
    timing: bool = False
    seconds: float = 0.0

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        if not self.timing:
            return self.judge.score(pixels, prompts, metadata)
        scores: list[Tensor] = []
        self.seconds += seconds(lambda: scores.append(self.judge.score(pixels, prompts, metadata)))
        return scores[0]


def seconds(call: Callable[[], Any]) -> float:
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def measure_sampling(run: Run, steps: int) -> float:
    """Median seconds of sampling the batches of a step; the first call warms up."""

    def collect(step: int) -> None:
        batch = run.data.batch(step, run.batch.prompts, 0, 1)
        with run.engine.autocast():
            run.objective.collect(run.context(step, run.batch.prompts), batch)

    times = [seconds(lambda step=step: collect(step)) for step in range(steps + 1)]  # type: ignore[misc]
    return statistics.median(times[1:])


def measure_judging(run: Run, batches: int, batch_size: int, steps: int) -> float:
    """Median seconds of scoring the batches of a step, without sampling."""
    pixels = torch.rand(batch_size, *run.policy.model.pixels, device=run.engine.device)
    prompts = [f"a red square and {i} circles" for i in range(batch_size)]

    @torch.no_grad()
    def score() -> None:
        for _ in range(batches):
            run.rubric.score(pixels, prompts, group_size=batch_size)

    return statistics.median([seconds(score) for _ in range(steps + 1)][1:])


@dataclass(frozen=True)
class StepTimes:
    """Median seconds of training steps, and those of the parts of the first one if its judge was timed."""

    step: float
    update: float
    sampling: float | None = None
    judging: float | None = None


def measure_steps(run: Run, steps: int, *, timed: bool) -> StepTimes:
    """Time training steps after one that warms up, in which the calls of the judge are `timed`."""
    times, updates, judge = list[float](), list[float](), run.rubric.rewards["judge"].reward
    for step in range(steps + 1):
        if isinstance(judge, TimedJudge):
            judge.timing, judge.seconds = timed and step == 0, judge.seconds if step else 0.0
        start = time.perf_counter()
        event = train_step(run, step).to_event()  # which waits for the GPU
        times.append(time.perf_counter() - start)
        updates.append(event.timings["time/update"])
    medians = statistics.median(times[1:]), statistics.median(updates[1:])
    if not (timed and isinstance(judge, TimedJudge)):
        return StepTimes(*medians)
    return StepTimes(*medians, times[0] - updates[0] - judge.seconds, judge.seconds)


def compare_weights(config: RunConfig, judge: RewardSpec, overlapped: str, folder: Path, steps: int) -> dict[str, bool]:
    """Whether weights after overlapped steps equal those of serial steps, and those of serial steps each other's."""
    few = min(config.batch.prompts, MAX_COMPARED_PROMPTS)
    config = replace(
        config, batch=replace(config.batch, prompts=few), engine=replace(config.engine, deterministic=True)
    )
    initial, weights = list[Tensor](), list[list[Tensor]]()
    for mode in ("never", overlapped, "never"):
        run = build_run(config, judge, mode, folder)  # type: ignore[arg-type]
        initial = trainable_weights(run)
        for step in range(steps):
            train_step(run, step).to_event()
        weights.append(trainable_weights(run))
        del run
    serial, together, again = weights
    return {
        "equal weights": equal(serial, together),
        "serial repeats": equal(serial, again),
        "weights change": not equal(serial, initial),  # equal scores of all samples train nothing
    }


def trainable_weights(run: Run) -> list[Tensor]:
    return [p.detach().clone() for p in run.policy.weights.trainable().values()]


def build_run(config: RunConfig, judge: RewardSpec, overlap: Literal["auto", "always", "never"], folder: Path) -> Run:
    engine = replace(config.engine, overlap_rewards=overlap)
    return build(replace(config, rewards={"judge": RewardConfig(judge)}, engine=engine), folder)


def with_num_steps(config: RunConfig, num_steps: int) -> RunConfig:
    process: Any = config.process
    return replace(config, process=replace(process, num_steps=num_steps))


def measure_section(name: str, config: RunConfig, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The times of one judge."""
    reset_memory()
    samples, steps = options.batches * options.batch_size, options.steps
    sampling = measure_sampling(build_run(config, SleepingJudge(), "never", folder), steps)
    judge: RewardSpec = SleepingJudge(sampling / samples)
    judging, overlapped = sampling, "auto"
    if name != "artificial":
        judge, overlapped = RandomNetwork(name, options.tiny), "always"  # type: ignore[arg-type]
        judged = build_run(config, judge, "never", folder)  # all runs share its judge as long as it exists
        judging = measure_judging(judged, options.batches, options.batch_size, steps)
        process: Any = config.process
        wanted = min(round(process.num_steps * judging / sampling), MAX_SAMPLING_STEPS)
        if wanted > process.num_steps and not options.tiny:
            config = with_num_steps(config, wanted)
            sampling = measure_sampling(build_run(config, SleepingJudge(), "never", folder), steps)
    serial = measure_steps(build_run(config, judge, "never", folder), steps, timed=True)
    together = measure_steps(build_run(config, judge, overlapped, folder), steps, timed=False)  # type: ignore[arg-type]
    sampling, judging = serial.sampling or sampling, serial.judging or judging
    longer, update = max(sampling, judging), (serial.update + together.update) / 2
    return {
        "section": name,
        "recipe": options.recipe,
        "device": device_name() if options.device == "cuda" else "CPU",
        "batches": options.batches,
        "batch size": options.batch_size,
        "sampling steps": config.process.num_steps,  # type: ignore[union-attr]
        "peak GiB": peak_gib(),
        "sampling": sampling,
        "judging": judging,
        "update": update,
        "serial": serial.step,
        "overlapped": together.step,
        "hidden": (serial.step - together.step) / min(sampling, judging),
        "rollout serial": (serial.step - update) / longer,
        "rollout overlapped": (together.step - update) / longer,
        "step serial": serial.step / longer,
        "step overlapped": together.step / longer,
        "best possible rollout": (options.batches + 1) / options.batches,
        "rollout within": together.step - update <= ALLOWED * longer,
        "step within": together.step <= ALLOWED * longer,
        **compare_weights(config, judge, overlapped, folder, steps),
    }


def equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(a.equal(b) for a, b in zip(first, second, strict=True))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("settings", nargs="*", help="of the run, such as engine.cuda_graphs=true")
    parser.add_argument("--recipe", default="grpo-playground-flow")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--judges", default="artificial", help=f"of {', '.join(JUDGES)}")
    parser.add_argument("--batches", type=int, default=12, help="rollout batches of a step")
    parser.add_argument("--batch-size", type=int, default=8, help="samples of a rollout batch")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=8.0, help="no section begins after them")
    parser.add_argument("--tiny", action="store_true", help="small networks")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    return parser.parse_args()


def main() -> None:
    options, start = parse_options(), time.monotonic()
    overrides = [f"engine.device={options.device}", f"batch.rollout_batch_size={options.batch_size}"]
    if options.device == "cuda":  # with `auto` the sampler uses other kernels if rewards score in threads
        overrides.append("engine.attention_backend=flash")
    config = load(options.recipe, [*overrides, "guard.every=0", "sample.every=0", *options.settings])
    assert isinstance(config, RunConfig)
    prompts = options.batches * options.batch_size // config.objective.group_size
    config = replace(config, batch=replace(config.batch, prompts=prompts), steps=options.steps + 1)
    results = []
    print(f"| judge | {' | '.join([*COLUMNS, *CHECKS])} |\n{'|---' * (1 + len(COLUMNS + CHECKS))}|", flush=True)
    for name in options.judges.split(","):
        if time.monotonic() - start > 60 * options.minutes:
            print(f"{name} is left out: more than {options.minutes:g} minutes have passed")
            continue
        with tempfile.TemporaryDirectory() as folder:
            result = measure_section(name, config, options, Path(folder))
        results.append(result)
        cells = [f"{result[column]:.2f}" for column in COLUMNS] + [str(result[check]) for check in CHECKS]
        print(f"| {' | '.join([name, *cells])} |", flush=True)
        if options.out:
            options.out.write_text(json.dumps(results, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
