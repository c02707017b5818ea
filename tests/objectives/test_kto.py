"""KTO: the loss for known likelihoods, the reference point, labels by rewards, and a toy with a liked mode."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
import toys
from scripted_policy import scripted_policy
from torch import Tensor

from tastemaker.core.objective import SingleProcess
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import Condition, Corrupted, LikeBatch, select_rows
from tastemaker.core.weights import FrozenCopyFinetuning
from tastemaker.objectives.denoising_likelihood import prediction_likelihood
from tastemaker.objectives.kto import KTO, LabeledSamples, OnlineKTO, kto_loss

LIVE = torch.tensor([-1.0, -2.5, -0.3, -4.0], dtype=torch.float64)  # log-likelihoods of four samples
REFERENCE = torch.tensor([-1.5, -2.0, -1.3, -3.2], dtype=torch.float64)
LIKED = torch.tensor([True, False, True, False])


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def expected_loss(gain: float, z: float, liked: bool, beta: float, utility: str) -> float:
    """The loss of one sample, written out with Python's floats."""
    value = beta * (gain - z) if liked else -beta * (gain - z)
    return {
        "kahneman_tversky": 1 - sigmoid(value),
        "loss_averse": -math.log(sigmoid(value)),
        "risk_seeking": math.log(sigmoid(-value)),
    }[utility]


@pytest.mark.parametrize("utility", ["kahneman_tversky", "loss_averse", "risk_seeking"])
def test_loss_and_gradient_follow_the_formula(utility: Any) -> None:
    gains, beta = [0.5, -0.5, 1.0, -0.8], 1.7
    z = max(0.0, sum(gains) / 4)
    gain = torch.tensor(gains, dtype=torch.float64, requires_grad=True)
    losses = kto_loss(gain, torch.full((4,), z, dtype=torch.float64), LIKED, beta, utility)
    expected = [expected_loss(g, z, bool(liked), beta, utility) for g, liked in zip(gains, LIKED, strict=True)]
    assert losses.tolist() == pytest.approx(expected, rel=1e-12)
    (gradient,) = torch.autograd.grad(losses.sum(), gain)
    step = 1e-6
    for i, liked in enumerate(LIKED.tolist()):
        above, below = (expected_loss(gains[i] + d, z, liked, beta, utility) for d in (step, -step))
        assert gradient[i].item() == pytest.approx((above - below) / (2 * step), rel=1e-6)


def scripted(objective: KTO, rows: Tensor | None = None) -> tuple[Any, LabeledSamples]:
    """Samples whose log-likelihoods under policy and reference are known; the reference point is that of the batch."""
    rows = torch.arange(4) if rows is None else rows
    policy, x = scripted_policy(), torch.stack([LIVE, REFERENCE], -1)[rows]
    policy.weights.net.double()
    policy.weights.snapshots["reference"] = {k: p.double() for k, p in policy.weights.snapshots["reference"].items()}
    ctx = toys.context(policy, len(x))
    samples = objective.compare_with_reference(ctx, Condition(("",) * len(x)), x, LIKED[rows], ctx.rng)
    return ctx, samples


def test_objective_computes_the_formula_with_weights_and_reference_point() -> None:
    objective = KTO(beta=2.0, like_weight=3.0, dislike_weight=0.5)
    ctx, samples = scripted(objective)
    gains = (LIVE - REFERENCE).tolist()
    z = max(0.0, sum(gains) / 4)
    assert z > 0 and samples.reference_point.tolist() == pytest.approx([z] * 4, rel=1e-6)
    weights = [3.0, 0.5, 3.0, 0.5]
    expected = [
        w * expected_loss(g, z, bool(liked), 2.0, "kahneman_tversky")
        for w, g, liked in zip(weights, gains, LIKED, strict=True)
    ]
    loss = objective.loss(ctx, samples, 0)
    assert loss.rows.tolist() == pytest.approx(expected, rel=1e-6)
    assert not samples.reference_point.requires_grad and not samples.reference.requires_grad
    assert loss.metrics["accuracy"].tolist() == [1, 1, 1, 1]


def test_negative_mean_gain_gives_the_reference_point_zero() -> None:
    _, samples = scripted(KTO(), torch.tensor([1, 3]))  # both lose likelihood
    assert samples.reference_point.tolist() == [0, 0]
    assert scripted(KTO(reference_point="zero"))[1].reference_point.tolist() == [0] * 4


def test_permuted_samples_have_permuted_losses() -> None:
    objective, order = KTO(beta=2.0), torch.tensor([2, 0, 3, 1])
    losses, permuted = (toys.total_loss(objective, *scripted(objective, rows)) for rows in (torch.arange(4), order))
    torch.testing.assert_close(permuted, losses[order])


@dataclass(frozen=True)
class OneOfTwoRanks(SingleProcess):
    """One of two ranks, which knows the tensors of both."""

    both: Tensor | None = None

    def gather(self, x: Tensor) -> Tensor:
        assert self.both is not None and any(
            torch.allclose(x, half, rtol=1e-4, atol=1e-5) for half in self.both.chunk(2)
        )
        return self.both


def test_reference_point_is_that_of_all_ranks() -> None:
    objective, policy = KTO(beta=10.0), toys.policy("flow", snapshots=("reference",))
    toys.perturb(policy, 0.05)
    batch, ctx = toys.likes(8, 1, 0), toys.context(policy, 8)
    whole = objective.collect(ctx, batch)
    noisy = policy.corrupt(whole.x, whole.rng)
    gain = (policy.likelihood(whole.cond, whole.x, noisy).detach() - whole.reference[:, 0])[:, None]
    assert whole.reference_point[0] == gain.mean().clamp(min=0)
    for rank, rows in enumerate(torch.arange(8).chunk(2)):
        comm = OneOfTwoRanks(rank, 2, gain)
        part = LikeBatch(*(select_rows(x, rows) for x in (batch.prompts, batch.pixels, batch.liked)))
        here = replace(ctx, comm=comm, rng=Randomness(0, 0, rows), first_row=int(rows[0]))
        half = objective.collect(here, part)
        assert torch.equal(half.reference_point, whole.reference_point[rows])
        with torch.no_grad():
            torch.testing.assert_close(
                toys.total_loss(objective, ctx, half), toys.total_loss(objective, ctx, whole)[rows]
            )


@pytest.mark.parametrize("name", toys.FAMILIES)
def test_first_loss_is_one_half_and_its_gradient_that_of_signed_likelihoods(name: str) -> None:
    objective = KTO(beta=0.8, num_timesteps=2)
    policy = toys.policy(name, FrozenCopyFinetuning(), objective.snapshots())
    ctx = toys.context(policy, 8)
    samples = objective.collect(ctx, toys.make_batch(objective, 8, policy.model.pixels))
    losses = toys.total_loss(objective, ctx, samples)
    torch.testing.assert_close(losses, torch.full((8,), 0.5))
    assert not samples.reference_point.any()
    noisy = [policy.corrupt(samples.x, samples.rng, draw=draw) for draw in range(2)]
    signed = sum(torch.where(samples.liked, 1, -1) * policy.likelihood(samples.cond, samples.x, n) for n in noisy)
    assert isinstance(signed, Tensor)
    gradient, expected = toys.gradient(policy, losses.sum()), toys.gradient(policy, -0.8 / 4 / 2 * signed.sum())
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["flow", "epsilon"])
def test_likelihood_by_predictions_is_that_of_outputs_and_anchor_starts_at_zero(name: str) -> None:
    """With an anchor, one prediction serves likelihood and distance; the likelihood is the same."""
    plain, anchored = KTO(beta=300.0), KTO(beta=300.0, kl_coef=2.0)
    policy = toys.policy(name, FrozenCopyFinetuning(), plain.snapshots())
    ctx = toys.context(policy, 8)
    samples = plain.collect(ctx, toys.make_batch(plain, 8, policy.model.pixels))
    first = anchored.loss(ctx, samples, 0)
    torch.testing.assert_close(first.rows, plain.loss(ctx, samples, 0).rows, rtol=2e-3, atol=1e-4)
    assert not first.metrics["kl"].any()
    toys.perturb(policy, 0.01)
    moved = anchored.loss(ctx, samples, 0)
    torch.testing.assert_close(
        moved.rows - 2 * moved.metrics["kl"], plain.loss(ctx, samples, 0).rows, rtol=2e-2, atol=2e-3
    )
    assert moved.metrics["kl"].gt(0).all()


def test_every_kind_of_likelihood_starts_without_gain_over_the_reference() -> None:
    objective = KTO(beta=50.0, likelihood="adaptive", num_timesteps=2)
    policy = toys.policy("epsilon", FrozenCopyFinetuning(), objective.snapshots())
    ctx = toys.context(policy, 8)
    samples = objective.collect(ctx, toys.likes(8, 1, 0))
    assert samples.reference_point.tolist() == [0] * 8
    losses = toys.total_loss(objective, ctx, samples)
    torch.testing.assert_close(losses, torch.full((8,), 0.5), rtol=1e-4, atol=1e-4)
    error = policy.restore(samples.cond, policy.corrupt(samples.x, samples.rng)).mean - samples.x
    adaptive = -(error**2).flatten(1).mean(1) / error.abs().flatten(1).mean(1)
    torch.testing.assert_close(samples.reference[:, 0], adaptive.detach(), rtol=1e-4, atol=1e-5)


def test_output_errors_of_noise_predictions_hardly_see_high_noise_levels_and_adaptive_ones_do() -> None:
    """What a shift of the predicted clean sample by .1 costs at a high and a low noise level: why KTO has a choice."""
    path = toys.DARK
    x, t = torch.zeros(2, 48), torch.tensor([0.9, 0.2])
    noisy = Corrupted(x, t, x)
    costs = {kind: -prediction_likelihood(path, x + 0.1, x, noisy, cast(Any, kind)) for kind in ("output", "adaptive")}
    high, low = costs["output"].tolist()
    assert high < 1e-3 * low and costs["adaptive"].tolist() == pytest.approx([0.1, 0.1], rel=1e-5)


def test_settings_that_need_denoised_samples_are_refused_on_tokens() -> None:
    for settings in ({"likelihood": "adaptive"}, {"kl_coef": 0.1}):
        objective = OnlineKTO(**cast(Any, settings))
        assert "TM2200" in (objective.find_problem(toys.FAMILIES["causal"].process, (16,)) or "")
        assert objective.find_problem(toys.FAMILIES["flow"].process, (3, 8, 8)) is None


def test_shared_noise_is_that_of_the_first_row() -> None:
    policy = toys.policy("flow", snapshots=("reference",))
    samples = KTO(shared_noise=True).collect(toys.context(policy, 4), toys.likes(4, 1, 0))
    noisy = policy.corrupt(samples.x, samples.rng)
    assert (noisy.t == noisy.t[0]).all() and (noisy.noise == noisy.noise[0]).all()


def test_mismatched_reference_point_is_the_gain_under_the_next_prompt() -> None:
    objective = KTO(reference_point="mismatched")
    policy = toys.policy("causal", snapshots=("reference",))
    toys.perturb(policy, 0.05)
    batch = toys.likes(8, 1, 0)
    samples = objective.collect(toys.context(policy, 8), batch)
    following, noisy = policy.embed((*batch.prompts[1:], batch.prompts[0])), policy.corrupt(samples.x, samples.rng)
    with torch.no_grad():
        live = policy.likelihood(following, samples.x, noisy)
        with policy.weights.use("reference"):
            before = policy.likelihood(following, samples.x, noisy)
    torch.testing.assert_close(samples.reference_point[0], (live - before).mean().clamp(min=0))
    assert batch.prompts[0] != batch.prompts[1]


@pytest.mark.parametrize(("label", "threshold"), [("group_mean", 0.5), ("threshold", 0.6)])
def test_rewards_label_the_models_own_samples(label: Any, threshold: float) -> None:
    objective = OnlineKTO(group_size=4, label=label, threshold=threshold)
    policy = toys.policy("flow", snapshots=objective.snapshots())
    samples = objective.collect(toys.context(policy, 4), toys.prompts(4))
    bound = samples.reward.view(4, 4).mean(1).repeat_interleave(4) if label == "group_mean" else threshold
    assert torch.equal(samples.liked, samples.reward > bound)
    assert len(samples) == 16 and samples.weight.all() and 0 < int(samples.liked.sum()) < 16


def test_policy_moves_to_the_liked_mode() -> None:
    """Data of two colors without a prompt, one liked and one disliked: samples move to the liked one."""
    objective = KTO(beta=300.0, num_timesteps=2)
    policy = toys.pretrained_policy("flow", snapshots=objective.snapshots())
    generator = torch.Generator().manual_seed(0)
    red, blue = (list(toys.TOY_COLORS).index(name) for name in ("red", "blue"))

    def batch() -> LikeBatch:
        liked = torch.rand(64, generator=generator) < 0.5
        colors = torch.where(liked, red, blue)
        return LikeBatch(("a white",) * 64, toys.solid_images(colors, 1, generator), liked)

    def redness() -> Tensor:
        cond = policy.embed(("a white",) * 128)
        pixels = policy.decode(policy.sample(cond, Randomness(3, 0, torch.arange(128))).final)
        return (pixels[:, :, 0] - pixels[:, :, 2]).flatten(1).mean(1)

    before = redness()
    toys.train(policy, objective, (batch() for _ in range(40)), 1e-3)
    after = redness()
    assert toys.z_score(before, after) > 5 and after.mean() > before.mean() + 0.1


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (KTO, {"beta": 0.0}, "beta"),
        (KTO, {"like_weight": 0.0, "dislike_weight": 0.0}, "like_weight"),
        (KTO, {"prompt_dropout": 1.5}, "prompt_dropout"),
        (OnlineKTO, {"group_size": 1}, "group_size"),
    ],
)
def test_invalid_settings_are_refused(kind: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**settings)
