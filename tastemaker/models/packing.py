"""Weights in eight bits: each row of a matrix as integers and one scale, half the size of half precision."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

SCALE = ".scale"  # beside each packed tensor, under its name
MOST = 127  # the largest integer used, either way
WORTH = 4096  # elements; smaller tensors are kept as they are
LEAST = 2.0**-14  # the smallest scale that half precision holds in full


def pack(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices and larger as int8 with a scale for each row."""
    packed: dict[str, Tensor] = {}
    for key, x in tensors.items():
        if not x.is_floating_point() or x.ndim < 2 or x.numel() < WORTH:
            packed[key] = x
            continue
        # Rounded to half precision first, for that is what will be multiplied with.
        scale = (x.detach().float().flatten(1).abs().amax(1) / MOST).clamp(min=LEAST).half()
        whole = (x.detach().float() / _rows(scale, x)).round().clamp(-MOST, MOST)
        packed[key], packed[key + SCALE] = whole.to(torch.int8), scale
    return packed


def unpack(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `pack` packed, as float32, and the rest as it is."""
    scales = {key for key in tensors if key.endswith(SCALE) and key.removesuffix(SCALE) in tensors}
    return {
        key: x.float() * _rows(tensors[key + SCALE], x) if key + SCALE in scales else x
        for key, x in tensors.items()
        if key not in scales
    }


def _rows(scale: Tensor, x: Tensor) -> Tensor:
    return scale.float().view(-1, *[1] * (x.ndim - 1))
