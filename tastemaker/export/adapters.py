"""Low-rank adapters in files: written as diffusers and ComfyUI name them, and read back from either."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ..lora import Lora, LoraWeights
from ..models.layouts import Layout
from ..pretrained import PICKLED, read, unpickled
from ..registry import ConfigError
from ..weights import Holder, Weights

FILE = "pytorch_lora_weights.safetensors"  # the name diffusers looks for in a folder
METADATA = "lora_adapter_metadata"  # where it looks for rank and scale
A, B = ".lora_A.weight", ".lora_B.weight"
TEXT = "text_encoder"  # how the names of adapters on text encoders begin
KINDS = (nn.Linear, nn.Conv2d, nn.Conv3d)  # of layers that are adapted
PEFT = "base_model.model."  # before the names that peft writes
PREFIXES = (PEFT, "transformer.", "unet.", "lora_transformer_", "lora_unet_")  # before names, in files of others
DOWN, UP, ALPHA = ".lora_down.weight", ".lora_up.weight", ".alpha"


def write_diffusers(weights: LoraWeights, layout: Layout, path: Path, dtype: torch.dtype) -> None:
    """With the scale multiplied into the second factor, for not every reader looks for it elsewhere."""
    rank, scale = weights.config.r, weights.config.lora_alpha / weights.config.r
    named = {key if key.startswith(TEXT) else f"{layout.part}.{key}": x for key, x in weights.trainable().items()}
    tensors = {
        key: (x.detach().float() * (scale if key.endswith(B) else 1)).to(dtype).contiguous() for key, x in named.items()
    }
    own = [key for key in weights.trainable() if not key.startswith(TEXT)]
    targets = sorted(key.removesuffix(A) for key in own if key.endswith(A))
    told = {"r": rank, "lora_alpha": rank, "target_modules": targets, "lora_dropout": 0.0, "bias": "none"}
    told = {f"{layout.part}.{name}": value for name, value in told.items()}
    save_file(tensors, path, {"format": "pt", METADATA: json.dumps(told, sort_keys=True)})


def write_comfyui(weights: LoraWeights, layout: Layout, path: Path, dtype: torch.dtype) -> None:
    """Down, up and alpha of each layer, whose name has no dots."""
    tensors: dict[str, Tensor] = {}
    for key, x in weights.trainable().items():
        layer, _, factor = key.partition(".lora_")
        name = re.sub(rf"^{TEXT}_?(\d?)\.", lambda told: f"lora_te{told[1] or 1}_", layer).replace(".", "_")
        name = name if layer.startswith(TEXT) else f"{layout.adapters}_{name}"
        tensors[name + (DOWN if factor.startswith("A") else UP)] = x.detach().to(dtype).contiguous()
        tensors[name + ALPHA] = torch.tensor(float(weights.config.lora_alpha))
    save_file(tensors, path, {"format": "pt"})


def write_authors(weights: LoraWeights, layout: Layout, path: Path) -> None:
    """As VADER keeps them: peft's names of the authors' layers, for readers who know alpha."""
    own = {key.partition(".lora_")[0] for key in weights.trainable() if not key.startswith(TEXT)}
    if layout.layers is None or len(own) * 2 != len(weights.trainable()):
        found = "no layout for adapters" if layout.layers is None else "no names for those of text encoders"
        raise ConfigError(f"--layout: the authors of this network have {found}; export it for diffusers")
    theirs = {ours: name for name, ours in layout.layers(sorted(own), weights.net).items()}
    scale, tensors = weights.config.lora_alpha / layout.alpha, {}
    for key, x in weights.trainable().items():
        layer, dot, factor = key.partition(".lora_")
        by = scale if factor.startswith("B") else 1.0
        tensors[f"{PEFT}{theirs[layer]}{dot}{factor}"] = x.detach().float().cpu() * by
    torch.save(tensors, path)


@dataclass(frozen=True)
class Factors:
    """One adapted layer: up @ down times alpha over their rank is added to its weight."""

    down: Tensor
    up: Tensor
    alpha: float


def named(
    tensors: Mapping[str, Tensor], net: nn.Module, path: Path, layout: Layout | None = None
) -> dict[str, Factors]:
    """The adapters of a file by the names of the network's layers, whoever wrote it."""
    layers = {name: name for name, module in net.named_modules() if isinstance(module, KINDS)}
    theirs = {} if layout is None or layout.layers is None else layout.layers(list(layers), net)
    layers |= {name.replace(".", "_"): name for name in layers} | theirs
    found: dict[str, Factors] = {}
    for key, down in tensors.items():
        for first, second in ((A, B), (DOWN, UP)):
            if key.endswith(first):
                stem = key.removesuffix(first)
                layer = layers.get(_bare(stem))
                if layer is None:
                    raise ConfigError(f"{path} adapts '{stem}', which this network does not have; name its base model")
                own = layout is None or _bare(stem) not in theirs or stem.startswith(f"{layout.part}.")
                usual = len(down) if layout is None or own else layout.alpha
                alpha = float(tensors.get(stem + ALPHA, torch.tensor(float(usual))))
                found[layer] = Factors(down, tensors[stem + second], alpha)
    if not found:
        raise ConfigError(f"{path} holds no adapters; expected tensors such as transformer.X{A} or lora_unet_X{DOWN}")
    return found


def nameless(given: Sequence[Tensor], net: nn.Module, path: Path) -> dict[str, Factors]:
    """As VADER keeps those of ModelScope: the up and down of each layer and convolution in their order, of scale 1."""
    layers = {name: module.weight for name, module in net.named_modules() if type(module) in KINDS}
    pairs = list(zip(given[::2], given[1::2], strict=False))
    fits = len(given) == 2 * len(layers) and all(
        (len(up), down.shape[1:]) == (len(weight), weight.shape[1:])
        for (up, down), weight in zip(pairs, layers.values(), strict=True)
    )
    if not fits:
        told = f"{len(given)} factors without names, which are not those of this network's {len(layers)} layers in turn"
        raise ConfigError(f"{path} holds {told}; name its base model, or adapters whose layers are named")
    rank = max(len(down) for _, down in pairs)  # of narrow layers less, made up with noughts
    return {
        layer: Factors(_widened(down, rank, 0), _widened(up, rank, 1), rank)
        for layer, (up, down) in zip(layers, pairs, strict=True)
    }


def _widened(x: Tensor, rank: int, dim: int) -> Tensor:
    shape = [rank - x.shape[dim] if i == dim else size for i, size in enumerate(x.shape)]
    return torch.cat([x, x.new_zeros(shape)], dim)


def _bare(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def of_others(path: Path) -> bool:
    """Whether a file holds adapters as diffusers, ComfyUI or VADER write them, which no checkpoint of a run does."""
    if not path.is_file() or path.suffix not in (*PICKLED, ".safetensors"):
        return False
    data = unpickled(path) if path.suffix in PICKLED else None
    names = () if isinstance(data, list) else read(path)
    return isinstance(data, list) or any(key.startswith(PREFIXES) and key.endswith((A, DOWN)) for key in names)


def found_in(path: Path, net: nn.Module, layout: Layout | None) -> tuple[dict[str, Factors], int, float]:
    """The adapters of a file by the names of a network's layers, whoever wrote it, and their rank and alpha."""
    data = unpickled(path) if path.suffix in PICKLED else None
    found = nameless(data, net, path) if isinstance(data, list) else named(read(path), net, path, layout)
    shapes = {(len(factors.down), factors.alpha) for factors in found.values()}
    if len(shapes) > 1:
        raise ConfigError(f"{path} has adapters of several ranks or scales; expected one for all layers")
    return found, *shapes.pop()


@dataclass(frozen=True)
class Attached:
    """Adapters of a file on the network, as those that would train."""

    path: Path
    layout: Layout | None = field(default=None, repr=False)  # of the model, whose authors may name its layers otherwise
    adapts: ClassVar[bool] = True

    def apply(self, model: Holder, snapshots: Sequence[str]) -> Weights:
        found, rank, alpha = found_in(self.path, model.net, self.layout)
        weights = Lora(rank, alpha, tuple(found)).apply(model, snapshots)
        _copy(found, weights, 1.0)
        return weights


@dataclass(frozen=True)
class Continued:
    """Adapters as a recipe asks for them, which begin as those of a file are."""

    tuning: Lora
    path: Path
    layout: Layout | None = field(default=None, repr=False)
    adapts: ClassVar[bool] = True

    def apply(self, model: Holder, snapshots: Sequence[str]) -> Weights:
        found, rank, alpha = found_in(self.path, model.net, self.layout)
        weights = self.tuning.apply(model, snapshots)
        own = {key.removesuffix(A) for key in weights.trainable() if key.endswith(A)}
        if rank != self.tuning.rank or own != set(found):
            raise ConfigError(
                f"{self.path} has adapters of rank {rank} on {len(found)} layers, and tuning asks for rank "
                f"{self.tuning.rank} on {len(own)}; set tuning.rank={rank}, and tuning.targets to its layers"
            )
        _copy(found, weights, alpha / (2 * rank if self.tuning.alpha is None else self.tuning.alpha))
        for name in weights.stored():
            weights.blend(name)
        return weights


@torch.no_grad()
def _copy(found: Mapping[str, Factors], weights: Weights, scale: float) -> None:
    own = weights.trainable()
    for layer, factors in found.items():
        own[layer + A].copy_(factors.down)
        own[layer + B].copy_(factors.up * scale)
