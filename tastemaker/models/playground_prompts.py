"""Turn playground prompts into conditions (word ids)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..core.registry import ConfigError
from ..core.types import Condition, Metadata, Prompts
from ..playground.captions import tokenize


def embed_playground_prompts(
    prompts: Prompts, facts: Sequence[Metadata], length: int, device: torch.device
) -> Condition:
    """Word ids [B, length]; a prompt in other words is refused by name."""
    try:
        ids = tokenize(prompts, length).to(device)
    except ValueError as error:
        raise ConfigError(f"prompt: {error}") from error
    return Condition(tuple(prompts), {"words": ids}, tuple(facts))
