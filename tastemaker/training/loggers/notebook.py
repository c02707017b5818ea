"""Progress of a run in a Jupyter notebook: a bar, the metrics and the latest samples, updated in place."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from html import escape
from typing import Any

from rich.console import Console

from ...report.figure import draw_samples
from ...report.sample_sets import SampleSet
from ..events import Event, SamplesGenerated, TrainingStarted
from .progress import ProgressLogger

REFRESH_INTERVAL = 0.5  # seconds between two updates of the display
STYLES = {"yellow": "color:#b35c00;font-weight:600", "dim": "opacity:.7"}


class NotebookProgressLogger(ProgressLogger):
    """Shows a progress bar with rate and remaining time, the metrics, warnings, and the latest grid of samples."""

    def __init__(
        self,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        frames: int = 1,
        remaining_time: Callable[[], str] | None = None,
    ) -> None:
        super().__init__(console, clock, frames=frames, remaining_time=remaining_time)
        self._ipython: Any = importlib.import_module("IPython.display")
        self._bar: Any = None  # display handles, which replace what they show
        self._samples: Any = None
        self._messages: list[tuple[str, str | None]] = []

    def log(self, event: Event) -> None:
        super().log(event)
        if isinstance(event, SamplesGenerated):
            self._show_samples(event)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.update(self._html())

    def _start(self, event: TrainingStarted) -> None:
        self._started, self._start_time = event, self._clock()
        self._last_line = self._start_time
        self._messages = [(f"note: {note}", "dim") for note in event.notes]
        self._bar = self._ipython.display(self._html(), display_id=True)

    def _print_line(self) -> None:
        """Update the bar, unless the last update is very recent."""
        done = self._last is not None and self._last.step >= self._started.steps
        if done or self._clock() - self._last_line >= REFRESH_INTERVAL:
            self._last_line = self._clock()
            self._bar.update(self._html())

    def _print(self, line: str, style: str | None = None) -> None:
        """Add a line below the bar."""
        self._messages.append((line, style))
        self._bar.update(self._html())

    def _show_samples(self, event: SamplesGenerated) -> None:
        samples = SampleSet(f"step {event.step}", tuple(event.pixels_with_sources()), event.prompts, means=event.scores)
        figure = draw_samples(samples)
        if self._samples is None:
            self._samples = self._ipython.display(figure, display_id=True)
        else:
            self._samples.update(figure)

    def _html(self) -> Any:
        """Return the bar, the metrics and the messages as HTML."""
        done = self._last.step if self._last else self._started.step
        words = [f"step {self._steps()}", self._speed(), self._remaining()]
        lines = [
            f"<b>{escape(str(self._started.directory))}</b>",
            f'<progress value="{done}" max="{self._started.steps}" style="width:20em"></progress> '
            + escape("  ·  ".join(word for word in words if word)),
            *(escape("  ·  ".join(texts)) for texts in (self._metrics(), self._rewards()) if texts),
            *(f'<span style="{STYLES.get(style or "", "")}">{escape(text)}</span>' for text, style in self._messages),
        ]
        return self._ipython.HTML("<div>" + "<br>".join(lines) + "</div>")
