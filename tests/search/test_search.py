"""What a search finds, and what it pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import toys
from torch import Tensor

from tastemaker.core.policy import Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.reward import Verdict, Verifier
from tastemaker.core.types import Metadata, PromptBatch, Prompts
from tastemaker.processes.dynamics import ODE
from tastemaker.search.base import RubricVerifier, Search, SearchResult
from tastemaker.search.best_of_n import BestOfN, SingleSample
from tastemaker.search.parm import PARMSearch, select_candidates
from tastemaker.search.prm import PRMSearch

FAMILIES = ["flow", "causal", "masked"]
ROWS = 64
GOOD = 0.8  # a score that about half of the pretrained samples reach


@dataclass(frozen=True)
class Listening(Verifier):
    """A verifier that remembers how many pictures it saw, and when."""

    inner: Verifier
    seen: list[tuple[float, int]] = field(default_factory=list)

    def judge(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata], progress: float) -> Verdict:
        assert len(pixels) == len(prompts)
        assert len(metadata) in (0, len(prompts))
        self.seen.append((progress, len(pixels)))
        return self.inner.judge(pixels, prompts, metadata, progress)


def found(search: Search, name: str, **settings: float) -> tuple[SearchResult, Listening]:
    policy = toys.pretrained_policy(name)
    verifier = Listening(RubricVerifier(toys.rubric(), promising_score=GOOD, **settings))
    return search.run(policy, verifier, toys.prompts(ROWS), Randomness(11, 0, torch.arange(ROWS))), verifier


def true(name: str, x: Tensor) -> Tensor:
    return toys.rubric().score(toys.pretrained_policy(name).decode(x), toys.prompts(ROWS).prompts).total


def calls(name: str) -> int:
    policy = toys.pretrained_policy(name)
    return policy.process.network_calls_per_sample(policy.model.shape)


@pytest.mark.parametrize("name", FAMILIES)
def test_single_sample_equals_policy_sample_without_verifier(name: str) -> None:
    result, verifier = found(SingleSample(), name)
    policy = toys.pretrained_policy(name)
    made = policy.sample(policy.embed(toys.prompts(ROWS).prompts), Randomness(11, 0, torch.arange(ROWS)))
    assert torch.equal(result.x, made.final)
    assert result.score.isnan().all()
    assert (result.cost.calls, result.cost.judged) == (ROWS * calls(name), 0)
    assert verifier.seen == []


@pytest.mark.parametrize("name", FAMILIES)
def test_best_of_n_beats_a_single_sample(name: str) -> None:
    (single, _), (best, verifier) = found(SingleSample(), name), found(BestOfN(4), name)
    assert toys.z_score(true(name, single.x), true(name, best.x)) > 3
    torch.testing.assert_close(best.score, true(name, best.x))
    assert (best.cost.calls, best.cost.judged) == (4 * ROWS * calls(name), 4 * ROWS)
    assert verifier.seen == [(1.0, 4 * ROWS)]


@pytest.mark.parametrize("name", FAMILIES)
def test_parm_pruning_costs_less_for_nearly_the_same_score(name: str) -> None:
    # The first guesses of a masked model at its tokens know nothing of each other.
    clear = 0.5 if name == "masked" else 0.25
    (best, _), (pruned, verifier) = (
        found(BestOfN(8), name),
        found(PARMSearch(8, start_progress=clear), name, clear_progress=clear),
    )
    assert pruned.cost.calls < 0.9 * best.cost.calls
    assert pruned.cost.judged == sum(count for _, count in verifier.seen)
    single, _ = found(SingleSample(), name)
    lost, won = best.score.mean() - pruned.score.mean(), best.score.mean() - true(name, single.x).mean()
    assert lost < 0.2 * won


@pytest.mark.parametrize("name", FAMILIES)
def test_parm_without_prune_finishes_all_candidates(name: str) -> None:
    kept, verifier = found(PARMSearch(4, prune=False), name)
    assert kept.cost.calls == 4 * ROWS * calls(name)
    assert kept.cost.judged == sum(count for _, count in verifier.seen)
    assert verifier.seen[-1] == (1.0, 4 * ROWS)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("first", [0.0, 0.6])
def test_parm_judges_each_candidate_once_after_start_progress(name: str, first: float) -> None:
    _, verifier = found(PARMSearch(4, start_progress=first), name, clear_progress=0.5)
    during = [progress for progress, _ in verifier.seen[:-1]]
    assert all(first <= progress < 1 for progress in during)
    assert sum(progress >= 0.5 for progress in during) == 1  # all are clear at the first such step


@pytest.mark.parametrize("name", FAMILIES)
def test_parm_keeps_one_candidate_per_prompt(name: str) -> None:
    policy = toys.pretrained_policy(name)
    nothing_will_do = RubricVerifier(toys.rubric(), clear_progress=0.0, promising_score=2.0)
    result = PARMSearch(4).run(policy, nothing_will_do, toys.prompts(ROWS), Randomness(11, 0, torch.arange(ROWS)))
    assert len(result.x) == ROWS
    assert result.cost.calls == (4 + calls(name) - 1) * ROWS  # one of four goes on after the first step
    assert torch.isfinite(result.score).all()


def test_select_candidates_keeps_unclear_and_promising() -> None:
    owner = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    clear = torch.tensor([True, True, False, True, True, True, True])
    promising = torch.tensor([True, False, False, False, False, False, False])
    score = torch.tensor([0.1, 0.9, 0.0, 0.3, 0.4, 0.5, 0.5])
    keep = select_candidates(Verdict(clear, promising, score), owner)
    # The promising and the unclear; the best of a prompt that would lose everyone; of equals the first.
    assert keep.tolist() == [True, False, True, False, True, True, False]
    # The best of the clear and the unclear, whoever promises.
    assert select_candidates(Verdict(clear, promising, score), owner, 1).tolist() == [
        False,
        True,
        True,
        False,
        True,
        True,
        False,
    ]


@dataclass(frozen=True)
class Indifferent(Verifier):
    """A verifier to whom all pictures are alike."""

    def judge(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata], progress: float) -> Verdict:
        same = torch.full((len(pixels),), 0.5)
        return Verdict(same > 0, same > 0, same)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("search", [BestOfN(4), PARMSearch(4), PARMSearch(4, prune=False)])
def test_ties_are_won_by_the_first(search: Search, name: str) -> None:
    policy = toys.pretrained_policy(name)
    rng = Randomness(11, 0, torch.arange(8))
    result = search.run(policy, Indifferent(), toys.prompts(8), rng)
    everyone = policy.sample(policy.embed(toys.prompts(8).prompts).repeat(4), rng.repeat(4)).final
    torch.testing.assert_close(result.x, everyone[::4], rtol=1e-4, atol=1e-4)


@dataclass(frozen=True)
class Contrary(Verifier):
    """Promises nothing of the best pictures and much of the others, then scores them truly."""

    def judge(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata], progress: float) -> Verdict:
        score = toys.rubric().score(pixels, prompts).total
        return Verdict(torch.ones_like(score, dtype=torch.bool), score < 0.8, score)


def test_promising_candidates_rank_first() -> None:
    policy, batch, rng = toys.pretrained_policy("flow"), toys.prompts(8), Randomness(11, 0, torch.arange(8))
    kept = PARMSearch(8, start_progress=0.5, prune=False).run(policy, Contrary(), batch, rng)
    best = BestOfN(8).run(policy, Contrary(), batch, rng)
    assert kept.score.mean() < best.score.mean()


@dataclass(frozen=True)
class Shortsighted(Verifier):
    """Makes out only bad pictures, and finds them promising."""

    def judge(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata], progress: float) -> Verdict:
        score = toys.rubric().score(pixels, prompts).total
        return Verdict(score < GOOD, score < GOOD, score)


def test_unclear_candidates_compete_with_promising_ones() -> None:
    policy, batch, rng = toys.pretrained_policy("flow"), toys.prompts(8), Randomness(11, 0, torch.arange(8))
    kept = PARMSearch(8, start_progress=0.5).run(policy, Shortsighted(), batch, rng)
    best = BestOfN(8).run(policy, Shortsighted(), batch, rng)
    assert torch.equal(kept.score, best.score)


def test_top_k_keeps_the_best_clear_candidates() -> None:
    policy, batch, rng = toys.pretrained_policy("flow"), toys.prompts(8), Randomness(11, 0, torch.arange(8))
    judge = RubricVerifier(toys.rubric(), 0.5, -1.0)  # everyone is promising
    every, few = (PARMSearch(8, start_progress=0.5, top_k=keep).run(policy, judge, batch, rng) for keep in (None, 2))
    steps = policy.process.num_steps  # type: ignore[attr-defined]
    assert every.cost.calls == 64 * steps
    assert few.cost.calls == 64 * (steps // 2) + 16 * (steps - steps // 2)
    single = BestOfN(1).run(policy, judge, batch, rng)
    assert single.score.mean() < few.score.mean() <= every.score.mean()


def test_top_k_ignores_promising() -> None:
    policy, batch, rng = toys.pretrained_policy("flow"), toys.prompts(8), Randomness(11, 0, torch.arange(8))
    strict = RubricVerifier(toys.rubric(), 0.5, 2.0)  # nobody is promising
    one, few = (PARMSearch(8, start_progress=0.5, top_k=keep).run(policy, strict, batch, rng) for keep in (None, 4))
    steps = policy.process.num_steps  # type: ignore[attr-defined]
    assert one.cost.calls == 64 * (steps // 2) + 8 * (steps - steps // 2)
    assert few.cost.calls == 64 * (steps // 2) + 32 * (steps - steps // 2)
    assert one.score.mean() < few.score.mean()


def test_metadata_stays_with_its_prompt() -> None:
    policy: Policy[Any] = toys.pretrained_policy("flow")
    heard: list[tuple[str, int]] = []

    @dataclass(frozen=True)
    class Noting(Verifier):
        def judge(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata], progress: float) -> Verdict:
            heard.extend((prompt, known["number"]) for prompt, known in zip(prompts, metadata, strict=True))
            return RubricVerifier(toys.rubric(), 0.2, GOOD).judge(pixels, prompts, metadata, progress)

    batch = PromptBatch(toys.PROMPTS, tuple({"number": i} for i in range(4)))
    PARMSearch(4).run(policy, Noting(), batch, Randomness(11, 0, torch.arange(4)))
    assert set(heard) == {(prompt, i) for i, prompt in enumerate(toys.PROMPTS)}


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="sample per prompt"):
        BestOfN(0)
    with pytest.raises(ValueError, match="expected at least one sample and progress from 0 to 1"):
        PARMSearch(4, start_progress=1.5)
    with pytest.raises(ValueError, match="top_k 2, prune false"):
        PARMSearch(4, prune=False, top_k=2)


def test_prm_continues_from_the_best_candidate() -> None:
    best, verifier = found(PRMSearch(4), "masked")
    steps = calls("masked")
    torch.testing.assert_close(best.score, true("masked", best.x))
    assert (best.cost.calls, best.cost.judged) == (4 * ROWS * steps, 4 * ROWS * steps)
    assert verifier.seen == [((k + 1) / steps, 4 * ROWS) for k in range(steps)]
    (single, _), (late, few) = (
        found(SingleSample(), "masked"),
        found(PRMSearch(8, start_progress=0.5, interval=2), "masked"),
    )
    assert [progress for progress, _ in few.seen] == [0.5, 1.0]
    assert toys.z_score(true("masked", single.x), true("masked", late.x)) > 3  # first guesses mislead


def test_prm_copies_diverge() -> None:
    policy, rng = toys.policy("masked"), Randomness(2, 0, torch.arange(1))
    cond, seen = policy.embed(["a red"]), []

    class First(Verifier):
        """Prefers the first, and remembers what all looked like."""

        def judge(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata], progress: float) -> Verdict:
            seen.append(pixels)
            score = -torch.arange(len(pixels)).float()
            return Verdict(score <= 0, score <= 0, score)

    result = PRMSearch(6).run(policy, First(), PromptBatch(("a red",), ({},)), rng)
    assert torch.equal(result.x, policy.sample(cond, rng.repeat(1)).final)  # its own draws all the way
    assert any(not torch.equal(pixels, pixels[:1].expand_as(pixels)) for pixels in seen[1:])


@pytest.mark.parametrize("name", ["flow", "causal"])
def test_prm_requires_a_stochastic_sampler(name: str) -> None:
    policy = toys.policy(name)
    if name == "flow":
        policy = replace(policy, process=replace(policy.process, dynamics=ODE()))
    with pytest.raises(ConfigError, match="parm"):
        PRMSearch(2).run(policy, RubricVerifier(toys.rubric()), toys.prompts(2), Randomness(0, 0, torch.arange(2)))
    with pytest.raises(ValueError, match="at least one step"):
        PRMSearch(interval=0)
