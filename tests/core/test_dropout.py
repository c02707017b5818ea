"""LoRA dropout depends on row and step only, not on micro-batches or recomputation."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from tiers import fast
from torch import Tensor, nn

from tastemaker.config.build import build, build_policy, make_tiny
from tastemaker.config.load import load
from tastemaker.core.dropout import MAX_POSITIONS, DropoutMasks, RowDropout
from tastemaker.core.lora import Lora
from tastemaker.core.policy import Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import Placement, select_rows
from tastemaker.core.weights import TrainableModel
from tastemaker.training.activation_memory import checkpoint_activations
from tastemaker.training.loop import train_step
from tastemaker.training.samples import generate_samples

VIDEO_MODELS = ["modelscope", "videocrafter2", "opensora", "wan", "cogvideox", "ltx", "hunyuanvideo", "mochi", "svd"]
SMALL = [
    "sample.every=0",
    "guard.every=0",
    "process.num_steps=2",
    "batch.prompts=2",
    "engine={precision: fp32, device: cpu}",
]


def build_lora_policy(name: str, directory: Path, modules: str = "backbone") -> Policy[Any]:
    """Return a small generator with LoRA on all layers, with random instead of initial weights."""
    (directory / "clips.yaml").write_text(f"extends: [base, models/{name}]\ndata: {{type: prompts, prompts: [a cat]}}")
    tuning = f"tuning={{type: lora, rank: 2, target_modules: all-layers, dropout: 0.3, modules: [{modules}]}}"
    settings = ["objective={type: reward_gradient}", "rewards={a: {type: brightness}}", tuning]
    config = load(directory / "clips.yaml", [*settings, *([f"model.image={toys.IMAGE}"] if name == "svd" else [])])
    policy = build_policy(make_tiny(config), Placement())
    for i, p in enumerate(policy.weights.trainable().values()):
        nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(i))
    return policy


def predict(policy: Policy[Any], rows: list[int], draw: int | None = 0) -> Tensor:
    rng = Randomness(3, 5, torch.arange(2))
    cond = policy.embed(["a cat", "two dogs and a long boat"], ({}, {}))
    x, t, indices = rng.normal("x", *policy.model.shape), torch.full((2,), 0.6), torch.tensor(rows)
    with (
        torch.no_grad(),
        nullcontext() if draw is None else policy.weights.dropout_masks(select_rows(rng, indices), draw),
    ):
        out: Tensor = policy.model.predict(x[indices], t[indices], select_rows(cond, indices))
    return out


@pytest.mark.parametrize("name", fast(VIDEO_MODELS, "modelscope", "wan"))
def test_dropout_mask_is_independent_of_the_batch(name: str, tmp_path: Path) -> None:
    policy = build_lora_policy(name, tmp_path)
    batched, separate = predict(policy, [0, 1]), torch.cat([predict(policy, [0]), predict(policy, [1])])
    torch.testing.assert_close(batched, separate, rtol=1e-3, atol=1e-3)
    other_masks = [predict(policy, [0, 1], draw) for draw in (1, None)]
    assert not any(torch.allclose(batched, other, rtol=1e-2, atol=1e-2) for other in other_masks)


@pytest.mark.slow
def test_text_encoder_dropout_is_shared_by_rows(tmp_path: Path) -> None:
    policy = build_lora_policy("modelscope", tmp_path, "backbone, text_encoder")
    batched, separate = predict(policy, [0, 1]), torch.cat([predict(policy, [0]), predict(policy, [1])])
    torch.testing.assert_close(batched, separate, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_dropout_gradients_do_not_depend_on_micro_batches(tmp_path: Path) -> None:
    updates = []
    for micro_batch_size in (1, 2):
        settings = [
            *SMALL,
            f"batch.micro_batch_size={micro_batch_size}",
            "tuning.modules=[backbone,text_encoder]",
            "tuning.dropout=0.3",
            "optim.lr=1e-2",
        ]
        run = build(make_tiny(load("vader-modelscope-aesthetic", settings)), tmp_path / str(micro_batch_size))
        before = {key: p.detach().clone() for key, p in run.policy.weights.trainable().items()}
        train_step(run, 0)
        train_step(run, 1)
        updates.append({key: p.detach() - before[key] for key, p in run.policy.weights.trainable().items()})
    one, two = updates
    assert any(x.abs().max() > 1e-3 for x in one.values())
    assert all(torch.allclose(x, two[key], rtol=1e-2, atol=1e-4) for key, x in one.items())


def test_displayed_samples_have_no_dropout(tmp_path: Path) -> None:
    settings = [*SMALL, "sample.count=1", "tuning.dropout=0.5"]
    run = build(make_tiny(load("vader-modelscope-aesthetic", settings)), tmp_path)
    with torch.no_grad():
        for p in run.policy.weights.trainable().values():
            nn.init.normal_(p, std=0.1)
    assert generate_samples(run, 0).pixels.equal(generate_samples(run, 0).pixels)


class LinearModel(TrainableModel):
    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net: nn.Module = nn.Sequential(nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh())])[0])


def test_recomputation_uses_the_same_dropout_mask() -> None:
    gradients = []
    for checkpointed in (False, True):
        model, x = LinearModel(), torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
        weights = Lora(rank=2, target_modules="all-linear", dropout=0.4).apply(model, ())
        for i, p in enumerate(weights.trainable().values()):
            nn.init.normal_(p, generator=torch.Generator().manual_seed(i))
        if checkpointed:
            checkpoint_activations(weights.net)
        with weights.dropout_masks(Randomness(0, 0, torch.arange(2))):
            model.net(model.net(x)).square().sum().backward()
        gradients.append([p.grad for p in weights.trainable().values()])
    assert all(a is not None and b is not None and a.equal(b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
def test_dropout_rate_and_independence(rate: float) -> None:
    net = nn.Identity()
    masks = DropoutMasks(net)
    layer = RowDropout(rate, 320, masks, last=True)
    with masks.active(Randomness(0, 0, torch.arange(2)), 0):
        x = net(torch.ones(2, 2048, 320))
        dropped = (layer(x) == 0).float()
        assert layer(x).mean().item() == pytest.approx(1, abs=0.01)
    std = (rate * (1 - rate)) ** 0.5
    assert dropped.mean().item() == pytest.approx(rate, abs=5 * std / dropped.numel() ** 0.5)
    for means, count in (
        (dropped.mean(2), 320),
        (dropped.mean(1), 2048),
    ):  # all positions and features have the same rate
        assert means.std().item() == pytest.approx(std / count**0.5, rel=0.15)
    assert (dropped[0] * dropped[1]).mean().item() == pytest.approx(rate**2, rel=0.3)


def test_convolution_dropout_and_position_wraparound() -> None:
    net = nn.Identity()
    masks = DropoutMasks(net)
    layer = RowDropout(0.5, 3, masks, last=False)
    with masks.active(Randomness(0, 0, torch.arange(1)), 0):
        dropped = layer(net(torch.ones(1, 3, 2 * MAX_POSITIONS))) == 0
    assert dropped[..., :MAX_POSITIONS].equal(dropped[..., MAX_POSITIONS:]) and not dropped[:, 0].equal(dropped[:, 1])


def test_zero_dropout_keeps_peft_layers() -> None:
    weights = Lora(rank=2, target_modules="all-linear").apply(LinearModel(), ())
    assert not any(isinstance(module, RowDropout) for module in weights.net.modules())
    assert not weights.net._forward_pre_hooks


def test_calls_with_other_batch_sizes_share_one_mask() -> None:
    net = nn.Identity()
    masks = DropoutMasks(net)
    layer = RowDropout(0.5, 64, masks, last=True)
    with masks.active(Randomness(0, 0, torch.arange(2)), 0):
        dropped = layer(net(torch.ones(3, 4, 64)))
    assert dropped[0].equal(dropped[1]) and dropped[0].equal(dropped[2]) and not dropped[0, 0].equal(dropped[0, 1])
