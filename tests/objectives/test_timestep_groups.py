"""Several timesteps in one call of the network: fewer calls, and the gradient and metrics of one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import toys
from torch import Tensor

from tastemaker.config.check import find_problems
from tastemaker.config.load import load
from tastemaker.config.step_counts import compute_step_counts
from tastemaker.core.lora import Lora
from tastemaker.core.objective import SingleProcess
from tastemaker.core.policy import Guidance
from tastemaker.core.types import Loss
from tastemaker.core.weights import FullFinetuning
from tastemaker.objectives.ddpo import DDPO
from tastemaker.objectives.grpo import GRPO
from tastemaker.objectives.timestep_groups import split_timesteps
from tastemaker.training.metrics import AverageMeter

CASES = {
    "reference": (GRPO(group_size=4, kl_coef=0.5, clip_range=0.1), Lora(rank=2)),
    "exact kl": (GRPO(group_size=4, kl_coef=0.5, kl_estimator="exact"), FullFinetuning()),
    "noise": (GRPO(group_size=4, time_weighting="noise", trust="none"), FullFinetuning()),
    "trust kl": (GRPO(group_size=4, trust="kl", trust_threshold=10.0), FullFinetuning()),
    "ddpo": (DDPO(clip_range=0.1, tracker_min_count=1), FullFinetuning()),
}


def test_groups_are_few_and_of_similar_size() -> None:
    for count in range(1, 12):
        for per_call in range(1, 13):
            groups = split_timesteps(count, per_call)
            assert [i for group in groups for i in group] == list(range(count))
            sizes = [len(group) for group in groups]
            assert len(groups) == -(-count // per_call) and max(sizes) <= per_call and max(sizes) - min(sizes) <= 1
            assert sizes == sorted(sizes, reverse=True)


def gradient_and_metrics(
    objective: Any, ctx: Any, experience: Any, draw: int | None
) -> tuple[Tensor, dict[str, float]]:
    """Differentiate part by part as the loop does; with `draw`, under dropout masks that all timesteps share."""
    meter, total, parts = AverageMeter(), torch.zeros(()), objective.parts(experience)
    weights = ctx.policy.weights
    for part in parts:
        with weights.dropout_masks(experience.rng, draw or 0):
            loss: Loss = objective.loss(ctx, experience, part)
            total = total + toys.gradient(ctx.policy, loss.rows.sum() / len(experience))
        meter.add_loss(loss, len(parts))
    return total, meter.compute(SingleProcess())


@pytest.mark.parametrize("name", ["flow", "epsilon"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("guidance", [None, Guidance(3.0, interval=(0.3, 0.8))], ids=["plain", "guided"])
def test_gradient_and_metrics_equal_those_of_one_timestep_at_a_time(case: str, name: str, guidance: Any) -> None:
    objective, tuning = CASES[case]
    policy = toys.policy(name, tuning, objective.snapshots(), guidance)
    ctx = toys.context(policy, 8, objective.make_state())
    experience = objective.collect(ctx, toys.prompts(8))
    experience = replace(experience, weight=torch.linspace(0.5, 1.5, len(experience)))
    assert len(experience.trajectory.segments) == 7
    toys.perturb(policy, 0.05)
    expected, metrics = gradient_and_metrics(objective, ctx, experience, None)
    assert expected.abs().max() > 0 and metrics["ratio_deviation"] > 0
    for per_call in (2, 3, 7):
        grouped = replace(objective, timesteps_per_call=per_call)
        actual, grouped_metrics = gradient_and_metrics(grouped, ctx, experience, None)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
        assert grouped_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def test_masked_tokens_of_several_steps_share_a_call() -> None:
    objective = GRPO(group_size=4, kl_coef=0.1, clip_range=0.2)
    ctx, experience = toys.policy_with_experience(objective, "masked")
    expected, metrics = gradient_and_metrics(objective, ctx, experience, None)
    actual, grouped = gradient_and_metrics(replace(objective, timesteps_per_call=2), ctx, experience, None)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    assert grouped == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def test_timesteps_of_a_sample_share_its_dropout_mask() -> None:
    objective = GRPO(group_size=4, trust="none")
    policy = toys.policy("flow", Lora(rank=2, dropout=0.5), guidance=Guidance(3.0))
    ctx = toys.context(policy, 4)
    experience = objective.collect(ctx, toys.prompts(4))
    toys.perturb(policy, 0.05)
    expected, _ = gradient_and_metrics(objective, ctx, experience, 5)
    actual, _ = gradient_and_metrics(replace(objective, timesteps_per_call=3), ctx, experience, 5)
    other, _ = gradient_and_metrics(objective, ctx, experience, 6)
    tolerance = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=tolerance)
    assert (other - expected).abs().max() > 100 * tolerance


def test_groups_make_fewer_calls_with_more_rows_and_a_first_ratio_of_one() -> None:
    objective = GRPO(group_size=4, timesteps_per_call=3)
    policy = toys.policy("flow")
    ctx = toys.context(policy, 4)
    experience = objective.collect(ctx, toys.prompts(4))
    rows: list[int] = []
    policy.weights.net.register_forward_hook(lambda *call: rows.append(len(call[2])))
    for part in objective.parts(experience):
        metrics = objective.loss(ctx, experience, part).metrics
        torch.testing.assert_close(metrics["ratio"], torch.ones(16), rtol=0, atol=1e-5)
        assert metrics["ratio"].shape == (16,)
    assert rows == [48, 32, 32]


def test_check_shows_timesteps_and_refuses_them_for_autoregressive_models() -> None:
    config = load("grpo-toy-flow", ["objective.timesteps_per_call=2"])
    assert find_problems(config, 1) == []
    assert compute_step_counts(config).timesteps_per_call == 2
    (message,) = find_problems(load("grpo-toy-causal", ["objective.timesteps_per_call=2"]), 1)
    assert "[TM2740]" in message
