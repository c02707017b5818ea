"""The preference model: what a fit recovers, how sure it is, and which pair it asks about next."""

from __future__ import annotations

import torch

from tastemaker.preferences.pair_selection import expected_information, select_pairs
from tastemaker.preferences.preference_model import (
    Comparisons,
    Prior,
    fit_posterior,
    fit_preference,
    split_prompts,
)
from tastemaker.preferences.statistics import describe_share, wilson_interval

SCALES = (("average", 1.0), ("layout", 1.0))


def simulate_votes(count: int, seed: int = 0) -> tuple[Comparisons, torch.Tensor]:
    """Votes by a true score that is linear in one block; the other block is noise."""
    generator = torch.Generator().manual_seed(seed)
    blocks = {name: torch.randn(2 * count, 6, generator=generator).double() for name in ("average", "layout")}
    truth = blocks["average"] @ torch.tensor([2.0, -1.0, 0.0, 0.0, 0.0, 0.5]).double()
    first, second = torch.arange(count), torch.arange(count, 2 * count)
    probability = (truth[first] - truth[second]).sigmoid()
    target = (torch.rand(count, generator=generator) < probability).double()
    return Comparisons(blocks, first, second, target, torch.arange(count) % 40), truth


def test_fit_recovers_the_probability_of_preference() -> None:
    votes, truth = simulate_votes(600)
    fitted = fit_preference(votes)
    score = fitted.score(votes.blocks)
    predicted = (score[votes.first] - score[votes.second]).sigmoid()
    actual = (truth[votes.first] - truth[votes.second]).sigmoid()
    assert (predicted - actual).abs().mean() < 0.05
    assert dict(fitted.prior.scales)["average"] > dict(fitted.prior.scales)["layout"]  # chosen by cross-validation
    head = fitted.to_head()(torch.cat(list(votes.blocks.values()), 1).float())
    torch.testing.assert_close(head.double(), score, atol=1e-4, rtol=1e-4)


def test_ties_count_half() -> None:
    votes, _ = simulate_votes(40)
    ties = Comparisons(votes.blocks, votes.first, votes.second, torch.full_like(votes.target, 0.5), votes.prompt)
    assert fit_preference(ties, Prior(1.0, SCALES), 1.0).score(votes.blocks).abs().max() < 1e-9
    # Two opposite votes on a pair say as much as two ties.
    twice = votes.select(torch.arange(40).repeat(2))
    opposite = torch.cat([votes.target, 1 - votes.target])
    both = Comparisons(twice.blocks, twice.first, twice.second, opposite, twice.prompt)
    assert fit_preference(both, Prior(1.0, SCALES), 1.0).score(votes.blocks).abs().max() < 1e-9


def test_folds_separate_prompts() -> None:
    prompt = torch.arange(50) % 7
    parts = split_prompts(prompt, 5, seed=1)
    assert sorted(torch.cat(parts).tolist()) == list(range(50))
    assert all(not set(prompt[a].tolist()) & set(prompt[b].tolist()) for a in parts for b in parts if a is not b)


def test_laplace_variance_agrees_with_the_inverse_hessian() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(12, 5, generator=generator).double()
    target = (torch.rand(12, generator=generator) < 0.5).double()
    posterior = fit_posterior(inputs, target, l2=0.7)
    probability = (inputs @ posterior.weight).sigmoid()
    gradient = inputs.T @ (probability - target) + 0.7 * posterior.weight
    assert gradient.abs().max() < 1e-6
    hessian = inputs.T @ (inputs * (probability * (1 - probability))[:, None]) + 0.7 * torch.eye(5).double()
    new = torch.randn(3, 5, generator=generator).double()
    torch.testing.assert_close(posterior.predict(new)[1], (new @ hessian.inverse() * new).sum(1))


def test_active_choice_asks_what_the_votes_do_not_know() -> None:
    # The votes differ in the first feature only; pairs that differ in the second are the ones to ask about.
    generator = torch.Generator().manual_seed(0)
    features = torch.zeros(60, 2).double()
    features[:40, 0] = torch.randn(40, generator=generator).double()
    features[40:50, 0], features[50:, 1] = 2.0, torch.linspace(1, 3, 10).double()
    first, second = torch.arange(0, 40, 2), torch.arange(1, 40, 2)
    target = (features[first, 0] > features[second, 0]).double()
    votes = Comparisons({"average": features}, first, second, target, torch.arange(20))
    standardized = fit_preference(votes, Prior(0.3, (("average", 1.0),)), 1.0)
    pairs = torch.tensor([(0, 1), (2, 3), (40, 50), (0, 59), (1, 51)])
    assert select_pairs(standardized, votes.blocks, pairs)[0] == 3  # the largest unknown difference
    assert len(set(select_pairs(standardized, votes.blocks, pairs, 4))) == 4
    information = expected_information(torch.tensor([0.0, 0.0, 5.0]).double(), torch.tensor([0.0, 9.0, 0.1]).double())
    assert information[0].abs() < 1e-12 and 0.2 < information[1] < 0.6932 and information[2] < 0.01
    shown = torch.tensor([3, 0, 2, 1, 5])
    assert select_pairs(None, votes.blocks, pairs, 2, strategy="balanced", shown=shown) == [1, 3]


def test_wilson_interval() -> None:
    low, high = wilson_interval(41, 60)
    assert abs(low - 0.5577) < 1e-3 and abs(high - 0.7867) < 1e-3  # computed by hand from Wilson's formula
    assert wilson_interval(0, 0) == (0.0, 1.0)
    assert describe_share(41, 60) == "68 % of 60 (95 % interval 56 to 79 %)"
