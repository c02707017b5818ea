"""`tastemaker demo`: evaluate, train, evaluate again and write the report, in one process and resumable."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ..config.load import load
from ..config.schema import RunConfig
from ..core import output_paths
from ..core.registry import ConfigError
from ..evaluation.benchmark_run import EvaluationOptions, evaluate_model, is_evaluated, load_benchmark
from ..evaluation.evaluate import REPORT, StageProgress
from ..report.output import write_and_announce_report
from ..search.generation import resolve_source
from ..training import checkpoint, resume
from ..training.session import run_training
from .demo_timer import DemoTimer

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
    exam: EvaluationOptions
    console: Console
    timer: DemoTimer = field(init=False)
    announced: bool = False  # whether the log has the first estimate

    def __post_init__(self) -> None:
        images = len(self.exam.benchmark) * self.exam.benchmark.seeds
        complete = is_evaluated(self.recipe, None, self.exam, self.out / "evaluations/before")
        spent = read_times(self.out).get("before") if complete else None
        self.timer = DemoTimer(self.config, images, evaluation_seconds=spent)

    def run(self) -> bool:
        """Go through the stages that are not finished; False if training was interrupted."""
        prompts = len(self.exam.benchmark)
        self._evaluate(1, f"evaluate the model before training (PlayEval, {prompts} prompts)", "before", None)
        if not self._train():
            return False
        title = "evaluate the trained model with a detector that was not used as the reward"
        self._evaluate(3, title, "after", checkpoint.latest(self.out))
        self._report()
        self._summarize()
        return True

    def _evaluate(self, stage: int, title: str, name: str, found: Path | None) -> None:
        out = self.out / "evaluations" / name
        config = self.recipe if found is None else resolve_source(str(self.out), [])[0]
        if is_evaluated(config, found, self.exam, out):
            return self._announce(stage, f"{title}: already done")
        self._announce(stage, title)
        with self._timed(name):
            evaluate_model(config, found, self.exam, out, tiny=False, console=self.console, note=self._note)
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
        found = checkpoint.latest(self.out)
        if found is not None and found.name == f"step-{self.config.steps:06d}":
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
            write_and_announce_report([self.out], None, Console(quiet=True))
        return None

    def _summarize(self) -> None:
        before, after = (strict_score(self.out / "evaluations" / name) for name in ("before", "after"))
        minutes, seconds = divmod(round(sum(read_times(self.out).values())), 60)
        spent = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
        self._print(f"\nStrict PlayEval score: {before:.3f} before -> {after:.3f} after training. Total time: {spent}.")
        self._print(f"Report, with images before and after: {(self.out / PAGE).resolve()}")
        self._print("\nNext, try:")
        self._print(f'  tastemaker generate {self.out} --prompt "a photo of a red car and a blue cup" --count 4')
        self._print("  tastemaker train nft-playground")

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
            raise ConfigError(f"`{key}` cannot be set for the demo; choose its directory with --out")
    output_paths.check_output_directory(out)
    out = out if out.name not in ("", "..") else out.resolve()  # a run needs a name
    recipe = load(RECIPE, overrides)
    config = replace(recipe, output=out.parent, name=out.name)
    if changed := resume.diff_run_config(config, out):
        found = "; ".join(f"{name}: {change}" for name, change in changed.items())
        raise ConfigError(f"{out} holds a demo with other settings ({found}); choose another --out or remove {out}")
    return Demo(recipe, config, out, EvaluationOptions(load_benchmark("playeval", prompts, None)), console).run()


def read_times(out: Path) -> dict[str, float]:
    """Seconds spent in each stage so far."""
    try:
        times: dict[str, float] = json.loads((out / TIMES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return times


def strict_score(evaluation: Path) -> float:
    """The mean strict PlayEval score over all tasks."""
    scores: dict[str, Any] = json.loads((evaluation / REPORT).read_text(encoding="utf-8"))["scores"]
    return float(scores["strict"]["overall"]["mean"])
