"""Shared parts of the small generators that are trained on the playground: prompts as word ids, and their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn

from ..core.policy import Backbone
from ..core.registry import ConfigError
from ..core.types import Condition, Metadata, Prompts
from ..playground.captions import tokenize
from . import weight_files
from .pretrained import load_weights_into

N = TypeVar("N", bound=nn.Module)


class PlaygroundBackbone(Backbone):
    """A generator whose prompts consist of the playground's words; the network embeds them itself."""

    forward_passes = 1
    device: torch.device
    max_text_tokens: int
    edits: bool = False  # whether prompts may have the words of edit instructions

    def embed(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        """Return token_ids [B, max_text_tokens]; a prompt with other words is an error."""
        try:
            token_ids = tokenize(prompts, self.max_text_tokens, edits=self.edits).to(self.device)
        except ValueError as error:
            raise ConfigError(f"prompt: {error} [TM504]") from error
        return Condition(tuple(prompts), {"token_ids": token_ids}, tuple(metadata))


def load_network(build: Callable[[], N], seed: int, weights: str | None) -> N:
    """Build a network whose random weights depend on the seed alone, and load the weights of a file or run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = build()
    if weights:
        load_weights_into(net, weight_files.read_weights(weights)[0], weights)
    return net
