"""Run the command line in this process and return its exit code."""

from __future__ import annotations

import pytest

from tastemaker.cli import main


def run_cli(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(list(arguments))
    return int(exit_info.value.code or 0)
