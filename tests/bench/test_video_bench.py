"""The bench of generators of clips runs at small size, every section by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("sections", ["modelscope,plain-modelscope", "videocrafter,plain-videocrafter,wan"])
def test_every_section_tells_seconds_of_one_frame_and_of_all(sections: str, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, str(ROOT / "bench/video.py"), "--tiny", "--sections", sections, "--out", str(out)]
    settings = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    wanted = {(section, frames) for section in sections.split(",") for frames in ("one frame", "all frames")}
    both = {section for section in sections.split(",") if section in ("modelscope", "videocrafter")}
    wanted |= {(section, "one frame, two clips at once") for section in both}
    assert {(line["section"], line["frames"]) for line in found} == wanted, done.stdout + done.stderr
    assert all(line["seconds a prompt"] > 0 for line in found)
    assert "| s a clip |" in done.stdout
