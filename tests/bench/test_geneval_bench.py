"""The bench of GenEval runs at small size and tells where the time goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_every_way_tells_its_speed_and_its_parts(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, str(ROOT / "bench/geneval.py"), "--tiny", "--out", str(out)]
    settings = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = json.loads(out.read_text(encoding="utf-8"))
    assert len(lines) == 3 and "| pictures/s |" in done.stdout
    for line in lines:
        assert sum(line["shares"].values()) == pytest.approx(1) and line["rate"] > 0 and line["things"] > 0
        assert set(line["shares"]) == {"reading", "resizing", "network", "masks", "colours", "rules"}
