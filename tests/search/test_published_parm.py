"""The published search: recorded flows with a scripted judge, candidates without chance, and what is made again."""

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

FLOWS = json.loads((Path(__file__).parents[1] / "fixtures/showo/reward_flow.json").read_text())["flows"]
ONE = PromptBatch(("a red",), ({},))


@dataclass(frozen=True)
class Recorded(Verifier):
    """Answers of a recording, candidate by candidate; pictures are told apart by when they come."""

    previews: list[list[tuple[bool, float, bool]]]  # of each candidate: promising, cost, clear
    finals: list[float]
    asked: list[str] = field(default_factory=list)
    left: list[int] = field(default_factory=list)  # candidates that are not clear yet

    def judge(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata], progress: float) -> Verdict:
        if progress == 1:
            self.asked.extend(["orm"] * len(pixels))
            score = torch.tensor(self.finals[: len(pixels)])
            return Verdict(score >= 0, score >= 0, score)
        said = [self.previews[k].pop(0) for k in self.left]
        self.asked.extend(["parm"] * len(said))
        self.left[:] = [k for k, (_, _, clear) in zip(self.left, said, strict=True) if not clear]
        promising, cost, clear = (torch.tensor(column) for column in zip(*said, strict=True))
        return Verdict(clear.bool(), promising.bool(), torch.where(clear.bool(), 1 - cost.float(), 0.0))


def recorded(flow: dict[str, Any]) -> Recorded:
    told, previews = list(flow["parm"]), []
    while told:
        looks = [tuple(told.pop(0))]
        while not looks[-1][2] and len(looks) < 3:
            looks.append(tuple(told.pop(0)))
        previews.append(looks)
    return Recorded(previews, [score for _, score in flow["orm"]], left=list(range(flow["search"])))


@pytest.mark.parametrize("flow", [flow for flow in FLOWS if flow["mod"] == "parm"], ids=lambda flow: flow["name"])
def test_published_parm_reproduces_recorded_runs(flow: dict[str, Any]) -> None:
    policy, judge, count = toys.policy("masked"), recorded(flow), flow["search"]
    policy = type(policy)(policy.model, policy.process.with_num_steps(3), policy.weights)
    rng = Randomness(3, 0, torch.arange(1))
    found = PublishedPARMSearch(count, reset_temperature=True).run(policy, judge, ONE, rng)
    cond = policy.embed(ONE.prompts).repeat(count)
    finals = start_candidates(policy, cond, rng.repeat(count)).finish().final
    assert [next(k for k in range(count) if torch.equal(finals[k], found.x[0]))] == flow["picked"]
    assert judge.asked == [call.partition(":")[0] for call in flow["calls"]]
    assert found.cost == SearchCost(3 * count, len(flow["calls"]))


@pytest.mark.parametrize("search", [BestOfN, PublishedPARMSearch])
def test_without_temperature_reset_later_candidates_are_greedy(search: Any) -> None:
    policy, rng = toys.policy("masked"), Randomness(3, 0, torch.arange(2))
    batch = PromptBatch(("a red", "a blue"), ({}, {}))

    @dataclass(frozen=True)
    class Nth(Verifier):
        place: int

        def judge(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata], progress: float) -> Verdict:
            yes = torch.ones(len(pixels), dtype=torch.bool)
            if progress < 1:
                return Verdict(yes, yes, torch.ones(len(pixels)))
            return Verdict(yes, yes, (torch.arange(len(pixels)) % 3 == self.place).float())

    cond, draws = policy.embed(batch.prompts).repeat(3), rng.repeat(3)
    warm = start_candidates(policy, cond, draws).finish().final
    cold_policy = type(policy)(policy.model, toys.MaskedProcess(num_steps=4, temperature=0.0), policy.weights)
    cold = start_candidates(cold_policy, cond, draws).finish().final
    for place in range(3):
        found = search(3, reset_temperature=False).run(policy, Nth(place), batch, rng)
        assert torch.equal(found.x, (cold if place else warm)[place::3])
        again = search(3, reset_temperature=True).run(policy, Nth(place), batch, rng)
        assert torch.equal(again.x, warm[place::3])
    assert not torch.equal(warm, cold)


def test_reset_temperature_false_requires_a_masked_generator() -> None:
    with pytest.raises(ValueError, match="only masked generators"):
        BestOfN(2, reset_temperature=False).run(
            toys.policy("flow"), RubricVerifier(toys.rubric()), ONE, Randomness(0, 0, torch.arange(1))
        )


@dataclass(frozen=True)
class Complaining(Verifier):
    """Says what is wrong, and hears what is told of it."""

    least: float
    heard: list[tuple[str, str]] = field(default_factory=list)

    def judge(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata], progress: float) -> Verdict:
        self.heard.extend((prompt, str(known.get("reason"))) for prompt, known in zip(prompts, metadata, strict=True))
        score = toys.rubric().score(pixels, prompts).total
        return Verdict(score >= -9, score >= self.least, score)

    def explain(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> list[str]:
        return [f"this is not {prompt}" for prompt in prompts]


@pytest.mark.parametrize("name", ["flow", "causal", "masked"])
def test_refine_regenerates_rejected_samples_with_feedback(name: str) -> None:
    policy, batch, rng = toys.pretrained_policy(name), toys.prompts(64), Randomness(5, 0, torch.arange(64))
    judge = Complaining(0.8)
    once, found = (
        BestOfN(1).run(policy, RubricVerifier(toys.rubric()), batch, rng),
        Refine(max_rounds=3).run(policy, judge, batch, rng),
    )
    assert toys.z_score(once.score, found.score) > 3
    kept = once.score >= 0.8
    assert torch.equal(found.x[kept], once.x[kept])
    assert ("a red", "this is not a red") in judge.heard
    wrong = int((~kept).sum())
    assert found.cost.calls >= once.cost.calls * (1 + wrong / 64) and found.cost.calls < 4 * once.cost.calls
    assert torch.equal(found.score, toys.rubric().score(policy.decode(found.x), batch.prompts).total)


def test_refine_stops_when_all_are_promising() -> None:
    policy, batch, rng = toys.policy("flow"), toys.prompts(8), Randomness(5, 0, torch.arange(8))
    found = Refine(BestOfN(2)).run(policy, RubricVerifier(toys.rubric(), promising_score=-9), batch, rng)
    assert found.cost == SearchCost(2 * 8 * 8, 2 * 8 + 8)
    with pytest.raises(ValueError, match="expected at least one"):
        Refine(max_rounds=0)
