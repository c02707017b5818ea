"""PARM++: regenerate samples that the verifier rejects, with its feedback."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.policy import Policy
from ..core.randomness import Randomness
from ..core.reward import Verifier
from ..core.types import PromptBatch
from .base import Search, SearchCost, SearchResult
from .best_of_n import SingleSample


@dataclass(frozen=True)
class Refine(Search):
    """Regenerate samples that are not promising, and keep the better of old and new.

    The generator gets the last attempt as metadata: `image` its pixels, and `reason` what is wrong, if the verifier
    explains. A generator that reads no metadata tries again with other draws.
    """

    constant_cost: ClassVar[bool] = False  # ends as soon as all samples are promising
    search: Search = SingleSample()  # generates each attempt
    max_rounds: int = 3

    def __post_init__(self) -> None:
        if self.max_rounds < 1:
            raise ValueError(f"'max_rounds' is {self.max_rounds}; set it to at least 1 [TM581]")

    @property
    def candidates_per_sample(self) -> int:
        return self.search.candidates_per_sample

    @torch.no_grad()
    def run(self, policy: Policy[Any], verifier: Verifier, batch: PromptBatch, rng: Randomness) -> SearchResult:
        result = self.search.run(policy, verifier, batch, rng)
        x = result.x.clone()
        verdict = verifier.judge(policy.decode(x), batch.prompts, batch.metadata, 1.0)
        score, promising = verdict.score.clone(), verdict.promising.clone()
        cost = result.cost + SearchCost(0, len(batch))
        for k in range(1, self.max_rounds + 1):
            rows = (~promising).nonzero().flatten()
            if not len(rows):
                break
            retry = add_feedback(verifier, batch, rows.tolist(), policy.decode(x[rows]))
            draws = replace(rng, step=rng.step + k, rows=rng.rows[rows])
            attempt = self.search.run(policy, verifier, retry, draws)
            verdict = verifier.judge(policy.decode(attempt.x), retry.prompts, retry.metadata, 1.0)
            better = verdict.score > score[rows]
            x[rows[better]], score[rows[better]] = attempt.x[better], verdict.score[better]
            promising[rows] = verdict.promising
            cost = cost + attempt.cost + SearchCost(0, len(rows))
        return SearchResult(x, score, cost)


def add_feedback(verifier: Verifier, batch: PromptBatch, rows: list[int], pixels: Tensor) -> PromptBatch:
    """The prompts of some rows, with their last attempt and what is wrong with it as metadata."""
    prompts = tuple(batch.prompts[i] for i in rows)
    metadata = tuple(batch.metadata[i] for i in rows)
    reasons = verifier.explain(pixels, prompts, metadata)
    feedback = zip(metadata, pixels.float().clamp(0, 1).cpu(), reasons, strict=True)
    return PromptBatch(prompts, tuple({**known, "image": image, "reason": reason} for known, image, reason in feedback))
