"""Trust regions of GRPO: recorded losses, equal gradients of all steps, masks, first ratio, weights of steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import toys
from golden_cases import GoldenCase, assert_golden, load_cases
from torch import Tensor

from tastemaker.config.check import find_problems
from tastemaker.config.load import load
from tastemaker.core.distributions import Gaussian
from tastemaker.core.types import Segment
from tastemaker.objectives.grpo import GRPO, noise_weight
from tastemaker.objectives.trust_region import kl_to_old_policy, trust_region_surrogate
from tastemaker.processes.dynamics import CPS, DenoisingStep, FlowSDE
from tastemaker.processes.gaussian import GaussianProcess, SDEWindow
from tastemaker.processes.paths import RectifiedFlow


def flow_sde_step(case: GoldenCase, velocity: Tensor) -> Gaussian:
    x, config = case.inputs["x"], case.config
    t, s = (torch.full((len(x),), config[name], dtype=torch.float64) for name in "ts")
    step = DenoisingStep(x, x - t.view(-1, 1, 1, 1) * velocity, t, s, config["sigma_max"])
    return FlowSDE(config["noise_level"]).step(RectifiedFlow(), step)


def recorded_segment(case: GoldenCase) -> Segment:
    x, action = case.inputs["x"], case.inputs["action"]
    t, s = (torch.full((len(x),), case.config[name], dtype=torch.float64) for name in "ts")
    old = flow_sde_step(case, case.inputs["v_old"])
    log_prob = old.log_prob(action)
    assert_golden(old.mean, case.outputs["old_mean"])
    assert_golden(log_prob[:, 0], case.outputs["old_log_prob"])
    return Segment(t, s, x, action, log_prob, torch.ones_like(log_prob), old.mean)


@pytest.mark.parametrize("name", [name for name in load_cases("trust_region") if "first_published" not in name])
def test_guard_and_dppo_match_recorded_losses(name: str) -> None:
    case = load_cases("trust_region")[name]
    velocity, segment = case.inputs["v"].clone().requires_grad_(True), recorded_segment(case)
    policy = flow_sde_step(case, velocity)
    log_prob = policy.log_prob(segment.action)
    assert_golden(log_prob.detach()[:, 0], case.outputs["log_prob"])
    guard = case.config["objective"] == "guard"
    objective, metrics = trust_region_surrogate(
        "ratio_norm" if guard else "kl",
        None if guard else case.config["kl_threshold"],
        policy,
        log_prob,
        segment,
        case.inputs["advantage"],
        case.config.get("clip_range", 1.0),
    )
    rows = -objective[:, 0]
    assert_golden(rows.detach(), case.outputs["rows"])
    assert_golden(torch.autograd.grad(rows.mean(), velocity)[0], case.outputs["grad_v"])
    assert_golden(metrics["ratio"], case.outputs["ratio"])
    if not guard:
        assert_golden(kl_to_old_policy(policy, segment)[:, 0], case.outputs["kl"])
        assert torch.equal(metrics["dropped"].bool(), case.outputs["dropped"].bool())
        assert 0 < metrics["dropped"].sum() < len(rows)


@pytest.mark.parametrize("name", load_cases("trust_region_tokens"))
def test_token_penalties_match_recorded_losses(name: str) -> None:
    case = load_cases("trust_region_tokens")[name]
    log_prob, old = case.inputs["log_prob"].clone().requires_grad_(True), case.inputs["old_log_prob"]
    assert case.config["weighted_by_old_probability"] == (name == "drpo")
    objective, _ = token_surrogate(name, case.config["threshold"], log_prob, old, case.inputs["advantage"])
    assert_golden(-objective.detach(), case.outputs["per_token"])
    rows = -objective.mean(1)
    assert_golden(rows.detach(), case.outputs["rows"])
    assert_golden(torch.autograd.grad(rows.mean(), log_prob)[0], case.outputs["grad_log_prob"])


def token_surrogate(trust: Any, threshold: float, log_prob: Tensor, old: Tensor, advantage: Tensor) -> Any:
    tokens = torch.zeros_like(old, dtype=torch.long)
    level = torch.ones(len(old))
    segment = Segment(level, level, tokens, tokens, old, torch.ones_like(old))
    policy: Any = None  # tokens are compared by their probabilities
    return trust_region_surrogate(trust, threshold, policy, log_prob, segment, advantage, 0.2)


def test_binary_mask_drops_tokens_that_move_further_away() -> None:
    old = torch.tensor([[0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.01]]).log()
    new = torch.tensor([[0.7, 0.3, 0.55, 0.45], [0.7, 0.3, 0.55, 0.05]]).log().requires_grad_(True)
    objective, metrics = token_surrogate("binary_tv", 0.1, new, old, torch.tensor([1.0, -1.0]))
    (gradient,) = torch.autograd.grad(objective.sum(), new)
    # The last token is five times as likely, but its probability hardly changed: a clip of ratios would stop it.
    assert (gradient != 0).tolist() == [[False, True, True, True], [True, False, True, True]]
    assert metrics["dropped"].tolist() == [0.25, 0.25]


@pytest.mark.parametrize("noise_level", [0.3, 0.7])
def test_every_step_of_guard_has_the_same_gradient(noise_level: float) -> None:
    """At ratio 1 the gradient by the velocity is A (1 + n^2 / 2) noise / N at every step below t = 1."""
    process = GaussianProcess(RectifiedFlow(3.0), FlowSDE(noise_level), 6)
    generator, levels = torch.Generator().manual_seed(0), process.path.timesteps(6).double()
    x, velocity, noise = torch.randn(3, 2, 4, generator=generator, dtype=torch.float64)
    advantage = torch.tensor([1.5, -0.5])
    for i in range(5):
        t, s = (levels[j].expand(2) for j in (i, i + 1))
        leaf = velocity.clone().requires_grad_(True)
        step = process.denoising_step(x, t, s, x - t[:, None] * leaf)
        policy = process.dynamics.step(process.path, step)
        mean = policy.mean.detach()
        action = mean + policy.std[:, None] * noise
        segment = Segment(t, s, x, action, policy.log_prob(action).detach(), torch.ones(2, 1), mean)
        log_prob = policy.log_prob(action)
        objective, _ = trust_region_surrogate("ratio_norm", None, policy, log_prob, segment, advantage, 1e-4)
        (gradient,) = torch.autograd.grad(objective.sum(), leaf)
        factor = 1.0 if i == 0 else 1 + noise_level**2 / 2
        torch.testing.assert_close(gradient, -advantage[:, None] * factor * noise / 4, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("dynamics", [FlowSDE(0.7), CPS(0.8)], ids=["flow_sde", "cps"])
@pytest.mark.parametrize("trust", ["ratio_norm", "kl", "none", "clip"])
def test_first_ratio_is_one_and_only_some_regions_keep_means(trust: Any, dynamics: Any) -> None:
    objective = GRPO(group_size=4, trust=trust)
    policy = toys.policy("flow")
    policy = replace(policy, process=GaussianProcess(RectifiedFlow(), dynamics, 4, SDEWindow(2)))
    ctx = toys.context(policy, 4)
    experience = objective.collect(ctx, toys.prompts(4))
    segments = experience.trajectory.segments
    assert [segment.mean is not None for segment in segments] == [trust in ("ratio_norm", "kl")] * 2
    for part in objective.parts(experience):
        assert (objective.loss(ctx, experience, part).metrics["ratio"] == 1).all()
    toys.perturb(policy, 0.01)
    metrics = objective.loss(ctx, experience, 0).metrics
    assert (metrics["ratio"] != 1).all()
    if trust == "kl":
        assert (metrics["old_kl"] > 0).all()


@pytest.mark.parametrize("family", ["causal", "masked"])
@pytest.mark.parametrize("trust", ["binary_tv", "drpo", "spo"])
def test_token_regions_start_at_ratio_one_with_the_plain_policy_gradient(trust: Any, family: str) -> None:
    objective, plain = GRPO(group_size=4, trust=trust, trust_threshold=1e-3), GRPO(group_size=4, trust="none")
    policy = toys.policy(family)
    ctx = toys.context(policy, 4)
    experience = objective.collect(ctx, toys.prompts(4))
    for part in objective.parts(experience):
        loss, expected = (each.loss(ctx, experience, part) for each in (objective, plain))
        assert (loss.metrics["ratio"] == 1).all() and not loss.metrics["ratio_deviation"].any()
        if trust == "binary_tv":
            assert not loss.metrics["dropped"].any()
        assert torch.equal(loss.rows, expected.rows)
        actual, full = (toys.gradient(policy, each.rows.sum()) for each in (loss, expected))
        assert full.any()
        torch.testing.assert_close(actual, full)
    toys.perturb(policy, 0.1)
    rows, expected_rows = (each.loss(ctx, experience, 0).rows for each in (objective, plain))
    assert not torch.equal(rows, expected_rows)


def test_kl_region_needs_the_noise_of_the_step_on_cps() -> None:
    """CPS scores actions without a variance; its KL is divided by the variance of the step all the same."""
    process = GaussianProcess(RectifiedFlow(), CPS(0.8), 4)
    x, t, s = torch.zeros(1, 4), torch.tensor([0.75]), torch.tensor([0.5])
    policy = process.dynamics.step(process.path, process.denoising_step(x, t, s, torch.ones(1, 4)))
    shifted = policy.mean + 0.1
    segment = Segment(t, s, x, shifted, torch.zeros(1, 1), torch.ones(1, 1), shifted)
    torch.testing.assert_close(kl_to_old_policy(policy, segment), 0.1**2 / (2 * policy.std**2)[:, None])


def test_noise_weighting_has_mean_one_and_grows_with_the_noise() -> None:
    weighted = GRPO(group_size=4, time_weighting="noise")
    for name in ("flow", "epsilon"):
        policy = toys.policy(name)
        ctx = toys.context(policy, 4)
        experience = weighted.collect(ctx, toys.prompts(4))
        segments = experience.trajectory.segments
        weights = torch.stack([noise_weight(policy.process, segments, part) for part in range(len(segments))])
        torch.testing.assert_close(weights.mean(0), torch.ones_like(weights[0]))
        stds = [policy.action_distribution(experience.trajectory.cond, each).std for each in segments]  # type: ignore[attr-defined]
        torch.testing.assert_close(weights[1, :, 0] / weights[0, :, 0], stds[1] / stds[0])
        rows, plain = (
            objective.loss(ctx, experience, 0).rows
            for objective in (weighted, replace(weighted, time_weighting="uniform"))
        )
        torch.testing.assert_close(rows, plain * weights[0, :, 0])


@pytest.mark.parametrize(
    ("recipe", "setting", "code"),
    [
        ("grpo-toy-flow", "objective.trust=drpo", "TM1546"),
        ("grpo-toy-causal", "objective.trust=kl", "TM1547"),
        ("grpo-toy-masked", "objective.trust=ratio_norm", "TM1547"),
        ("grpo-playground-epsilon", "objective.trust=ratio_norm", "TM1548"),
        ("grpo-toy-causal", "objective.time_weighting=noise", "TM1549"),
        ("grpo-toy-flow", "objective.trust=kl", ""),
        ("grpo-playground-epsilon", "objective.trust=kl", ""),
        ("grpo-toy-masked", "objective.trust=binary_tv", ""),
    ],
)
def test_trust_regions_are_checked_against_the_process(recipe: str, setting: str, code: str) -> None:
    problems = " ".join(find_problems(load(recipe, [setting])))
    assert (code in problems) if code else not problems


def test_noise_weighting_and_normalized_ratios_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="TM1545"):
        GRPO(trust="ratio_norm", time_weighting="noise")
