"""Adapters of files by the names of the layers they adapt, in networks and text encoders, whoever wrote them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ..core.lora import trainable_text_encoders
from ..core.registry import ConfigError
from ..core.weights import HasNet
from ..models.pipeline_layout import PipelineLayout
from ..models.pretrained import PICKLED, load_pickle_safely, load_state_dict

METADATA_KEY = "lora_adapter_metadata"  # where diffusers looks for rank and scale, and nobody else writes them
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
LORA_DOWN, LORA_UP, LORA_ALPHA = ".lora_down.weight", ".lora_up.weight", ".alpha"
ADAPTABLE_LAYERS = (nn.Linear, nn.Conv2d, nn.Conv3d)  # of layers that are adapted
PEFT_PREFIX = "base_model.model."  # before the names that peft writes
KNOWN_PREFIXES = (
    PEFT_PREFIX,
    "transformer.",
    "unet.",
    "lora_transformer_",
    "lora_unet_",
)  # before names, in files of others
SECOND_TRANSFORMER_PREFIX = "transformer_2."  # of a pipeline with two, never of one with one
TEXT_ENCODER_PREFIX = "text_encoder"  # how the names of adapters on text encoders begin
COMFYUI_TEXT_PREFIX = "lora_te"  # and how they do in ComfyUI


@dataclass(frozen=True)
class LoraFactors:
    """One adapted layer: up @ down times alpha over their rank is added to its weight."""

    down: Tensor
    up: Tensor
    alpha: float


@dataclass(frozen=True)
class LoraLayerNames:
    """The layers of a model, by all the names they go under in files."""

    ours: Mapping[str, str]
    authors: Mapping[str, str]  # of the network alone
    part: str  # of a pipeline, that the network is
    alpha: float | None  # of adapters under the authors' names

    @classmethod
    def of(cls, net: nn.Module, encoders: Mapping[str, nn.Module], layout: PipelineLayout | None) -> LoraLayerNames:
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
        theirs |= stem.startswith(f"{PEFT_PREFIX}{TEXT_ENCODER_PREFIX}")
        return self.alpha if theirs and self.alpha is not None else rank


def _adapted(net: nn.Module) -> list[str]:
    return [name for name, module in net.named_modules() if isinstance(module, ADAPTABLE_LAYERS)]


def _words(encoder: str, own: Sequence[str]) -> dict[str, str]:
    """Names of a text encoder's layers; ComfyUI counts encoders, the first with a number or without."""
    number = encoder.removeprefix(TEXT_ENCODER_PREFIX).removeprefix("_")
    known = {f"{encoder}.{name}": f"{encoder}.{name}" for name in own}
    for beginning in (f"{COMFYUI_TEXT_PREFIX}{number or 1}_", *(() if number else (f"{COMFYUI_TEXT_PREFIX}_",))):
        known |= {beginning + name.replace(".", "_"): f"{encoder}.{name}" for name in own}
    return known


def _bare(name: str) -> str:
    for prefix in KNOWN_PREFIXES:
        name = name.removeprefix(prefix)
    return name


def adapts_text_encoder(names: Iterable[str]) -> bool:
    """Whether any of these adapters is of a text encoder."""
    return any(
        re.match(rf"{TEXT_ENCODER_PREFIX}(_\d)?\.|{COMFYUI_TEXT_PREFIX}\d?_", name.removeprefix(PEFT_PREFIX))
        for name in names
    )


def match_layers(tensors: Mapping[str, Tensor], layers: LoraLayerNames, path: Path) -> dict[str, LoraFactors]:
    """The adapters of a file by our names of the layers."""
    found: dict[str, LoraFactors] = {}
    for key, down in tensors.items():
        for first, second in ((LORA_A, LORA_B), (LORA_DOWN, LORA_UP)):
            if key.endswith(first):
                stem = key.removesuffix(first)
                layer = layers.find(stem)
                if layer is None:
                    raise ConfigError(f"{path} adapts '{stem}', which this network does not have; name its base model")
                told = tensors.get(stem + LORA_ALPHA)
                alpha = layers.scale(stem, len(down)) if told is None else float(told)
                found[layer] = LoraFactors(down, tensors[stem + second], alpha)
    if not found:
        raise ConfigError(
            f"{path} holds no adapters; expected tensors such as transformer.X{LORA_A} or lora_unet_X{LORA_DOWN}"
        )
    return found


def match_unnamed_factors(given: Sequence[Tensor], net: nn.Module, path: Path) -> dict[str, LoraFactors]:
    """As VADER keeps those of ModelScope: the up and down of each layer and convolution in their order, of scale 1."""
    layers = {name: module.weight for name, module in net.named_modules() if type(module) in ADAPTABLE_LAYERS}
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
        layer: LoraFactors(_widened(down, rank, 0), _widened(up, rank, 1), rank)
        for layer, (up, down) in zip(layers, pairs, strict=True)
    }


def _widened(x: Tensor, rank: int, dim: int) -> Tensor:
    shape = [rank - x.shape[dim] if i == dim else size for i, size in enumerate(x.shape)]
    return torch.cat([x, x.new_zeros(shape)], dim)


def is_external_lora(path: Path) -> bool:
    """Whether a file holds adapters as diffusers, ComfyUI or VADER write them, which no checkpoint of a run does."""
    if not path.is_file() or path.suffix not in (*PICKLED, ".safetensors"):
        return False
    data = load_pickle_safely(path) if path.suffix in PICKLED else None
    names = () if isinstance(data, list) else load_state_dict(path)
    begins = (*KNOWN_PREFIXES, SECOND_TRANSFORMER_PREFIX, COMFYUI_TEXT_PREFIX)
    theirs = any(key.startswith(begins) and key.endswith((LORA_A, LORA_DOWN)) for key in names)
    return isinstance(data, list) or theirs or (path.suffix == ".safetensors" and _described(path))


def _described(path: Path) -> bool:
    """Whether diffusers is told of them, for a run names adapters of text encoders as it does."""
    with safe_open(path, "pt") as file:
        return METADATA_KEY in (file.metadata() or {})


def read_lora(path: Path, model: HasNet, layout: PipelineLayout | None) -> tuple[dict[str, LoraFactors], int, float]:
    """The adapters of a file by the names of a model's layers, whoever wrote it, and their rank and alpha."""
    data = load_pickle_safely(path) if path.suffix in PICKLED else None
    if isinstance(data, list):
        found = match_unnamed_factors(data, model.net, path)
    else:
        tensors = load_state_dict(path)
        encoders = trainable_text_encoders(model) if adapts_text_encoder(tensors) else {}
        found = match_layers(tensors, LoraLayerNames.of(model.net, encoders, layout), path)
    shapes = {(len(factors.down), factors.alpha) for factors in found.values()}
    if len(shapes) > 1:
        raise ConfigError(f"{path} has adapters of several ranks or scales; expected one for all layers")
    return found, *shapes.pop()
