"""Benches in sections: each is a process of its own with a time limit, whose results count even if it fails."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LEAST = 10  # seconds below which a section is not begun


def say(section: str, text: str) -> None:
    print(f"[{section}] {text}", flush=True)


def carry_out(
    script: str, limits: Mapping[str, float], chosen: argparse.Namespace, more: Sequence[str] = (), **environment: str
) -> list[dict[str, Any]]:
    """Those chosen, within the seconds there are for all; what is known so far is written after each."""
    began, found = time.monotonic(), list[dict[str, Any]]()
    for section in chosen.sections.split(","):
        limit = min(limits[section], chosen.seconds - (time.monotonic() - began))
        if limit < LEAST:
            say(section, "left out: no time")
            continue
        part = Path(tempfile.mkdtemp()) / "part.json"
        command = [sys.executable, script, "--section", section, "--out", str(part), "--seconds", f"{limit:.0f}"]
        command += [*(["--tiny"] if chosen.tiny else []), *more]
        try:
            settings = os.environ | {"PYTHONUNBUFFERED": "1", **environment}
            subprocess.run(command, timeout=limit, check=True, env=settings)
        except subprocess.TimeoutExpired:
            say(section, f"ended after {limit:.0f} s")
        except subprocess.CalledProcessError as error:
            say(section, f"failed with {error.returncode}")
        found += json.loads(part.read_text(encoding="utf-8")) if part.is_file() else []
        if chosen.out:
            Path(chosen.out).write_text(json.dumps(found, indent=1), encoding="utf-8")
    say("all", f"{time.monotonic() - began:.0f} s")
    return found
