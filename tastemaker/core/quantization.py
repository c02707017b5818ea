"""Weights in 8 bits with a scale per row, and the networks whose token decoders multiply them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

Kind = Literal["fp8", "int8"]
LARGEST = {"fp8": 448.0, "int8": 127.0}
DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
AMAX_FLOOR = 1e-30  # of rows of zeros


def kind_of(weight: Tensor) -> Kind:
    return "int8" if weight.dtype == torch.int8 else "fp8"


def quantize_rows(x: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Round x [N, K] to 8 bits; return the numbers and the scale of each row in fp32: [N, K], [N, 1].

    One reduction and one elementwise pass, which torch.compile fuses to one kernel that writes nothing but the result.
    """
    amax = x.abs().amax(-1, keepdim=True).float().clamp(min=AMAX_FLOOR)
    scaled = x.float() * (LARGEST[kind] / amax)
    return (scaled.round() if kind == "int8" else scaled).to(DTYPES[kind]), amax / LARGEST[kind]


def expand(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [M, K] of 8-bit numbers with a scale per row [M, 1] in fp32, rounded once."""
    return weight.to(dtype).mul_(scale)  # in place: the product in fp32 is never kept


class TokenNetwork(nn.Module):
    """A network that generates token by token, and whose decoder can multiply its blocks' matrices in 8 bits."""

    rollout_kind: Kind | None = None  # of these matrices in rollouts; None: the precision of the run
