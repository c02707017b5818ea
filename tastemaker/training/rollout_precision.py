"""Rollouts in 8 bits or bf16: copies of the large linear layers, for calls without a gradient.

8-bit weights have a scale per row; inputs get one at every call. Weights are copied when they have changed, in one
pass over them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import TrainingError
from ..core.fused_lora import FusedLoraLinear
from ..core.quantization import Kind, TokenNetwork, kind_of, quantize_rows
from ..core.rollout_scope import ROLLOUTS
from .low_precision_linear import QuantizedLinear, QuantizedRolloutLinear, RolloutKind, RolloutLinear
from .quantized_base import large_linear_layers

FP8_CAPABILITY = (8, 9)  # Ada and Hopper


@dataclass(eq=False)
class RolloutCopies:
    """The copies of a network's weights in fewer bits, and which version of each weight was copied.

    Versions are kept here and not in the layers, where torch.compile would make a graph for each of them.
    """

    layers: list[RolloutLinear]
    kind: RolloutKind
    versions: dict[RolloutLinear, tuple[int, int]] = field(default_factory=dict)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights that have changed; the copies stay where they are."""
        for layer in self.layers:
            version = (layer.weight._version, layer.weight.data_ptr())
            if version == self.versions.get(layer):
                continue
            if self.kind == "bf16":
                self._write(layer, layer.weight.to(torch.bfloat16), None)
            else:
                self._write(layer, *quantize_rows(layer.weight, self.kind))
            self.versions[layer] = version

    def _write(self, layer: RolloutLinear, weight: Tensor, scale: Tensor | None) -> None:
        copy, copy_scale = layer.rollout_weight, layer.rollout_scale
        if copy is None or copy.device != weight.device:
            layer.rollout_weight, layer.rollout_scale = weight, scale
            return
        copy.copy_(weight)
        if copy_scale is not None and scale is not None:
            copy_scale.copy_(scale)


def rollout_layers(net: nn.Module, *, merge: bool = False) -> list[nn.Linear]:
    """Return the linear layers that compute in fewer bits in rollouts: with adapters the frozen ones only.

    With `merge`, layers with adapters are left out: merged copies of these are made by `merged_rollouts`.
    """
    large = large_linear_layers(net)
    merged = {layer.base_layer for layer in net.modules() if isinstance(layer, FusedLoraLinear)} if merge else set()
    frozen = [layer for layer in large if not layer.weight.requires_grad] or large
    return [layer for layer in frozen if layer not in merged]


def use_low_precision_rollouts(
    net: nn.Module, kind: RolloutKind, device: torch.device, *, merge: bool = False
) -> RolloutCopies:
    """Let the large linear layers of a network compute in fewer bits in rollouts; return the copies of their weights.

    With adapters these are the frozen layers only. Weights that have 8 bits already are multiplied without a copy.
    """
    chosen = rollout_layers(net, merge=merge)
    kinds: set[RolloutKind] = {
        kind_of(layer.weight) if isinstance(layer, QuantizedLinear) else kind for layer in chosen
    }
    for each in kinds:
        check_device(each, device)
    copied: list[RolloutLinear] = []
    for layer in chosen:
        # In place, so that parameter names stay the same.
        if isinstance(layer, QuantizedLinear):
            layer.__class__ = QuantizedRolloutLinear
            continue
        layer.register_buffer("rollout_weight", None, persistent=False)
        layer.register_buffer("rollout_scale", None, persistent=False)
        layer.__class__ = RolloutLinear
        assert isinstance(layer, RolloutLinear)
        copied.append(layer)
    copies = RolloutCopies(copied, kind)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def refresh(module: nn.Module, inputs: Any) -> None:
        if ROLLOUTS.active and not torch.is_grad_enabled():
            copies.refresh()

    if copied:
        net.register_forward_pre_hook(refresh)
    return copies


def decode_in_8_bits(net: TokenNetwork, kind: Kind, device: torch.device) -> None:
    """Let token decoders multiply the matrices of a network's blocks in 8 bits in rollouts; they keep the copies.

    Inputs keep their precision: a decoding step has few rows, and its time is that of reading the weights.
    """
    check_device(kind, device)
    net.rollout_kind = kind


def check_device(kind: RolloutKind, device: torch.device) -> None:
    """Refuse FP8 on GPUs that cannot multiply it."""
    if kind == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        raise TrainingError(
            f"engine.rollout_precision: fp8 needs a GPU of compute capability 8.9 or later (RTX 40, L40, H100), but "
            f"this one has {found}; set engine.rollout_precision to int8 or bf16 [TM2602]"
        )
