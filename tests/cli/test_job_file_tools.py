"""Job files are read by the tools themselves, in an environment of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools/check_job_files.py"


@pytest.mark.long
def test_tools_accept_the_job_files_and_refuse_mistakes(tmp_path: Path) -> None:
    """SkyPilot, Kubeflow's client and submitit, and sbatch where apt can fetch Slurm."""
    index = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path / "download")]
    reached = subprocess.run([*index, "submitit==1.5.4"], capture_output=True, text=True, check=False)
    if reached.returncode:
        pytest.skip(f"no package index can be reached: {reached.stderr.strip()[-200:]}")
    command = [sys.executable, str(TOOL), str(tmp_path / "tools")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    for system in ("sky", "k8s", "submitit"):
        assert any(line.startswith(f"{system}: many") and "accepted" in line for line in lines), done.stdout
        assert any(line.startswith(f"{system}: mistake") and "refused" in line for line in lines), done.stdout
    assert any(line.startswith("slurm: ") for line in lines), done.stdout
