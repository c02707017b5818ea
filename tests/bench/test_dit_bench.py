"""The bench of the two stages runs at small size, every section by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    "sections", ["limit", pytest.param("latents,pictures,vae,vae-diffusers", marks=pytest.mark.long)]
)
def test_every_section_tells_pictures_a_second(sections: str, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, str(ROOT / "bench/dit.py"), "--tiny", "--sections", sections, "--out", str(out)]
    settings = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert {line["section"] for line in found} == set(sections.split(",")), done.stdout + done.stderr
    assert all(line.get("pictures/s", 1) > 0 for line in found)
    assert [line["section"] for line in found if "limit" in line] == [sections.split(",")[0]]
    assert "| pictures/s |" in done.stdout
