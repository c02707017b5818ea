"""One call of a reward: what it gets, and which scores are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .errors import RewardError
from .reward_inputs import quote_prompts
from .types import Metadata, Prompts

if TYPE_CHECKING:
    from .reward import WeightedReward


def score_checked(
    name: str,
    reward: WeightedReward,
    pixels: Tensor,
    prompt_sets: Sequence[Prompts],
    metadata: Sequence[Metadata],
    group_size: int,
) -> list[Tensor]:
    """Scores of one call of a reward, checked; failures become a RewardError."""
    # A reward of the user's may write into its pixels, also through numpy, where torch would not notice.
    private = pixels.clone() if reward.reward.needs_copy else pixels
    entries = [dict(entry) for entry in metadata] if reward.reward.needs_copy else metadata
    try:
        if reward.spec.needs_group:
            values = [reward.reward.score_groups(private, prompts, entries, group_size) for prompts in prompt_sets]
        else:
            values = reward.reward.score_prompts(private, prompt_sets, entries)
    except torch.OutOfMemoryError:
        raise
    except (Exception, SystemExit) as error:  # a reward that calls sys.exit would end the run as if it were done
        kind, prompts = type(error).__name__, quote_prompts(prompt_sets[0])
        raise RewardError(
            f"reward '{name}' failed on {prompts} ({kind}: {error}); fix the cause, or remove rewards.{name} [TM115]"
        ) from error
    return [_check_scores(name, reward, pixels, *pair) for pair in zip(prompt_sets, values, strict=True)]


def _check_scores(name: str, reward: WeightedReward, pixels: Tensor, prompts: Prompts, value: object) -> Tensor:
    """Refuse scores of the wrong shape, values that are no real, finite numbers, and missing gradients."""
    if not isinstance(value, Tensor) or value.shape != (len(pixels),):
        result = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise RewardError(
            f"reward '{name}' returned {result} for {len(pixels)} samples {quote_prompts(prompts)}; return a tensor "
            "with one score per sample [TM116]"
        )
    if value.is_meta or value.is_complex() or value.layout != torch.strided:
        kind = "a meta tensor, which has no values" if value.is_meta else f"complex numbers ({value.dtype})"
        kind = f"a {value.layout} tensor" if value.layout != torch.strided else kind
        raise RewardError(
            f"reward '{name}' returned {kind} for {list(prompts[:3])}; return a dense tensor of real numbers [TM1163]"
        )
    finite = torch.isfinite(value.detach())
    if not bool(finite.all()):
        bad = quote_prompts([prompts[i] for i in (~finite).nonzero().flatten().tolist()])
        raise RewardError(
            f"reward '{name}' returned NaN or infinity for {bad}; fix the reward, or remove rewards.{name} [TM117]"
        )
    if reward.needs_gradient and torch.is_grad_enabled() and pixels.requires_grad and not value.requires_grad:
        raise RewardError(
            f"reward '{name}' is declared differentiable, but its scores of {quote_prompts(prompts)} have no gradient; "
            "compute the scores without detach or no_grad, or declare differentiable = False [TM118]"
        )
    return value.float()
