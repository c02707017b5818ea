import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_bench_of_loading_runs_at_small_size(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "image_loading.py"), "--count", "8", "--out", "loading.json"]
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": ""}
    done = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "loading.json").read_text())
    assert {*told["files"]} == {"256", "512", "1024"} and told["aim"] == 250
    assert all(row["gallery, folder, no threads"]["per core"] > 0 for row in told["files"].values())
