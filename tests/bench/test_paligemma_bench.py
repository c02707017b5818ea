"""The bench of PaliGemma's answers runs at small size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_every_way_to_write_is_measured_and_writes_the_same(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, str(ROOT / "bench/paligemma.py"), "--tiny", "--out", str(out)]
    settings = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    (alike,) = [line for line in found if "as written" in line]
    assert alike["name"] == "alike in float32" and alike["as written"] == alike["step by step"] == 1
    ways = {(line["rows"], line["way"]): line["tokens/s"] for line in found if "way" in line}
    assert set(ways) == {(rows, way) for rows in (1, 3) for way in ("generate", "steps")} and min(ways.values()) > 0
    assert "| times generate |" in done.stdout and "[answers]" in done.stdout
