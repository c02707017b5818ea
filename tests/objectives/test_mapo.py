"""MaPO: the loss for known errors, its limit at an error of zero, and pairs of the model's own samples."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import toys

from tastemaker.core.weights import FrozenCopyFinetuning
from tastemaker.objectives.dpo import DPO
from tastemaker.objectives.mapo import MaPO, OnlineMaPO, mapo_loss, odds_score
from tastemaker.objectives.online_dpo import OnlineDPO


def score(error: float, scale: float) -> float:
    return scale * error / (math.exp(scale * error) - 1)


def test_loss_and_gradient_follow_the_formula() -> None:
    errors = torch.tensor([[0.4, 0.41], [1.3, 1.2], [0.02, 0.03]], dtype=torch.float64).T.requires_grad_()
    losses = mapo_loss(errors[0], errors[1], 0.1, 1000.0, 0.5)

    def formula(chosen: float, rejected: float) -> float:
        margin = 1000 * (score(chosen, 0.5) - score(rejected, 0.5))
        return chosen + 0.1 * math.log1p(math.exp(-margin))

    pairs = errors.detach().T.tolist()
    assert losses.tolist() == pytest.approx([formula(*pair) for pair in pairs], rel=1e-9)
    (gradient,) = torch.autograd.grad(losses.sum(), errors)
    for i, (chosen, rejected) in enumerate(pairs):
        step = 1e-7
        numeric = (formula(chosen + step, rejected) - formula(chosen - step, rejected)) / (2 * step)
        assert gradient[0, i].item() == pytest.approx(numeric, rel=1e-5)


def test_score_of_errors_from_zero_to_very_large_ones() -> None:
    error = torch.tensor([0.0, 1e-12, 1e-4, 3.0, 1e4], dtype=torch.float64, requires_grad=True)
    scores = odds_score(error, 0.5)
    assert scores.tolist() == pytest.approx([1.0, 1.0, 1 - 0.25e-4, score(3.0, 0.5), 0.0], rel=1e-9)
    (gradient,) = torch.autograd.grad(scores.sum(), error)
    assert gradient.isfinite().all() and gradient[0] == -0.25 and gradient[1].item() == pytest.approx(-0.25, abs=1e-3)


def test_loss_is_that_of_the_networks_errors_without_a_reference() -> None:
    objective = MaPO(beta=0.3, margin_scale=50.0)
    policy = toys.policy("epsilon")
    assert objective.snapshots() == ()
    ctx = toys.context(policy, 8)
    pairs = objective.collect(ctx, toys.pairs(8, 1, 0))
    noisy = policy.corrupt(pairs.chosen, pairs.rng)
    other = policy.corrupt(pairs.rejected, pairs.rng, noisy.t, noisy.noise)
    chosen, rejected = (
        ((policy.model.predict(n.x, n.t, pairs.cond) - n.noise) ** 2).flatten(1).mean(1) for n in (noisy, other)
    )
    expected = mapo_loss(chosen, rejected, 0.3, 50.0, 0.5)
    torch.testing.assert_close(toys.total_loss(objective, ctx, pairs), expected)


def test_reference_margin_starts_at_zero_where_the_published_one_measures_how_hard_images_are() -> None:
    """Without a reference, pairs of the model's own samples are decided at the start, whatever the model prefers."""
    margins = {}
    for reference_margin in (False, True):
        objective = OnlineMaPO(group_size=8, reference_margin=reference_margin)
        policy = toys.pretrained_policy("flow", snapshots=objective.snapshots())
        ctx = toys.context(policy, 32)
        pairs = objective.collect(ctx, toys.prompts(32))
        noisy = policy.corrupt(pairs.chosen, pairs.rng)
        with torch.no_grad():
            error = -policy.likelihood(pairs.cond, pairs.chosen, noisy)
            margin_loss = (toys.total_loss(objective, ctx, pairs) - error) / objective.beta  # log(1 + exp(-margin))
        margins[reference_margin] = -margin_loss.double().expm1().log()
    assert (margins[False].abs() > 5).float().mean() > 0.5
    torch.testing.assert_close(margins[True], torch.zeros(32, dtype=torch.float64), rtol=0, atol=1e-3)


def test_anchor_is_the_distance_of_velocities_to_the_reference() -> None:
    objective = OnlineMaPO(group_size=4, kl_coef=0.5, likelihood="adaptive")
    policy = toys.policy("epsilon", FrozenCopyFinetuning(), snapshots=objective.snapshots())
    ctx = toys.context(policy, 8)
    pairs = objective.collect(ctx, toys.prompts(8))
    assert not objective.loss(ctx, pairs, 0).metrics["kl"].any()
    toys.perturb(policy, 0.05)
    loss, free = objective.loss(ctx, pairs, 0), replace(objective, kl_coef=0.0).loss(ctx, pairs, 0)
    assert loss.metrics["kl"].gt(0).all()
    torch.testing.assert_close(loss.rows - free.rows, 0.5 * loss.metrics["kl"] * pairs.weight, rtol=1e-3, atol=1e-6)
    noisy = policy.corrupt(pairs.chosen, pairs.rng), policy.corrupt(pairs.rejected, pairs.rng)
    expected = torch.zeros(8)
    for each in noisy:
        now = policy.restore(pairs.cond, each).mean
        with policy.weights.use("reference"):
            before = policy.restore(pairs.cond, each).mean
        alpha, sigma = policy.process.path.alpha(each.t), policy.process.path.sigma(each.t)
        expected += (((now - before) ** 2).flatten(1).mean(1) * ((alpha + sigma) / sigma) ** 2 / 2).detach()
    torch.testing.assert_close(loss.metrics["kl"], expected, rtol=1e-4, atol=1e-7)


def test_swapped_pairs_have_the_loss_of_the_other_sample() -> None:
    errors = torch.tensor([0.2, 0.7])
    swapped = mapo_loss(errors.flip(0), errors, 0.1, 10.0, 0.5)
    torch.testing.assert_close(swapped.flip(0), mapo_loss(errors, errors.flip(0), 0.1, 10.0, 0.5))


def test_pairs_are_those_of_dpo() -> None:
    policy = toys.policy("flow", snapshots=("reference",))
    for mapo, dpo, batch in (
        (MaPO(), DPO(), toys.pairs(8, 1, 0)),
        (OnlineMaPO(group_size=4), OnlineDPO(group_size=4), toys.prompts(8)),
    ):
        ours, theirs = (each.collect(toys.context(policy, 8), batch) for each in (mapo, dpo))  # type: ignore[attr-defined]
        assert torch.equal(ours.chosen, theirs.chosen) and torch.equal(ours.rejected, theirs.rejected)
        assert torch.equal(ours.weight, theirs.weight)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (MaPO, {"error_scale": 0.0}, "error_scale"),
        (OnlineMaPO, {"group_size": 1}, "group_size"),
        (MaPO, {"kl_coef": -1.0}, "kl_coef"),
    ],
)
def test_invalid_settings_are_refused(kind: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**settings)
