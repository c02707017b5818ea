"""Where networks run that no recipe places."""

from __future__ import annotations

import os

from ..core.types import Placement
from .precision import DTYPES, select_device


def choose_placement(device: str, precision: str) -> Placement:
    return Placement(select_device(device, int(os.environ.get("LOCAL_RANK", "0"))), DTYPES[precision])
