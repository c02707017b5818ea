"""`tastemaker report`: one page about one run or several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ..core import output_paths
from .page import write_report


def write_and_announce_report(runs: Sequence[Path], out: Path | None, console: Console) -> Path:
    """Write the page and say where it is."""
    path = write_report(runs, out and output_paths.check_output_file(out))
    console.print(f"the report is {path}", markup=False, highlight=False, soft_wrap=True)
    return path
