"""Adapters of files by the names of the layers they adapt, in networks and text encoders, whoever wrote them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ..lora import taught
from ..models.layouts import Layout
from ..pretrained import PICKLED, read, unpickled
from ..registry import ConfigError
from ..weights import Holder

METADATA = "lora_adapter_metadata"  # where diffusers looks for rank and scale, and nobody else writes them
A, B = ".lora_A.weight", ".lora_B.weight"
DOWN, UP, ALPHA = ".lora_down.weight", ".lora_up.weight", ".alpha"
KINDS = (nn.Linear, nn.Conv2d, nn.Conv3d)  # of layers that are adapted
PEFT = "base_model.model."  # before the names that peft writes
PREFIXES = (PEFT, "transformer.", "unet.", "lora_transformer_", "lora_unet_")  # before names, in files of others
SECOND = "transformer_2."  # of a pipeline with two, never of one with one
TEXT = "text_encoder"  # how the names of adapters on text encoders begin
TOKENS = "lora_te"  # and how they do in ComfyUI


@dataclass(frozen=True)
class Factors:
    """One adapted layer: up @ down times alpha over their rank is added to its weight."""

    down: Tensor
    up: Tensor
    alpha: float


@dataclass(frozen=True)
class Layers:
    """The layers of a model, by all the names they go under in files."""

    ours: Mapping[str, str]
    authors: Mapping[str, str]  # of the network alone
    part: str  # of a pipeline, that the network is
    alpha: float | None  # of adapters under the authors' names

    @classmethod
    def of(cls, net: nn.Module, encoders: Mapping[str, nn.Module], layout: Layout | None) -> Layers:
        own = _adapted(net)
        theirs = {} if layout is None or layout.layers is None else layout.layers(own, net)
        known = {name: name for name in own} | {name.replace(".", "_"): name for name in own}
        for part, begins in layout.parts.items() if layout is not None else ():
            known |= {f"{part}.{name.removeprefix(begins)}": name for name in own if name.startswith(begins)}
        for name, encoder in encoders.items():
            known |= _words(name, _adapted(encoder))
        return cls(known, theirs, layout.part if layout else "", layout.alpha if layout and layout.layers else None)

    def find(self, stem: str) -> str | None:
        """Our name of what a file calls so."""
        bare = _bare(stem)
        return self.authors.get(bare) or self.ours.get(stem) or self.ours.get(bare)

    def scale(self, stem: str, rank: int) -> float:
        """The alpha of adapters that do not tell it: those under the authors' names have one of their own."""
        theirs = _bare(stem) in self.authors and not stem.startswith(f"{self.part}.")
        theirs |= stem.startswith(f"{PEFT}{TEXT}")
        return self.alpha if theirs and self.alpha is not None else rank


def _adapted(net: nn.Module) -> list[str]:
    return [name for name, module in net.named_modules() if isinstance(module, KINDS)]


def _words(encoder: str, own: Sequence[str]) -> dict[str, str]:
    """Names of a text encoder's layers; ComfyUI counts encoders, the first with a number or without."""
    number = encoder.removeprefix(TEXT).removeprefix("_")
    known = {f"{encoder}.{name}": f"{encoder}.{name}" for name in own}
    for beginning in (f"{TOKENS}{number or 1}_", *(() if number else (f"{TOKENS}_",))):
        known |= {beginning + name.replace(".", "_"): f"{encoder}.{name}" for name in own}
    return known


def _bare(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def on_text(names: Iterable[str]) -> bool:
    """Whether any of these adapters is of a text encoder."""
    return any(re.match(rf"{TEXT}(_\d)?\.|{TOKENS}\d?_", name.removeprefix(PEFT)) for name in names)


def named(tensors: Mapping[str, Tensor], layers: Layers, path: Path) -> dict[str, Factors]:
    """The adapters of a file by our names of the layers."""
    found: dict[str, Factors] = {}
    for key, down in tensors.items():
        for first, second in ((A, B), (DOWN, UP)):
            if key.endswith(first):
                stem = key.removesuffix(first)
                layer = layers.find(stem)
                if layer is None:
                    raise ConfigError(f"{path} adapts '{stem}', which this network does not have; name its base model")
                told = tensors.get(stem + ALPHA)
                alpha = layers.scale(stem, len(down)) if told is None else float(told)
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


def of_others(path: Path) -> bool:
    """Whether a file holds adapters as diffusers, ComfyUI or VADER write them, which no checkpoint of a run does."""
    if not path.is_file() or path.suffix not in (*PICKLED, ".safetensors"):
        return False
    data = unpickled(path) if path.suffix in PICKLED else None
    names = () if isinstance(data, list) else read(path)
    begins = (*PREFIXES, SECOND, TOKENS)
    theirs = any(key.startswith(begins) and key.endswith((A, DOWN)) for key in names)
    return isinstance(data, list) or theirs or (path.suffix == ".safetensors" and _described(path))


def _described(path: Path) -> bool:
    """Whether diffusers is told of them, for a run names adapters of text encoders as it does."""
    with safe_open(path, "pt") as file:
        return METADATA in (file.metadata() or {})


def found_in(path: Path, model: Holder, layout: Layout | None) -> tuple[dict[str, Factors], int, float]:
    """The adapters of a file by the names of a model's layers, whoever wrote it, and their rank and alpha."""
    data = unpickled(path) if path.suffix in PICKLED else None
    if isinstance(data, list):
        found = nameless(data, model.net, path)
    else:
        tensors = read(path)
        encoders = taught(model) if on_text(tensors) else {}
        found = named(tensors, Layers.of(model.net, encoders, layout), path)
    shapes = {(len(factors.down), factors.alpha) for factors in found.values()}
    if len(shapes) > 1:
        raise ConfigError(f"{path} has adapters of several ranks or scales; expected one for all layers")
    return found, *shapes.pop()
