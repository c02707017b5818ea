"""`tastemaker demo`: evaluate, train, evaluate again and write the report, in one process and resumable."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ..config.load import load
from ..config.schema import RunConfig
from ..console import print_next_steps
from ..core import output_paths
from ..core.registry import ConfigError
from ..core.safe_files import read_json, read_json_object
from ..evaluation.benchmark_run import EvaluationOptions, evaluate_model, is_evaluated, load_benchmark
from ..evaluation.evaluate import REPORT, StageProgress
from ..report.page import write_report
from ..search.generation import resolve_source
from ..training import checkpoint, run_directory
from ..training.events import CheckpointSaved, Event, GuardChecked, SamplesGenerated, StepCompleted, TrainingStarted
from ..training.loop import is_due
from ..training.trainer import own_directory, run_training

# Ratios of costs, used until the cost itself is measured. They depend on the recipe, hardly on the machine.
TRAINING = 2.0  # one training sample, with its gradient, in evaluation images
SCORING = 0.2  # scoring and summarizing an image, in evaluation images
RECENT = 10  # training steps that are averaged


def format_seconds(seconds: float) -> str:
    """Seconds in words, rounded to what an estimate is worth: '45 s', '3 min 20 s', '1 h 5 min'."""
    if seconds < 60:
        return f"{max(5, 5 * round(seconds / 5))} s" if seconds < 57 else "1 min"
    if seconds < 3600 - 5:
        minutes, rest = divmod(10 * round(seconds / 10), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


class DemoTimer:
    """Estimates the remaining time of evaluation, training and second evaluation.

    In the first evaluation the estimate rests on the images per second after the first batch; the cost of a training
    step is derived from it. From the second training step on, measured seconds per step replace that. The first batch
    and the first step are left out, for they include one-time work. The second evaluation is as long as the first.
    """

    def __init__(
        self, config: RunConfig, images: int, *, evaluation_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._config, self._images, self._clock = config, images, clock
        self.evaluation_seconds = evaluation_seconds  # of the first evaluation, once it is complete
        self._stage = 1
        self._evaluated: StageProgress | None = None
        self._step = self._first_step = 0
        self._seconds_per_image: float | None = None
        self._steps: deque[float] = deque(maxlen=RECENT)  # seconds of each
        self._others: dict[type[Event], float] = {}  # seconds of the last sampling, guard check and checkpoint
        self._last = clock()  # time of the last event
        self._remaining: float | None = None

    def start(self, stage: int) -> None:
        """Stage 1 is the first evaluation, 2 the training, 3 the second evaluation, 4 the report."""
        self._stage, self._evaluated = stage, None
        self._update()

    def see_evaluation(self, done: StageProgress) -> None:
        before, seconds = self._evaluated, self._clock() - self._last
        if before is not None and before.stage == done.stage == "samples" and done.completed > before.completed:
            self._seconds_per_image = seconds / (done.completed - before.completed)
        self._evaluated = done
        self._update()

    def log(self, event: Event) -> None:
        """Observe the training run."""
        seconds = self._clock() - self._last
        if isinstance(event, TrainingStarted):
            self._first_step = event.step
        elif isinstance(event, StepCompleted):
            if event.step > self._first_step + 1:
                self._steps.append(seconds)
        elif isinstance(event, SamplesGenerated | GuardChecked | CheckpointSaved):
            self._others[type(event)] = seconds
        self._step = event.step
        self._update()

    def close(self) -> None:
        return None

    def remaining(self) -> float | None:
        """Seconds until the demo ends; None before anything is measured."""
        if self._remaining is None:
            return None
        return max(self._remaining - (self._clock() - self._last), 0.0)

    def text(self) -> str:
        """The estimate as a phrase, which says whether training itself has been measured."""
        seconds = self.remaining()
        if seconds is None or (self._stage > 2 and not seconds):
            return ""
        if self._stage == 1 or (self._stage == 2 and not self._steps):
            return f"roughly {format_seconds(seconds)} left in total"
        return f"about {format_seconds(seconds)} left in total (measured)"

    def _update(self) -> None:
        self._last = self._clock()
        training = self._training_left() if self._stage <= 2 else 0.0
        if self._stage == 1:
            parts = [self._evaluation_left(), training, self._evaluation()]
        elif self._stage == 2:
            parts = [training, self._evaluation()]
        else:
            parts = [self._evaluation_left() if self._stage == 3 else 0.0]
        known = [part for part in parts if part is not None]
        self._remaining = sum(known) if len(known) == len(parts) else None

    def _evaluation(self) -> float | None:
        """Seconds of a whole evaluation."""
        if self.evaluation_seconds is not None:
            return self.evaluation_seconds
        return None if self._seconds_per_image is None else self._images * self._seconds_per_image * (1 + SCORING)

    def _evaluation_left(self) -> float | None:
        whole, done = self._evaluation(), self._evaluated
        if whole is None or done is None:
            return whole
        sampling = whole / (1 + SCORING)
        if done.stage == "samples":
            return whole - sampling * done.completed / done.total
        return (whole - sampling) * (1 - done.completed / done.total / 2) if done.stage == "scores" else 0.0

    def _training_left(self) -> float | None:
        config, left = self._config, range(self._step + 1, self._config.steps + 1)
        per_image = self._seconds_per_image
        if self._steps:
            step = sum(self._steps) / len(self._steps)
        elif per_image is not None:
            step = TRAINING * per_image * config.batch.prompts * config.objective.group_size
        else:
            return None
        others = (
            (SamplesGenerated, config.sample.every, config.sample.count),
            (GuardChecked, config.guard.interval(config.steps), config.guard.prompts * config.guard.samples_per_prompt),
            (CheckpointSaved, config.checkpoint.every, 0),
        )
        total = len(left) * step
        for kind, every, images in others:
            times = sum(is_due(done, every, config.steps) for done in left)
            times += (
                self._step == 0 and every > 0 and kind is not CheckpointSaved and kind not in self._others
            )  # before step 1
            total += times * self._others.get(kind, images * (per_image or 0.0))
        return total


RECIPE = "reward-gradient-playground"
TIMES = "demo.json"  # seconds spent in each stage, over all calls
PAGE = "report.html"
STAGES = 4


@dataclass
class Demo:
    """One demo in one directory."""

    recipe: RunConfig  # as evaluated before training
    config: RunConfig  # as trained, in `out`
    out: Path
    evaluation: EvaluationOptions
    console: Console
    timer: DemoTimer = field(init=False)
    announced: bool = False  # whether the log has the first estimate

    def __post_init__(self) -> None:
        images = len(self.evaluation.benchmark) * self.evaluation.benchmark.samples_per_prompt
        complete = is_evaluated(self.recipe, None, self.evaluation, self.out / "evaluations/before")
        spent = read_times(self.out).get("before") if complete else None
        self.timer = DemoTimer(self.config, images, evaluation_seconds=spent)

    def run(self) -> bool:
        """Go through the stages that are not finished; False if training was interrupted."""
        prompts = len(self.evaluation.benchmark)
        self._evaluate(1, f"evaluate the model before training (PlayEval, {prompts} prompts)", "before", None)
        if not self._train():
            return False
        title = "evaluate the trained model with a detector that was not used as the reward"
        self._evaluate(3, title, "after", checkpoint.latest_checkpoint(self.out))
        self._report()
        self._summarize()
        return True

    def _evaluate(self, stage: int, title: str, name: str, checkpoint_path: Path | None) -> None:
        out = self.out / "evaluations" / name
        config = self.recipe if checkpoint_path is None else resolve_source(str(self.out), [])[0]
        if is_evaluated(config, checkpoint_path, self.evaluation, out):
            return self._announce(stage, f"{title}: already done")
        self._announce(stage, title)
        with self._timed(name):
            evaluate_model(
                config,
                checkpoint_path,
                self.evaluation,
                out,
                tiny=False,
                console=self.console,
                progress_note=self._note,
            )
        if stage == 1:
            self.timer.evaluation_seconds = read_times(self.out)[name]
        return None

    def _note(self, done: StageProgress) -> str:
        """The estimate, to be shown beside the progress bar; a log file gets it once, as a line."""
        self.timer.see_evaluation(done)
        text = self.timer.text()
        if text and not self.announced and not self.console.is_terminal:
            self._print(text)
        self.announced = self.announced or bool(text)
        return text

    def _train(self) -> bool:
        title = f"train for {self.config.steps} steps; the reward is a detector's verdict on each image"
        latest = checkpoint.latest_checkpoint(self.out)
        if latest is not None and latest.name == f"step-{self.config.steps:06d}":
            self._announce(2, f"{title}: already done")
            return True
        self._announce(2, title)
        with self._timed("train"):
            return run_training(self.config, console=self.console, timer=self.timer)

    def _report(self) -> None:
        page, scores = self.out / PAGE, self.out / "evaluations/after" / REPORT
        if page.is_file() and page.stat().st_mtime_ns >= scores.stat().st_mtime_ns:
            return self._announce(4, "write the report: already done")
        self._announce(4, "write the report")
        with self._timed("report"):
            write_report([self.out])
        return None

    def _summarize(self) -> None:
        reports = [self.out / "evaluations" / name / REPORT for name in ("before", "after")]
        scores: list[dict[str, Any]] = [read_json(path)["scores"] for path in reports]
        before, after = (float(each["strict"]["overall"]["mean"]) for each in scores)
        minutes, seconds = divmod(round(sum(read_times(self.out).values())), 60)
        spent = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
        self._print(f"\nStrict PlayEval score: {before:.3f} before -> {after:.3f} after training. Total time: {spent}.")
        self._print(f"Report, with images before and after: {(self.out / PAGE).resolve()}")
        print_next_steps(
            f'tastemaker generate {self.out} --prompt "a photo of a red car and a blue cup" --count 4',
            "tastemaker train nft-playground",
        )

    def _announce(self, stage: int, title: str) -> None:
        self.timer.start(stage)
        self._print(f"{stage} of {STAGES}: {title}", "bold")

    def _print(self, line: str, style: str | None = None) -> None:
        self.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        """Add the seconds within the block to those of earlier calls, also if it is interrupted."""
        began = time.monotonic()
        try:
            yield
        finally:
            times = read_times(self.out)
            times[stage] = times.get(stage, 0.0) + time.monotonic() - began
            self.out.mkdir(parents=True, exist_ok=True)
            (self.out / TIMES).write_text(json.dumps(times), encoding="utf-8")


def run_demo(out: Path, overrides: Sequence[str], *, prompts: int, console: Console) -> bool:
    """Run the demo or what is left of it; False if training was interrupted."""
    for key in ("name", "output"):
        if any(override.partition("=")[0] == key for override in overrides):
            raise ConfigError(f"demo: `{key}` cannot be set here; choose the directory with --out [TM756]")
    output_paths.check_output_directory(out)
    out = out if out.name not in ("", "..") else out.resolve()  # a run needs a name
    recipe = load(RECIPE, overrides)
    config = replace(recipe, output_dir=out.parent, name=out.name)
    if changed := run_directory.diff_run_config(config, out):
        changes = "; ".join(f"{name}: {change}" for name, change in changed.items())
        raise ConfigError(
            f"--out: {out} already contains a demo with other settings ({changes}); choose another --out, or "
            f"remove {out} [TM757]"
        )
    with own_directory(config.engine, out):
        return Demo(recipe, config, out, EvaluationOptions(load_benchmark("playeval", prompts, None)), console).run()


def read_times(out: Path) -> dict[str, float]:
    """Seconds spent in each stage so far."""
    try:
        return {stage: float(seconds) for stage, seconds in read_json_object(out / TIMES).items()}
    except (ValueError, TypeError):
        return {}
