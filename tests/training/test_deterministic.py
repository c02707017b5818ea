"""`engine.deterministic` selects deterministic kernels in the forward and the backward pass, and nowhere else."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tastemaker.config.schema import EngineConfig, OptimConfig
from tastemaker.core.weights import FullWeights
from tastemaker.training.engine import Engine


class Recorder(torch.autograd.Function):
    """The identity, which notes in both passes whether deterministic kernels are selected."""

    seen: list[bool]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Recorder.seen.append(torch.are_deterministic_algorithms_enabled())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        Recorder.seen.append(torch.are_deterministic_algorithms_enabled())
        return grads[0]


@pytest.mark.parametrize("deterministic", [False, True])
def test_both_passes_use_deterministic_kernels(deterministic: bool) -> None:
    Recorder.seen = []
    engine = Engine(EngineConfig(device="cpu", deterministic=deterministic), OptimConfig(), 1, seed=0)
    net = nn.Linear(3, 1)
    engine.prepare(FullWeights(net))
    with engine.autocast():
        loss = Recorder.apply(net(torch.ones(2, 3))).sum()  # type: ignore[no-untyped-call]
    assert not torch.are_deterministic_algorithms_enabled()
    engine.backward(loss, last=True)
    assert Recorder.seen == [deterministic] * 2
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_matrix_products_have_their_own_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    Engine(EngineConfig(device="cuda", deterministic=True), OptimConfig(), 1, seed=0)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
