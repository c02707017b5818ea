"""A generator that learns to tell of pictures, as a network of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from ..distributions import Categorical
from ..policy import ModelSpec
from ..registry import ConfigError
from ..types import Facts, Loss, Placement


@runtime_checkable
class Telling(Protocol):
    """A backbone that answers questions about pictures."""

    net: nn.Module

    def tell(self, pixels: Tensor, turns: Sequence[Sequence[str]], said: Sequence[str]) -> Any:
        """`logits` [B, A, V] of answers' `ids` [B, A], and which of them are `counted`; answers end on the right."""


class Narrator(nn.Module):
    """From pictures, what was said and what is to be answered, to how far the answers are from being given."""

    def __init__(self, model: Telling) -> None:
        super().__init__()
        self.net = model.net
        self.model = model  # no module: what it sees by is frozen

    def forward(self, pixels: Tensor, asked: Sequence[Facts], first: bool = False) -> Loss:
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


def narrator(spec: ModelSpec, placement: Placement) -> Narrator:
    model: object = spec.load(placement)
    if isinstance(model, Telling):
        return Narrator(model)
    raise ConfigError(f"judge.model: a {type(spec).__name__} tells nothing of pictures; expected type showo")
