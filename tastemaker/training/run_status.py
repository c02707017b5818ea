"""status.json in the directory of a run: whether it runs, and why it ended.

This module imports no torch, so that any tool can read the file. A process that is killed leaves the state "running"
behind; the run lock tells whether it is still alive.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from ..core.output_paths import write_text_atomically
from ..core.safe_files import parse_json

STATUS_FILE = "status.json"
MAX_REASON, MAX_STATUS_BYTES = 2000, 16_384
State = Literal["running", "finished", "stopped", "failed"]


@dataclass(frozen=True)
class RunStatus:
    """The last thing that a run said about itself."""

    state: State
    step: int  # completed
    steps: int  # in all
    reason: str = ""  # why it ended
    time: str = ""  # ISO 8601, UTC


def write_status(directory: Path, status: RunStatus) -> None:
    """Write the status with the current time. Errors are ignored: they must not hide the reason of a failure."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    with suppress(OSError):
        values = {**asdict(status), "reason": status.reason[:MAX_REASON], "time": now, "pid": os.getpid()}
        write_text_atomically(directory / STATUS_FILE, json.dumps(values, indent=1) + "\n")


def read_status(directory: Path) -> RunStatus | None:
    """Read the status of a run; None if it has none, or a damaged one."""
    try:
        with (directory / STATUS_FILE).open("rb") as file:
            values = parse_json(file.read(MAX_STATUS_BYTES).decode(), directory / STATUS_FILE)
        state, step, steps = values["state"], values["step"], values["steps"]
        if state not in ("running", "finished", "stopped", "failed") or not math.isfinite(step + steps):
            return None
        return RunStatus(state, int(step), int(steps), str(values.get("reason", "")), str(values.get("time", "")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
