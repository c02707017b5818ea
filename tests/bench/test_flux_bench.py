"""The bench of full-size generators runs at small size, every section by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param("plain", marks=pytest.mark.slow),
        pytest.param("parts,full,lora,grpo-sd35,grpo-flux", marks=pytest.mark.long),
    ],
)
def test_every_section_tells_seconds_and_shares(sections: str, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, str(ROOT / "bench/flux.py"), "--tiny", "--sections", sections, "--out", str(out)]
    settings = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert {line["section"] for line in found} == set(sections.split(",")), done.stdout + done.stderr
    for line in found:
        if "shares" in line:
            assert sum(line["shares"].values()) == pytest.approx(1)
            assert line["shares"]["rollout"] > 0 and line["recompiled"] == 0
    assert "| s a prompt |" in done.stdout
