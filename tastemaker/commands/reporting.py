"""`tastemaker report`: one page about one run or several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ..report.page import write
from . import targets


def report(runs: Sequence[Path], out: Path | None, console: Console) -> Path:
    """Write the page and say where it is."""
    path = write(runs, out and targets.file(out))
    console.print(f"the report is {path}", markup=False, highlight=False, soft_wrap=True)
    return path
