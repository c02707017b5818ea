"""The interface of inference-time search: its result, its cost and its verifier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ..core.policy import Policy, Rollout
from ..core.randomness import Randomness
from ..core.reward import Rubric, Verdict, Verifier
from ..core.types import Condition, Metadata, PromptBatch, Prompts, Segment, select_rows


@dataclass(frozen=True)
class SearchCost:
    """Cost of a search: network calls times samples, verifier calls, and the floating-point operations of both.

    The field names are keys of metadata.jsonl, samples.jsonl and report.json.
    """

    calls: float  # of the network
    verifier_calls: float = 0
    flops: float = 0.0  # 0 if they were not counted

    def __add__(self, other: SearchCost) -> SearchCost:
        return SearchCost(
            self.calls + other.calls, self.verifier_calls + other.verifier_calls, self.flops + other.flops
        )

    def per_sample(self, count: int) -> SearchCost:
        return SearchCost(self.calls / count, self.verifier_calls / count, self.flops / count)


@dataclass(frozen=True)
class SearchResult:
    x: Tensor  # [B, ...] one sample per prompt, in model space
    score: Tensor  # [B] by the verifier; NaN if it was not asked
    cost: SearchCost


class Search(ABC):
    """An inference-time search for the best sample of each prompt."""

    constant_cost: ClassVar[bool] = True  # the number of network calls does not depend on scores
    uses_verifier: ClassVar[bool] = True

    @property
    def candidates_per_sample(self) -> int:
        """How many candidates of each sample are started at once."""
        return int(getattr(self, "n", 1))

    @abstractmethod
    def run(self, policy: Policy[Any], verifier: Verifier, batch: PromptBatch, rng: Randomness) -> SearchResult:
        """Search one sample for each prompt."""


class StepObserver(Protocol):
    """Gets the previews of all candidates after every sampling step."""

    def __call__(self, pixels: Tensor, rng: Randomness, step: int) -> None:
        """Previews [B, F, 3, H, W] after `step` steps. Row b is candidate `rng.rows[b] % n` of `rng.rows[b] // n`."""


_observer: ContextVar[StepObserver | None] = ContextVar("step_observer", default=None)


@contextmanager
def observe_steps(observer: StepObserver | None) -> Iterator[None]:
    """Give the previews of all searches within the block to an observer. Every preview is decoded."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


class ObservedRollout(Rollout):
    """A rollout whose previews an observer gets after every step."""

    def __init__(self, rollout: Rollout, policy: Policy[Any], rng: Randomness, observer: StepObserver) -> None:
        self.rollout, self.policy, self.rng, self.observer, self.steps = rollout, policy, rng, observer, 0

    @property
    def cond(self) -> Condition:  # type: ignore[override]
        return self.rollout.cond

    @property
    def start(self) -> Tensor:  # type: ignore[override]
        return self.rollout.start

    @property
    def segments(self) -> tuple[Segment, ...]:  # type: ignore[override]
        return self.rollout.segments

    @property
    def network_calls(self) -> int:  # type: ignore[override]
        return self.rollout.network_calls

    @property
    def progress(self) -> float:
        return self.rollout.progress

    @property
    def stochastic_until(self) -> float:
        return self.rollout.stochastic_until

    def set_start(self, start: Tensor) -> None:
        self.rollout.set_start(start)

    def step(self) -> None:
        self.rollout.step()
        self.steps += 1
        self.observer(self.policy.decode(self.preview().detach()), self.rng, self.steps)

    def preview(self) -> Tensor:
        return self.rollout.preview()

    def select(self, rows: Tensor) -> None:
        self.rollout.select(rows)
        self.rng = select_rows(self.rng, rows)

    def reseed(self, rng: Randomness) -> None:
        self.rollout.reseed(rng)
        self.rng = rng


def start_candidates(policy: Policy[Any], cond: Condition, rng: Randomness) -> Rollout:
    """Start rollouts that are not trained on, so the process need not recompute their log-probabilities."""
    rollout = replace(policy, process=policy.process.with_sampled_log_probs()).rollout(cond, rng)
    observer = _observer.get()
    return rollout if observer is None else ObservedRollout(rollout, policy, rng, observer)


def split_candidates(
    policy: Policy[Any], count: int, n: int, *, reset_temperature: bool
) -> list[tuple[Policy[Any], Tensor]]:
    """Which policy generates which of `count` candidates, n per prompt: [(policy, rows)].

    The published searches anneal the temperature of masked generators once and never reset it, so that it is 0 from
    the second candidate of a prompt on; `reset_temperature` restarts its annealing for every candidate.
    """
    rows = torch.arange(count)
    if reset_temperature:
        return [(policy, rows)]
    greedy = replace(policy, process=policy.process.without_temperature())
    first = rows % n == 0
    return [share for share in ((policy, rows[first]), (greedy, rows[~first])) if len(share[1])]


def check_candidates(n: int) -> None:
    if n < 1:
        raise ValueError(f"'n': expected at least one sample per prompt, got {n}; raise 'n' [TM557]")


@dataclass(frozen=True)
class RubricVerifier(Verifier):
    """A rubric as verifier: previews are clear from `clear_progress`, and promising from `promising_score`."""

    rubric: Rubric
    clear_progress: float = 0.5
    promising_score: float = 0.0

    def judge(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata], progress: float) -> Verdict:
        score = self.rubric.pointwise().score(pixels, prompts, metadata).total
        clear = torch.full_like(score, progress >= self.clear_progress, dtype=torch.bool)
        return Verdict(clear, score >= self.promising_score, score)
