"""Weights in eight bits: each row of a matrix as integers and one scale, half the size of half precision."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

SCALE_SUFFIX = ".scale"  # beside each packed tensor, under its name
INT8_MAX = 127  # the largest integer used, either way
MIN_ELEMENTS = 4096  # elements; smaller tensors are kept as they are
MIN_SCALE = 2.0**-14  # the smallest scale that half precision holds in full


def quantize_int8(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices and larger as int8 with a scale for each row."""
    packed: dict[str, Tensor] = {}
    for key, x in tensors.items():
        if not x.is_floating_point() or x.ndim < 2 or x.numel() < MIN_ELEMENTS:
            packed[key] = x
            continue
        # Rounded to half precision first, for that is what will be multiplied with.
        scale = (x.detach().float().flatten(1).abs().amax(1) / INT8_MAX).clamp(min=MIN_SCALE).half()
        whole = (x.detach().float() / _rows(scale, x)).round().clamp(-INT8_MAX, INT8_MAX)
        packed[key], packed[key + SCALE_SUFFIX] = whole.to(torch.int8), scale
    return packed


def dequantize_int8(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `pack` packed, as float32, and the rest as it is."""
    scales = {key for key in tensors if key.endswith(SCALE_SUFFIX) and key.removesuffix(SCALE_SUFFIX) in tensors}
    return {
        key: x.float() * _rows(tensors[key + SCALE_SUFFIX], x) if key + SCALE_SUFFIX in scales else x
        for key, x in tensors.items()
        if key not in scales
    }


def _rows(scale: Tensor, x: Tensor) -> Tensor:
    return scale.float().view(-1, *[1] * (x.ndim - 1))
