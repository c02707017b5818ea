from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.objective import Context, Objective
from ..core.policy import Process
from ..core.randomness import Randomness
from ..core.types import Condition, ImageBatch, Loss, TokenBatch, concatenate
from ..processes.autoregressive import AutoregressiveProcess
from .likelihood import encode_batch


@dataclass(frozen=True)
class ContrastivePairs:
    right: Condition
    wrong: Condition
    x: Tensor  # [B, ...] in model space
    alone: Tensor  # [B] whether there is no wrong one: the right one was left out, or the two are the same
    rng: Randomness

    def __len__(self) -> int:
        return len(self.right)


@dataclass(frozen=True)
class CCA(Objective[Process, ImageBatch | TokenBatch, ContrastivePairs, None]):
    """Condition contrastive alignment: a picture is to be likelier than before under its own condition, not another's.

    What comes of it needs no guidance. The wrong condition is that of the next picture of the batch.
    """

    beta: float = 0.02
    against: float = 1000.0  # weight of the wrong condition, lambda in the paper
    drop: float = 0.1  # of the conditions, so that guidance stays possible; such pictures are only made likelier
    form: Literal["cca", "dpo"] = "cca"  # each likelihood by itself, or their difference, in which `against` is unused
    needs: ClassVar[type] = AutoregressiveProcess
    consumes: ClassVar[type] = ImageBatch
    also: ClassVar[tuple[type, ...]] = (TokenBatch,)

    def __post_init__(self) -> None:
        if not (self.beta > 0 and self.against >= 0 and 0 <= self.drop <= 1):
            found = f"beta {self.beta}, against {self.against}, drop {self.drop}"
            raise ValueError(f"found {found}; expected beta above 0, against of at least 0 and drop from 0 to 1")

    def snapshots(self) -> tuple[str, ...]:
        return ("reference",)

    @torch.no_grad()
    def collect(self, ctx: Context[Process], batch: ImageBatch | TokenBatch) -> ContrastivePairs:
        everyone = ctx.comm.gather_objects(batch.prompts)
        first = ctx.comm.rank * len(batch)  # the next picture may be another rank's
        others = [everyone[(first + i + 1) % len(everyone)] for i in range(len(batch))]
        untold = ctx.rng.uniform("drop", 1).flatten() < self.drop
        right = ["" if gone else prompt for prompt, gone in zip(batch.prompts, untold.tolist(), strict=True)]
        x = encode_batch(ctx.policy, batch, ctx.rng)
        same = torch.tensor([one == other for one, other in zip(batch.prompts, others, strict=True)], device=x.device)
        return ContrastivePairs(ctx.policy.embed(right), ctx.policy.embed(others), x, untold | same, ctx.rng)

    def parts(self, experience: ContrastivePairs) -> Sequence[None]:
        return (None,)

    def loss(self, ctx: Context[Process], experience: ContrastivePairs, part: None) -> Loss:
        right, wrong = self._gaps(ctx, experience)
        told = ~experience.alone
        praise, blame = -F.logsigmoid(self.beta * right), -F.logsigmoid(-self.beta * wrong)
        if self.form == "dpo":
            rows = torch.where(told, -F.logsigmoid(self.beta * (right - wrong)), praise)
        else:
            rows = (praise + self.against * blame * told) / max(self.against, 1.0)
        watched = {"accuracy": (right > wrong).float(), "right": right.detach(), "wrong": wrong.detach()}
        return Loss(rows, watched)

    def _gaps(self, ctx: Context[Process], seen: ContrastivePairs) -> tuple[Tensor, Tensor]:
        """By how much likelier each picture is than to the reference, under either condition, in one pass: [B] both."""
        policy, whole = ctx.policy, ctx.policy.corrupt(seen.x, seen.rng)
        cond, x, noisy = concatenate([(seen.right, seen.x, whole), (seen.wrong, seen.x, whole)])
        with policy.weights.use("reference"):
            was = policy.likelihood(cond, x, noisy)
        right, wrong = (policy.likelihood(cond, x, noisy) - was).chunk(2)
        return right, wrong
