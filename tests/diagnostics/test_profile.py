"""`tastemaker profile`: shares that add up, a trace that opens, and settings that fit the measured shares."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tastemaker.cli import app
from tastemaker.config.build import build
from tastemaker.config.load import load
from tastemaker.core.randomness import Randomness
from tastemaker.diagnostics.gpu_presets import GPU_PRESETS, match_device_name
from tastemaker.diagnostics.profile import (
    Profile,
    memory_by_part,
    network_tensors,
    peak_tflops,
    profile_run,
    suggest_settings,
    tensors_of,
)
from tastemaker.training import low_precision_linear
from tastemaker.training.low_precision_linear import RolloutLinear

GIB = 2.0**30


def test_profile_trains_and_writes_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    settings = ["batch.prompts=4", "--steps", "2", "--trace", str(trace)]
    result = CliRunner().invoke(app, ["profile", "grpo-toy-flow", *settings])
    assert result.exit_code == 0, result.output
    assert all(part in result.stdout for part in ("rollout", "optimizer state", "rewards", "frozen networks"))
    names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
    assert any("backward" in name.lower() for name in names)


def test_shares_add_up_and_memory_is_counted(tmp_path: Path) -> None:
    config = load("grpo-toy-flow", ["batch.prompts=4", "ema_decay=0.9"])
    run = build(config, tmp_path)
    steps: list[int] = []
    profile = profile_run(run, config, 2, progress=lambda: steps.append(1))
    assert len(steps) == 3 and not list(tmp_path.glob("checkpoints/*"))
    assert 0.5 < sum(map(profile.share, profile.phases)) <= 1.01
    weights = 4 * sum(p.numel() for p in run.policy.weights.net.parameters())
    assert profile.memory["weights"] == profile.memory["gradients"] == weights
    assert profile.memory["optimizer state"] > 2 * weights
    assert profile.peak_memory is None and profile.flops is None


@torch.no_grad()
def test_memory_of_rewards_and_copies_for_rollouts_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_precision_linear, "MIN_WEIGHTS", 256)
    config = load("nft-playground", ["engine.rollout_precision=int8"])
    run = build(config, tmp_path, tiny=True)
    scorers: list[Any] = [reward.reward for reward in run.rubric.rewards.values()]
    before = memory_by_part(run)
    assert before["rewards"] == sum(x.nbytes for scorer in scorers for x in scorer.net.state_dict().values()) > 0
    assert before["copies of weights for rollouts"] == before["autoencoder and other frozen networks"] == 0
    run.policy.sample(run.policy.embed(["a red bicycle"]), Randomness(0, 0, torch.arange(1)))
    layers = [module for module in run.policy.weights.net.modules() if isinstance(module, RolloutLinear)]
    expected = sum(layer.weight.numel() + 4 * len(layer.weight) for layer in layers)
    assert memory_by_part(run)["copies of weights for rollouts"] == expected > 0


def test_memory_of_the_autoencoder_is_counted_once_and_on_one_device(tmp_path: Path) -> None:
    run = build(load("nft-playground-words"), tmp_path)
    model: Any = run.policy.model.unguided
    vae, own = tensors_of(model.autoencoder), set(map(id, tensors_of(model.net)))
    assert memory_by_part(run)["autoencoder and other frozen networks"] == sum(x.nbytes for x in vae) > 0
    assert len(network_tensors([model, model], torch.device("cpu"), own)) == len(vae)
    assert not network_tensors(model, torch.device("meta"), own)


@pytest.mark.parametrize(
    ("name", "gib", "peak"),
    [
        ("NVIDIA H200", 139.8, 989),
        ("NVIDIA H100 80GB HBM3", 79.1, 989),
        ("NVIDIA H100 PCIe", 79.1, None),
        ("NVIDIA A100-SXM4-40GB", 39.4, 312),
        ("NVIDIA GeForce RTX 4090", 23.6, 165),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.6, None),
        ("NVIDIA L40S", 44.5, 362),
        ("NVIDIA L4", 22.2, 121),
        ("Tesla T4", 14.6, None),
    ],
)
def test_peaks_of_known_gpus(name: str, gib: float, peak: float | None) -> None:
    preset = match_device_name(name, gib)
    assert (preset.peak_tflops if preset else None) == peak


def test_cards_of_one_chip_differ_in_memory() -> None:
    large, small = (match_device_name("NVIDIA A100-SXM4", gib) for gib in (79.2, 39.4))
    assert large is GPU_PRESETS["a100-80g"] and small is GPU_PRESETS["a100-40g"]


def test_utilization_is_of_the_peak_in_16_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="NVIDIA L4", total_memory=22.2 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    peaks = {
        precision: peak_tflops(build(load("grpo-toy-flow", [f"engine.precision={precision}"]), tmp_path / precision))
        for precision in ("bf16", "fp32")
    }
    assert peaks == {"bf16": 121, "fp32": None}


@pytest.mark.parametrize(
    ("phases", "overrides", "expected"),
    [
        ({"update": 0.8}, ["batch.micro_batch_size=2"], ["batch.micro_batch_size=4"]),
        ({"rollout": 0.8}, ["batch.rollout_batch_size=8"], ["batch.rollout_batch_size=16"]),
        ({"waiting": 0.5, "rollout": 0.4}, [], ["rewards.NAME.device=cuda:1, or a reward server with replicas"]),
        ({"rollout": 0.3, "update": 0.3}, [], []),
    ],
)
def test_suggestions_are_about_the_largest_shares(
    phases: dict[str, float], overrides: list[str], expected: list[str], tmp_path: Path
) -> None:
    config = load("nft-toy-flow", overrides)
    profile = Profile(1.0, phases, {}, None, None, None)
    found = suggest_settings(profile, build(config, tmp_path), config)
    assert [each.setting for each in found] == expected


def test_8_bit_rollouts_are_suggested_for_large_layers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("nft-playground", ["engine.precision=bf16"])
    run = build(config, tmp_path, tiny=True)
    profile = Profile(1.0, {"rollout": 0.9}, {}, 1 * GIB, 80 * GIB, None)
    run.engine.device = torch.device("cuda")
    found = []
    for limit in (low_precision_linear.MIN_WEIGHTS, 256):
        monkeypatch.setattr(low_precision_linear, "MIN_WEIGHTS", limit)
        found.append([each.setting for each in suggest_settings(profile, run, config)])
    assert "engine.rollout_precision=fp8" not in found[0] and "engine.rollout_precision=fp8" in found[1]


def test_8_bit_rollouts_are_suggested_for_tokens_with_their_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_precision_linear, "MIN_WEIGHTS", 256)
    config = load("grpo-playground-causal", ["engine.precision=bf16"])
    run = build(config, tmp_path, tiny=True)
    run.engine.device = torch.device("cuda")
    profile = Profile(1.0, {"rollout": 0.9}, {}, 1 * GIB, 80 * GIB, None)
    reasons = {each.setting: each.reason for each in suggest_settings(profile, run, config)}
    assert "weighed" in reasons["engine.rollout_precision=fp8"]


def test_full_gpus_get_settings_that_save_memory(tmp_path: Path) -> None:
    config: Any = load("grpo-lora-toy-flow", ["batch.micro_batch_size=2"])
    run = build(config, tmp_path)
    full = Profile(1.0, {"update": 0.9}, {}, 75 * GIB, 80 * GIB, None)
    settings = [each.setting for each in suggest_settings(full, run, config)]
    assert "engine.base_precision=int8" in settings
    roomy = suggest_settings(replace(full, peak_memory=20 * GIB), run, config)
    assert "engine.base_precision=int8" not in [each.setting for each in roomy]
