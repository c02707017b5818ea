"""Fine-tune a generator that also answers questions about images (Show-o) as a judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from ..core.distributions import Categorical
from ..core.policy import ModelSpec
from ..core.registry import ConfigError
from ..core.types import Loss, Metadata, Placement


@runtime_checkable
class VisionLanguageBackbone(Protocol):
    """A backbone that answers questions about pictures."""

    net: nn.Module

    def tell(self, pixels: Tensor, turns: Sequence[Sequence[str]], said: Sequence[str]) -> Any:
        """`logits` [B, A, V] of answers' `ids` [B, A], and which of them are `counted`; answers end on the right."""


class GeneratorJudge(nn.Module):
    """Module that maps images, dialogue turns and answers to the answers' loss."""

    def __init__(self, model: VisionLanguageBackbone) -> None:
        super().__init__()
        self.net = model.net
        self.model = model  # no module: what it sees by is frozen

    def forward(self, pixels: Tensor, asked: Sequence[Metadata], first: bool = False) -> Loss:
        """Minus the mean log-probability of an answer's tokens, or of its `first`, and whether that is likeliest.

        Nothing else counts: neither the picture nor what was asked.
        """
        told = self.model.tell(pixels, [each["turns"] for each in asked], [str(each["answer"]) for each in asked])
        counted = told.counted.float()
        begins = told.counted & (told.counted.cumsum(1) == 1)
        each = Categorical(told.logits).log_prob(told.ids)
        right = ((told.logits.argmax(-1) == told.ids) & begins).any(1).float()
        weight = begins.float() if first else counted
        return Loss(-(each * weight).sum(1) / weight.sum(1), {"right": right})


def load_generator_judge(spec: ModelSpec, placement: Placement) -> GeneratorJudge:
    model: object = spec.load(placement)
    if isinstance(model, VisionLanguageBackbone):
        return GeneratorJudge(model)
    raise ConfigError(f"judge.model: a {type(spec).__name__} tells nothing of pictures; expected type showo")
