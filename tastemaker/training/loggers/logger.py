"""The logger interface; an error in a logger never stops a run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from rich.console import Console
from rich.markup import escape

from ...console import make_console
from ..events import Event, GuardChecked, SamplesGenerated, StepCompleted


class Logger(Protocol):
    """Receives the events of a run."""

    def log(self, event: Event) -> None: ...
    def close(self) -> None: ...


def logged_metrics(event: Event) -> dict[str, float]:
    """Return the metrics of an event under the names that TensorBoard, Weights & Biases and Trackio have in common."""
    if isinstance(event, StepCompleted):
        return event.scalars()
    if isinstance(event, SamplesGenerated):
        return {f"samples/{name}": value for name, value in event.scores.items()}
    if isinstance(event, GuardChecked):
        return {f"guard/{name}": value for name, value in event.metrics.items()}
    return {}


class LoggerCollection:
    """Passes each event to all loggers; a logger that raises is reported once and removed."""

    def __init__(self, loggers: Sequence[Logger], console: Console | None = None) -> None:
        self._loggers = list(loggers)
        self._console = console or make_console(stderr=True)

    def add(self, logger: Logger) -> None:
        self._loggers.append(logger)

    def log(self, event: Event) -> None:
        for logger in list(self._loggers):
            try:
                logger.log(event)
            except Exception as error:
                self._remove(logger, error)

    def close(self) -> None:
        for logger in list(self._loggers):
            try:
                logger.close()
            except Exception as error:
                self._report(logger, error)
        self._loggers.clear()

    def _remove(self, logger: Logger, error: Exception) -> None:
        self._loggers.remove(logger)
        with suppress(Exception):  # it failed before, which is what gets reported
            logger.close()
        self._report(logger, error)

    def _report(self, logger: Logger, error: Exception) -> None:
        cause = f"{type(error).__name__}: {error}"
        line = escape(f"{type(logger).__name__} failed and is switched off ({cause}); training continues")
        self._console.print(f"[yellow]warning[/] {line}", soft_wrap=True, highlight=False)
