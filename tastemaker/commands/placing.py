"""Where networks run that no recipe places."""

from __future__ import annotations

import os

from ..train.precision import DTYPES, choose
from ..types import Placement


def placement(device: str, precision: str) -> Placement:
    return Placement(choose(device, int(os.environ.get("LOCAL_RANK", "0"))), DTYPES[precision])
