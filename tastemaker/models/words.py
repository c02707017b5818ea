"""Captions of the playground as conditions, for every generator that reads its words."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..playground.captions import tokens
from ..registry import ConfigError
from ..types import Condition, Facts, Prompts


def read(prompts: Prompts, facts: Sequence[Facts], length: int, device: torch.device) -> Condition:
    """Word ids [B, length]; a prompt in other words is refused by name."""
    try:
        ids = tokens(prompts, length).to(device)
    except ValueError as error:
        raise ConfigError(f"prompt: {error}") from error
    return Condition(tuple(prompts), {"words": ids}, tuple(facts))
