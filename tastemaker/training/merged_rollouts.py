"""Rollouts with merged adapters: each adapted linear layer is one matrix product, of W + scale B A, instead of three.

Copies are made again when the weights or the active adapter have changed. With `engine.rollout_precision` those of
large layers are rounded to fewer bits, and take the place of copies of the weights without adapters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.fused_lora import FusedLoraLinear, change_class
from ..core.quantization import quantize_rows
from ..core.rollout_scope import ROLLOUTS
from .low_precision_linear import (
    RolloutKind,
    computes_in_fewer_bits,
    linear_8bit,
    linear_bf16,
)
from .quantized_base import large_linear_layers
from .rollout_precision import check_device

MergedKind = RolloutKind | Literal["same"]


class MergedLoraLinear(FusedLoraLinear):
    """A fused LoRA layer that multiplies the sum of its weight and its active adapter in rollouts."""

    merged_kind: MergedKind
    merged_weight: Tensor | None  # [M, K], made before the first rollout
    merged_scale: Tensor | None  # [M, 1]; of 8-bit weights only

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.is_grad_enabled() or not ROLLOUTS.active or self.disable_adapters or self.merged_weight is None:
            return super().forward(x, *args, **kwargs)
        bias = self.base_layer.bias
        if self.merged_kind == "same":
            return F.linear(x, self.merged_weight, bias)
        if not computes_in_fewer_bits(x):  # too few tokens
            return super().forward(x, *args, **kwargs)
        if self.merged_scale is None:
            return linear_bf16(x, self.merged_weight, bias)
        return linear_8bit(x, self.merged_weight, self.merged_scale, bias)

    def merge(self, name: str) -> Tensor:
        """Return the sum of the weight and an adapter in fp32: [M, K]."""
        (a, b), weight, scale = self.matrices(name), self.base_layer.weight, float(self.scaling[name])
        with torch.autocast(weight.device.type, enabled=False):
            return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale)


@dataclass(eq=False)
class MergedCopies:
    """The merged copies of a network's layers, and of which weights and adapter each was made."""

    layers: list[MergedLoraLinear]
    versions: dict[MergedLoraLinear, tuple[Any, ...]] = field(default_factory=dict)

    @torch.no_grad()
    def refresh(self) -> None:
        """Merge again where weights or the active adapter have changed; copies stay where they are in memory."""
        for layer in self.layers:
            (name,) = layer.active_adapters
            weights = (layer.base_layer.weight, *layer.matrices(name))
            version = (name, layer.scaling[name], *((p._version, p.data_ptr()) for p in weights))
            if layer.disable_adapters or version == self.versions.get(layer):
                continue
            self._write(layer, layer.merge(name))
            self.versions[layer] = version

    def _write(self, layer: MergedLoraLinear, merged: Tensor) -> None:
        kind, scale = layer.merged_kind, None
        if kind == "fp8" or kind == "int8":
            merged, scale = quantize_rows(merged, kind)
        else:
            merged = merged.to(torch.bfloat16 if kind == "bf16" else layer.base_layer.weight.dtype)
        if layer.merged_weight is None or layer.merged_weight.device != merged.device:
            layer.merged_weight, layer.merged_scale = merged, scale
            return
        layer.merged_weight.copy_(merged)
        if layer.merged_scale is not None and scale is not None:
            layer.merged_scale.copy_(scale)


def merged_kinds(net: nn.Module, kind: MergedKind) -> dict[FusedLoraLinear, MergedKind]:
    """Return the layers whose adapters can be merged, with the precision of each copy: large layers have fewer bits."""
    large = set(large_linear_layers(net)) if kind != "same" else set[nn.Linear]()
    layers = [layer for layer in net.modules() if isinstance(layer, FusedLoraLinear)]
    return {layer: kind if layer.base_layer in large else "same" for layer in layers}


def use_merged_rollouts(net: nn.Module, kind: MergedKind, device: torch.device) -> MergedCopies:
    """Let the LoRA layers of a network multiply merged weights in rollouts; return the copies."""
    if kind != "same":
        check_device(kind, device)
    merged: list[MergedLoraLinear] = []
    for layer, layer_kind in merged_kinds(net, kind).items():
        layer.register_buffer("merged_weight", None, persistent=False)
        layer.register_buffer("merged_scale", None, persistent=False)
        change_class(layer, MergedLoraLinear)
        assert isinstance(layer, MergedLoraLinear)
        layer.merged_kind = layer_kind
        merged.append(layer)
    copies = MergedCopies(merged)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def refresh(module: nn.Module, inputs: Any) -> None:
        if ROLLOUTS.active and not torch.is_grad_enabled():
            copies.refresh()

    if merged:
        net.register_forward_pre_hook(refresh)
    return copies


def merged_copy_bytes(net: nn.Module, kind: MergedKind) -> float:
    """Bytes of the copies that rollouts with merged adapters keep."""
    total = 0.0
    for layer, layer_kind in merged_kinds(net, kind).items():
        weight = layer.base_layer.weight
        if layer_kind in ("fp8", "int8"):
            total += weight.numel() + 4 * len(weight)
        else:
            total += weight.numel() * (2 if layer_kind == "bf16" else weight.itemsize)
    return total
