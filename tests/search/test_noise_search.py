"""Noise search: neighbors of the best initial noise, costs and random numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import toys
from exact_denoiser import FunctionVerifier, exact_policy, numbered_prompts
from torch import Tensor

from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.processes.dynamics import ODE, FlowSDE
from tastemaker.processes.gaussian import GaussianProcess, SDEWindow
from tastemaker.search.base import RubricVerifier
from tastemaker.search.best_of_n import BestOfN
from tastemaker.search.noise_search import NoiseSearch

PROCESS = GaussianProcess(dynamics=ODE(), num_steps=8)


def test_one_round_is_best_of_n() -> None:
    policy, batch, rng = exact_policy(PROCESS), numbered_prompts(6), Randomness(2, 0, torch.arange(6))
    best, found = (s.run(policy, FunctionVerifier(lambda x: x), batch, rng) for s in (BestOfN(5), NoiseSearch(5, 1)))
    assert torch.equal(best.x, found.x) and torch.equal(best.score, found.score) and best.cost == found.cost


def test_neighbors_have_the_distribution_of_noise_at_the_distance_of_the_step_size() -> None:
    pivot = Randomness(0, 0, torch.arange(1)).normal("start", 1, 1, 100, 100)
    draws = Randomness(1, 0, torch.arange(2))
    near, nearest = (NoiseSearch(2, step_size=size).neighbors(pivot, draws) for size in (0.5, 0.01))
    assert near.shape == (2, 1, 1, 100, 100) and not torch.equal(near[0], near[1])
    assert float(near.std()) == pytest.approx(1, abs=0.03)
    correlation = float(torch.corrcoef(torch.stack([near[0].flatten(), pivot.flatten()]))[0, 1])
    assert correlation == pytest.approx(1 / math.sqrt(1.25), abs=0.03)
    torch.testing.assert_close(nearest, pivot.expand_as(nearest), rtol=0, atol=0.06)


def test_rounds_continue_from_the_best_noise_and_never_lose_it() -> None:
    policy, batch, rng = exact_policy(PROCESS), numbered_prompts(200), Randomness(2, 0, torch.arange(200))
    scores: list[Tensor] = []
    for rounds in (1, 2, 6):
        verifier = FunctionVerifier(lambda x: -((x - 3) ** 2))  # 3 is almost four standard deviations away
        result = NoiseSearch(4, rounds, 0.5).run(policy, verifier, batch, rng)
        scores.append(result.score)
        torch.testing.assert_close(result.score, -((result.x.flatten() - 3) ** 2))
        assert result.cost.verifier_calls == sum(count for _, count in verifier.calls) == rounds * 4 * 200
        assert result.cost.calls == rounds * 4 * 200 * 8
    assert (scores[1] >= scores[0]).all() and (scores[2] >= scores[1]).all()
    random = BestOfN(24).run(policy, FunctionVerifier(lambda x: -((x - 3) ** 2)), batch, rng)
    assert scores[2].mean() > random.score.mean()  # at equal network calls


def test_samples_follow_the_ode_whichever_sampler_is_configured() -> None:
    batch, rng = numbered_prompts(3), Randomness(0, 0, torch.arange(3))
    stochastic = replace(PROCESS, dynamics=FlowSDE(), window=SDEWindow(2))
    first, second = (
        NoiseSearch(2, 2).run(exact_policy(process), FunctionVerifier(lambda x: x), batch, rng)
        for process in (PROCESS, stochastic)
    )
    assert torch.equal(first.x, second.x) and first.cost == second.cost


def test_network_calls_are_those_made() -> None:
    policy, rng = exact_policy(PROCESS), Randomness(0, 0, torch.arange(3))
    result = NoiseSearch(4, 3).run(policy, FunctionVerifier(lambda x: x), numbered_prompts(3), rng)
    assert result.cost.calls == policy.model.predictions == 3 * 3 * 4 * 8  # type: ignore[attr-defined]


def test_results_do_not_depend_on_the_split_into_batches() -> None:
    policy, verifier, search = toys.pretrained_policy("flow"), RubricVerifier(toys.rubric()), NoiseSearch(2, 3)
    policy = replace(policy, process=replace(policy.process, dynamics=ODE()))
    whole = search.run(policy, verifier, toys.prompts(8), Randomness(5, 0, torch.arange(8)))
    parts = [search.run(policy, verifier, toys.prompts(4), Randomness(5, 0, torch.arange(4) + k)) for k in (0, 4)]
    torch.testing.assert_close(torch.cat([part.x for part in parts]), whole.x, rtol=1e-4, atol=1e-4)
    other = search.run(policy, verifier, toys.prompts(8), Randomness(6, 0, torch.arange(8)))
    assert not torch.equal(other.x, whole.x)


def test_tokens_and_impossible_settings_are_refused() -> None:
    rng = Randomness(0, 0, torch.arange(4))
    for name in ("causal", "masked"):
        with pytest.raises(ConfigError, match=r"tokens.*best_of_n.*TM1620"):
            NoiseSearch(2).run(toys.policy(name), RubricVerifier(toys.rubric()), toys.prompts(4), rng)
    for settings in ({"rounds": 0}, {"step_size": 0.0}, {"step_size": math.nan}):
        with pytest.raises(ValueError, match=r"rounds.*step_size.*TM1626"):
            NoiseSearch(**settings)  # type: ignore[arg-type]
