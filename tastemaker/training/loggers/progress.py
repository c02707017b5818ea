"""Progress of a run: a live display on a terminal, and a plain line every few seconds elsewhere."""

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

from ...console import make_console
from ..events import (
    CheckpointSaved,
    Event,
    GuardChecked,
    SamplesGenerated,
    StepCompleted,
    TrainingFinished,
    TrainingStarted,
)

LABELS = {
    "reward/mean": "reward",
    "loss/policy": "loss",
    "loss": "loss",
    "kl": "KL",
    "grad_norm": "grad norm",
    "lr": "lr",
}
RELATIVE_REWARD = "relative_reward/"  # of SRPO, by branch
LINE_INTERVAL = 5.0  # seconds between plain lines


class ProgressLogger:
    """Shows steps, reward, loss, KL, gradient norm, samples per second and the remaining time."""

    def __init__(
        self,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        frames: int = 1,
        remaining_time: Callable[[], str] | None = None,  # shown instead of the remaining time of this run
    ) -> None:
        self._console, self._clock = console or make_console(stderr=True), clock
        self._remaining_time = remaining_time
        self._live: Live | None = None
        self._started = TrainingStarted(0, 1, Path(), 0)
        self._start_time = self._last_line = clock()
        self._throughput = Throughput()
        self._first: StepCompleted | None = None
        self._last: StepCompleted | None = None
        self._checkpoint: Path | None = None
        self._noun = _sample_noun(frames)
        self._warned = False
        self._guard_rewards: list[float] = []  # on the guard's fixed prompts

    def log(self, event: Event) -> None:
        if isinstance(event, TrainingStarted):
            self._start(event)
        elif isinstance(event, StepCompleted):
            self._first, self._last = self._first or event, event
            self._throughput.add(event)
            self._print_line()
        elif isinstance(event, SamplesGenerated):
            self._noun = _sample_noun(event.pixels.shape[1])
        elif isinstance(event, GuardChecked):
            if event.warning and not self._warned:
                self._print(f"warning, step {event.step}: {event.warning}", "yellow")
            self._warned = event.warning is not None
            self._guard_rewards += [event.metrics["reward/mean"]] if "reward/mean" in event.metrics else []
        elif isinstance(event, CheckpointSaved):
            self._checkpoint = event.path
        elif isinstance(event, TrainingFinished):
            self.close()
            self._print(self._summary(event))

    def close(self) -> None:
        if self._live:
            self._live.stop()
        self._live = None

    def _start(self, event: TrainingStarted) -> None:
        self.close()
        self._started, self._start_time = event, self._clock()
        self._last_line = self._start_time - LINE_INTERVAL
        resumed = f" from step {event.step}" if event.step else ""
        parameters = f"{event.trainable_parameters:,} trainable parameters"
        self._print(f"{event.directory}: {event.steps} steps{resumed}, {parameters}")
        for note in event.notes:
            self._print(f"note: {note}", "dim")
        if self._console.is_terminal:
            self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4, transient=True)
            self._live.start()

    def _print_line(self) -> None:
        """Print a plain line if there is no live display and the last line is old enough."""
        done = self._last is not None and self._last.step >= self._started.steps
        if self._live or not (done or self._clock() - self._last_line >= LINE_INTERVAL):
            return
        self._last_line = self._clock()
        words = [f"step {self._steps()}", *self._metrics(), self._speed(), self._remaining()]
        self._print("  ".join(word for word in words if word))

    def _render(self) -> Group:
        bar = Table.grid(expand=True, padding=(0, 1))
        bar.add_column(ratio=1)
        done = self._last.step if self._last else self._started.step
        speed, left = Text(self._speed(), "cyan"), Text(self._remaining(), "dim")
        bar.add_row(ProgressBar(self._started.steps, done), Text(self._steps(), "bold"), speed, left, style=None)
        lines = [
            Text("  ".join(words), overflow="ellipsis", no_wrap=True) for words in (self._metrics(), self._rewards())
        ]
        return Group(bar, *(line for line in lines if line.plain))

    def _steps(self) -> str:
        return f"{self._last.step if self._last else self._started.step}/{self._started.steps}"

    def _metrics(self) -> list[str]:
        metrics = self._last.metrics if self._last else {}
        words = [f"{label} {metrics[name]:.4g}" for name, label in LABELS.items() if name in metrics]
        return [*self._other_rewards(), *words]

    def _other_rewards(self) -> list[str]:
        """Return the guard's last reward and the mean of SRPO's relative rewards, if steps have no reward."""
        metrics = self._last.metrics if self._last else {}
        relative = [value for name, value in metrics.items() if name.startswith(RELATIVE_REWARD)]
        if "reward/mean" in metrics:
            return []
        words = [f"reward {self._guard_rewards[-1]:.4g}"] if self._guard_rewards else []
        return [*words, *([f"relative reward {sum(relative) / len(relative):.4g}"] if relative else [])]

    def _rewards(self) -> list[str]:
        """Return each reward, if there are several."""
        metrics = self._last.metrics if self._last else {}
        rewards = {name.removeprefix("rewards/"): x for name, x in metrics.items() if name.startswith("rewards/")}
        return [f"{name} {value:.4g}" for name, value in rewards.items()] if len(rewards) > 1 else []

    def _speed(self) -> str:
        return f"{self._throughput.samples_per_second:.3g} {self._noun}/s" if self._last else "starting"

    def _remaining(self) -> str:
        if self._remaining_time is not None:
            return self._remaining_time()
        if self._last is None or not self._started.step < self._last.step < self._started.steps:
            return ""
        elapsed = self._clock() - self._start_time  # with sampling and saving, unlike the seconds of steps
        left = elapsed / (self._last.step - self._started.step) * (self._started.steps - self._last.step)
        return f"{timedelta(seconds=round(left))} left"

    def _summary(self, event: TrainingFinished) -> str:
        elapsed = timedelta(seconds=round(self._clock() - self._start_time))
        words = []
        if self._first and self._last:
            name = next(name for name in ("reward/mean", "loss/policy", "loss") if name in self._last.metrics)
            ends = [update.metrics[name] for update in (self._first, self._last) if name in update.metrics]
            if name != "reward/mean" and self._guard_rewards:
                name, ends = "reward/mean", [self._guard_rewards[0], self._guard_rewards[-1]]
            words.append(f"{LABELS[name]} {' -> '.join(f'{value:.4g}' for value in ends)}")
        words += [f"took {elapsed}", *([f"saved in {self._checkpoint}"] if self._checkpoint else [])]
        return f"{event.reason} ({', '.join(words)})"

    def _print(self, line: str, style: str | None = None) -> None:
        self._console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def _sample_noun(frames: int) -> str:
    return "images" if frames == 1 else "videos"


class Throughput:
    """Samples per second as an exponential moving average over steps."""

    def __init__(self, decay: float = 0.9) -> None:
        self._decay, self._samples, self._seconds = decay, 0.0, 0.0

    def add(self, event: StepCompleted) -> None:
        self._samples = self._decay * self._samples + event.samples
        self._seconds = self._decay * self._seconds + event.seconds

    @property
    def samples_per_second(self) -> float:
        return self._samples / self._seconds if self._seconds else 0.0
