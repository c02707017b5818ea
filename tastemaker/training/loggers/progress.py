"""How the run goes: a live display on a terminal, now and then a plain line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..events import (
    CheckpointSaved,
    Event,
    GuardChecked,
    SamplesGenerated,
    StepCompleted,
    TrainingFinished,
    TrainingStarted,
)

LABELS = {"reward": "reward", "loss": "loss", "kl": "KL", "grad_norm": "grad norm", "lr": "lr"}
LINE_INTERVAL = 5.0  # seconds between plain lines


class ProgressLogger:
    """Steps, reward, loss, KL, gradient norm, images per second and the time that is left."""

    def __init__(
        self,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        frames: int = 1,
        time_left: Callable[[], str] | None = None,  # shown in place of the time that is left of this run
    ) -> None:
        self._console, self._clock = console or Console(stderr=True), clock
        self._time_left = time_left
        self._live: Live | None = None
        self._started = TrainingStarted(0, 1, Path(), 0)
        self._begun = self._told = clock()
        self._pace = Throughput()
        self._first: StepCompleted | None = None
        self._last: StepCompleted | None = None
        self._saved: Path | None = None
        self._kind = _sample_noun(frames)
        self._warned = False

    def see(self, event: Event) -> None:
        if isinstance(event, TrainingStarted):
            self._start(event)
        elif isinstance(event, StepCompleted):
            self._first, self._last = self._first or event, event
            self._pace.add(event)
            self._tell()
        elif isinstance(event, SamplesGenerated):
            self._kind = _sample_noun(event.pixels.shape[1])
        elif isinstance(event, GuardChecked):
            if event.warning and not self._warned:
                self._print(f"warning, step {event.step}: {event.warning}", "yellow")
            self._warned = event.warning is not None
        elif isinstance(event, CheckpointSaved):
            self._saved = event.path
        elif isinstance(event, TrainingFinished):
            self.close()
            self._print(self._summary(event))

    def close(self) -> None:
        if self._live:
            self._live.stop()
        self._live = None

    def _start(self, event: TrainingStarted) -> None:
        self.close()
        self._started, self._begun = event, self._clock()
        self._told = self._begun - LINE_INTERVAL
        again = f" from step {event.step}" if event.step else ""
        self._print(f"{event.directory}: {event.steps} steps{again}, {event.parameters:,} parameters train")
        if self._console.is_terminal:
            self._live = Live(console=self._console, get_renderable=self._picture, refresh_per_second=4, transient=True)
            self._live.start()

    def _tell(self) -> None:
        """The plain line, where nothing can be drawn over."""
        done = self._last is not None and self._last.step >= self._started.steps
        if self._live or not (done or self._clock() - self._told >= LINE_INTERVAL):
            return
        self._told = self._clock()
        words = [f"step {self._steps()}", *self._numbers(), self._speed(), self._left()]
        self._print("  ".join(word for word in words if word))

    def _picture(self) -> Group:
        bar = Table.grid(expand=True, padding=(0, 1))
        bar.add_column(ratio=1)
        done = self._last.step if self._last else self._started.step
        speed, left = Text(self._speed(), "cyan"), Text(self._left(), "dim")
        bar.add_row(ProgressBar(self._started.steps, done), Text(self._steps(), "bold"), speed, left, style=None)
        lines = [
            Text("  ".join(numbers), overflow="ellipsis", no_wrap=True) for numbers in (self._numbers(), self._parts())
        ]
        return Group(bar, *(line for line in lines if line.plain))

    def _steps(self) -> str:
        return f"{self._last.step if self._last else self._started.step}/{self._started.steps}"

    def _numbers(self) -> list[str]:
        metrics = self._last.metrics if self._last else {}
        return [f"{label} {metrics[name]:.4g}" for name, label in LABELS.items() if name in metrics]

    def _parts(self) -> list[str]:
        """Each reward by itself, where there are several."""
        metrics = self._last.metrics if self._last else {}
        parts = {name.removeprefix("reward/"): x for name, x in metrics.items() if name.startswith("reward/")}
        return [f"{name} {value:.4g}" for name, value in parts.items()] if len(parts) > 1 else []

    def _speed(self) -> str:
        return f"{self._pace.rate:.3g} {self._kind}/s" if self._last else "starting"

    def _left(self) -> str:
        if self._time_left is not None:
            return self._time_left()
        if self._last is None or not self._started.step < self._last.step < self._started.steps:
            return ""
        taken = self._clock() - self._begun  # with sampling and saving, which a step's own seconds leave out
        left = taken / (self._last.step - self._started.step) * (self._started.steps - self._last.step)
        return f"{timedelta(seconds=round(left))} left"

    def _summary(self, event: TrainingFinished) -> str:
        taken = timedelta(seconds=round(self._clock() - self._begun))
        words = []
        if self._first and self._last:
            name = "reward" if "reward" in self._last.metrics else "loss"
            ends = [f"{update.metrics[name]:.4g}" for update in (self._first, self._last) if name in update.metrics]
            words.append(f"{name} {' -> '.join(ends)}")
        words += [f"took {taken}", *([f"saved in {self._saved}"] if self._saved else [])]
        return f"{event.reason} ({', '.join(words)})"

    def _print(self, line: str, style: str | None = None) -> None:
        self._console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def _sample_noun(frames: int) -> str:
    """What samples of so many frames are called."""
    return "images" if frames == 1 else "clips"


class Throughput:
    """Samples per second, recent steps counting most."""

    def __init__(self, keep: float = 0.9) -> None:
        self._keep, self._samples, self._seconds = keep, 0.0, 0.0

    def add(self, event: StepCompleted) -> None:
        self._samples = self._keep * self._samples + event.samples
        self._seconds = self._keep * self._seconds + event.seconds

    @property
    def rate(self) -> float:
        return self._samples / self._seconds if self._seconds else 0.0
