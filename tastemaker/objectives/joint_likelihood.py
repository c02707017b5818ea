"""Joint training of a unified model on image generation, language and image understanding (Show-o, Xie et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.objective import Context, Objective, drop_prompts, require_settings
from ..core.randomness import Purpose, Randomness
from ..core.types import Condition, JointBatch, Loss, Metadata, to_device
from ..processes.masked import MaskedProcess


@dataclass(frozen=True)
class JointExperience:
    """Samples of three kinds; see JointBatch."""

    cond: Condition
    x: Tensor  # [B, ...] captioned images in model space; zero for the others
    question_pixels: Tensor  # [B, 3, h, w]
    conversations: tuple[Metadata, ...]
    share: Tensor  # [B] of the sample's kind in the whole batch
    rng: Randomness

    def __len__(self) -> int:
        return len(self.cond)


@dataclass(frozen=True)
class JointLikelihood(Objective[MaskedProcess, JointBatch, JointExperience, None]):
    """Image generation, language modeling and understanding in one loss: the weighted sum of the mean of each kind.

    Every sample counts the same within its kind, however many tokens it has. Needs a model with text and image tokens
    (Show-o), and data of type `joint`.
    """

    t2i_coef: float = 1.0  # weight of masked-token prediction of captioned images
    lm_coef: float = 0.1  # weight of next-token prediction of texts
    mmu_coef: float = 1.0  # weight of next-token prediction of answers about images
    prompt_dropout: float = 0.1  # share of captions dropped, for classifier-free guidance
    needs: ClassVar[type] = MaskedProcess
    consumes: ClassVar[type] = JointBatch

    def __post_init__(self) -> None:
        coefs = (self.t2i_coef, self.lm_coef, self.mmu_coef)
        valid = min(coefs) >= 0 and max(coefs) > 0 and 0 <= self.prompt_dropout <= 1
        expected = "coefficients of at least 0, one of them above 0, and a share from 0 to 1"
        require_settings(self, "t2i_coef lm_coef mmu_coef prompt_dropout", valid, expected)

    @torch.no_grad()
    def collect(self, ctx: Context[MaskedProcess], batch: JointBatch) -> JointExperience:
        device = ctx.rng.rows.device
        dropped = ctx.host_rng().uniform(Purpose.PROMPT_DROPOUT, 1).flatten() < self.prompt_dropout
        cond = ctx.policy.embed(drop_prompts(batch.prompts, dropped))
        images = torch.tensor([i for i, each in enumerate(batch.conversations) if not each], dtype=torch.long)
        x = torch.zeros(len(batch), *ctx.policy.model.shape, dtype=torch.long, device=device)
        if len(images):
            x[images.to(device)] = ctx.policy.encode(to_device(batch.pixels[images], device))
        question_pixels, share = to_device(batch.question_pixels, device), to_device(batch.share, device)
        return JointExperience(cond, x, question_pixels, batch.conversations, share, ctx.rng)

    def parts(self, experience: JointExperience) -> Sequence[None]:
        return (None,)

    def loss(self, ctx: Context[MaskedProcess], experience: JointExperience, part: None) -> Loss:
        """Negative log-likelihood per token, weighted such that the mean over the batch is the sum over the kinds."""
        policy, conversations = ctx.policy, experience.conversations
        noisy = policy.corrupt(experience.x, experience.rng, draw=ctx.epoch)
        rows = -policy.model.unguided.joint_log_likelihood(
            experience.x, noisy, experience.cond, conversations, experience.question_pixels
        )
        kinds = ["lm" if "text" in each else "mmu" if "turns" in each else "t2i" for each in conversations]
        coefs = {"t2i": self.t2i_coef, "lm": self.lm_coef, "mmu": self.mmu_coef}
        weighted = rows * rows.new_tensor([coefs[kind] for kind in kinds]) / experience.share
        means = rows.detach() / experience.share
        metrics = {f"loss/{name}": means * means.new_tensor([float(kind == name) for kind in kinds]) for name in coefs}
        return Loss(weighted, metrics)
