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


def capture_on_cpu(work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """Emulate a capture without a GPU: replay runs the function and writes into the same memory."""
    outputs = tree_map(torch.clone, work())

    def replay() -> None:
        for output, value in zip(tree_leaves(outputs), tree_leaves(work()), strict=True):
            output.copy_(value)

    return outputs, replay


class CountingNet(nn.Module):
    """Counts its forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.runs = nn.Linear(4, 4), 0

    def forward(self, x: Tensor, level: Tensor, scale: float = 1.0, extra: Any = None) -> dict[str, Tensor]:
        self.runs += 1
        return {"output": self.layer(x) * scale + level[:, None]}


def use_captured_graphs(net: nn.Module, graph_key: Callable[[], str | None] = lambda: "") -> CudaGraphForward:
    use_cuda_graphs(net, graph_key, capture_on_cpu)
    captured: Any = net.forward
    assert isinstance(captured, CudaGraphForward)
    return captured


def test_replayed_outputs_equal_eager_outputs_and_are_copies() -> None:
    net = CountingNet()
    forward, captured = net.forward, use_captured_graphs(net)
    with torch.no_grad():
        outputs = []
        for _ in range(4):
            x, level = torch.randn(3, 4), torch.rand(3)
            output = net(x, level)["output"]
            assert torch.equal(output, forward(x, level)["output"])
            outputs.append((output, output.clone()))
        assert all(torch.equal(kept, copied) for kept, copied in outputs)  # a replay does not overwrite earlier outputs
    assert [graph is not None for graph in captured.graphs.values()] == [True]


def test_each_shape_argument_and_dtype_has_its_own_graph() -> None:
    net = CountingNet()
    forward, captured = net.forward, use_captured_graphs(net)
    with torch.no_grad():
        for _ in range(3):
            for rows, scale in ((2, 1.0), (3, 1.0), (2, 0.5)):
                x, level = torch.randn(rows, 4), torch.rand(rows)
                assert torch.equal(net(x, level, scale)["output"], forward(x, level, scale)["output"])
                assert torch.equal(net(x, level, scale=scale)["output"], forward(x, level, scale)["output"])
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(3):
                assert net(torch.randn(2, 4), torch.zeros(2, dtype=torch.bfloat16))["output"].dtype == torch.bfloat16
    assert len(captured.graphs) == 7
    with torch.no_grad():
        for rows in range(4, 40):
            for _ in range(2):
                net(torch.randn(rows, 4), torch.rand(rows))
    assert len(captured.graphs) == MAX_GRAPHS


def test_calls_with_gradient_or_unknown_arguments_are_not_captured() -> None:
    net = CountingNet()
    captured = use_captured_graphs(net)
    for _ in range(3):
        net(torch.randn(3, 4), torch.rand(3))["output"].sum().backward()
    assert net.layer.weight.grad is not None
    with torch.no_grad():
        for _ in range(3):
            net(torch.randn(3, 4), torch.rand(3), extra=object())
    assert not captured.graphs


@torch.no_grad()
def test_replay_uses_swapped_moved_and_updated_weights() -> None:
    net = CountingNet()
    weights, forward = FullWeights(net, ["old"]), net.forward
    use_captured_graphs(net, weights.graph_key)
    x, level = torch.randn(3, 4), torch.rand(3)

    def assert_equals_eager() -> None:
        for _ in range(3):
            assert torch.equal(net(x, level)["output"], forward(x, level)["output"])

    assert_equals_eager()
    net.layer.weight.add_(1)  # as an optimizer does
    assert_equals_eager()
    with weights.use("old"):
        assert_equals_eager()
    net.layer.weight.data = torch.randn(4, 4)
    assert_equals_eager()


@torch.no_grad()
def test_lora_switches_are_respected_and_dropout_is_not_captured() -> None:
    net = CountingNet()
    weights = LoraWeights(net, LoraConfig(r=2, target_modules=["layer"], lora_dropout=0.5), ["reference", "old"])
    for key, p in net.named_parameters():
        if "lora_B" in key:
            nn.init.normal_(p)
    forward, captured = net.forward, use_captured_graphs(net, weights.graph_key)
    x, level = torch.randn(3, 4), torch.rand(3)
    outputs = {}
    for name in (LIVE_ADAPTER, "reference", "old"):
        with weights.use(name):
            for _ in range(3):
                outputs[name] = net(x, level)["output"]
                assert torch.equal(outputs[name], forward(x, level)["output"])
    assert not torch.equal(outputs[LIVE_ADAPTER], outputs["reference"])
    assert not torch.equal(outputs["old"], outputs[LIVE_ADAPTER])
    num_graphs = len(captured.graphs)
    with weights.dropout_masks(Randomness(0, 0, torch.arange(3))):
        for _ in range(3):
            net(x, level)
    assert len(captured.graphs) == num_graphs


def test_failed_capture_warns_once_and_runs_eagerly() -> None:
    def failing_capture(work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    net = CountingNet()
    use_cuda_graphs(net, lambda: "", failing_capture)
    x, level = torch.randn(3, 4), torch.rand(3)
    with torch.no_grad():
        net(x, level)
        with pytest.warns(UserWarning, match=r"engine\.cuda_graphs"):
            output = net(x, level)["output"]
        assert torch.equal(output, net(x, level)["output"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
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
