"""Searches: scores, network calls and verifier calls of best-of-n, PARM and PRM."""

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
NUM_PROMPTS = 64
GOOD = 0.8  # a score that about half of the pretrained samples reach


@dataclass(frozen=True)
class RecordingVerifier(Verifier):
    """A verifier that records the progress and the number of samples of every call."""

    inner: Verifier
    calls: list[tuple[float, int]] = field(default_factory=list)

    def judge(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata], progress: float) -> Verdict:
        assert len(pixels) == len(prompts)
        assert len(metadata) in (0, len(prompts))
        self.calls.append((progress, len(pixels)))
        return self.inner.judge(pixels, prompts, metadata, progress)


def run_search(search: Search, name: str, **settings: float) -> tuple[SearchResult, RecordingVerifier]:
    policy = toys.pretrained_policy(name)
    verifier = RecordingVerifier(RubricVerifier(toys.rubric(), promising_score=GOOD, **settings))
    return search.run(
        policy, verifier, toys.prompts(NUM_PROMPTS), Randomness(11, 0, torch.arange(NUM_PROMPTS))
    ), verifier


def true_scores(name: str, x: Tensor) -> Tensor:
    return toys.rubric().score(toys.pretrained_policy(name).decode(x), toys.prompts(NUM_PROMPTS).prompts).total


def calls(name: str) -> int:
    policy = toys.pretrained_policy(name)
    return policy.process.network_calls_per_sample(policy.model.shape)


@pytest.mark.parametrize("name", FAMILIES)
def test_single_sample_equals_policy_sample_and_calls_no_verifier(name: str) -> None:
    result, verifier = run_search(SingleSample(), name)
    policy = toys.pretrained_policy(name)
    sample = policy.sample(
        policy.embed(toys.prompts(NUM_PROMPTS).prompts), Randomness(11, 0, torch.arange(NUM_PROMPTS))
    )
    assert torch.equal(result.x, sample.final)
    assert result.score.isnan().all()
    assert (result.cost.calls, result.cost.verifier_calls) == (NUM_PROMPTS * calls(name), 0)
    assert verifier.calls == []


@pytest.mark.parametrize("name", FAMILIES)
def test_best_of_n_beats_a_single_sample(name: str) -> None:
    (single, _), (best, verifier) = run_search(SingleSample(), name), run_search(BestOfN(4), name)
    assert toys.z_score(true_scores(name, single.x), true_scores(name, best.x)) > 3
    torch.testing.assert_close(best.score, true_scores(name, best.x))
    assert (best.cost.calls, best.cost.verifier_calls) == (4 * NUM_PROMPTS * calls(name), 4 * NUM_PROMPTS)
    assert verifier.calls == [(1.0, 4 * NUM_PROMPTS)]


@pytest.mark.parametrize("name", FAMILIES)
def test_parm_pruning_costs_less_for_nearly_the_same_score(name: str) -> None:
    # A masked model predicts its first tokens independently of each other.
    clear = 0.5 if name == "masked" else 0.25
    (best, _), (pruned, verifier) = (
        run_search(BestOfN(8), name),
        run_search(PARMSearch(8, start_progress=clear), name, clear_progress=clear),
    )
    assert pruned.cost.calls < 0.9 * best.cost.calls
    assert pruned.cost.verifier_calls == sum(count for _, count in verifier.calls)
    single, _ = run_search(SingleSample(), name)
    loss, gain = best.score.mean() - pruned.score.mean(), best.score.mean() - true_scores(name, single.x).mean()
    assert loss < 0.2 * gain


@pytest.mark.parametrize("name", FAMILIES)
def test_parm_with_prune_false_finishes_all_candidates(name: str) -> None:
    kept, verifier = run_search(PARMSearch(4, prune=False), name)
    assert kept.cost.calls == 4 * NUM_PROMPTS * calls(name)
    assert kept.cost.verifier_calls == sum(count for _, count in verifier.calls)
    assert verifier.calls[-1] == (1.0, 4 * NUM_PROMPTS)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("start_progress", [0.0, 0.6])
def test_parm_judges_each_candidate_once_after_start_progress(name: str, start_progress: float) -> None:
    _, verifier = run_search(PARMSearch(4, start_progress=start_progress), name, clear_progress=0.5)
    during = [progress for progress, _ in verifier.calls[:-1]]
    assert all(start_progress <= progress < 1 for progress in during)
    assert sum(progress >= 0.5 for progress in during) == 1  # all are clear at the first such step


@pytest.mark.parametrize("name", FAMILIES)
def test_parm_keeps_one_candidate_per_prompt(name: str) -> None:
    policy = toys.pretrained_policy(name)
    reject_all = RubricVerifier(toys.rubric(), clear_progress=0.0, promising_score=2.0)
    result = PARMSearch(4).run(
        policy, reject_all, toys.prompts(NUM_PROMPTS), Randomness(11, 0, torch.arange(NUM_PROMPTS))
    )
    assert len(result.x) == NUM_PROMPTS
    assert (
        result.cost.calls == (4 + calls(name) - 1) * NUM_PROMPTS
    )  # one of four candidates continues after the first step
    assert torch.isfinite(result.score).all()


def test_select_candidates_keeps_unclear_and_promising() -> None:
    owner = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    clear = torch.tensor([True, True, False, True, True, True, True])
    promising = torch.tensor([True, False, False, False, False, False, False])
    score = torch.tensor([0.1, 0.9, 0.0, 0.3, 0.4, 0.5, 0.5])
    keep = select_candidates(Verdict(clear, promising, score), owner)
    # Keeps promising and unclear candidates, else the best one of the prompt; the first one wins ties.
    assert keep.tolist() == [True, False, True, False, True, True, False]
    # Keeps the best clear candidate and all unclear ones, promising or not.
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
class ConstantVerifier(Verifier):
    """Gives every sample the same score."""

    def judge(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata], progress: float) -> Verdict:
        score = torch.full((len(pixels),), 0.5)
        return Verdict(score > 0, score > 0, score)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("search", [BestOfN(4), PARMSearch(4), PARMSearch(4, prune=False)])
def test_ties_are_won_by_the_first(search: Search, name: str) -> None:
    policy = toys.pretrained_policy(name)
    rng = Randomness(11, 0, torch.arange(8))
    result = search.run(policy, ConstantVerifier(), toys.prompts(8), rng)
    candidates = policy.sample(policy.embed(toys.prompts(8).prompts).repeat(4), rng.repeat(4)).final
    torch.testing.assert_close(result.x, candidates[::4], rtol=1e-4, atol=1e-4)


@dataclass(frozen=True)
class ContraryVerifier(Verifier):
    """Calls the best samples not promising and the others promising, with their true scores."""

    def judge(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata], progress: float) -> Verdict:
        score = toys.rubric().score(pixels, prompts).total
        return Verdict(torch.ones_like(score, dtype=torch.bool), score < 0.8, score)


def test_promising_candidates_rank_first() -> None:
    policy, batch, rng = toys.pretrained_policy("flow"), toys.prompts(8), Randomness(11, 0, torch.arange(8))
    kept = PARMSearch(8, start_progress=0.5, prune=False).run(policy, ContraryVerifier(), batch, rng)
    best = BestOfN(8).run(policy, ContraryVerifier(), batch, rng)
    assert kept.score.mean() < best.score.mean()


@dataclass(frozen=True)
class LowScoreVerifier(Verifier):
    """Calls only low-scoring samples clear, and those promising."""

    def judge(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata], progress: float) -> Verdict:
        score = toys.rubric().score(pixels, prompts).total
        return Verdict(score < GOOD, score < GOOD, score)


def test_unclear_candidates_compete_with_promising_ones() -> None:
    policy, batch, rng = toys.pretrained_policy("flow"), toys.prompts(8), Randomness(11, 0, torch.arange(8))
    kept = PARMSearch(8, start_progress=0.5).run(policy, LowScoreVerifier(), batch, rng)
    best = BestOfN(8).run(policy, LowScoreVerifier(), batch, rng)
    assert torch.equal(kept.score, best.score)


def test_top_k_keeps_the_best_clear_candidates() -> None:
    policy, batch, rng = toys.pretrained_policy("flow"), toys.prompts(8), Randomness(11, 0, torch.arange(8))
    judge = RubricVerifier(toys.rubric(), 0.5, -1.0)  # all are promising
    unlimited, top_two = (
        PARMSearch(8, start_progress=0.5, top_k=top_k).run(policy, judge, batch, rng) for top_k in (None, 2)
    )
    steps = policy.process.num_steps  # type: ignore[attr-defined]
    assert unlimited.cost.calls == 64 * steps
    assert top_two.cost.calls == 64 * (steps // 2) + 16 * (steps - steps // 2)
    single = BestOfN(1).run(policy, judge, batch, rng)
    assert single.score.mean() < top_two.score.mean() <= unlimited.score.mean()


def test_top_k_ignores_promising() -> None:
    policy, batch, rng = toys.pretrained_policy("flow"), toys.prompts(8), Randomness(11, 0, torch.arange(8))
    strict = RubricVerifier(toys.rubric(), 0.5, 2.0)  # none is promising
    default, top_four = (
        PARMSearch(8, start_progress=0.5, top_k=top_k).run(policy, strict, batch, rng) for top_k in (None, 4)
    )
    steps = policy.process.num_steps  # type: ignore[attr-defined]
    assert default.cost.calls == 64 * (steps // 2) + 8 * (steps - steps // 2)
    assert top_four.cost.calls == 64 * (steps // 2) + 32 * (steps - steps // 2)
    assert default.score.mean() < top_four.score.mean()


def test_metadata_stays_with_its_prompt() -> None:
    policy: Policy[Any] = toys.pretrained_policy("flow")
    received: list[tuple[str, int]] = []

    @dataclass(frozen=True)
    class MetadataRecorder(Verifier):
        def judge(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata], progress: float) -> Verdict:
            received.extend((prompt, entry["number"]) for prompt, entry in zip(prompts, metadata, strict=True))
            return RubricVerifier(toys.rubric(), 0.2, GOOD).judge(pixels, prompts, metadata, progress)

    batch = PromptBatch(toys.PROMPTS, tuple({"number": i} for i in range(4)))
    PARMSearch(4).run(policy, MetadataRecorder(), batch, Randomness(11, 0, torch.arange(4)))
    assert set(received) == {(prompt, i) for i, prompt in enumerate(toys.PROMPTS)}


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sample per prompt.*TM557"):
        BestOfN(0)
    with pytest.raises(ValueError, match=r"1\.5.*TM577"):
        PARMSearch(4, start_progress=1.5)
    with pytest.raises(ValueError, match=r"top_k 2, prune false.*TM578"):
        PARMSearch(4, prune=False, top_k=2)


def test_prm_continues_from_the_best_candidate() -> None:
    best, verifier = run_search(PRMSearch(4), "masked")
    steps = calls("masked")
    torch.testing.assert_close(best.score, true_scores("masked", best.x))
    assert (best.cost.calls, best.cost.verifier_calls) == (4 * NUM_PROMPTS * steps, 4 * NUM_PROMPTS * steps)
    assert verifier.calls == [((k + 1) / steps, 4 * NUM_PROMPTS) for k in range(steps)]
    (single, _), (late, interval_verifier) = (
        run_search(SingleSample(), "masked"),
        run_search(PRMSearch(8, start_progress=0.5, interval=2), "masked"),
    )
    assert [progress for progress, _ in interval_verifier.calls] == [0.5, 1.0]
    assert (
        toys.z_score(true_scores("masked", single.x), true_scores("masked", late.x)) > 3
    )  # early previews are misleading


def test_prm_copies_diverge() -> None:
    policy, rng = toys.policy("masked"), Randomness(2, 0, torch.arange(1))
    cond, previews = policy.embed(["a red"]), []

    class FirstCandidateVerifier(Verifier):
        """Prefers the first candidate and records the previews of all."""

        def judge(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata], progress: float) -> Verdict:
            previews.append(pixels)
            score = -torch.arange(len(pixels)).float()
            return Verdict(score <= 0, score <= 0, score)

    result = PRMSearch(6).run(policy, FirstCandidateVerifier(), PromptBatch(("a red",), ({},)), rng)
    assert torch.equal(
        result.x, policy.sample(cond, rng.repeat(1)).final
    )  # the first candidate keeps its own random draws
    assert any(not torch.equal(pixels, pixels[:1].expand_as(pixels)) for pixels in previews[1:])


@pytest.mark.parametrize("name", ["flow", "causal"])
def test_prm_requires_a_stochastic_sampler(name: str) -> None:
    policy = toys.policy(name)
    if name == "flow":
        policy = replace(policy, process=replace(policy.process, dynamics=ODE()))
    with pytest.raises(ConfigError, match="parm"):
        PRMSearch(2).run(policy, RubricVerifier(toys.rubric()), toys.prompts(2), Randomness(0, 0, torch.arange(2)))
    with pytest.raises(ValueError, match=r"interval.*TM579"):
        PRMSearch(interval=0)
