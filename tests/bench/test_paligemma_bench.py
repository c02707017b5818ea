"""The bench of PaliGemma's answers runs at small size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_every_way_to_write_is_measured_and_writes_the_same(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, str(ROOT / "bench/paligemma.py"), "--tiny", "--out", str(out)]
    settings = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["alike in float32"] == {"as written": 1, "step by step": 1}
    for rows in ("1 rows", "3 rows"):
        assert found["measured"][rows]["steps"]["times generate"] > 0
