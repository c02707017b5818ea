"""Training of published generators on two ranks, sharded or context parallel, equals one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launch_ranks import failures, report
from published_ranks import CASES, cases, train
from safetensors.torch import save_file


@pytest.mark.slow
@pytest.mark.ranks
def test_published_models_on_two_ranks_equal_one(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    for case in CASES:
        save_file(train(case, {}), tmp_path / f"{case}.safetensors")
    assert failures(report("published_ranks.py", tmp_path, 2), [*cases(2), "refusals"]) == []
