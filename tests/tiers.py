"""Which parameters of a test are part of every run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def fast(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """Parameters of a test: those chosen are tried in every run, the others in the slow set."""
    found = list(values)
    assert all(value in found for value in chosen), f"{chosen} are not all among {found}"
    return [value if value in chosen else pytest.param(value, marks=pytest.mark.slow) for value in found]
