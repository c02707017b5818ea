"""Group norm of a few large images in frozen networks, such as the decoders of image generators.

PyTorch computes the statistics of a group of channels in one block of threads, so that one image with 32 groups leaves
most of a GPU idle. On an H200 this took half of the time of FLUX's decoder at 720x720.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

MIN_PIXELS = 4096  # of a plane: a tile of the kernels
MAX_GROUPS = 256  # of all samples together: with more, PyTorch's kernel has work for every multiprocessor


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


class _GroupNormFunction(torch.autograd.Function):
    """Group norm of a contiguous input, with a gradient for it only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        from . import split_group_norm_triton as kernels

        out, moments = kernels.normalize(x, groups, weight, bias, eps)
        ctx.save_for_backward(x, weight, moments)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        from . import split_group_norm_triton as kernels

        x, weight, moments = ctx.saved_tensors
        return kernels.gradient(grads[0].contiguous(), x, moments, weight), None, None, None, None


class SplitGroupNorm(nn.GroupNorm):
    """Group norm that splits each group over many programs, where that is faster."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.can_split(input):
            return super().forward(input)
        out: Tensor = _GroupNormFunction.apply(input, self.num_groups, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call]
        return out

    def can_split(self, x: Tensor) -> bool:
        """Whether x [B, C, ...] is an input of few large groups on a GPU with Triton, and only x needs a gradient."""
        return (
            x.device.type == "cuda"
            and self.affine
            and not self.weight.requires_grad
            and x.is_contiguous()
            and len(x) * self.num_groups <= MAX_GROUPS
            and x.shape[2:].numel() >= MIN_PIXELS
            and not torch.is_autocast_enabled(x.device.type)  # which computes norms in float32
            and not torch.compiler.is_compiling()
            and has_triton()
        )


def use_split_group_norms(net: nn.Module) -> None:
    """Replace the group norms of a frozen network; parameters and their names stay."""
    for parent in list(net.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.GroupNorm:
                setattr(parent, name, _replace(child))


def _replace(norm: nn.GroupNorm) -> SplitGroupNorm:
    other = SplitGroupNorm(norm.num_groups, norm.num_channels, norm.eps, norm.affine, device="meta")
    other.weight, other.bias = norm.weight, norm.bias
    return other.train(norm.training)
