"""Frozen weights in 8 bits: gradients are those of the rounded network, and only adapters are saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from test_rollout_precision import KINDS, Blocks, inputs, relative_difference, rollout_call

from tastemaker.config.build import build
from tastemaker.config.check import require_valid
from tastemaker.config.load import load
from tastemaker.core.lora import LoraWeights
from tastemaker.core.quantization import Kind, expand
from tastemaker.core.registry import ConfigError
from tastemaker.diagnostics.plan import estimate_resources
from tastemaker.export.weights import load_weights
from tastemaker.training import low_precision_linear
from tastemaker.training.events import StepCompleted
from tastemaker.training.loop import train
from tastemaker.training.low_precision_linear import QuantizedLinear, RolloutLinear
from tastemaker.training.quantized_base import large_linear_layers, quantize_frozen_layers
from tastemaker.training.rollout_precision import use_low_precision_rollouts

CPU = torch.device("cpu")


def adapted() -> LoraWeights:
    """A network with adapters that change its output."""
    weights = LoraWeights(Blocks(), LoraConfig(r=4, target_modules=["blocks.0", "blocks.1"]))
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        for p in weights.trainable().values():
            p.normal_(std=0.05)
    return weights


@KINDS
def test_gradients_are_those_of_the_rounded_network(kind: Kind, error: float) -> None:
    quantized, rounded, exact = adapted(), adapted(), adapted()
    layers = quantize_frozen_layers(quantized.net, kind)
    assert len(layers) == 2 and all(layer.weight.itemsize == 1 for layer in layers)
    copies = [
        layer for layer in rounded.net.modules() if isinstance(layer, torch.nn.Linear) and layer.weight.numel() > 60_000
    ]
    for layer, copy in zip(layers, copies, strict=False):
        copy.weight.data.copy_(expand(layer.weight, layer.weight_scale, torch.float32))
    x, outputs, gradients = inputs(), [], []
    for weights in (quantized, rounded, exact):
        given = x.clone().requires_grad_()
        out = weights.net(given)
        out.square().mean().backward()
        outputs.append(out.detach())
        gradients.append(torch.cat([given.grad.flatten(), *(p.grad.flatten() for p in weights.trainable().values())]))
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(gradients[0], gradients[1])
    assert 0 < relative_difference(outputs[0], outputs[2]) < error


def test_backward_pass_keeps_8_bits_per_weight() -> None:
    weights, saved = adapted(), []
    quantize_frozen_layers(weights.net, "int8")
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        weights.net(inputs().requires_grad_())
    # The last one is that of the layer outside of the blocks.
    assert [x.dtype for x in saved if x.shape == (256, 256)] == [torch.int8, torch.int8, torch.float32]


def test_exports_merge_into_full_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = adapted()
    quantize_frozen_layers(weights.net, "int8")
    with pytest.raises(ConfigError, match=r"engine\.base_precision.*TM2610"):
        weights.merged()
    monkeypatch.setattr(low_precision_linear, "MIN_WEIGHTS", 1)
    monkeypatch.setattr(low_precision_linear, "ALIGNMENT", 1)
    monkeypatch.setattr("tastemaker.training.quantized_base.repeated_blocks", lambda net: [net])
    config = load("grpo-lora-toy-flow", ["engine.base_precision=int8"])
    run = build(config, tmp_path)
    assert any(p.dtype == torch.int8 for p in run.policy.weights.net.parameters())
    exported = load_weights(config, tmp_path, run.save(1))
    assert isinstance(exported, LoraWeights)
    assert all(x.dtype != torch.int8 for x in exported.merged().values())


def test_rollouts_use_the_8_bit_weights_themselves() -> None:
    weights = adapted()
    assert len(quantize_frozen_layers(weights.net, "int8")) == 2
    assert not use_low_precision_rollouts(weights.net, "int8", CPU).layers  # that would need a copy
    out = rollout_call(weights.net, inputs())
    assert 0 < relative_difference(out, weights.net(inputs()).detach()) < 0.02


def test_frozen_adapters_keep_their_precision() -> None:
    weights = LoraWeights(Blocks(), LoraConfig(r=256, target_modules=["blocks.0", "blocks.1"]), ["old", "ema"])
    names = [name for name, module in weights.net.named_modules() if module in large_linear_layers(weights.net)]
    assert names == ["blocks.0.base_layer", "blocks.1.base_layer"]
    assert len(quantize_frozen_layers(weights.net, "int8")) == 2
    assert len({p.dtype for p in weights._adapter("old").values()} | {torch.float32}) == 1
    use_low_precision_rollouts(weights.net, "int8", CPU)
    kinds = {type(module) for name, module in weights.net.named_modules() if ".lora_" in name and "." in name}
    assert torch.nn.Linear in kinds and not any(issubclass(kind, QuantizedLinear | RolloutLinear) for kind in kinds)


@pytest.mark.slow
def test_adapters_train_on_quantized_weights_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_precision_linear, "MIN_WEIGHTS", 256)
    settings = ["sample.every=0", "guard.every=0", "engine.base_precision=int8", "checkpoint.every=1"]
    config = load("srpo-qwen-image-lora", [*settings, "steps=2"])
    require_valid(config)
    run = build(config, tmp_path, tiny=True)
    assert [x.dtype for x in run.policy.weights.net.parameters()].count(torch.int8) > 10
    losses = [event.metrics["grad_norm"] for event in train(run) if isinstance(event, StepCompleted)]
    saved = load_file(tmp_path / "checkpoints/step-000002/weights.safetensors")
    assert all("lora_" in key for key in saved) and all(loss > 0 for loss in losses)
    resumed = build(config, tmp_path, tiny=True)
    resumed.resume(tmp_path / "checkpoints/step-000001")
    again = [event.metrics["grad_norm"] for event in train(resumed) if isinstance(event, StepCompleted)]
    assert again == losses[1:]


@pytest.mark.slow
def test_plan_counts_8_bit_weights() -> None:
    whole, quantized = (
        estimate_resources(load("srpo-qwen-image-lora", [f"engine.base_precision={kind}"]), 1)
        for kind in ("same", "int8")
    )
    assert 0.5 < quantized.weights / whole.weights < 0.55
    assert quantized.update_activations < 1.1 * whole.update_activations


def test_only_adapters_leave_weights_that_can_be_quantized() -> None:
    with pytest.raises(ConfigError, match=r"engine\.base_precision.*TM2607"):
        require_valid(load("nft-toy-flow", ["engine.base_precision=int8"]))
    require_valid(load("grpo-lora-toy-flow", ["engine.base_precision=int8"]))
