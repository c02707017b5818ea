from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.policy import Policy, Rollout
from ..core.randomness import Randomness
from ..core.reward import Verdict, Verifier
from ..core.types import PromptBatch
from .base import Search, SearchCost, SearchResult, start_candidates


@dataclass(frozen=True)
class PARMSearch(Search):
    """Step-wise assessment: whoever is clear yet unpromising goes early, never the last of a prompt; then best-of-N'.

    Each candidate is judged once, at the first step at which it is clear. With `drop` off everyone finishes and
    the promising are preferred at the end, as published. `keep` compares the clear of a prompt instead of asking each
    for more than a limit, which a judge of early previews seldom finds passed by those that will be right.
    """

    n: int = 4
    first: float = 0.0  # progress before which nobody is judged
    drop: bool = True
    keep: int | None = None  # of a prompt's clear candidates, how many go on: the likeliest; the promising if not given

    def __post_init__(self) -> None:
        if self.n < 1 or not 0 <= self.first <= 1:
            raise ValueError(
                f"found n {self.n}, first {self.first}; expected at least one sample and progress from 0 to 1"
            )
        if self.keep is not None and (self.keep < 1 or not self.drop):
            found = f"keep {self.keep}, drop {str(self.drop).lower()}"
            raise ValueError(f"found {found}; expected at least one that is kept, and 'drop' on")

    @torch.no_grad()
    def find(self, policy: Policy[Any], verifier: Verifier, batch: PromptBatch, rng: Randomness) -> SearchResult:
        cond = policy.embed(batch.prompts, batch.facts).repeat(self.n)
        rollout = start_candidates(policy, cond, rng.repeat(self.n))
        owner = torch.arange(len(batch), device=rng.rows.device).repeat_interleave(self.n)
        known = Verdict(
            torch.zeros_like(owner, dtype=torch.bool),
            owner >= 0,
            torch.full(owner.shape, -torch.inf, device=owner.device),
        )
        judged = 0
        while rollout.progress < 1:
            rollout.step()
            if self.first <= rollout.progress < 1 and not bool(known.clear.all()):
                judged += int((~known.clear).sum())
                known = self._judge(policy, verifier, rollout, known)
                keep = select_candidates(known, owner, self.keep) if self.drop else torch.ones_like(known.clear)
                rows = keep.nonzero().flatten()
                rollout.select(rows)
                owner = owner[rows]
                known = Verdict(known.clear[rows], known.promising[rows], known.score[rows])
        final, cond = rollout.preview(), rollout.cond
        score = verifier.judge(policy.decode(final), cond.prompts, cond.facts, 1.0).score
        # Any promising candidate comes before all others; within them, or those kept, the final score decides.
        ranked = torch.where(known.promising, score, score - 1e6) if self.keep is None else score
        best = torch.stack([torch.where(owner == i, ranked, -torch.inf).argmax() for i in range(len(batch))])
        return SearchResult(final[best], score[best], SearchCost(rollout.price, judged + len(final)))

    def _judge(self, policy: Policy[Any], verifier: Verifier, rollout: Rollout, known: Verdict) -> Verdict:
        cond, fresh = rollout.cond, (~known.clear).nonzero().flatten()
        prompts = [cond.prompts[i] for i in fresh.tolist()]
        facts = [cond.facts[i] for i in fresh.tolist()] if cond.facts else ()
        verdict = verifier.judge(policy.decode(rollout.preview()[fresh]), prompts, facts, rollout.progress)
        clear, promising, score = known.clear.clone(), known.promising.clone(), known.score.clone()
        clear[fresh], score[fresh] = verdict.clear, verdict.score
        promising[fresh] = ~verdict.clear | verdict.promising
        return Verdict(clear, promising, score)


def select_candidates(known: Verdict, owner: Tensor, most: int | None = None) -> Tensor:
    """Who goes on: the unclear; of a prompt's clear ones so many of the best, or those that promise, at least one."""
    keep = ~known.clear | (known.promising if most is None else torch.zeros_like(known.clear))
    for prompt in set(owner.tolist()):
        own = owner == prompt
        if most is None and bool((keep & own).any()):
            continue
        rivals = (own & known.clear).nonzero().flatten()
        keep[rivals[known.score[rivals].argsort(descending=True, stable=True)[: most or 1]]] = True
    return keep
