"""Encode prompts at every network call, so that gradients reach the text encoders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from .distributions import expand_dims_like
from .policy import Backbone, BackboneWrapper
from .types import Condition, Metadata, Prompts
from .weights import Weights

PROMPT_INDEX = "prompt"  # tensor with the index i of each prompt in the table; -1 - i: without the prompt


def wrap_trainable_text_encoder(model: Backbone, weights: Weights) -> Backbone:
    """Wrap the model if its text encoders train, so that every network call encodes the prompts."""
    return TrainableTextEncoderBackbone(model, weights) if weights.text_encoders else model


class PromptTable:
    """The prompts of a run, by index."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self._indices: dict[str, int] = {}

    def index(self, prompt: str) -> int:
        """The index of a prompt, which is added if it is new."""
        index = self._indices.setdefault(prompt, len(self.prompts))
        if index == len(self.prompts):
            self.prompts.append(prompt)
        return index


class TrainableTextEncoderBackbone(BackboneWrapper):
    """A model whose conditions hold prompt indices; prompts are encoded at every network call.

    Gradients reach the text encoders, and every snapshot of the weights encodes with its own adapters.
    """

    def __init__(self, model: Backbone, weights: Weights, prompt_table: PromptTable | None = None) -> None:
        super().__init__(model)
        self.weights, self.has_unconditional = weights, model.has_unconditional
        self.prompt_table = PromptTable() if prompt_table is None else prompt_table
        self._cached: tuple[object, Condition] | None = None  # of the latest call without gradient, with its key

    def rewrap(self, model: Backbone) -> Self:
        return type(self)(model, self.weights, self.prompt_table)

    def embed(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        self._cached = None
        indices = torch.tensor([self.prompt_table.index(prompt) for prompt in prompts], device=self._device)
        return Condition(tuple(prompts), {PROMPT_INDEX: indices}, tuple(metadata))

    def without_prompt(self, cond: Condition) -> Condition:
        return Condition(cond.prompts, {PROMPT_INDEX: -1 - cond.tensors[PROMPT_INDEX]}, cond.metadata)

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        return self.model.predict(x, t, self.encode_prompts(cond))

    def encode_prompts(self, cond: Condition) -> Condition:
        """The prompts encoded by the current weights; cached within a rollout, where the weights do not change."""
        indices = tuple(cond.tensors[PROMPT_INDEX].tolist())
        if torch.is_grad_enabled():
            self._cached = None
            return self._encode(cond, indices)
        key = (indices, self.weights.active)
        if self._cached is None or self._cached[0] != key:
            self._cached = key, self._encode(cond, indices)
        return self._cached[1]

    def _encode(self, cond: Condition, indices: Sequence[int]) -> Condition:
        prompts = [self.prompt_table.prompts[index if index >= 0 else -1 - index] for index in indices]
        encoded = self.model.embed(prompts, cond.metadata)
        if not self.has_unconditional or min(indices) >= 0:
            return encoded
        uncond, dropped = self.model.without_prompt(encoded).tensors, cond.tensors[PROMPT_INDEX] < 0
        tensors = {key: torch.where(expand_dims_like(dropped, x), uncond[key], x) for key, x in encoded.tensors.items()}
        return Condition(encoded.prompts, tensors, encoded.metadata)

    @property
    def _device(self) -> torch.device:
        return next(self.model.net.parameters()).device
