"""CCA: condition contrastive alignment of autoregressive models (Chen et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.objective import Context, Objective, drop_prompts, require_settings
from ..core.policy import Process
from ..core.randomness import Purpose, Randomness
from ..core.types import Condition, ImageBatch, Loss, TokenBatch, concatenate
from ..processes.autoregressive import AutoregressiveProcess
from .likelihood import encode_batch


@dataclass(frozen=True)
class ContrastivePairs:
    """Samples with their own condition and that of another sample."""

    positive: Condition
    negative: Condition
    x: Tensor  # [B, ...] in model space
    has_no_negative: Tensor  # [B] bool: the sample's prompt was dropped, or both conditions are the same
    rng: Randomness

    def __len__(self) -> int:
        return len(self.positive)


@dataclass(frozen=True)
class CCA(Objective[Process, ImageBatch | TokenBatch, ContrastivePairs, None]):
    """Raise the likelihood of a sample under its own condition, and lower it under another one.

    The aligned model samples well without guidance. The negative condition is that of the next sample of the batch.
    """

    beta: float = 0.02
    negative_weight: float = 1000.0  # weight of the negative condition, lambda in the paper
    prompt_dropout: float = 0.1  # share of samples without a condition, which keeps guidance possible
    # Each log-ratio by itself, or their difference as in DPO, where negative_weight is not used.
    loss_type: Literal["cca", "dpo"] = "cca"
    needs: ClassVar[type] = AutoregressiveProcess
    consumes: ClassVar[type] = ImageBatch
    also_consumes: ClassVar[tuple[type, ...]] = (TokenBatch,)

    def __post_init__(self) -> None:
        require_settings(
            self,
            "beta negative_weight prompt_dropout",
            self.beta > 0 and self.negative_weight >= 0 and 0 <= self.prompt_dropout <= 1,
            "beta above 0, negative_weight of at least 0 and prompt_dropout from 0 to 1",
        )

    def snapshots(self) -> tuple[str, ...]:
        return ("reference",)

    @torch.no_grad()
    def collect(self, ctx: Context[Process], batch: ImageBatch | TokenBatch) -> ContrastivePairs:
        all_prompts = ctx.comm.gather_objects(batch.prompts)
        first = ctx.comm.rank * len(batch)  # the next sample may be on another rank
        negatives = [all_prompts[(first + i + 1) % len(all_prompts)] for i in range(len(batch))]
        dropped = ctx.rng.uniform(Purpose.PROMPT_DROPOUT, 1).flatten() < self.prompt_dropout
        positives = drop_prompts(batch.prompts, dropped)
        x = encode_batch(ctx.policy, batch, ctx.rng)
        same = torch.tensor([a == b for a, b in zip(batch.prompts, negatives, strict=True)], device=x.device)
        return ContrastivePairs(ctx.policy.embed(positives), ctx.policy.embed(negatives), x, dropped | same, ctx.rng)

    def parts(self, experience: ContrastivePairs) -> Sequence[None]:
        return (None,)

    def loss(self, ctx: Context[Process], experience: ContrastivePairs, part: None) -> Loss:
        """-log sigmoid(beta R+) - negative_weight log sigmoid(-beta R-), R the log-ratio to the reference."""
        positive, negative = self._log_ratios(ctx, experience)
        has_negative = ~experience.has_no_negative
        positive_loss, negative_loss = -F.logsigmoid(self.beta * positive), -F.logsigmoid(-self.beta * negative)
        if self.loss_type == "dpo":
            rows = torch.where(has_negative, -F.logsigmoid(self.beta * (positive - negative)), positive_loss)
        else:
            rows = positive_loss + self.negative_weight * negative_loss * has_negative
            rows = rows / max(self.negative_weight, 1.0)
        metrics = {
            "accuracy": (positive > negative).float(),
            "log_ratio/positive": positive.detach(),
            "log_ratio/negative": negative.detach(),
        }
        return Loss(rows, metrics)

    def _log_ratios(self, ctx: Context[Process], pairs: ContrastivePairs) -> tuple[Tensor, Tensor]:
        """log p(x | c) - log p_ref(x | c) for the positive and the negative condition, in one pass: [B] each."""
        policy, corrupted = ctx.policy, ctx.policy.corrupt(pairs.x, pairs.rng)
        cond, x, noisy = concatenate([(pairs.positive, pairs.x, corrupted), (pairs.negative, pairs.x, corrupted)])
        with policy.weights.use("reference"):
            reference = policy.likelihood(cond, x, noisy)
        positive, negative = (policy.likelihood(cond, x, noisy) - reference).chunk(2)
        return positive, negative
