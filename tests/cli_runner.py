"""The command line called in this process, and the code it leaves with."""

from __future__ import annotations

import pytest

from tastemaker.cli import main


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    return int(left.value.code or 0)
