"""Run the command line in this process and return its exit code."""

from __future__ import annotations

import sys
from unittest.mock import patch

import pytest

from tastemaker.cli import main


def run_cli(*arguments: str) -> int:
    # An interrupted command ends its process at once if other threads are alive, as those of earlier tests may be.
    with patch("tastemaker.cli.exit_now", sys.exit), pytest.raises(SystemExit) as exit_info:
        main(list(arguments))
    return int(exit_info.value.code or 0)
