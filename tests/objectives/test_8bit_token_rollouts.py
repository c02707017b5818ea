"""8-bit rollouts of tokens: ratios of the training precision, and truncated weights for what the rounding changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toys

from tastemaker.config.build import build
from tastemaker.config.check import require_valid
from tastemaker.config.load import load
from tastemaker.core.policy import Guidance
from tastemaker.core.registry import ConfigError
from tastemaker.core.rollout_scope import ROLLOUTS
from tastemaker.core.types import Segment
from tastemaker.objectives.ddpo import DDPO
from tastemaker.objectives.grpo import GRPO
from tastemaker.objectives.ppo import importance_weights, rollout_precision_metrics
from tastemaker.training.loop import train_step
from tastemaker.training.run import Run

SETTINGS = [
    *("sample.every=0", "guard.every=0", "rewards={bright: {type: brightness}}", "batch.prompts=4"),
    *("objective.group_size=4", "batch.minibatches=1", "batch.micro_batch_size=4", "engine.param_dtype=fp32"),
]


def tiny_run(folder: Path, kind: str, *settings: str, recipe: str = "ar-grpo") -> Run:
    config = load(recipe, [*SETTINGS, f"engine.rollout_precision={kind}", *settings])
    require_valid(config)
    run = build(config, folder, tiny=True)
    toys.perturb(run.policy, 0.2)
    return run


def rounded_segment(log_ratio: list[float]) -> Segment:
    """A segment of one sample with tokens whose rounding changed their log-probability by these numbers."""
    row = torch.zeros(1, len(log_ratio))
    ids, ones = row.long(), torch.ones(1)
    return Segment(ones, 0 * ones, ids, ids, row, torch.ones_like(row), precision_log_ratio=torch.tensor([log_ratio]))


def test_importance_weights_are_ratios_up_to_the_cap() -> None:
    segment = rounded_segment([0.0, -0.5, 0.5, 1.0])
    weights = importance_weights(segment, 2.0)
    assert weights is not None
    torch.testing.assert_close(weights, torch.tensor([[0.0, -0.5, 0.5, 1.0]]).exp().clamp(max=2))
    metrics = {name: float(value) for name, value in rollout_precision_metrics((segment,), 2.0).items()}
    assert metrics["rollout/truncated"] == 0.25
    assert metrics["rollout/importance_weight"] == pytest.approx(float(weights.mean()))
    assert metrics["rollout/kl"] == pytest.approx((0 + 0.10653 + 0.14872 + 0.71828) / 4, abs=1e-4)
    exact = replace(segment, precision_log_ratio=None)
    assert importance_weights(exact, 2.0) is None and rollout_precision_metrics((exact,), 2.0) == {}


@pytest.mark.parametrize("objective", [GRPO(group_size=2, clip_range=0.2), DDPO(clip_range=0.2)])
def test_loss_is_weighted_by_the_importance_of_tokens(objective: Any) -> None:
    """Equal weights of all tokens scale the loss and leave the ratio as it is; they are constants."""
    policy = toys.policy("causal")
    ctx = replace(toys.context(policy, 4), state=objective.make_state())
    experience = objective.collect(ctx, toys.prompts(4))
    experience = replace(experience, advantage=torch.linspace(-1, 2, len(experience)))
    (segment,) = experience.trajectory.segments
    assert segment.precision_log_ratio is None
    plain = objective.loss(ctx, experience, 0)
    for factor, expected in ((1.0, 1.0), (1.5, 1.5), (5.0, 2.0)):
        ratio = torch.full_like(segment.log_prob, factor).log()
        segments = (replace(segment, precision_log_ratio=ratio),)
        changed = replace(experience, trajectory=replace(experience.trajectory, segments=segments))
        loss = objective.loss(ctx, changed, 0)
        torch.testing.assert_close(loss.rows, expected * plain.rows)
        torch.testing.assert_close(loss.metrics["ratio"], plain.metrics["ratio"])
        share = objective.metrics(changed)["rollout/truncated"]
        assert torch.equal(share, torch.full_like(share, float(factor > 2)))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_first_ratio_of_8bit_rollouts_is_exactly_one(kind: str, tmp_path: Path) -> None:
    """Guided rollouts and unguided training, as in the recipe: the weight is that of the rounding alone."""
    metrics = train_step(tiny_run(tmp_path, kind, "engine.precision=bf16"), 0).to_event().metrics
    assert (metrics["ratio"], metrics["ratio_deviation"], metrics["clip_fraction"]) == (
        pytest.approx(1, abs=1e-7),
        0,
        0,
    )
    assert 0.5 < metrics["rollout/importance_weight"] < 1.5
    assert 0 <= metrics["rollout/truncated"] < 0.2 and 1e-6 < metrics["rollout/kl"] < 0.2
    assert metrics["grad_norm"] > 0


def test_rollouts_in_the_training_precision_have_no_weights(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, "same", "engine.precision=fp32")
    metrics = train_step(run, 0).to_event().metrics
    assert not [name for name in metrics if name.startswith("rollout/")]


@pytest.mark.parametrize("guidance", [None, Guidance(2.0), Guidance(2.0, rollouts_only=True)])
def test_importance_compares_the_sampler_with_itself_in_the_training_precision(
    guidance: Guidance | None, tmp_path: Path
) -> None:
    run = tiny_run(tmp_path, "int8", "engine.precision=fp32", "guidance=null")
    policy, rng = run.policy, run.context(0, 2).rng
    if guidance:
        policy = replace(policy, model=policy.process.wrap_guidance(policy.model, guidance))
    cond = policy.embed(run.data.batch(0, 2, 0, 1).prompts)
    with torch.no_grad():
        rollout = policy.process.start(policy.model, cond, rng)
        (segment,) = rollout.finish().segments
        calls = len(rng) * policy.model.forward_passes
        scored = policy.action_distribution(cond, segment).log_prob(segment.action)
        with ROLLOUTS.exact():
            (exact,) = policy.sample(cond, rng).segments
    ratio = segment.precision_log_ratio
    assert ratio is not None and 1e-5 < ratio.abs().mean() < 0.1
    torch.testing.assert_close(segment.log_prob, scored, rtol=1e-5, atol=1e-5)
    assert exact.precision_log_ratio is None
    # With guidance in rollouts only, one more call per sequence scores the guided sampler.
    extra = 2 if guidance and guidance.rollouts_only else 1
    assert rollout.network_calls == calls * (policy.model.shape[0] + extra)


def test_8bit_rollouts_resume_equally(tmp_path: Path) -> None:
    settings = ("engine.precision=fp32", "optim.lr=1e-2")
    run, resumed = (tiny_run(tmp_path / name, "int8", *settings) for name in ("one", "two"))
    for step in range(2):
        train_step(run, step)
    path = run.save(2)
    uninterrupted = train_step(run, 2).to_event().metrics
    resumed.resume(path)
    assert train_step(resumed, 2).to_event().metrics == uninterrupted


@pytest.mark.parametrize(
    ("recipe", "settings", "code"),
    [
        ("ar-grpo", ["engine.rollout_precision=fp8"], ""),
        ("grpo-playground-causal", ["engine.rollout_precision=int8"], ""),
        ("ar-grpo", ["engine.rollout_precision=fp8", "process.recompute_log_probs=false"], "TM2691"),
        ("grpo-playground-causal", ["engine.rollout_precision=bf16", "engine.precision=fp32"], "TM2692"),
        ("grpo-llamagen-tf", ["engine.rollout_precision=fp8"], "TM2604"),
        ("grpo-playground-masked", ["engine.rollout_precision=fp8"], "TM2604"),
        ("grpo-janus", ["engine.rollout_precision=fp8"], "TM2606"),
        ("ar-grpo", ["engine.rollout_precision=fp8", "engine.strategy=fsdp"], "TM2605"),
    ],
)
def test_8bit_rollouts_of_tokens_are_allowed_or_refused(recipe: str, settings: list[str], code: str) -> None:
    config = load(recipe, settings)
    if not code:
        require_valid(config)
        return
    with pytest.raises(ConfigError, match=rf"engine\.rollout_precision.*{code}"):
        require_valid(config)


def test_cap_below_one_is_refused() -> None:
    for objective in (GRPO, DDPO):
        with pytest.raises(ValueError, match=r"importance_cap 0\.5.*TM088"):
            objective(importance_cap=0.5)
