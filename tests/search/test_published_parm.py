"""The published PARM search: recorded runs with a scripted judge, greedy candidates, and refinement."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from torch import Tensor

from tastemaker.core.randomness import Randomness
from tastemaker.core.reward import Verdict, Verifier
from tastemaker.core.types import Metadata, PromptBatch, Prompts
from tastemaker.search.base import RubricVerifier, SearchCost, start_candidates
from tastemaker.search.best_of_n import BestOfN
from tastemaker.search.parm import PublishedPARMSearch
from tastemaker.search.refine import Refine

RECORDED_RUNS = json.loads((Path(__file__).parents[1] / "fixtures/showo/reward_flow.json").read_text())["flows"]
ONE = PromptBatch(("a red",), ({},))


@dataclass(frozen=True)
class RecordedVerifier(Verifier):
    """Replays recorded verdicts, candidate by candidate in the order of the calls."""

    previews: list[list[tuple[bool, float, bool]]]  # of each candidate: promising, cost, clear
    finals: list[float]
    calls: list[str] = field(default_factory=list)
    unclear: list[int] = field(default_factory=list)  # candidates that are not clear yet

    def judge(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata], progress: float) -> Verdict:
        if progress == 1:
            self.calls.extend(["orm"] * len(pixels))
            score = torch.tensor(self.finals[: len(pixels)])
            return Verdict(score >= 0, score >= 0, score)
        verdicts = [self.previews[k].pop(0) for k in self.unclear]
        self.calls.extend(["parm"] * len(verdicts))
        self.unclear[:] = [k for k, (_, _, clear) in zip(self.unclear, verdicts, strict=True) if not clear]
        promising, cost, clear = (torch.tensor(column) for column in zip(*verdicts, strict=True))
        return Verdict(clear.bool(), promising.bool(), torch.where(clear.bool(), 1 - cost.float(), 0.0))


def recorded_verifier(run: dict[str, Any]) -> RecordedVerifier:
    remaining, previews = list(run["parm"]), []
    while remaining:
        verdicts = [tuple(remaining.pop(0))]
        while not verdicts[-1][2] and len(verdicts) < 3:
            verdicts.append(tuple(remaining.pop(0)))
        previews.append(verdicts)
    return RecordedVerifier(previews, [score for _, score in run["orm"]], unclear=list(range(run["search"])))


@pytest.mark.parametrize("run", [run for run in RECORDED_RUNS if run["mod"] == "parm"], ids=lambda run: run["name"])
def test_published_parm_reproduces_recorded_runs(run: dict[str, Any]) -> None:
    policy, judge, count = toys.policy("masked"), recorded_verifier(run), run["search"]
    policy = type(policy)(policy.model, policy.process.with_num_steps(3), policy.weights)
    rng = Randomness(3, 0, torch.arange(1))
    result = PublishedPARMSearch(count, reset_temperature=True).run(policy, judge, ONE, rng)
    cond = policy.embed(ONE.prompts).repeat(count)
    finals = start_candidates(policy, cond, rng.repeat(count)).finish().final
    assert [next(k for k in range(count) if torch.equal(finals[k], result.x[0]))] == run["picked"]
    assert judge.calls == [call.partition(":")[0] for call in run["calls"]]
    assert result.cost == SearchCost(3 * count, len(run["calls"]))


@pytest.mark.parametrize("search", [BestOfN, PublishedPARMSearch])
def test_later_candidates_are_greedy_unless_temperature_is_reset(search: Any) -> None:
    policy, rng = toys.policy("masked"), Randomness(3, 0, torch.arange(2))
    batch = PromptBatch(("a red", "a blue"), ({}, {}))

    @dataclass(frozen=True)
    class NthCandidateVerifier(Verifier):
        index: int

        def judge(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata], progress: float) -> Verdict:
            yes = torch.ones(len(pixels), dtype=torch.bool)
            if progress < 1:
                return Verdict(yes, yes, torch.ones(len(pixels)))
            return Verdict(yes, yes, (torch.arange(len(pixels)) % 3 == self.index).float())

    cond, draws = policy.embed(batch.prompts).repeat(3), rng.repeat(3)
    sampled = start_candidates(policy, cond, draws).finish().final
    greedy_policy = type(policy)(policy.model, toys.MaskedProcess(num_steps=4, temperature=0.0), policy.weights)
    greedy = start_candidates(greedy_policy, cond, draws).finish().final
    for index in range(3):
        result = search(3, reset_temperature=False).run(policy, NthCandidateVerifier(index), batch, rng)
        assert torch.equal(result.x, (greedy if index else sampled)[index::3])
        reset = search(3, reset_temperature=True).run(policy, NthCandidateVerifier(index), batch, rng)
        assert torch.equal(reset.x, sampled[index::3])
    assert not torch.equal(sampled, greedy)


def test_reset_temperature_false_requires_a_masked_generator() -> None:
    with pytest.raises(ValueError, match=r"masked.*TM103"):
        BestOfN(2, reset_temperature=False).run(
            toys.policy("flow"), RubricVerifier(toys.rubric()), ONE, Randomness(0, 0, torch.arange(1))
        )


@dataclass(frozen=True)
class ExplainingVerifier(Verifier):
    """Gives a reason for every rejection, and records the reasons in the metadata it gets."""

    min_score: float
    feedback: list[tuple[str, str]] = field(default_factory=list)

    def judge(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata], progress: float) -> Verdict:
        self.feedback.extend(
            (prompt, str(entry.get("reason"))) for prompt, entry in zip(prompts, metadata, strict=True)
        )
        score = toys.rubric().score(pixels, prompts).total
        return Verdict(score >= -9, score >= self.min_score, score)

    def explain(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> list[str]:
        return [f"this is not {prompt}" for prompt in prompts]


@pytest.mark.parametrize("name", ["flow", "causal", "masked"])
def test_refine_regenerates_rejected_samples_with_feedback(name: str) -> None:
    policy, batch, rng = toys.pretrained_policy(name), toys.prompts(64), Randomness(5, 0, torch.arange(64))
    judge = ExplainingVerifier(0.8)
    single, result = (
        BestOfN(1).run(policy, RubricVerifier(toys.rubric()), batch, rng),
        Refine(max_rounds=3).run(policy, judge, batch, rng),
    )
    assert toys.z_score(single.score, result.score) > 3
    kept = single.score >= 0.8
    assert torch.equal(result.x[kept], single.x[kept])
    assert ("a red", "this is not a red") in judge.feedback
    wrong = int((~kept).sum())
    assert result.cost.calls >= single.cost.calls * (1 + wrong / 64) and result.cost.calls < 4 * single.cost.calls
    assert torch.equal(result.score, toys.rubric().score(policy.decode(result.x), batch.prompts).total)


def test_refine_stops_when_all_are_promising() -> None:
    policy, batch, rng = toys.policy("flow"), toys.prompts(8), Randomness(5, 0, torch.arange(8))
    result = Refine(BestOfN(2)).run(policy, RubricVerifier(toys.rubric(), promising_score=-9), batch, rng)
    assert result.cost == SearchCost(2 * 8 * 8, 2 * 8 + 8)
    with pytest.raises(ValueError, match=r"'max_rounds' is 0.*TM581"):
        Refine(max_rounds=0)
