"""report.html, written when a run ends."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ..report.page import write
from ..train.events import Event, Finished, Started


class Pages:
    """Writes the report of the run and says where it is; the last to see an event, for it reads what others wrote."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._directory = Path()

    def see(self, event: Event) -> None:
        if isinstance(event, Started):
            self._directory = event.directory
        elif isinstance(event, Finished):
            path = write([self._directory])
            self._console.print(f"the report is {path}", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        return None
