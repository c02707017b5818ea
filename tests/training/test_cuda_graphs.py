"""Captured CUDA graphs give the results of eager calls with the current weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from tastemaker.core.lora import LIVE_ADAPTER, LoraWeights
from tastemaker.core.randomness import Randomness
from tastemaker.core.weights import FullWeights
from tastemaker.training.cuda_graphs import MAX_GRAPHS, CudaGraphForward, make_capture, use_cuda_graphs


def taped(work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """A capture without a GPU: replay runs the same code on the same memory."""
    made = tree_map(torch.clone, work())

    def play() -> None:
        for held, new in zip(tree_leaves(made), tree_leaves(work()), strict=True):
            held.copy_(new)

    return made, play


class Net(nn.Module):
    """Counts its forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.runs = nn.Linear(4, 4), 0

    def forward(self, x: Tensor, level: Tensor, scale: float = 1.0, more: Any = None) -> dict[str, Tensor]:
        self.runs += 1
        return {"output": self.layer(x) * scale + level[:, None]}


def recorded(net: nn.Module, alike: Callable[[], str | None] = lambda: "") -> CudaGraphForward:
    use_cuda_graphs(net, alike, taped)
    made: Any = net.forward
    assert isinstance(made, CudaGraphForward)
    return made


def test_replayed_outputs_equal_eager_outputs_and_are_copies() -> None:
    net = Net()
    forward, made = net.forward, recorded(net)
    with torch.no_grad():
        output = []
        for _ in range(4):
            x, level = torch.randn(3, 4), torch.rand(3)
            result = net(x, level)["output"]
            assert torch.equal(result, forward(x, level)["output"])
            output.append((result, result.clone()))
        assert all(torch.equal(held, as_said) for held, as_said in output)  # nobody writes into what was given out
    assert [take is not None for take in made.graphs.values()] == [True]


def test_each_shape_argument_and_dtype_has_its_own_graph() -> None:
    net = Net()
    forward, made = net.forward, recorded(net)
    with torch.no_grad():
        for _ in range(3):
            for rows, scale in ((2, 1.0), (3, 1.0), (2, 0.5)):
                x, level = torch.randn(rows, 4), torch.rand(rows)
                assert torch.equal(net(x, level, scale)["output"], forward(x, level, scale)["output"])
                assert torch.equal(net(x, level, scale=scale)["output"], forward(x, level, scale)["output"])
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(3):
                assert net(torch.randn(2, 4), torch.zeros(2, dtype=torch.bfloat16))["output"].dtype == torch.bfloat16
    assert len(made.graphs) == 7
    with torch.no_grad():
        for rows in range(4, 40):
            for _ in range(2):
                net(torch.randn(rows, 4), torch.rand(rows))
    assert len(made.graphs) == MAX_GRAPHS


def test_calls_with_gradient_or_unknown_arguments_are_not_captured() -> None:
    net = Net()
    made = recorded(net)
    for _ in range(3):
        net(torch.randn(3, 4), torch.rand(3))["output"].sum().backward()
    assert net.layer.weight.grad is not None
    with torch.no_grad():
        for _ in range(3):
            net(torch.randn(3, 4), torch.rand(3), more=object())
    assert not made.graphs


@torch.no_grad()
def test_replay_uses_swapped_moved_and_updated_weights() -> None:
    net = Net()
    weights, forward = FullWeights(net, ["old"]), net.forward
    recorded(net, weights.graph_key)
    x, level = torch.randn(3, 4), torch.rand(3)

    def agrees() -> None:
        for _ in range(3):
            assert torch.equal(net(x, level)["output"], forward(x, level)["output"])

    agrees()
    net.layer.weight.add_(1)  # as an optimizer does
    agrees()
    with weights.use("old"):
        agrees()
    net.layer.weight.data = torch.randn(4, 4)
    agrees()


@torch.no_grad()
def test_lora_switches_are_respected_and_dropout_is_not_captured() -> None:
    net = Net()
    weights = LoraWeights(net, LoraConfig(r=2, target_modules=["layer"], lora_dropout=0.5), ["reference", "old"])
    for key, p in net.named_parameters():
        if "lora_B" in key:
            nn.init.normal_(p)
    forward, made = net.forward, recorded(net, weights.graph_key)
    x, level = torch.randn(3, 4), torch.rand(3)
    output = {}
    for name in (LIVE_ADAPTER, "reference", "old"):
        with weights.use(name):
            for _ in range(3):
                output[name] = net(x, level)["output"]
                assert torch.equal(output[name], forward(x, level)["output"])
    assert not torch.equal(output[LIVE_ADAPTER], output["reference"])
    assert not torch.equal(output["old"], output[LIVE_ADAPTER])
    kept = len(made.graphs)
    with weights.dropout_masks(Randomness(0, 0, torch.arange(3))):
        for _ in range(3):
            net(x, level)
    assert len(made.graphs) == kept


def test_failed_capture_warns_once_and_runs_eagerly() -> None:
    def refused(work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    net = Net()
    use_cuda_graphs(net, lambda: "", refused)
    x, level = torch.randn(3, 4), torch.rand(3)
    with torch.no_grad():
        net(x, level)
        with pytest.warns(UserWarning, match=r"engine.cuda_graphs"):
            output = net(x, level)["output"]
        assert torch.equal(output, net(x, level)["output"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here, where recordings are graphs")
@torch.no_grad()
def test_cuda_graphs_match_eager_calls() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda()
    forward = net.forward
    use_cuda_graphs(net, lambda: "", make_capture())
    for rows in (4, 8, 4, 8, 4, 8):
        x = torch.randn(rows, 64, device="cuda")
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            assert torch.equal(net(x), forward(x))
        net[0].weight.mul_(1.1)
