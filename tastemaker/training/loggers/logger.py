"""The logger interface; an error in a logger never stops a run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from rich.console import Console
from rich.markup import escape

from ..events import Event


class Logger(Protocol):
    def see(self, event: Event) -> None: ...
    def close(self) -> None: ...


class LoggerCollection:
    """Pass each event to all loggers; one that raises is reported once and removed."""

    def __init__(self, observers: Sequence[Logger], console: Console | None = None) -> None:
        self._observers = list(observers)
        self._console = console or Console(stderr=True)

    def see(self, event: Event) -> None:
        for observer in list(self._observers):
            try:
                observer.see(event)
            except Exception as error:
                self._drop(observer, error)

    def close(self) -> None:
        for observer in list(self._observers):
            try:
                observer.close()
            except Exception as error:
                self._report(observer, error)
        self._observers.clear()

    def _drop(self, observer: Logger, error: Exception) -> None:
        self._observers.remove(observer)
        with suppress(Exception):  # it is broken already, and that is being said
            observer.close()
        self._report(observer, error)

    def _report(self, observer: Logger, error: Exception) -> None:
        who, what = type(observer).__name__, f"{type(error).__name__}: {error}"
        line = escape(f"{who} watches no longer ({what}); the run goes on without it")
        self._console.print(f"[yellow]warning[/] {line}", soft_wrap=True, highlight=False)
