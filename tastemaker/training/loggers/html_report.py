"""Writes report.html when a run ends."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ...console import make_console
from ...report.page import write_report
from ..events import Event, TrainingFinished, TrainingStarted


class HtmlReportLogger:
    """Writes the HTML report and prints its path. It must be the last logger: it reads what the others wrote."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or make_console(stderr=True)
        self._directory = Path()

    def log(self, event: Event) -> None:
        if isinstance(event, TrainingStarted):
            self._directory = event.directory
        elif isinstance(event, TrainingFinished):
            path = write_report([self._directory])
            self._console.print(f"the report is {path}", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        return None
