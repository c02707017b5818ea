"""Two ranks that share a published generator, its weights or its tokens, learn what one learns; all in one launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine_toys import environment
from published_ranks import CASES, plan, trained
from safetensors.torch import save_file

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.xdist_group("ranks")]
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("published")
    for case in CASES:
        save_file(trained(case, {}), folder / f"{case}.safetensors")
    own = environment()
    settings = own | {"PYTHONPATH": os.pathsep.join([own["PYTHONPATH"], str(HERE.parent)])}
    command = [sys.executable, str(HERE / "published_ranks.py"), str(folder)]
    both = [
        subprocess.Popen([*command, str(rank), "2"], env=settings, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=180)[1] for process in both]
    written = [folder / f"report-{rank}.json" for rank in range(2)]
    assert all(path.exists() for path in written), "\n".join(errors)
    return [json.loads(path.read_text()) for path in written]


@pytest.mark.parametrize("case", [*plan(2), "refusals"])
def test_two_ranks_learn_what_one_learns(reports: list[dict[str, str]], case: str) -> None:
    for rank, report in enumerate(reports):
        assert report.get(case, "not reached") == "passed", f"rank {rank}: {report.get(case, 'not reached')}"
