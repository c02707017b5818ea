"""LoRA layers in fewer passes over the activations than peft's, with the same parameters, names and results.

peft casts the input to the adapter's dtype and back, and scales and adds in passes of their own. Here the product with
B adds to the base layer's output and applies the scale, and so does its backward pass to the input's gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

CAST = "_tastemaker_cast"  # attribute of an activation: its cast to the compute dtype, and the state it was made in


def count_addmm_flops(added: list[int], x: list[int], y: list[int], **kwargs: Any) -> int:
    """FLOPs of added + x @ y from the shapes, with or without scales."""
    return 2 * x[0] * x[1] * y[1]


FLOP_FORMULAS = {torch.ops.aten.addmm_: count_addmm_flops}  # which FlopCounterMode does not know


class FusedLoraFunction(torch.autograd.Function):
    """x W^T + b + scale (x A^T) B^T for a frozen W; all tensors but x [N, K] and bias [M] are matrices.

    Keeps x and x A^T [N, rank] for the backward pass. Every sum and every scale is part of a matrix product.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        weight, a, b = weight.to(x.dtype), a.to(x.dtype), b.to(x.dtype)
        out = F.linear(x, weight, None if bias is None else bias.to(x.dtype))
        inner = F.linear(x, a)
        ctx.save_for_backward(x, weight, a, b, inner)
        ctx.scale = scale
        if torch.compiler.is_compiling():  # compiled in place, PyTorch 2.11 computes wrong gradients
            return torch.addmm(out, inner, b.t(), alpha=scale)
        return out.addmm_(inner, b.t(), alpha=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, Tensor | None, Tensor | None, None]:
        x, weight, a, b, inner = ctx.saved_tensors
        grad_x = grad_a = grad_b = None
        grad_inner = scaled_product(grad, b, ctx.scale)
        if ctx.needs_input_grad[3]:
            grad_a = grad_inner.t() @ x
        if ctx.needs_input_grad[4]:
            grad_b = scaled_product(grad.t(), inner, ctx.scale)
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ weight).addmm_(grad_inner, a)
        return grad_x, None, None, grad_a, grad_b, None


def scaled_product(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """Return scale * x @ y of two matrices, with the scale as part of the product."""
    return torch.addmm(x.new_empty(()), x, y, beta=0, alpha=scale)  # beta=0: never read


class FusedLoraLinear(nn.Module):
    """peft's LoRA layer with a forward pass of three matrix products and no elementwise pass.

    `change_class` puts it before the class of a layer, whose parameters stay and whose `forward` is still called where
    that knows more: several active adapters, other arguments, and inputs of another dtype without autocast.
    """

    base_layer: nn.Linear
    lora_A: nn.ModuleDict
    lora_B: nn.ModuleDict
    lora_dropout: nn.ModuleDict
    scaling: dict[str, float]
    active_adapters: list[str]
    disable_adapters: bool
    merged: bool

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        active = self.active_adapters
        if args or kwargs or self.disable_adapters or self.merged or len(active) != 1:
            return cast(Tensor, super().forward(x, *args, **kwargs))
        a, b = self.matrices(active[0])
        device = x.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else a.dtype
        if not autocast and x.dtype != dtype:
            return cast(Tensor, super().forward(x))
        x = cast_once(x, dtype).contiguous()  # layers add in the same order with and without gradients
        dropped, scale = self.lora_dropout[active[0]](x), float(self.scaling[active[0]])
        base = self.base_layer
        if torch.is_grad_enabled() and dropped is x and is_frozen_linear(base):
            with torch.autocast(device, enabled=False):
                out: Tensor = FusedLoraFunction.apply(  # type: ignore[no-untyped-call]
                    x.view(-1, x.shape[-1]), base.weight, base.bias, a, b, scale
                )
            return out.view(*x.shape[:-1], out.shape[-1])
        return add_adapter(base(x), dropped, a, b, scale)

    def matrices(self, name: str) -> tuple[Tensor, Tensor]:
        """The matrices A [rank, K] and B [M, rank] of an adapter."""
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        assert isinstance(a, Tensor) and isinstance(b, Tensor)
        return a, b


def is_frozen_linear(layer: nn.Module) -> bool:
    """Whether a layer computes x W^T + b with gradients, for weights that do not train and are not in 8 bits."""
    if not isinstance(layer, nn.Linear) or layer.weight.itemsize == 1 or layer.weight.requires_grad:
        return False
    return layer.bias is None or not layer.bias.requires_grad


def add_adapter(out: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return out [..., M] + scale (x A^T) B^T for x [..., K], in the dtype of `out`; in place without gradients."""
    with torch.autocast(x.device.type, enabled=False):
        rows = out.reshape(-1, out.shape[-1])
        inner = F.linear(x.reshape(-1, x.shape[-1]), a.to(x.dtype)).to(out.dtype)
        outer = b.to(out.dtype).t()
        if torch.is_grad_enabled():
            return torch.addmm(rows, inner, outer, alpha=scale).view(out.shape)
        return rows.addmm_(inner, outer, alpha=scale).view(out.shape)


def cast_once(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in a dtype; with gradients, layers that read the same tensor share one cast.

    The cast is an attribute of x and disappears with it. Without gradients nothing is kept: CUDA graphs, which record
    such calls, would miss a cast that was made before. torch.compile finds equal casts itself.
    """
    if x.dtype == dtype:
        return x
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or (x.is_leaf and x.requires_grad):
        return x.to(dtype)  # the graph of a cast of a leaf would keep the leaf, and with it the cast
    made, state = getattr(x, CAST, None), (x._version, x.requires_grad)
    if made is None or made[0] != state or made[1].dtype != dtype:
        made = (state, x.to(dtype))
        setattr(x, CAST, made)
    return cast(Tensor, made[1])


def fuse_adapters(layers: Iterable[Any]) -> None:
    """Let those of peft's LoRA layers compute in fewer passes that add scale B A x to a linear layer and nothing else.

    Layers with a bias in the adapter or a variant such as DoRA stay as they are.
    """
    for layer in layers:
        if isinstance(layer.get_base_layer(), nn.Linear) and not (
            layer.fan_in_fan_out or layer.lora_variant or any(layer.lora_bias.values())
        ):
            change_class(layer, FusedLoraLinear)


def change_class(layer: nn.Module, kind: type[nn.Module]) -> None:
    """Put a class before that of a layer, in place, so that parameter names stay the same."""
    before: Any = type(layer)
    after: Any = kind
    layer.__class__ = _combine(after, before)


@cache
def _combine(kind: Any, base: Any) -> Any:
    """The class with the methods of `kind` before those of `base`; one for all layers, as torch.compile needs it."""
    return type(kind.__name__, (kind, base), {"__module__": kind.__module__})
