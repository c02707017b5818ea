"""What chance replaces or leaves out where samples are drawn around pictures."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.policy import Policy
from ..core.randomness import Randomness
from ..core.types import Condition, select_rows
from ..processes.autoregressive import AutoregressiveProcess
from .teacher_forcing import teacher_forced_distribution

LLAMAGEN_PROMPT_DROPOUT = 0.1  # share of conditions that LlamaGen leaves out while its network is in training mode


def replace_tokens_randomly(
    policy: Policy[AutoregressiveProcess], cond: Condition, x: Tensor, rng: Randomness, share: float
) -> Tensor:
    """Tokens [B, K], a share of them replaced by any code there is, all codes alike."""
    codes = teacher_forced_distribution(policy, select_rows(cond, torch.arange(1)), x[:1]).logits.shape[-1]
    other = (rng.uniform("code", x.shape[1]) * codes).long().clamp(max=codes - 1)
    return torch.where(rng.uniform("noise", x.shape[1]) < share, other, x)


def drop_prompts(prompts: Sequence[str], rng: Randomness, share: float, draw: int = 0) -> list[str]:
    """The same with a share of them left out, by chance."""
    gone = (rng.uniform("untold", 1, draw=draw).flatten() < share).tolist()
    return ["" if left else prompt for prompt, left in zip(prompts, gone, strict=True)]


def sample_token_mask(rng: Randomness, like: Tensor, skip: float, draw: int) -> Tensor:
    """Which tokens of samples [B, G, K] count, by chance, but in each at least one: [B, G, K]."""
    if not skip:
        return torch.ones(like.shape, device=like.device)
    kept = rng.uniform("skip", *like.shape[1:], draw=draw) >= skip
    kept[..., 0] |= ~kept.any(-1)
    return kept.float()
