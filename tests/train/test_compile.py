"""Compiled networks: in place, and the same numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tastemaker.config.build import build, shrunk
from tastemaker.config.load import load
from tastemaker.config.run import EngineConfig
from tastemaker.train.failures import TrainingError
from tastemaker.train.loop import learn, look
from tastemaker.train.precision import check
from tastemaker.train.run import Run


def prepared(folder: Path, *, compile: bool) -> Run:
    engine = ["engine.device=cpu", "engine.precision=fp32", "data.device=cpu", "batch.prompts=8", "sample.count=8"]
    config = shrunk(load("playground-flow16", engine))
    return build(replace(config, engine=replace(config.engine, compile=compile)), folder / str(compile))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch, about itself
def test_a_compiled_network_learns_and_samples_the_same(tmp_path: Path) -> None:
    runs = [prepared(tmp_path, compile=compile) for compile in (False, True)]
    names = [list(run.policy.weights.trainable()) for run in runs]
    assert names[0] == names[1]
    plain, compiled = ([learn(run, step).metrics["loss"] for step in range(3)] for run in runs)
    assert compiled == pytest.approx(plain, rel=1e-4)
    assert torch.allclose(look(runs[0], 3).pixels, look(runs[1], 3).pixels, atol=1e-3)


def test_without_a_compiler_it_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(TrainingError, match=r"engine\.compile is true, but a C\+\+ compiler was not found here"):
        check(EngineConfig(device="cpu", compile=True), torch.device("cpu"), 1)
    with pytest.raises(TrainingError, match="cannot be combined with tf32"):
        check(EngineConfig(device="cpu", compile=True, precision="tf32"), torch.device("cpu"), 1)
    check(EngineConfig(device="cpu"), torch.device("cpu"), 1)
