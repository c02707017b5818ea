"""Prompt work of a group: in rollouts, layers that read prompts only compute once for adjacent samples of a prompt."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from ..core.rollout_scope import ROLLOUTS

PROMPT_ID = "prompt_id"  # tensor of a condition, int64 [B] on the CPU: rows with the same number have the same prompt


def prompt_ids(prompts: Sequence[str]) -> Tensor:
    """A number for each prompt: int64 [B]."""
    digests = [blake2b(prompt.encode(), digest_size=7).digest() for prompt in prompts]
    return torch.tensor([int.from_bytes(digest, "little") for digest in digests], dtype=torch.int64)


def adjacent_samples(ids: Tensor) -> int:
    """The largest number that divides the length of every run of equal ids [B]."""
    return math.gcd(*(len(list(run)) for _, run in groupby(ids.tolist())))


class SharedPromptLayers:
    """Computes the layers of a network whose names match `patterns` for one of several adjacent, equal rows.

    Only in rollouts: a checkpointed block computes again during the backward pass, when the numbers of another call
    may be set. CUDA graphs and compiled code, which serve every batch of a shape, do not share either.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns, self.repeats = tuple(patterns), 1
        self.shared: set[nn.Module] = set()  # layers that are computing for some of the rows

    @contextmanager
    def calls(self, net: nn.Module, cond: dict[str, Tensor]) -> Iterator[None]:
        """Within the block, calls of the network in a rollout share the work of a condition's equal prompts."""
        ids = cond.get(PROMPT_ID)
        if ids is None or torch.is_grad_enabled() or not ROLLOUTS.active:
            yield
            return
        # All layers, adapters included, exist at the first rollout.
        hooks = [hook for layer in self._layers(net) for hook in self._register(layer)]
        self.repeats = adjacent_samples(ids)
        try:
            yield
        finally:
            self.repeats = 1
            self.shared.clear()
            for hook in hooks:
                hook.remove()

    def _layers(self, net: nn.Module) -> list[nn.Module]:
        return [m for name, m in net.named_modules() if any(fnmatch.fnmatch(name, p) for p in self.patterns)]

    def _register(self, layer: nn.Module) -> tuple[Any, Any]:
        return layer.register_forward_pre_hook(self._select), layer.register_forward_hook(self._expand)

    def _select(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        (x,) = inputs
        if self.repeats == 1 or torch.compiler.is_compiling():
            return None
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        self.shared.add(layer)
        return (x[:: self.repeats],)

    def _expand(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        if layer not in self.shared:
            return None
        self.shared.remove(layer)
        return output.repeat_interleave(self.repeats, 0)
