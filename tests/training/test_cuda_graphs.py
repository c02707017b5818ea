"""Recorded calls say what the network would say now, whatever it runs on; others are made as ever."""

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
    """What a GPU does with a graph: the same lines once more, on what lies in the same memory."""
    made = tree_map(torch.clone, work())

    def play() -> None:
        for held, new in zip(tree_leaves(made), tree_leaves(work()), strict=True):
            held.copy_(new)

    return made, play


class Net(nn.Module):
    """Counts how often its lines are run."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.runs = nn.Linear(4, 4), 0

    def forward(self, x: Tensor, level: Tensor, scale: float = 1.0, more: Any = None) -> dict[str, Tensor]:
        self.runs += 1
        return {"said": self.layer(x) * scale + level[:, None]}


def recorded(net: nn.Module, alike: Callable[[], str | None] = lambda: "") -> CudaGraphForward:
    use_cuda_graphs(net, alike, taped)
    made: Any = net.forward
    assert isinstance(made, CudaGraphForward)
    return made


def test_what_is_played_is_what_would_be_said_and_stays() -> None:
    net = Net()
    forward, made = net.forward, recorded(net)
    with torch.no_grad():
        said = []
        for _ in range(4):
            x, level = torch.randn(3, 4), torch.rand(3)
            found = net(x, level)["said"]
            assert torch.equal(found, forward(x, level)["said"])
            said.append((found, found.clone()))
        assert all(torch.equal(held, as_said) for held, as_said in said)  # nobody writes into what was given out
    assert [take is not None for take in made.takes.values()] == [True]


def test_every_shape_number_and_precision_has_a_recording_of_its_own() -> None:
    net = Net()
    forward, made = net.forward, recorded(net)
    with torch.no_grad():
        for _ in range(3):
            for rows, scale in ((2, 1.0), (3, 1.0), (2, 0.5)):
                x, level = torch.randn(rows, 4), torch.rand(rows)
                assert torch.equal(net(x, level, scale)["said"], forward(x, level, scale)["said"])
                assert torch.equal(net(x, level, scale=scale)["said"], forward(x, level, scale)["said"])
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(3):
                assert net(torch.randn(2, 4), torch.zeros(2, dtype=torch.bfloat16))["said"].dtype == torch.bfloat16
    assert len(made.takes) == 7
    with torch.no_grad():
        for rows in range(4, 40):
            for _ in range(2):
                net(torch.randn(rows, 4), torch.rand(rows))
    assert len(made.takes) == MAX_GRAPHS


def test_calls_with_a_gradient_or_with_things_unknown_are_not_recorded() -> None:
    net = Net()
    made = recorded(net)
    for _ in range(3):
        net(torch.randn(3, 4), torch.rand(3))["said"].sum().backward()
    assert net.layer.weight.grad is not None
    with torch.no_grad():
        for _ in range(3):
            net(torch.randn(3, 4), torch.rand(3), more=object())
    assert not made.takes


@torch.no_grad()
def test_weights_that_are_borrowed_moved_or_learned_are_those_that_speak() -> None:
    net = Net()
    weights, forward = FullWeights(net, ["old"]), net.forward
    recorded(net, weights.alike)
    x, level = torch.randn(3, 4), torch.rand(3)

    def agrees() -> None:
        for _ in range(3):
            assert torch.equal(net(x, level)["said"], forward(x, level)["said"])

    agrees()
    net.layer.weight.add_(1)  # as an optimizer does
    agrees()
    with weights.use("old"):
        agrees()
    net.layer.weight.data = torch.randn(4, 4)
    agrees()


@torch.no_grad()
def test_adapters_speak_or_not_as_they_are_switched_and_dropout_is_never_recorded() -> None:
    net = Net()
    weights = LoraWeights(net, LoraConfig(r=2, target_modules=["layer"], lora_dropout=0.5), ["reference", "old"])
    for key, p in net.named_parameters():
        if "lora_B" in key:
            nn.init.normal_(p)
    forward, made = net.forward, recorded(net, weights.alike)
    x, level = torch.randn(3, 4), torch.rand(3)
    said = {}
    for name in (LIVE_ADAPTER, "reference", "old"):
        with weights.use(name):
            for _ in range(3):
                said[name] = net(x, level)["said"]
                assert torch.equal(said[name], forward(x, level)["said"])
    assert not torch.equal(said[LIVE_ADAPTER], said["reference"])
    assert not torch.equal(said["old"], said[LIVE_ADAPTER])
    kept = len(made.takes)
    with weights.dropping(Randomness(0, 0, torch.arange(3))):
        for _ in range(3):
            net(x, level)
    assert len(made.takes) == kept


def test_a_network_that_cannot_be_recorded_goes_on_as_it_was_and_says_so_once() -> None:
    def refused(work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    net = Net()
    use_cuda_graphs(net, lambda: "", refused)
    x, level = torch.randn(3, 4), torch.rand(3)
    with torch.no_grad():
        net(x, level)
        with pytest.warns(
            UserWarning, match=r"cannot be recorded \(operation not permitted when stream is capturing\)"
        ):
            said = net(x, level)["said"]
        assert torch.equal(said, net(x, level)["said"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here, where recordings are graphs")
@torch.no_grad()
def test_graphs_say_what_calls_say() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda()
    forward = net.forward
    use_cuda_graphs(net, lambda: "", make_capture())
    for rows in (4, 8, 4, 8, 4, 8):
        x = torch.randn(rows, 64, device="cuda")
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            assert torch.equal(net(x), forward(x))
        net[0].weight.mul_(1.1)
