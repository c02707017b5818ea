"""MaPO: the loss for known errors, its limit at an error of zero, and pairs of the model's own samples."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import toys

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
    [(MaPO, {"error_scale": 0.0}, "error_scale"), (OnlineMaPO, {"group_size": 1}, "group_size")],
)
def test_invalid_settings_are_refused(kind: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**settings)
