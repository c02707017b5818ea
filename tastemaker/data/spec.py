"""Where batches come from: a pure function of the step, so that resuming is a number."""

from __future__ import annotations

from typing import Any, Protocol

from ..core.types import PromptBatch


class Dataset(Protocol):
    def __len__(self) -> int: ...
    def batch(self, step: int, size: int, rank: int, world: int) -> Any:
        """This rank's share of the `size` rows of a step: PromptBatch, Pictures or Pairs."""

    def first(self, count: int) -> PromptBatch:
        """Prompts to look at, always the same."""


class DataSpec(Protocol):
    @property
    def yields(self) -> type:
        """PromptBatch, Pictures or Pairs."""

    def load(self, seed: int) -> Dataset: ...
