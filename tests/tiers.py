"""Marks for test parameters that only the slow set runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def fast(values: Iterable[Any], *selected: Any) -> list[Any]:
    """Test parameters: the selected ones run always, the others are marked slow."""
    params = list(values)
    assert all(value in params for value in selected), f"{selected} are not all among {params}"
    return [value if value in selected else pytest.param(value, marks=pytest.mark.slow) for value in params]
