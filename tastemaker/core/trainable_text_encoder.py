"""Encode prompts at every network call, so that gradients reach the text encoders."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .distributions import broadcast_to_shape
from .guidance import SupportsUnconditional
from .lora import LoraWeights
from .policy import Backbone, SupportsDistilledGuidance, SupportsResize
from .types import Condition, Metadata, Prompts
from .weights import Weights

PROMPT_INDEX = "prompt"  # the tensor that stands for all others: which text a row is of, below 0 without it


def wrap_trainable_text_encoder(model: Backbone, weights: Weights) -> Backbone:
    """The model, around it what reads its prompts anew if the weights hold text encoders."""
    return TrainableTextEncoderBackbone(model, weights) if isinstance(weights, LoraWeights) and weights.texts else model


class PromptTable:
    """Texts that were asked for, by number."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        found = self._numbers.setdefault(text, len(self.texts))
        if found == len(self.texts):
            self.texts.append(text)
        return found


class TrainableTextEncoderBackbone:
    """Conditions carry the numbers of prompts; what encoders say of them is found by the weights of the moment.

    So the gradient reaches the encoders, borrowed weights read with encoders of their own, and no objective knows.
    """

    def __init__(self, model: Backbone, weights: LoraWeights, known: PromptTable | None = None) -> None:
        self.model, self.weights, self.known = model, weights, PromptTable() if known is None else known
        self.shape, self.pixels, self.passes = model.shape, model.pixels, model.passes
        self._latest: tuple[object, Condition] | None = None
        # What only some backbones can, this one can if its own can.
        if isinstance(model, SupportsUnconditional):
            self.without = self._without
        if isinstance(model, SupportsResize):
            self.sized = lambda height, width: TrainableTextEncoderBackbone(
                model.sized(height, width), weights, self.known
            )
        if isinstance(model, SupportsDistilledGuidance):
            self.steered = lambda scale: TrainableTextEncoderBackbone(model.steered(scale), weights, self.known)

    @property
    def net(self) -> nn.Module:
        return self.model.net

    @net.setter
    def net(self, net: nn.Module) -> None:
        self.model.net = net

    def embed(self, prompts: Prompts, facts: Sequence[Metadata] = ()) -> Condition:
        self._latest = None
        numbers = torch.tensor([self.known.number(text) for text in prompts], device=self._device)
        return Condition(tuple(prompts), {PROMPT_INDEX: numbers}, tuple(facts))

    def _without(self, cond: Condition) -> Condition:
        return Condition(cond.prompts, {PROMPT_INDEX: -1 - cond.tensors[PROMPT_INDEX]}, cond.facts)

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        return self.model.predict(x, t, self.read(cond))

    def read(self, cond: Condition) -> Condition:
        """What the encoders say now; the same words again within one rollout, for nothing is learned there."""
        numbers = tuple(cond.tensors[PROMPT_INDEX].tolist())
        if torch.is_grad_enabled():
            self._latest = None
            return self._read(cond, numbers)
        told = (numbers, self.weights.active)
        if self._latest is None or self._latest[0] != told:
            self._latest = told, self._read(cond, numbers)
        return self._latest[1]

    def _read(self, cond: Condition, numbers: Sequence[int]) -> Condition:
        texts = [self.known.texts[number if number >= 0 else -1 - number] for number in numbers]
        given = self.model.embed(texts, cond.facts)
        if not isinstance(self.model, SupportsUnconditional) or min(numbers) >= 0:
            return given
        plain, apart = self.model.without(given).tensors, cond.tensors[PROMPT_INDEX] < 0
        tensors = {key: torch.where(broadcast_to_shape(apart, x), plain[key], x) for key, x in given.tensors.items()}
        return Condition(given.prompts, tensors, given.facts)

    def encode(self, pixels: Tensor) -> Tensor:
        return self.model.encode(pixels)

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        return self.model.decode(x, frames)

    @property
    def _device(self) -> torch.device:
        return next(self.model.net.parameters()).device
