"""The bench of Show-o's sampling runs at small size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_every_way_to_paint_candidates_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, str(ROOT / "bench/showo.py"), "--tiny", "--out", str(out)]
    settings = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert out.is_file(), done.stdout + done.stderr
    found = {line["name"]: line for line in json.loads(out.read_text())}
    assert set(found) == {"one by one", "together", "prompt read once", "alike in float32"}
    assert found["alike in float32"]["of pictures"] == found["alike in float32"]["of steps"] == 1
    assert "| times one by one |" in done.stdout and "[eager]" in done.stdout
