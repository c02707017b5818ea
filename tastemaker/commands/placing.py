"""Where rewards run that no recipe places."""

from __future__ import annotations

from ..train.precision import DTYPES, choose
from ..types import Placement


def placement(device: str, precision: str) -> Placement:
    return Placement(choose(device, 0), DTYPES[precision])
