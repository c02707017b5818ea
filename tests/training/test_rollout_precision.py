"""8-bit rollouts: near the exact network, renewed after updates, and never part of what trains."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from engine_toys import build_engine
from peft import LoraConfig
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tastemaker.config.build import build
from tastemaker.config.check import require_valid
from tastemaker.config.load import load
from tastemaker.config.schema import OptimConfig
from tastemaker.core.lora import LoraWeights
from tastemaker.core.registry import ConfigError
from tastemaker.core.rollout_scope import ROLLOUTS
from tastemaker.core.weights import FullWeights
from tastemaker.training import activation_memory, low_precision_linear
from tastemaker.training.events import StepCompleted
from tastemaker.training.loop import train
from tastemaker.training.low_precision_linear import Kind, quantize_rows
from tastemaker.training.optimizer import TorchAdamW
from tastemaker.training.quantized_base import quantize_frozen_layers
from tastemaker.training.rollout_precision import use_low_precision_rollouts

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
    return torch.randn(4, 32, 256, generator=torch.Generator().manual_seed(1))


def relative_difference(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / y.norm())


@torch.no_grad()
def rollout_call(net: nn.Module, x: Tensor) -> Tensor:
    with ROLLOUTS.calls():
        out: Tensor = net(x)
    return out


@KINDS
def test_rows_are_rounded_to_8_bits(kind: Kind, error: float) -> None:
    x = inputs().view(-1, 256) * torch.logspace(-4, 4, 128)[:, None]  # rows of very different sizes
    numbers, scale = quantize_rows(x, kind)
    assert numbers.dtype.itemsize == 1 and scale.shape == (128, 1)
    rounded = numbers.float() * scale
    assert float(((rounded - x).norm(dim=1) / x.norm(dim=1)).max()) < error
    assert rounded.abs().amax() <= x.abs().amax() * 1.001
    assert quantize_rows(torch.zeros(2, 16), kind)[0].float().abs().max() == 0


@KINDS
def test_only_rollouts_compute_in_8_bits(kind: Kind, error: float) -> None:
    net, x = Blocks(), inputs()
    exact = net(x).detach()
    assert len(use_low_precision_rollouts(net, kind, CPU).layers) == 2  # not the layer outside of the blocks
    assert list(net.state_dict()) == list(Blocks().state_dict())
    with torch.no_grad():
        assert net(x).equal(exact)
    with ROLLOUTS.calls():
        assert net(x).equal(exact)  # with gradients
    difference = relative_difference(rollout_call(net, x), exact)
    assert 1e-4 < difference < error
    with ROLLOUTS.exact():
        assert rollout_call(net, x).equal(exact)


def test_samples_do_not_depend_on_the_size_of_their_batch() -> None:
    """Layers of one row per sample, such as those of modulation, keep their precision in every batch."""
    net, x = Blocks(), inputs()
    use_low_precision_rollouts(net, "int8", CPU)
    torch.testing.assert_close(rollout_call(net, x)[:1], rollout_call(net, x[:1]))
    for few in (x[0], x[:, 0], x[:, :16], x.reshape(8, 16, 256)):
        assert rollout_call(net, few).equal(net(few).detach())
    assert not rollout_call(net, x[:, :17]).equal(net(x[:, :17]).detach())


@KINDS
def test_rollouts_and_training_expand_the_same_weights(kind: Kind, error: float) -> None:
    """A unit matrix as the input shows the weights that the layer multiplies."""
    net = Blocks().requires_grad_(False)
    exact = net.blocks[0].weight.clone()
    (layer, _) = quantize_frozen_layers(net, kind)
    scale = layer.weight_scale
    use_low_precision_rollouts(net, kind, CPU)
    layer.bias = None
    unit = torch.eye(256)[None]
    with torch.autocast("cpu", torch.bfloat16):
        trained = layer(unit)
        with torch.no_grad(), ROLLOUTS.calls():
            sampled = layer(unit)
    assert trained.equal(sampled)
    assert trained[0].t().equal((layer.weight.float() * scale).bfloat16())  # rounded once
    assert relative_difference(trained[0].t().float(), exact) < error


def test_bf16_rollouts_of_a_network_that_trains_in_fp32() -> None:
    net, x = Blocks(), inputs()
    copies = use_low_precision_rollouts(net, "bf16", CPU)
    low, exact = rollout_call(net, x), net(x).detach()
    assert low.dtype == torch.float32 and 1e-4 < relative_difference(low, exact) < 0.01
    assert all(layer.rollout_weight.dtype == torch.bfloat16 for layer in copies.layers)
    with torch.no_grad():
        net.blocks[0].weight.mul_(2)
    assert relative_difference(rollout_call(net, x), net(x).detach()) < 0.01 < relative_difference(low, net(x).detach())


def test_settings_that_change_no_layer_are_reported() -> None:
    narrow = FullWeights(nn.Sequential(nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])))
    with pytest.warns(UserWarning, match=r"engine\.rollout_precision: int8 changes nothing.*1024.*TM2681"):
        build_engine(narrow, rollout_precision="int8")
    weights = FullWeights(Blocks())
    build_engine(weights, precision="bf16", rollout_precision="bf16")  # as it is
    assert type(weights.net.blocks[0]) is nn.Linear


def test_changed_weights_are_copied_again() -> None:
    net, x = Blocks(), inputs()
    layers = use_low_precision_rollouts(net, "int8", CPU).layers
    before = rollout_call(net, x)
    copy = layers[0].rollout_weight
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net(x).square().mean().backward()
    optimizer.step()
    after = rollout_call(net, x)
    assert layers[0].rollout_weight is copy  # compiled calls may keep its address
    assert relative_difference(after, before) > 0.05
    assert relative_difference(after, net(x).detach()) < 0.03


def test_adapters_keep_their_precision() -> None:
    net = Blocks()
    net.blocks[0].requires_grad_(False)
    assert use_low_precision_rollouts(net, "int8", CPU).layers == [net.blocks[0]]


@pytest.mark.parametrize("optimizer", ["adamw", "fused", "int8"])
def test_updates_of_every_optimizer_renew_the_copies(optimizer: str) -> None:
    weights = FullWeights(Blocks())
    optim = OptimConfig(lr=1e-2, state_dtype="int8" if optimizer == "int8" else "fp32")
    engine = build_engine(weights, optim, rollout_precision="int8")
    if optimizer == "fused":  # as on a GPU
        engine.optimizer = TorchAdamW(engine.parameters, optim, fused=True)
    before = rollout_call(weights.net, inputs())
    engine.backward(weights.net(inputs()).square().mean(), last=True)
    engine.step(0)
    after = rollout_call(weights.net, inputs())
    assert relative_difference(after, before) > 0.05
    assert relative_difference(after, weights.net(inputs()).detach()) < 0.03


class ManyBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # from PyTorch itself
@pytest.mark.parametrize("base", ["same", "int8"])
def test_8_bit_blocks_share_graphs(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    eager, compiled = (LoraWeights(ManyBlocks(), LoraConfig(r=4, target_modules=r"blocks\.\d\.0")) for _ in range(2))
    outputs = []
    for weights in (eager, compiled):
        if base != "same":
            quantize_frozen_layers(weights.net, "int8")
        use_low_precision_rollouts(weights.net, "int8", CPU)
        if weights is compiled:
            activation_memory.compile_blocks(weights.net)
        x = inputs()
        for _ in range(2):
            low = rollout_call(weights.net, x)
            with torch.no_grad():
                exact = weights.net(x)
            out = weights.net(x)
            out.square().mean().backward()
        outputs.append(torch.stack([low, exact, out.detach()]))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-5)
    assert relative_difference(outputs[1][0], outputs[1][1]) > 1e-4
    # Without gradients a graph for rollouts and one for other calls; with them one for the first block, whose input
    # needs no gradient, and one for the others.
    assert counters["stats"]["unique_graphs"] == 4 and not counters["graph_break"]


@pytest.fixture
def small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_precision_linear, "MIN_WEIGHTS", 256)


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
        ("grpo-toy-flow", "bf16", "TM2604"),
        ("nft-toy-flow", "bf16", ""),
    ],
)
def test_objectives_that_need_the_probabilities_of_rollouts_are_refused(recipe: str, setting: str, code: str) -> None:
    config = load(recipe, [f"engine.rollout_precision={setting}"])
    if not code:
        require_valid(config)
        return
    with pytest.raises(ConfigError, match=rf"engine\.rollout_precision.*{code}"):
        require_valid(config)
