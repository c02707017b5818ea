"""Benches in sections: what was found counts, whoever ends them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPT = """
import argparse, os, time
from sections import carry_out, deadline, keeper, say

options = argparse.ArgumentParser()
for name, default in (("sections", "quick,slow,late"), ("out", ""), ("section", ""), ("seconds", "60")):
    options.add_argument(f"--{name}", default=default, type=float if name == "seconds" else str)
options.add_argument("--tiny", action="store_true")
chosen = options.parse_args()
if not chosen.section:
    carry_out(__file__, {"quick": 20, "slow": float(os.environ.get("SLOW", 20)), "late": 100}, chosen)
else:
    keep = keeper(chosen.out)
    keep({"section": chosen.section, "left": deadline(chosen) - time.monotonic()})
    say(chosen.section, "known")
    if chosen.section == "slow":
        open("process", "w").write(str(os.getpid()))
        time.sleep(60)
"""


def begun(folder: Path, *options: str, **settings: str) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(SCRIPT)
    told = os.environ | {"PYTHONPATH": str(ROOT / "bench")} | settings
    command = [sys.executable, "script.py", "--out", "found.json", *options]
    return subprocess.Popen(command, cwd=folder, env=told, stdout=subprocess.PIPE, text=True)


def found(folder: Path) -> list[dict[str, Any]]:
    path = folder / "found.json"
    told: list[dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else []
    return told


def test_a_section_that_is_ended_tells_what_it_found_and_one_without_time_is_left_out(tmp_path: Path) -> None:
    said = begun(tmp_path, "--seconds", "30", SLOW="3").communicate(timeout=60)[0]
    lines = found(tmp_path)
    assert [line["section"] for line in lines] == ["quick", "slow"]
    assert 0 < lines[1]["left"] <= 3 and 18 < lines[0]["left"] <= 20
    assert "ended after 3 s" in said and "[late]" in said and "left out" in said


def test_what_is_known_is_written_while_a_section_runs_and_nothing_outlives_a_bench_that_is_ended(
    tmp_path: Path,
) -> None:
    bench, until = begun(tmp_path), time.monotonic() + 30
    while [line["section"] for line in found(tmp_path)] != ["quick", "slow"] and time.monotonic() < until:
        time.sleep(0.1)
    assert [line["section"] for line in found(tmp_path)] == ["quick", "slow"]
    inner = int((tmp_path / "process").read_text())
    bench.send_signal(signal.SIGTERM)
    assert bench.wait(20) == 143
    assert bench.stdout is not None
    bench.stdout.close()
    with pytest.raises(ProcessLookupError):
        os.kill(inner, 0)
