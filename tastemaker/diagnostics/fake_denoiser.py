"""What a run asks of a network that denoises latents: one call at a time, with nothing kept between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from ..core.types import Condition


class FakeDenoiser(ABC):
    """A latent denoiser on fake tensors; subclasses provide its conditioning."""

    backbone: Any

    @abstractmethod
    def condition(self, rows: int) -> Condition:
        """What so many rows are told."""

    def score(self, rows: int) -> Tensor:
        x, t = torch.empty(rows, *self.backbone.shape), torch.empty(rows)
        found: Tensor = self.backbone.predict(x, t, self.condition(rows))
        return found.float()

    def sample(self, rows: int) -> None:
        self.score(rows)

    def call(self) -> None:
        self.score(1)

    def again(self, calls: int) -> int:
        return 0

    def held(self, rows: int, adapted: bool) -> list[Tensor]:
        return []

    def moved(self, samples: float, at_once: int) -> float:
        return 0.0
