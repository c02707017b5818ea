from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.policy import Policy
from ..core.randomness import Randomness
from ..core.reward import Verifier
from ..core.types import Condition, PromptBatch, concatenate, select_rows
from .base import Search, SearchCost, SearchResult, split_candidates, start_candidates


@dataclass(frozen=True)
class CandidateHistory:
    """Candidates that went all the way, and what was thought of them on it."""

    final: Tensor  # [B, ...]
    promising: Tensor  # [B] bool, clear once and promising then
    score: Tensor  # [B] how little of a no there was; of one that never was clear, nought


@dataclass(frozen=True)
class PublishedPARMSearch(Search):
    """PARM as its code has it: nobody is dropped, and whoever never is clear is not promising either.

    The promising are compared when finished, and without any the least sure no decides. Ask a judge whose mode is
    upstream_generate for scores as published.
    """

    n: int = 4
    reset: bool = False  # the temperature with every candidate

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"'n' is {self.n}; expected at least one sample a prompt")

    @torch.no_grad()
    def find(self, policy: Policy[Any], verifier: Verifier, batch: PromptBatch, rng: Randomness) -> SearchResult:
        cond, draws = policy.embed(batch.prompts, batch.facts).repeat(self.n), rng.repeat(self.n)
        made = split_candidates(policy, len(cond), self.n, reset=self.reset)
        followed = [
            rollout_with_judgments(maker, verifier, select_rows(cond, rows), select_rows(draws, rows))
            for maker, rows in made
        ]
        order = torch.cat([rows for _, rows in made]).argsort()
        path = select_rows(concatenate([path for path, _ in followed]), order)
        rows = path.promising.nonzero().flatten()
        score = torch.full_like(path.score, -torch.inf)
        if len(rows):
            some = select_rows(cond, rows)
            score[rows] = verifier.judge(policy.decode(path.final[rows]), some.prompts, some.facts, 1.0).score
        each, known = score.view(-1, self.n), path.score.view(-1, self.n)
        chosen = torch.where(path.promising.view(-1, self.n).any(1), each.argmax(1), known.argmax(1))
        best = torch.arange(len(batch), device=chosen.device) * self.n + chosen
        found = torch.where(path.promising[best], score[best], path.score[best])
        price = SearchCost(0, len(rows))
        for _, paid in followed:
            price = price + paid
        return SearchResult(path.final[best], found, price)


def rollout_with_judgments(
    policy: Policy[Any], verifier: Verifier, cond: Condition, rng: Randomness
) -> tuple[CandidateHistory, SearchCost]:
    """Look at every step, the last one too, until each candidate was clear once."""
    rollout, judged = start_candidates(policy, cond, rng), 0
    clear = torch.zeros(len(cond), dtype=torch.bool, device=rng.rows.device)
    promising, score = clear.clone(), torch.zeros(len(cond), device=clear.device)
    while rollout.progress < 1:
        rollout.step()
        fresh = (~clear).nonzero().flatten()
        if not len(fresh):
            continue
        judged += len(fresh)
        some, pixels = select_rows(cond, fresh), policy.decode(rollout.preview()[fresh])
        # A little before the end: at the very end, other questions are asked.
        verdict = verifier.judge(pixels, some.prompts, some.facts, min(rollout.progress, 1 - 1e-6))
        clear[fresh], promising[fresh] = verdict.clear, verdict.clear & verdict.promising
        score[fresh] = torch.where(verdict.clear, verdict.score, torch.zeros_like(verdict.score))
    return CandidateHistory(rollout.preview(), promising, score), SearchCost(rollout.price, judged)
