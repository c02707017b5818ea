"""PARM (potential assessment reward model): judge previews, and finish the promising candidates only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.policy import Policy, Rollout
from ..core.randomness import Randomness
from ..core.reward import Verdict, Verifier
from ..core.types import Condition, PromptBatch, concatenate, select_rows
from .base import Search, SearchCost, SearchResult, check_candidates, split_candidates, start_candidates


@dataclass(frozen=True)
class PARMSearch(Search):
    """Prune candidates that are clear and not promising, at least one per prompt stays; then best-of-N'.

    Each candidate is judged once, at the first step at which it is clear. Without `prune` all candidates finish and
    promising ones are preferred, as published. `top_k` keeps the best of a prompt's clear candidates instead of those
    above a threshold, which scores of early previews seldom reach.
    """

    n: int = 4
    start_progress: float = 0.0  # progress before which candidates are not judged
    prune: bool = True
    top_k: int | None = None  # clear candidates of a prompt that continue; by default the promising ones

    def __post_init__(self) -> None:
        if self.n < 1 or not 0 <= self.start_progress <= 1:
            raise ValueError(
                f"expected n of at least 1 and start_progress from 0 to 1, got n {self.n} and start_progress "
                f"{self.start_progress}; correct these settings [TM577]"
            )
        if self.top_k is not None and (self.top_k < 1 or not self.prune):
            raise ValueError(
                f"expected top_k of at least 1 together with prune: true, got top_k {self.top_k}, prune "
                f"{str(self.prune).lower()}; correct these settings [TM578]"
            )

    @torch.no_grad()
    def run(self, policy: Policy[Any], verifier: Verifier, batch: PromptBatch, rng: Randomness) -> SearchResult:
        cond = policy.embed(batch.prompts, batch.metadata).repeat(self.n)
        rollout = start_candidates(policy, cond, rng.repeat(self.n))
        prompt = torch.arange(len(batch), device=rng.rows.device).repeat_interleave(self.n)  # of each candidate
        verdict = Verdict(
            torch.zeros_like(prompt, dtype=torch.bool),
            prompt >= 0,
            torch.full(prompt.shape, -torch.inf, device=prompt.device),
        )
        verifier_calls = 0
        while rollout.progress < 1:
            rollout.step()
            if self.start_progress <= rollout.progress < 1 and not bool(verdict.judgeable.all()):
                verifier_calls += int((~verdict.judgeable).sum())
                verdict = judge_unclear(policy, verifier, rollout, verdict)
                keep = (
                    select_candidates(verdict, prompt, self.top_k) if self.prune else torch.ones_like(verdict.judgeable)
                )
                rows = keep.nonzero().flatten()
                rollout.select(rows)
                prompt = prompt[rows]
                verdict = Verdict(verdict.judgeable[rows], verdict.promising[rows], verdict.score[rows])
        final, cond = rollout.preview(), rollout.cond
        score = verifier.judge(policy.decode(final), cond.prompts, cond.metadata, 1.0).score
        # A promising candidate ranks before all others; among equals, or with top_k, the final score decides.
        ranked = torch.where(verdict.promising, score, score - 1e6) if self.top_k is None else score
        best = torch.stack([torch.where(prompt == i, ranked, -torch.inf).argmax() for i in range(len(batch))])
        return SearchResult(final[best], score[best], SearchCost(rollout.network_calls, verifier_calls + len(final)))


def judge_unclear(policy: Policy[Any], verifier: Verifier, rollout: Rollout, verdict: Verdict) -> Verdict:
    """Judge the previews of candidates that were not clear before; a candidate is promising until it is clear."""
    cond, unclear = rollout.cond, (~verdict.judgeable).nonzero().flatten()
    prompts = [cond.prompts[i] for i in unclear.tolist()]
    metadata = [cond.metadata[i] for i in unclear.tolist()] if cond.metadata else ()
    update = verifier.judge(policy.decode(rollout.preview()[unclear]), prompts, metadata, rollout.progress)
    clear, promising, score = verdict.judgeable.clone(), verdict.promising.clone(), verdict.score.clone()
    clear[unclear], score[unclear] = update.judgeable, update.score
    promising[unclear] = ~update.judgeable | update.promising
    return Verdict(clear, promising, score)


def select_candidates(verdict: Verdict, prompt: Tensor, top_k: int | None = None) -> Tensor:
    """Which candidates continue: unclear ones, and of a prompt's clear ones the promising or the best `top_k`: [N].

    If nothing of a prompt would continue, its best clear candidate does.
    """
    keep = ~verdict.judgeable | (verdict.promising if top_k is None else torch.zeros_like(verdict.judgeable))
    for index in set(prompt.tolist()):
        of_prompt = prompt == index
        if top_k is None and bool((keep & of_prompt).any()):
            continue
        clear = (of_prompt & verdict.judgeable).nonzero().flatten()
        keep[clear[verdict.score[clear].argsort(descending=True, stable=True)[: top_k or 1]]] = True
    return keep


@dataclass(frozen=True)
class CandidateHistory:
    """Finished candidates with the verdicts on their previews."""

    final: Tensor  # [B, ...]
    promising: Tensor  # [B] bool, at the first clear preview
    score: Tensor  # [B] of that preview; 0 if no preview was clear


@dataclass(frozen=True)
class PublishedPARMSearch(Search):
    """PARM as its published code has it: no candidate is pruned, and one without a clear preview is not promising.

    Promising candidates are compared when they are finished; if a prompt has none, the scores of the previews decide.
    Use a judge whose mode is upstream_generate for scores as published.
    """

    n: int = 4
    reset_temperature: bool = False  # for every candidate of a masked generator

    def __post_init__(self) -> None:
        check_candidates(self.n)

    @torch.no_grad()
    def run(self, policy: Policy[Any], verifier: Verifier, batch: PromptBatch, rng: Randomness) -> SearchResult:
        cond, draws = policy.embed(batch.prompts, batch.metadata).repeat(self.n), rng.repeat(self.n)
        shares = split_candidates(policy, len(cond), self.n, reset_temperature=self.reset_temperature)
        results = [
            rollout_with_judgments(p, verifier, select_rows(cond, rows), select_rows(draws, rows)) for p, rows in shares
        ]
        order = torch.cat([rows for _, rows in shares]).argsort()
        history = select_rows(concatenate([candidates for candidates, _ in results]), order)
        rows = history.promising.nonzero().flatten()
        score = torch.full_like(history.score, -torch.inf)
        if len(rows):
            promising = select_rows(cond, rows)
            pixels = policy.decode(history.final[rows])
            score[rows] = verifier.judge(pixels, promising.prompts, promising.metadata, 1.0).score
        final_scores, preview_scores = score.view(-1, self.n), history.score.view(-1, self.n)
        any_promising = history.promising.view(-1, self.n).any(1)
        chosen = torch.where(any_promising, final_scores.argmax(1), preview_scores.argmax(1))
        best = torch.arange(len(batch), device=chosen.device) * self.n + chosen
        best_score = torch.where(history.promising[best], score[best], history.score[best])
        cost = SearchCost(0, len(rows))
        for _, rollout_cost in results:
            cost = cost + rollout_cost
        return SearchResult(history.final[best], best_score, cost)


def rollout_with_judgments(
    policy: Policy[Any], verifier: Verifier, cond: Condition, rng: Randomness
) -> tuple[CandidateHistory, SearchCost]:
    """Judge each candidate at every step, the last one included, until it was clear once."""
    rollout, verifier_calls = start_candidates(policy, cond, rng), 0
    clear = torch.zeros(len(cond), dtype=torch.bool, device=rng.rows.device)
    promising, score = clear.clone(), torch.zeros(len(cond), device=clear.device)
    while rollout.progress < 1:
        rollout.step()
        unclear = (~clear).nonzero().flatten()
        if not len(unclear):
            continue
        verifier_calls += len(unclear)
        candidates, pixels = select_rows(cond, unclear), policy.decode(rollout.preview()[unclear])
        # Just below 1: at a progress of 1, verifiers ask the questions for finished samples.
        verdict = verifier.judge(pixels, candidates.prompts, candidates.metadata, min(rollout.progress, 1 - 1e-6))
        clear[unclear], promising[unclear] = verdict.judgeable, verdict.judgeable & verdict.promising
        score[unclear] = torch.where(verdict.judgeable, verdict.score, torch.zeros_like(verdict.score))
    return CandidateHistory(rollout.preview(), promising, score), SearchCost(rollout.network_calls, verifier_calls)
