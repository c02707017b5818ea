"""8-bit rollouts: near the exact network, renewed after updates, and never part of what trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tastemaker.config.build import build
from tastemaker.config.check import require_valid
from tastemaker.config.load import load
from tastemaker.core.registry import ConfigError
from tastemaker.core.rollout_scope import ROLLOUTS
from tastemaker.training import rollout_precision
from tastemaker.training.events import StepCompleted
from tastemaker.training.loop import train
from tastemaker.training.rollout_precision import Kind, quantize_rows, use_low_precision_rollouts

CPU = torch.device("cpu")
KINDS = pytest.mark.parametrize(("kind", "error"), [("fp8", 0.06), ("int8", 0.02)])
QUIET = ["sample.every=0", "guard.every=0", "checkpoint.every=100"]


class Blocks(nn.Module):
    """Two linear layers in blocks, and one outside of them."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.blocks = nn.ModuleList([nn.Linear(256, 256), nn.Linear(256, 256)])
            self.last = nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        out: Tensor = self.last(x)
        return out


def inputs() -> Tensor:
    return torch.randn(4, 16, 256, generator=torch.Generator().manual_seed(1))


def relative_difference(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / y.norm())


@torch.no_grad()
def rollout_call(net: nn.Module, x: Tensor) -> Tensor:
    with ROLLOUTS.calls():
        out: Tensor = net(x)
    return out


@KINDS
def test_rows_are_rounded_to_8_bits(kind: Kind, error: float) -> None:
    x = inputs().view(-1, 256) * torch.logspace(-4, 4, 64)[:, None]  # rows of very different sizes
    numbers, scale = quantize_rows(x, kind)
    assert numbers.dtype.itemsize == 1 and scale.shape == (64, 1)
    rounded = numbers.float() * scale
    assert float(((rounded - x).norm(dim=1) / x.norm(dim=1)).max()) < error
    assert rounded.abs().amax() <= x.abs().amax() * 1.001
    assert quantize_rows(torch.zeros(2, 16), kind)[0].float().abs().max() == 0


@KINDS
def test_only_rollouts_compute_in_8_bits(kind: Kind, error: float) -> None:
    net, x = Blocks(), inputs()
    exact = net(x).detach()
    assert len(use_low_precision_rollouts(net, kind, CPU)) == 2  # not the layer outside of the blocks
    assert list(net.state_dict()) == list(Blocks().state_dict())
    with torch.no_grad():
        assert net(x).equal(exact)
    with ROLLOUTS.calls():
        assert net(x).equal(exact)  # with gradients
    difference = relative_difference(rollout_call(net, x), exact)
    assert 1e-4 < difference < error
    with ROLLOUTS.exact():
        assert rollout_call(net, x).equal(exact)
    assert rollout_call(net, x[:1, :1]).equal(net(x[:1, :1]).detach())  # few rows gain nothing


def test_changed_weights_are_copied_again() -> None:
    net, x = Blocks(), inputs()
    layers = use_low_precision_rollouts(net, "int8", CPU)
    before = rollout_call(net, x)
    copy = layers[0].weight
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net(x).square().mean().backward()
    optimizer.step()
    after = rollout_call(net, x)
    assert layers[0].weight is copy  # compiled calls may keep its address
    assert relative_difference(after, before) > 0.05
    assert relative_difference(after, net(x).detach()) < 0.03


def test_adapters_keep_their_precision() -> None:
    net = Blocks()
    net.blocks[0].requires_grad_(False)
    assert [layer.layer for layer in use_low_precision_rollouts(net, "int8", CPU)] == [net.blocks[0]]


@pytest.fixture
def small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_precision, "MIN_WEIGHTS", 256)


@pytest.mark.slow
@pytest.mark.usefixtures("small_layers")
@pytest.mark.parametrize("recipe", ["nft-playground-flow", "elbo-grpo-playground-flow", "reward-gradient-playground"])
def test_objectives_train_on_8_bit_rollouts(recipe: str, tmp_path: Path) -> None:
    """Samples differ a little, so rewards and losses do; both runs train."""
    losses = {}
    for kind in ("same", "int8"):
        overrides = [*QUIET, "steps=1", "batch.prompts=2", "engine.precision=fp32", f"engine.rollout_precision={kind}"]
        config = load(recipe, overrides)
        require_valid(config)
        events = list(train(build(config, tmp_path / kind)))
        (step,) = (event for event in events if isinstance(event, StepCompleted))
        losses[kind] = step.metrics["grad_norm"]
    assert losses["same"] != losses["int8"] > 0


@pytest.mark.parametrize(
    ("recipe", "setting", "code"),
    [
        ("grpo-toy-flow", "fp8", "TM2604"),
        ("ddpo-toy-epsilon", "int8", "TM2604"),
        ("nft-toy-flow", "int8", ""),
        ("dpo-toy-flow", "fp8", ""),
    ],
)
def test_objectives_that_need_the_probabilities_of_rollouts_are_refused(recipe: str, setting: str, code: str) -> None:
    config = load(recipe, [f"engine.rollout_precision={setting}"])
    if not code:
        require_valid(config)
        return
    with pytest.raises(ConfigError, match=rf"engine\.rollout_precision.*{code}"):
        require_valid(config)
