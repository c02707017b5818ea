from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..core.policy import Policy
from ..core.randomness import Randomness
from ..core.reward import Verifier
from ..core.types import Metadata, PromptBatch, Prompts
from .base import Search, SearchCost, SearchResult
from .single import SingleSample


@runtime_checkable
class ExplainingVerifier(Protocol):
    """A verifier that can say what is wrong."""

    def reasons(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Sequence[str]:
        """One a picture."""


@dataclass(frozen=True)
class Refine(Search):
    """PARM++'s reflection: what the judge does not find right is made again, and the better one stays.

    The generator is told of the last try by facts: `image` its pixels, `reason` what is wrong, where the judge is a
    critic. One that reads no facts tries again, with other draws.
    """

    even: ClassVar[bool] = False  # once all is right nobody tries again
    search: Search = SingleSample()  # by which each try is made
    rounds: int = 3  # of reflection, at most

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"'rounds' is {self.rounds}; expected at least one")

    @torch.no_grad()
    def find(self, policy: Policy[Any], verifier: Verifier, batch: PromptBatch, rng: Randomness) -> SearchResult:
        found = self.search.find(policy, verifier, batch, rng)
        x, price = found.x.clone(), found.price
        verdict = verifier.judge(policy.decode(x), batch.prompts, batch.facts, 1.0)
        score, right = verdict.score.clone(), verdict.promising.clone()
        price = price + SearchCost(0, len(batch))
        for k in range(1, self.rounds + 1):
            rows = (~right).nonzero().flatten()
            if not len(rows):
                break
            asked = add_feedback(verifier, batch, rows.tolist(), policy.decode(x[rows]))
            draws = replace(rng, step=rng.step + k, rows=rng.rows[rows])
            again = self.search.find(policy, verifier, asked, draws)
            verdict = verifier.judge(policy.decode(again.x), asked.prompts, asked.facts, 1.0)
            better = verdict.score > score[rows]
            x[rows[better]], score[rows[better]] = again.x[better], verdict.score[better]
            right[rows] = verdict.promising
            price = price + again.price + SearchCost(0, len(rows))
        return SearchResult(x, score, price)


def add_feedback(verifier: Verifier, batch: PromptBatch, rows: list[int], pixels: Tensor) -> PromptBatch:
    """The prompts of some rows, with what came of them."""
    prompts = tuple(batch.prompts[i] for i in rows)
    facts = tuple(batch.facts[i] for i in rows)
    wrong = verifier.reasons(pixels, prompts, facts) if isinstance(verifier, ExplainingVerifier) else [""] * len(rows)
    known = zip(facts, pixels.float().clamp(0, 1).cpu(), wrong, strict=True)
    return PromptBatch(prompts, tuple({**fact, "image": picture, "reason": reason} for fact, picture, reason in known))
