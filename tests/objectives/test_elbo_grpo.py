"""Policy gradients on the forward process: recorded losses, first ratio, levels and masks, memory by levels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import pytest
import torch
import toys
from golden_cases import GoldenCase, assert_golden, load_cases
from torch import Tensor

from tastemaker.core.group_selection import PoolSelection
from tastemaker.core.policy import Policy, Process
from tastemaker.core.randomness import Randomness
from tastemaker.core.reward import Reward, RewardCard, RewardSpec
from tastemaker.core.types import Condition, Corrupted, Placement, Trajectory, select_rows
from tastemaker.core.weights import FrozenCopyFinetuning, FullWeights
from tastemaker.objectives.denoising_likelihood import error_likelihood
from tastemaker.objectives.elbo_grpo import ElboGRPO, ForwardRollout, all_likelihoods
from tastemaker.objectives.likelihood_estimators import (
    LikelihoodEstimate,
    LikelihoodEstimator,
    MaskedEstimator,
    masked_elbo,
)
from tastemaker.objectives.timestep_sampling import sample_grid_indices, sample_timesteps
from tastemaker.processes.dynamics import ODE
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.masked import MaskedProcess
from tastemaker.processes.paths import RectifiedFlow

NAMES = {"live": "", "old": "_old", "reference": "_ref", "lagged": "_ema"}


class NamedWeights(FullWeights):
    """Weights that only remember which snapshot is in use."""

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        self.active = name
        with torch.no_grad():
            yield
        self.active = "live"


@dataclass(frozen=True)
class ScriptedEstimator(LikelihoodEstimator):
    """Likelihoods of recorded network outputs, in float64."""

    values: dict[str, Tensor]
    num_levels: int
    kind: Any = "adaptive"

    def corrupt(self, policy: Policy[Process], x: Tensor, rng: Randomness, level: int) -> Corrupted:
        if "hidden" in self.values:
            hidden = self.values["hidden"].bool()
            return Corrupted(x, torch.full((len(x),), level), ~hidden if level else hidden)
        t = self.values["t"][level].expand(len(x))
        return Corrupted(torch.full((len(x),), level), t, self.values["noise"][level])

    def estimate(self, policy: Policy[Process], cond: Condition, x: Tensor, noisy: Corrupted) -> LikelihoodEstimate:
        suffix = NAMES[policy.weights.active]
        if "hidden" in self.values:
            logits = self.values[f"logits{suffix}"][int(noisy.t[0])]
            log_prob = logits.log_softmax(-1).gather(-1, x[..., None]).squeeze(-1)
            return LikelihoodEstimate(masked_elbo((log_prob * noisy.noise).sum(1), noisy.noise) / x.shape[1])
        error = self.values[f"v{suffix}"][int(noisy.x[0])] - (noisy.noise - x)
        prediction = x - noisy.t.view(-1, 1, 1, 1) * error
        return LikelihoodEstimate(error_likelihood(prediction, x, noisy.t, self.kind), prediction, noisy.t, noisy.t**-2)


@dataclass(frozen=True)
class ScriptedElboGRPO(ElboGRPO):
    estimator: Any = None

    def make_estimator(self, process: Process) -> LikelihoodEstimator:
        return cast(LikelihoodEstimator, self.estimator)


def compute_recorded_case(case: GoldenCase, settings: dict[str, Any], kind: str) -> tuple[Tensor, Tensor]:
    """Loss of each sample, and the gradient of their mean by the network's outputs."""
    values = {key: x.clone() for key, x in case.inputs.items()}
    on_tokens = "hidden" in values
    leaf = values["logits" if on_tokens else "v"].requires_grad_(True)
    levels = 2 if case.config.get("coupled") else 1 if on_tokens else len(values["t"])
    estimator = ScriptedEstimator(values, levels, kind)
    objective = ScriptedElboGRPO(advantage_clip=1e9, kl_coef=0.0, estimator=estimator)
    objective = replace(objective, **settings)
    x, advantage = values["tokens" if on_tokens else "x0"], values.get("advantage", values.get("advantage_before_clip"))
    assert advantage is not None
    policy: Any = toys.policy("masked" if on_tokens else "flow")
    policy = replace(policy, weights=NamedWeights(policy.model.net))
    trajectory, rng = Trajectory(Condition(("",) * len(x)), x, x), Randomness(0, 0, torch.arange(len(x)))
    with policy.weights.use("old"):
        old = all_likelihoods(policy, estimator, trajectory, rng)
    rewards = advantage, objective.shape_advantages(advantage), {}
    experience = ForwardRollout(trajectory, rng, *rewards, num_levels=levels, old_likelihood=old)
    rows = toys.total_loss(objective, toys.context(policy, len(x)), experience)
    return rows.detach(), torch.autograd.grad(rows.mean(), leaf)[0]


@pytest.mark.parametrize("name", load_cases("awm"))
def test_awm_matches_recorded_losses(name: str) -> None:
    case = load_cases("awm")[name]
    settings = {
        "ratio": {"exp_first": "per_level", "sum_first": "per_sample"}[case.config["loss_type"]],
        "clip_range": case.config["clip_range"],
        "kl_coef": case.config["beta"],
        "ema_kl_coef": case.config["ema_beta"],
        "advantage_clip": case.config["adv_clip_max"],
        "advantage_scale": case.config["advantage_max"] / case.config["adv_clip_max"],
    }
    rows, gradient = compute_recorded_case(case, settings, case.config["weighting"].lower())
    assert_golden(rows, case.outputs["rows"])
    assert_golden(gradient, case.outputs["grad_v"])


@pytest.mark.parametrize("name", load_cases("elbo_ratio"))
def test_vgrpo_and_epg_match_recorded_losses(name: str) -> None:
    case = load_cases("elbo_ratio")[name]
    if "kind" in case.config:
        settings = {"loss_type": case.config["kind"], "ratio": "per_level", "kl_coef": case.config["kl_coef"]}
    else:
        settings = {
            "clip_range": case.config["clip_range"],
            "old_kl_coef": case.config["kl_coef"],
            "kl_weighting": "clean",
            "advantage_tanh": case.config["soft_clip"],
        }
    rows, gradient = compute_recorded_case(case, settings, "adaptive")
    assert_golden(rows, case.outputs["rows"])
    assert_golden(gradient, case.outputs["grad_v"])


def test_par_has_the_gradient_of_pepg() -> None:
    """The derivative of (A - d)^2 / 2 is -(A - d), if both ratios have no gradient."""
    case = load_cases("elbo_ratio")["pepg"]
    for ratio in ("per_level", "per_sample", "none"):
        gradients = [
            compute_recorded_case(case, {"loss_type": kind, "ratio": ratio}, "adaptive")[1] for kind in ("par", "pepg")
        ]
        assert_golden(*gradients)


@pytest.mark.parametrize("name", load_cases("masked_elbo"))
def test_masked_elbo_matches_recorded_losses(name: str) -> None:
    case = load_cases("masked_elbo")[name]
    settings = {"clip_range": case.config["clip_range"], "kl_coef": case.config["kl_coef"]}
    rows, gradient = compute_recorded_case(case, settings, "adaptive")
    assert_golden(rows, case.outputs["rows"])
    assert_golden(gradient, case.outputs["grad_logits"])


@pytest.mark.parametrize("name", load_cases("awm_levels"))
def test_levels_match_recorded_strata(name: str) -> None:
    case = load_cases("awm_levels")[name]
    fraction, steps = case.config["timestep_fraction"], case.config["num_steps"]
    indices = sample_grid_indices(case.inputs["uniform"][None], steps, case.config["time_type"], fraction)
    assert torch.equal(indices[0], case.outputs["indices"])


def test_every_law_gives_valid_timesteps_from_noise_to_clean() -> None:
    uniform = Randomness(0, 0, torch.arange(500)).uniform("laws", 6)
    for steps in (1, 2, 8, 40):
        process = GaussianProcess(RectifiedFlow(3.0), num_steps=steps)
        for law in ("path", "discrete", "discrete_wo_init", "discrete_with_init", "uniform", "logit_normal"):
            t = sample_timesteps(process, uniform, law, 0.9, 3.0)  # type: ignore[arg-type]
            assert t.shape == (500, 6) and ((t > 0) & (t <= 1)).all(), law
            sign = -1 if law.startswith("discrete") else 1  # strata of the sampler begin at the noise
            assert (sign * t.diff(dim=1) >= 0).all(), law
            if steps == 40:
                assert (t == 1).any() == (law in ("discrete", "discrete_with_init")), law
                assert (t[:, 0] == 1).all() == (law == "discrete_with_init"), law


VARIANTS = [
    ElboGRPO(group_size=4),
    ElboGRPO(group_size=4, ratio="per_level", likelihood="ghuber", ema_kl_coef=1.0, old_kl_coef=0.1),
    ElboGRPO(group_size=4, loss_type="epg", ratio="per_level", noise_sharing="independent"),
    ElboGRPO(group_size=4, loss_type="ppo", ratio="none", kl_coef=0.0),
]
TOKEN_VARIANT = ElboGRPO(group_size=4, clip_range=0.2, num_timesteps=2, advantage="leave_one_out", old_kl_coef=0.1)
CASES = [(objective, name) for objective in VARIANTS for name in ("flow", "epsilon")]
CASES += [(TOKEN_VARIANT, name) for name in ("masked", "causal")]


@pytest.mark.parametrize(("objective", "name"), CASES)
def test_first_ratio_is_exactly_one(objective: ElboGRPO, name: str) -> None:
    policy = toys.policy(name, snapshots=objective.snapshots())
    ctx = toys.context(policy, 4)
    experience = objective.collect(ctx, toys.prompts(4))
    assert experience.trajectory.segments == ()
    assert (experience.old_likelihood is None) == (objective.ratio == "none")
    for part in objective.parts(experience):
        metrics = objective.loss(ctx, experience, part).metrics
        assert (metrics["ratio"] == 1).all()
        assert all(not metrics[key].any() for key in metrics if key.endswith("kl"))
    toys.perturb(policy, 0.01)
    ratio = objective.loss(ctx, experience, objective.parts(experience)[0]).metrics["ratio"]
    assert (ratio == 1).all() == (objective.ratio == "none")


@dataclass(frozen=True)
class ConstantReward(RewardSpec, Reward):
    """Every image has the same reward, whose mean is not exact in float32."""

    batch_size = 100_000
    card: ClassVar[RewardCard] = RewardCard(range="any", failure_modes="anything")
    differentiable = False
    modality = "image"
    runs_on = "device"

    def load(self, placement: Placement) -> ConstantReward:
        return self

    def tiny(self) -> ConstantReward:
        return self

    def score(self, pixels: Tensor, prompts: Any, metadata: Any) -> Tensor:
        return torch.full((len(pixels),), 0.1)


@pytest.mark.parametrize("name", ["flow", "epsilon", "masked", "causal"])
def test_equal_rewards_have_no_gradient(name: str) -> None:
    objective = ElboGRPO(group_size=3, clip_range=0.2, kl_coef=0.0)
    policy = toys.policy(name)
    ctx = toys.context(policy, 4, spec=ConstantReward())
    experience = objective.collect(ctx, toys.prompts(4))
    toys.perturb(policy, 0.01)
    assert not any(toys.gradient(policy, loss.rows.sum()).any() for loss in losses(objective, ctx, experience))
    ctx = toys.context(policy, 4)
    experience = objective.collect(ctx, toys.prompts(4))
    assert any(toys.gradient(policy, loss.rows.sum()).any() for loss in losses(objective, ctx, experience))


def losses(objective: ElboGRPO, ctx: Any, experience: Any) -> list[Any]:
    return [objective.loss(ctx, experience, part) for part in objective.parts(experience)]


@pytest.mark.parametrize("name", ["flow", "masked"])
def test_gradients_of_levels_sum_to_the_gradient_of_the_sample(name: str) -> None:
    """The ratio of a sample is the exponential of a mean, yet only one level is in memory at a time."""
    objective = ElboGRPO(group_size=4, clip_range=0.002 if name == "flow" else 0.005, kl_coef=0.0, num_timesteps=3)
    policy = toys.policy(name, FrozenCopyFinetuning(), ())
    ctx = toys.context(policy, 4)
    experience = objective.collect(ctx, toys.prompts(4))
    toys.perturb(policy, 0.01)
    estimator, (x, cond) = (
        objective.make_estimator(policy.process),
        (experience.trajectory.final, experience.trajectory.cond),
    )
    levels = [estimator.corrupt(policy, x, experience.rng, level) for level in range(estimator.num_levels)]
    mean = torch.stack([estimator.estimate(policy, cond, x, noisy).likelihood for noisy in levels]).mean(0)
    assert experience.old_likelihood is not None
    ratio = (mean - experience.old_likelihood.mean(1)).exp()
    clipped = ratio.clamp(1 - objective.clip_range, 1 + objective.clip_range)
    assert 0 < (ratio != clipped).double().mean() < 1
    expected = torch.maximum(-experience.advantage * ratio, -experience.advantage * clipped)
    rows = toys.total_loss(objective, ctx, experience)
    torch.testing.assert_close(rows, expected, rtol=1e-9, atol=1e-9)
    actual, full = (toys.gradient(policy, loss.sum()) for loss in (rows, expected))
    torch.testing.assert_close(actual, full, rtol=1e-4, atol=1e-5 * float(full.abs().max()))


def test_samples_of_a_prompt_share_levels_and_noise() -> None:
    policy, rng = toys.policy("flow"), Randomness(0, 0, torch.arange(4)).repeat(3)
    x = torch.zeros(12, *policy.model.shape)
    for sharing, distinct in (("independent", 12), ("group", 4), ("batch", 1)):
        objective = ElboGRPO(group_size=3, timestep_sampling="path", timestep_sharing=sharing, noise_sharing=sharing)  # type: ignore[arg-type]
        estimator = objective.make_estimator(policy.process)
        noisy = [estimator.corrupt(policy, x, rng, level) for level in range(4)]
        assert [len(each.t.unique()) for each in noisy] == [distinct] * 4
        assert [len(each.noise.flatten(1).unique(dim=0)) for each in noisy] == [distinct] * 4
        assert not torch.equal(noisy[0].noise, noisy[1].noise)
        rows = torch.tensor([7, 2])
        subset = estimator.corrupt(policy, x[rows], select_rows(rng, rows), 2)
        assert torch.equal(subset.x, noisy[2].x[rows])


@pytest.mark.parametrize("name", ["flow", "masked"])
def test_kept_samples_of_a_pool_share_levels_and_noise_within_their_prompt_only(name: str) -> None:
    """The rows of kept samples are numbered within the pool: 12 of each prompt, of which 4 are left."""
    keep = PoolSelection(best=2, worst=2, pool_size=12, pool_num_steps=2)
    objective = ElboGRPO(group_size=4, timestep_sampling="path", num_timesteps=2, keep=keep)
    policy = toys.policy(name, snapshots=objective.snapshots())
    if name == "flow":
        policy = replace(policy, process=replace(policy.process, dynamics=ODE()))
    experience = objective.collect(toys.context(policy, 4), toys.prompts(4))
    assert experience.rng.rows.view(4, 4).div(12, rounding_mode="floor").T.unique(dim=0).tolist() == [[0, 1, 2, 3]]
    estimator = objective.make_estimator(policy.process)
    noisy = [
        estimator.corrupt(policy, experience.trajectory.final, experience.rng, level)
        for level in range(estimator.num_levels)
    ]
    for draws in (torch.stack([each.t for each in noisy], 1), torch.cat([each.noise.flatten(1) for each in noisy], 1)):
        prompts = draws.view(4, 4, -1)
        assert torch.equal(prompts, prompts[:, :1].expand_as(prompts))
        assert len(prompts[:, 0].unique(dim=0)) == 4


@pytest.mark.parametrize("sharing", ["independent", "group"])
def test_masks_and_complements_cover_every_token_once(sharing: Any) -> None:
    policy, tokens = toys.policy("masked"), 16
    estimator = MaskedEstimator(cast(MaskedProcess, policy.process), 2, sharing, sharing, rows_per_prompt=4)
    rng = Randomness(0, 0, torch.arange(2000)).repeat(4)
    x = torch.zeros(len(rng), tokens, dtype=torch.long)
    masks = [estimator.corrupt(policy, x, rng, level).noise for level in range(estimator.num_levels)]
    assert torch.equal(masks[1], ~masks[0]) and torch.equal(masks[3], ~masks[2])
    assert torch.equal(estimator.corrupt(policy, x, rng, 0).x == -1, masks[0])
    counts = torch.bincount(masks[0].sum(1), minlength=tokens + 1) / len(rng)
    torch.testing.assert_close(counts, torch.full_like(counts, 1 / (tokens + 1)), rtol=0, atol=0.02)
    per_prompt = masks[0].sum(1).view(-1, 4)
    if sharing == "group":
        assert torch.equal(masks[0].view(-1, 4, tokens)[:, 0], masks[0].view(-1, 4, tokens)[:, 3])
        assert (masks[0].sum(1) != masks[2].sum(1)).all()  # strata over draws
    else:
        assert (per_prompt.sort(1).values.diff(dim=1) >= 3).all()  # strata over the samples of a prompt
    # With equal log-probabilities of all tokens the estimate is L + 1 of them, L where one of the masks is empty.
    elbo = torch.stack([masked_elbo(-mask.sum(1).double(), mask) for mask in masks[:2]]).mean(0)
    torch.testing.assert_close(elbo.mean(), torch.tensor(-float(tokens), dtype=torch.float64), rtol=0.01, atol=0)


def test_norm_guard_acts_only_on_larger_velocities() -> None:
    guarded, plain = (ElboGRPO(group_size=4, kl_coef=0.0, norm_guard_coef=coef) for coef in (2.0, 0.0))
    policy = toys.policy("flow", snapshots=guarded.snapshots())
    ctx = toys.context(policy, 4)
    experience = guarded.collect(ctx, toys.prompts(4))
    for scale, acts in ((1.5, True), (0.5, False)):
        before = {key: p.detach().clone() for key, p in policy.weights.trainable().items()}
        with torch.no_grad():
            for p in policy.weights.trainable().values():
                p.mul_(scale)
        part = guarded.parts(experience)[0]
        loss = guarded.loss(ctx, experience, part)
        penalty = (loss.rows - plain.loss(ctx, experience, plain.parts(experience)[0]).rows) * experience.num_levels
        larger = loss.metrics["velocity_norm_ratio"] > 1
        assert larger.any() == acts
        assert torch.equal(penalty > 1e-12, larger)
        with torch.no_grad():
            for key, p in policy.weights.trainable().items():
                p.copy_(before[key])


def moved_policy(objective: ElboGRPO, name: str) -> tuple[Any, Any, Policy[Any]]:
    """Experience without advantages of a policy that has moved since: all that is left of the loss are its anchors."""
    policy = toys.policy(name, FrozenCopyFinetuning(), objective.snapshots())
    ctx = toys.context(policy, 4)
    experience = objective.collect(ctx, toys.prompts(4))
    toys.perturb(policy, 0.01)
    return ctx, replace(experience, advantage=torch.zeros_like(experience.advantage)), policy


def predicted_velocity(policy: Policy[Any], cond: Condition, noisy: Corrupted, snapshot: str | None = None) -> Tensor:
    """The network's output on rectified flow, of the live weights or of a snapshot."""
    with policy.weights.use(snapshot) if snapshot else nullcontext():
        return cast(Tensor, policy.model.predict(noisy.x, noisy.t, cond)).double()


ESTIMATORS: dict[str, Any] = {"k1": lambda x: x, "k2": lambda x: x**2 / 2, "k3": lambda x: x.exp() - 1 - x}


@pytest.mark.parametrize("name", ["flow", "epsilon"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_estimates_of_likelihoods_and_their_gradients(estimator: Any, name: str) -> None:
    """The anchor is that function of l - l_ref at each level, and only the live likelihood has a gradient."""
    objective = ElboGRPO(group_size=4, num_timesteps=2, kl_coef=0.7, kl_estimator=estimator, timestep_sampling="path")
    ctx, experience, policy = moved_policy(objective, name)
    trajectory, levels = experience.trajectory, objective.make_estimator(policy.process)
    expected = []
    for level in range(2):
        noisy = levels.corrupt(policy, trajectory.final, experience.rng, level)
        with policy.weights.use("reference"):
            reference = levels.estimate(policy, trajectory.cond, trajectory.final, noisy).likelihood
        x = levels.estimate(policy, trajectory.cond, trajectory.final, noisy).likelihood - reference
        assert x.abs().min() > 1e-8
        expected.append(ESTIMATORS[estimator](x))
    for part, kl in zip(objective.parts(experience), expected, strict=True):
        loss = objective.loss(ctx, experience, part)
        torch.testing.assert_close(loss.metrics["kl"], kl.detach())
        torch.testing.assert_close(loss.rows, 0.7 * kl / 2)
        actual, full = (toys.gradient(policy, rows.sum()) for rows in (loss.rows, 0.7 * kl / 2))
        torch.testing.assert_close(actual, full, rtol=1e-4, atol=1e-5 * float(full.abs().max()))


@pytest.mark.parametrize("weighting", ["output", "clean", "elbo"])
def test_anchor_weightings_by_the_distance_of_velocities(weighting: Any) -> None:
    """AWM's ELBO weighting divides by twice the variance of Flow-SDE with noise 0.7, whose level stops at 0.99."""
    objective = ElboGRPO(group_size=4, num_timesteps=4, kl_coef=0.7, kl_weighting=weighting)
    ctx, experience, policy = moved_policy(objective, "flow")
    trajectory, levels = experience.trajectory, objective.make_estimator(policy.process)
    seen = []
    for part in objective.parts(experience):
        noisy = levels.corrupt(policy, trajectory.final, experience.rng, part.index)
        live, reference = (predicted_velocity(policy, trajectory.cond, noisy, name) for name in (None, "reference"))
        t = noisy.t.double()
        variance = 0.7**2 * t / (1 - t.clamp(max=0.99))
        weight = {"output": torch.ones_like(t), "clean": t**2, "elbo": 1 / (2 * variance)}[weighting]
        expected = weight * ((live - reference) ** 2).flatten(1).mean(1)
        torch.testing.assert_close(objective.loss(ctx, experience, part).metrics["kl"], expected, rtol=1e-4, atol=0)
        seen += t.tolist()
    assert max(seen) == 1 and min(seen) < 0.5


def test_norm_guard_is_the_squared_excess_of_the_norm_over_the_references() -> None:
    objective = ElboGRPO(group_size=4, kl_coef=0.0, norm_guard_coef=2.0, ratio="none", timestep_sampling="path")
    ctx, experience, policy = moved_policy(objective, "flow")
    trajectory, levels = experience.trajectory, objective.make_estimator(policy.process)
    signs: set[bool] = set()
    for part in objective.parts(experience):
        noisy = levels.corrupt(policy, trajectory.final, experience.rng, part.index)
        norm, reference = (
            (predicted_velocity(policy, trajectory.cond, noisy, name) ** 2).flatten(1).mean(1).sqrt()
            for name in (None, "reference")
        )
        loss = objective.loss(ctx, experience, part)
        expected = 2.0 * (norm - reference).clamp(min=0) ** 2 / experience.num_levels
        torch.testing.assert_close(loss.rows, expected, rtol=1e-4, atol=1e-5 * float(expected.detach().max()))
        torch.testing.assert_close(loss.metrics["velocity_norm_ratio"], (norm / reference).detach(), rtol=1e-5, atol=0)
        actual, full = (toys.gradient(policy, value.sum()) for value in (loss.rows, expected))
        torch.testing.assert_close(actual, full, rtol=1e-3, atol=1e-4 * float(full.abs().max()))
        signs |= set((norm > reference).tolist())
    assert signs == {True, False}


@pytest.mark.parametrize("ratio", ["per_sample", "none"])
@pytest.mark.parametrize("estimator", ["mse", *ESTIMATORS])
def test_importance_weights_of_anchors_and_their_gradients(estimator: Any, ratio: Any) -> None:
    """With w = exp(l - l_old) the anchor is w D; the gradient of the weight is a part of its gradient."""
    objective = ElboGRPO(group_size=4, num_timesteps=2, kl_coef=0.7, kl_estimator=estimator, ratio=ratio)
    weighted = replace(objective, kl_importance=True)
    ctx, experience, policy = moved_policy(weighted, "flow")
    levels, trajectory = weighted.make_estimator(policy.process), experience.trajectory
    assert experience.old_likelihood is not None
    for part, plain in zip(weighted.parts(experience), objective.parts(experience), strict=True):
        noisy = levels.corrupt(policy, trajectory.final, experience.rng, part.index)
        likelihood = levels.estimate(policy, trajectory.cond, trajectory.final, noisy).likelihood
        weight = (likelihood - experience.old_likelihood[:, part.index]).exp()
        expected = weight * objective.loss(ctx, experience, plain).rows
        loss = weighted.loss(ctx, experience, part)
        assert (weight - 1).abs().min() > 1e-8
        torch.testing.assert_close(loss.rows, expected)
        assert bool((loss.metrics["ratio"] == 1).all()) == (ratio == "none")
        actual, full = (toys.gradient(policy, rows.sum()) for rows in (loss.rows, expected))
        torch.testing.assert_close(actual, full, rtol=1e-4, atol=1e-5 * float(full.abs().max()))


def test_importance_weighted_k1_has_the_gradient_of_the_kl_to_the_reference() -> None:
    """Five outcomes with exact likelihoods: the mean over the sampling policy equals KL(policy || reference)."""
    logits, old, reference = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    old, reference = old.log_softmax(0), reference.log_softmax(0)
    zeros, ones = torch.zeros(5, 1, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    noisy = Corrupted(zeros, ones, zeros + 1)
    logits.requires_grad_(True)

    def mean_anchor(objective: ElboGRPO) -> Tensor:
        current, other = (LikelihoodEstimate(x, zeros, ones, ones) for x in (logits.log_softmax(0), reference))
        rows, _ = objective.anchor_penalty(current, {"reference": other}, noisy, zeros, old)
        return (old.exp() * rows).sum()

    weighted = ElboGRPO(kl_coef=1.0, kl_estimator="k1", kl_importance=True)
    log_prob = logits.log_softmax(0)
    exact = (log_prob.exp() * (log_prob - reference)).sum()
    torch.testing.assert_close(mean_anchor(weighted), exact)
    gradients = [torch.autograd.grad(value, logits)[0] for value in (mean_anchor(weighted), exact)]
    torch.testing.assert_close(*gradients)
    assert exact > 0.1 and gradients[0].abs().max() > 0.01
    plain = torch.autograd.grad(mean_anchor(replace(weighted, kl_importance=False)), logits)[0]
    assert not torch.allclose(plain, gradients[1], atol=0.01)


@pytest.mark.parametrize("name", ["masked", "causal"])
def test_importance_weights_are_refused_on_tokens(name: str) -> None:
    family = toys.FAMILIES[name]
    assert "TM2764" in str(ElboGRPO(kl_importance=True).find_problem(family.process, (1,)))
    assert ElboGRPO(kl_importance=True).find_problem(toys.FAMILIES["flow"].process, (1,)) is None
