"""Dropout whose masks depend on step and row only, not on ranks, micro-batches or recomputation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .randomness import Purpose, Randomness

MAX_POSITIONS = 2**17  # positions per row, such as tokens, with their own random word; later ones repeat them


class DropoutMasks:
    """Dropout masks of one update for all layers of a network, drawn per sample."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.layers = net, list[RowDropout]()
        self.position_words: Tensor | None = None  # [B, MAX_POSITIONS], shared by all layers
        self.batch_size = 0  # of the latest network call, a multiple of the update's with guidance
        net.register_forward_pre_hook(self._record_batch_size, with_kwargs=True)

    def _record_batch_size(self, net: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.batch_size = len(next(x for x in (*inputs, *named.values()) if isinstance(x, Tensor)))

    @contextmanager
    def active(self, rng: Randomness, draw: int) -> Iterator[None]:
        """Context in which dropout is on, with the same masks at every call, recomputation included."""
        sizes = [4 * math.ceil(layer.features / 4) for layer in self.layers]  # blocks of 4 words keep memory aligned
        self.position_words = _odd_words(rng.words(Purpose.DROPOUT_POSITIONS, MAX_POSITIONS, draw))
        words = torch.split(_odd_words(rng.words(Purpose.DROPOUT_FEATURES, sum(sizes), draw)), sizes, 1)
        for layer, feature_words in zip(self.layers, words, strict=True):
            layer.feature_words = feature_words[:, : layer.features]
        try:
            yield
        finally:
            self.position_words, self.batch_size = None, 0
            for layer in self.layers:
                layer.feature_words = None


class RowDropout(nn.Module):
    """Dropout of a layer's input; the identity outside of `DropoutMasks.active`.

    An element is dropped where the product of the word of its position and the word of its feature, both odd and cut
    to 32 bits, is below a limit. Any two such products are independent, so sums have the mean and variance of ordinary
    dropout, with one random word per position and per feature only.
    """

    def __init__(self, p: float, features: int, masks: DropoutMasks, *, last: bool) -> None:
        super().__init__()
        self.p, self.features, self.masks = p, features, masks
        self.axis = -1 if last else 1  # of features
        self.limit = round(p * 2**32) - 2**31
        self.feature_words: Tensor | None = None  # [B, features]
        masks.layers.append(self)

    def forward(self, x: Tensor) -> Tensor:
        if self.feature_words is None or self.masks.position_words is None:
            return x
        dropped = self._mask(x, self.feature_words, self.masks.position_words)
        return x.masked_fill(dropped, 0) * (1 / (1 - self.p))

    def _mask(self, x: Tensor, feature_words: Tensor, position_words: Tensor) -> Tensor:
        """Which elements of x are dropped: bool, of the shape of x."""
        batch_size = self.masks.batch_size or len(feature_words)
        if batch_size % len(feature_words) or len(x) % batch_size:  # x has no rows of the update: one mask for all
            feature_words, position_words, batch_size = feature_words[:1], position_words[:1], len(x)
        # A row may be several rows of x, as a video is several frames: then these are positions too.
        position_shape = [len(x) // batch_size, *x.shape[1:]]
        feature_shape = [1] * len(position_shape)
        feature_shape[self.axis], position_shape[self.axis] = self.features, 1
        count = math.prod(position_shape)
        if count > MAX_POSITIONS:
            position_words = position_words.repeat(1, math.ceil(count / MAX_POSITIONS))
        positions = position_words[:, :count].reshape(-1, *position_shape)
        dropped = positions * feature_words.reshape(-1, *feature_shape) < self.limit
        return dropped.expand(batch_size // len(feature_words), *dropped.shape).reshape(x.shape)


def _odd_words(words: Tensor) -> Tensor:
    return ((words | 1) - 2**31).to(torch.int32)
