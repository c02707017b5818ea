"""Step time with a judge as slow as sampling: serial scoring against overlapped scoring.

    python bench/reward_overlap.py --device cpu --batches 12

An artificial judge on the host takes as long for a rollout batch as the sampler. The script prints the seconds of the
rollout (sampling and scoring, without the update, which has to wait for all scores) divided by the longer of sampling
and judging alone. With n batches no schedule is better than (n + 1) / n, because the last batch is judged when nothing
is left to sample. It also compares the weights after the steps to the bit.
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
from torch import Tensor

from tastemaker.config.build import build
from tastemaker.config.load import load
from tastemaker.config.schema import RewardConfig, RunConfig
from tastemaker.core.reward import Reward, RewardCard, RewardSpec
from tastemaker.core.types import Metadata, Placement, Prompts
from tastemaker.training.loop import train_step
from tastemaker.training.run import Run


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


def measure(run: Run, steps: int) -> float:
    """Median seconds of `collect` over some steps; the first call warms up."""

    def collect(step: int) -> None:
        batch = run.data.batch(step, run.batch.prompts, 0, 1)
        with run.engine.autocast():
            run.objective.collect(run.context(step, run.batch.prompts), batch)
        if run.engine.device.type == "cuda":
            torch.cuda.synchronize()

    return statistics.median(seconds(lambda step=step: collect(step)) for step in range(steps + 1))  # type: ignore[misc]


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def build_run(config: RunConfig, judge: float, overlap: Literal["auto", "never"], folder: Path) -> Run:
    engine = replace(config.engine, overlap_rewards=overlap)
    return build(replace(config, rewards={"judge": RewardConfig(SleepingJudge(judge))}, engine=engine), folder)


def train_weights(run: Run, steps: int) -> list[Tensor]:
    for step in range(steps):
        train_step(run, step).to_event()
    return [p.detach().clone() for p in run.policy.weights.trainable().values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--recipe", default="grpo-playground-flow")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", type=int, default=12, help="rollout batches of a step")
    parser.add_argument("--batch-size", type=int, default=8, help="samples of a rollout batch")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    args = parser.parse_args()
    overrides = [f"engine.device={args.device}", f"batch.rollout_batch_size={args.batch_size}"]
    config = load(args.recipe, [*overrides, "guard.every=0", "sample.every=0"])
    assert isinstance(config, RunConfig)
    samples = args.batches * args.batch_size
    prompts = samples // config.objective.group_size
    config = replace(config, batch=replace(config.batch, prompts=prompts), steps=args.steps)
    with tempfile.TemporaryDirectory() as name:
        sampling = measure(build_run(config, 0.0, "never", Path(name)), args.steps)
        judge = sampling / samples
        rollouts, weights = {}, {}
        for overlap in ("never", "auto"):
            run = build_run(config, judge, overlap, Path(name))
            rollouts[overlap] = measure(run, args.steps)
            weights[overlap] = train_weights(run, args.steps)
    result = {
        "recipe": args.recipe,
        "device": args.device,
        "batches": args.batches,
        "sampling": sampling,
        "judging": judge * samples,
        "serial": rollouts["never"],
        "overlapped": rollouts["auto"],
        "ratio serial": rollouts["never"] / sampling,
        "ratio overlapped": rollouts["auto"] / sampling,
        "best possible": (args.batches + 1) / args.batches,
        "equal weights": all(a.equal(b) for a, b in zip(*weights.values(), strict=True)),
    }
    shown = ["sampling", "judging", "serial", "overlapped", "ratio serial", "ratio overlapped", "best possible"]
    print(f"| {' | '.join([*shown, 'equal weights'])} |\n{'|---' * 8}|")
    print(f"| {' | '.join(f'{result[name]:.2f}' for name in shown)} | {result['equal weights']} |")
    if args.out:
        args.out.write_text(json.dumps(result, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
