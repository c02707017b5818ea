"""Dropout that belongs to rows: what a row leaves out is a function of step and row, whichever rank has the row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .randomness import Randomness

PLACES = 2**17  # of a row, such as tokens; those after them begin anew


class DropoutMasks:
    """Dropout masks of one update for all layers of a network, drawn per sample."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.layers = net, list[RowDropout]()
        self.places: Tensor | None = None  # [B, PLACES] a word for each place, whichever layer asks
        self.called = 0  # rows of the latest call of the network: several times those of the update, with guidance
        net.register_forward_pre_hook(self._called, with_kwargs=True)

    def _called(self, net: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.called = len(next(x for x in (*inputs, *named.values()) if isinstance(x, Tensor)))

    @contextmanager
    def by(self, rng: Randomness, draw: int) -> Iterator[None]:
        """Within the block every call leaves out the same of a row, the repetition in a backward pass too."""
        sizes = [4 * math.ceil(layer.features / 4) for layer in self.layers]  # whole blocks, so that memory is aligned
        self.places = _odd(rng.words("dropout places", PLACES, draw))
        words = torch.split(_odd(rng.words("dropout features", sum(sizes), draw)), sizes, 1)
        for layer, own in zip(self.layers, words, strict=True):
            layer.words = own[:, : layer.features]
        try:
            yield
        finally:
            self.places, self.called = None, 0
            for layer in self.layers:
                layer.words = None


class RowDropout(nn.Module):
    """Leaves out a share of what a layer sees, and nothing outside of `DropoutMasks.by`.

    A place and a feature are left out where the product of their words, odd and cut to 32 bits, lies below a limit. Any
    two such draws are independent, so sums over them have the mean and variance that draws of their own would give,
    and there are few words: one for each place and one for each feature.
    """

    def __init__(self, share: float, features: int, chance: DropoutMasks, *, last: bool) -> None:
        super().__init__()
        self.share, self.features, self.chance = share, features, chance
        self.axis = -1 if last else 1  # of features
        self.limit = round(share * 2**32) - 2**31
        self.words: Tensor | None = None  # [B, features]
        chance.layers.append(self)

    def forward(self, x: Tensor) -> Tensor:
        if self.words is None or self.chance.places is None:
            return x
        return x.masked_fill(self._left_out(x, self.words, self.chance.places), 0) * (1 / (1 - self.share))

    def _left_out(self, x: Tensor, words: Tensor, places: Tensor) -> Tensor:
        called = self.chance.called or len(words)
        if called % len(words) or len(x) % called:  # not these rows: the same for all, by the first
            words, places, called = words[:1], places[:1], len(x)
        shape = [len(x) // called, *x.shape[1:]]  # a row may be several here, as a clip is of frames
        apart = [1] * len(shape)
        apart[self.axis], shape[self.axis] = self.features, 1
        count = math.prod(shape)
        if count > PLACES:
            places = places.repeat(1, math.ceil(count / PLACES))
        out = places[:, :count].reshape(-1, *shape) * words.reshape(-1, *apart) < self.limit
        return out.expand(called // len(words), *out.shape).reshape(x.shape)


def _odd(words: Tensor) -> Tensor:
    return ((words | 1) - 2**31).to(torch.int32)
