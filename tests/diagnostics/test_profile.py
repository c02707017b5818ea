"""`tastemaker profile`: shares that add up, a trace that opens, and settings that fit the measured shares."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tastemaker.cli import app
from tastemaker.config.build import build
from tastemaker.config.load import load
from tastemaker.diagnostics.profile import Profile, profile_run, suggest_settings

GIB = 2.0**30


def test_profile_trains_and_writes_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    settings = ["batch.prompts=4", "--steps", "2", "--trace", str(trace)]
    result = CliRunner().invoke(app, ["profile", "grpo-toy-flow", *settings])
    assert result.exit_code == 0, result.output
    assert "rollout" in result.stdout and "optimizer state" in result.stdout
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


def test_full_gpus_get_settings_that_save_memory(tmp_path: Path) -> None:
    config: Any = load("grpo-lora-toy-flow", ["batch.micro_batch_size=2"])
    run = build(config, tmp_path)
    full = Profile(1.0, {"update": 0.9}, {}, 75 * GIB, 80 * GIB, None)
    settings = [each.setting for each in suggest_settings(full, run, config)]
    assert "engine.base_precision=int8" in settings
    roomy = suggest_settings(replace(full, peak_memory=20 * GIB), run, config)
    assert "engine.base_precision=int8" not in [each.setting for each in roomy]
