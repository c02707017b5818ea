"""Low-rank adapters in files: written as diffusers and ComfyUI name them, and read back from either."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ..lora import Lora, LoraWeights
from ..models.layouts import Layout
from ..pretrained import read
from ..registry import ConfigError
from ..weights import Holder, Weights

FILE = "pytorch_lora_weights.safetensors"  # the name diffusers looks for in a folder
METADATA = "lora_adapter_metadata"  # where it looks for rank and scale
A, B = ".lora_A.weight", ".lora_B.weight"
DOWN, UP, ALPHA = ".lora_down.weight", ".lora_up.weight", ".alpha"


def write_diffusers(weights: LoraWeights, layout: Layout, path: Path, dtype: torch.dtype) -> None:
    """With the scale multiplied into the second factor, for not every reader looks for it elsewhere."""
    rank, scale = weights.config.r, weights.config.lora_alpha / weights.config.r
    tensors = {
        f"{layout.part}.{key}": (x.detach().float() * (scale if key.endswith(B) else 1)).to(dtype).contiguous()
        for key, x in weights.trainable().items()
    }
    targets = sorted(key.removesuffix(A) for key in weights.trainable() if key.endswith(A))
    told = {"r": rank, "lora_alpha": rank, "target_modules": targets, "lora_dropout": 0.0, "bias": "none"}
    told = {f"{layout.part}.{name}": value for name, value in told.items()}
    save_file(tensors, path, {"format": "pt", METADATA: json.dumps(told, sort_keys=True)})


def write_comfyui(weights: LoraWeights, layout: Layout, path: Path, dtype: torch.dtype) -> None:
    """Down, up and alpha of each layer, whose name has no dots."""
    tensors: dict[str, Tensor] = {}
    for key, x in weights.trainable().items():
        layer, _, factor = key.partition(".lora_")
        name = f"{layout.adapters}_{layer.replace('.', '_')}"
        tensors[name + (DOWN if factor.startswith("A") else UP)] = x.detach().to(dtype).contiguous()
        tensors[name + ALPHA] = torch.tensor(float(weights.config.lora_alpha))
    save_file(tensors, path, {"format": "pt"})


@dataclass(frozen=True)
class Factors:
    """One adapted layer: up @ down times alpha over their rank is added to its weight."""

    down: Tensor
    up: Tensor
    alpha: float


def named(tensors: Mapping[str, Tensor], net: nn.Module, path: Path) -> dict[str, Factors]:
    """The adapters of a file by the names of the network's layers, whoever wrote it."""
    layers = {name: name for name, module in net.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)}
    layers |= {name.replace(".", "_"): name for name in layers}
    found: dict[str, Factors] = {}
    for key, down in tensors.items():
        for first, second in ((A, B), (DOWN, UP)):
            if key.endswith(first):
                stem = key.removesuffix(first)
                layer = layers.get(_bare(stem))
                if layer is None:
                    raise ConfigError(f"{path} adapts '{stem}', which this network does not have; name its base model")
                alpha = tensors.get(stem + ALPHA)
                found[layer] = Factors(down, tensors[stem + second], len(down) if alpha is None else float(alpha))
    if not found:
        raise ConfigError(f"{path} holds no adapters; expected tensors such as transformer.X{A} or lora_unet_X{DOWN}")
    return found


def _bare(name: str) -> str:
    prefixes = ("base_model.model.", "transformer.", "unet.", "lora_transformer_", "lora_unet_")
    for prefix in prefixes:
        name = name.removeprefix(prefix)
    return name


@dataclass(frozen=True)
class Attached:
    """Adapters of a file on the network, as those that would train."""

    path: Path
    adapts: ClassVar[bool] = True

    def apply(self, model: Holder, snapshots: Sequence[str]) -> Weights:
        found = named(read(self.path), model.net, self.path)
        shapes = {(len(factors.down), factors.alpha) for factors in found.values()}
        if len(shapes) > 1:
            raise ConfigError(f"{self.path} has adapters of several ranks or scales; expected one for all layers")
        rank, alpha = shapes.pop()
        weights = Lora(rank, alpha, tuple(found)).apply(model, snapshots)
        own = weights.trainable()
        with torch.no_grad():
            for layer, factors in found.items():
                own[layer + A].copy_(factors.down)
                own[layer + B].copy_(factors.up)
        return weights
