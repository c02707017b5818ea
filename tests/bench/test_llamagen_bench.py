"""The bench of token generators runs at small size, every section by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_every_section_tells_its_numbers(tmp_path: Path) -> None:
    out, sections = tmp_path / "found.json", "B,grpo,parts,agreement,L,XL,XXL,3B,XXL-64"
    command = [sys.executable, str(ROOT / "bench/llamagen.py"), "--tiny", "--sections", sections, "--out", str(out)]
    settings = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert {line["section"] for line in found} == set(sections.split(",")), done.stdout + done.stderr
    for line in found:
        if "shares" in line:
            assert sum(line["shares"].values()) == pytest.approx(1)
        if line.get("dtype", "").startswith("float32"):
            assert line["tokens alike"] == 1
    assert "| ms a step |" in done.stdout
