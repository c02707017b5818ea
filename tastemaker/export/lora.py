"""Write LoRA files for diffusers, ComfyUI and original layouts, and load them as tunings."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..core.lora import Lora, LoraWeights, trainable_text_encoders
from ..core.registry import ConfigError
from ..core.weights import HasNet, Weights
from ..models.pipeline_layout import PipelineLayout
from .lora_reading import (
    LORA_A,
    LORA_ALPHA,
    LORA_B,
    LORA_DOWN,
    LORA_UP,
    METADATA_KEY,
    PEFT_PREFIX,
    TEXT_ENCODER_PREFIX,
    LoraFactors,
    read_lora,
)

DIFFUSERS_LORA_FILE = "pytorch_lora_weights.safetensors"  # the name diffusers looks for in a folder


def write_diffusers_lora(weights: LoraWeights, layout: PipelineLayout, path: Path, dtype: torch.dtype) -> None:
    """With the scale multiplied into the second factor, for not every reader looks for it elsewhere."""
    rank, scale = weights.config.r, weights.config.lora_alpha / weights.config.r
    named = {_in_pipeline(key, layout): x for key, x in weights.trainable().items()}
    tensors = {
        key: (x.detach().float() * (scale if key.endswith(LORA_B) else 1)).to(dtype).contiguous()
        for key, x in named.items()
    }
    told: dict[str, object] = {}
    for part in sorted({key.partition(".")[0] for key in tensors}):
        targets = sorted(key.removesuffix(LORA_A).removeprefix(f"{part}.") for key in tensors if _down_of(key, part))
        own = {"r": rank, "lora_alpha": rank, "target_modules": targets, "lora_dropout": 0.0, "bias": "none"}
        told |= {f"{part}.{name}": value for name, value in own.items()}
    save_file(tensors, path, {"format": "pt", METADATA_KEY: json.dumps(told, sort_keys=True)})


def _in_pipeline(key: str, layout: PipelineLayout) -> str:
    """A name after that of the pipeline's part which has the layer."""
    if key.startswith(TEXT_ENCODER_PREFIX):
        return key
    part, begins = next((part, begins) for part, begins in layout.parts.items() if key.startswith(begins))
    return f"{part}.{key.removeprefix(begins)}"


def _down_of(key: str, part: str) -> bool:
    return key.startswith(f"{part}.") and key.endswith(LORA_A)


def write_comfyui_lora(weights: LoraWeights, layout: PipelineLayout, path: Path, dtype: torch.dtype) -> None:
    """Down, up and alpha of each layer, whose name has no dots."""
    tensors: dict[str, Tensor] = {}
    for key, x in weights.trainable().items():
        layer, _, factor = key.partition(".lora_")
        name = re.sub(rf"^{TEXT_ENCODER_PREFIX}_?(\d?)\.", lambda told: f"lora_te{told[1] or 1}_", layer).replace(
            ".", "_"
        )
        name = name if layer.startswith(TEXT_ENCODER_PREFIX) else f"{layout.adapters}_{name}"
        tensors[name + (LORA_DOWN if factor.startswith("A") else LORA_UP)] = x.detach().to(dtype).contiguous()
        tensors[name + LORA_ALPHA] = torch.tensor(float(weights.config.lora_alpha))
    save_file(tensors, path, {"format": "pt"})


def write_original_lora(weights: LoraWeights, layout: PipelineLayout, path: Path) -> None:
    """As VADER keeps them: peft's names of the authors' layers, for readers who know alpha.

    Where diffusers has no pipeline for them either, those of text encoders go along, named as their folders are.
    """
    layers = {key.partition(".lora_")[0] for key in weights.trainable()}
    own = {layer for layer in layers if not layer.startswith(TEXT_ENCODER_PREFIX)}
    if layout.layers is None or (layout.pipeline and own != layers):
        found = "no layout for adapters" if layout.layers is None else "no names for those of text encoders"
        raise ConfigError(f"--layout: the authors of this network have {found}; give diffusers")
    theirs = {layer: layer for layer in layers - own}
    theirs |= {ours: name for name, ours in layout.layers(sorted(own), weights.net).items()}
    scale, tensors = weights.config.lora_alpha / layout.alpha, {}
    for key, x in weights.trainable().items():
        layer, dot, factor = key.partition(".lora_")
        by = scale if factor.startswith("B") else 1.0
        tensors[f"{PEFT_PREFIX}{theirs[layer]}{dot}{factor}"] = x.detach().float().cpu() * by
    torch.save(tensors, path)


@dataclass(frozen=True)
class LoraFromFile:
    """Adapters of a file on the network and its text encoders, as those that would train."""

    path: Path
    layout: PipelineLayout | None = field(
        default=None, repr=False
    )  # of the model, whose authors may name its layers otherwise
    adapts: ClassVar[bool] = True

    def apply(self, model: HasNet, snapshots: Sequence[str]) -> Weights:
        found, rank, alpha = read_lora(self.path, model, self.layout)
        tuning = Lora(rank, alpha)
        own, words = _divided(found)
        encoders = trainable_text_encoders(model) if words else {}
        texts = {name: (encoders[name], tuning.config(encoders[name], layers)) for name, layers in words.items()}
        weights = LoraWeights(model.net, tuning.config(model.net, own) if own else None, snapshots, texts)
        _copy(found, weights, 1.0)
        return weights


def _divided(found: Mapping[str, LoraFactors]) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """The layers of the network, and those of each text encoder by its name."""
    words: dict[str, tuple[str, ...]] = {}
    for layer in (layer for layer in found if layer.startswith(TEXT_ENCODER_PREFIX)):
        encoder, _, name = layer.partition(".")
        words[encoder] = (*words.get(encoder, ()), name)
    return tuple(layer for layer in found if not layer.startswith(TEXT_ENCODER_PREFIX)), words


@dataclass(frozen=True)
class LoraContinued:
    """Adapters as a recipe asks for them, which begin as those of a file are."""

    tuning: Lora
    path: Path
    layout: PipelineLayout | None = field(default=None, repr=False)
    adapts: ClassVar[bool] = True

    def apply(self, model: HasNet, snapshots: Sequence[str]) -> Weights:
        found, rank, alpha = read_lora(self.path, model, self.layout)
        weights = self.tuning.apply(model, snapshots)
        own = {key.removesuffix(LORA_A) for key in weights.trainable() if key.endswith(LORA_A)}
        if rank != self.tuning.rank or own != set(found):
            raise ConfigError(
                f"{self.path} has adapters of rank {rank} on {len(found)} layers, and tuning asks for rank "
                f"{self.tuning.rank} on {len(own)}; set tuning.rank={rank}, tuning.adapt={_adapts(found)}, and "
                f"tuning.targets to its layers"
            )
        _copy(found, weights, alpha / (2 * rank if self.tuning.alpha is None else self.tuning.alpha))
        for name in weights.stored():
            weights.blend(name)
        return weights


def _adapts(found: Mapping[str, LoraFactors]) -> str:
    """What a recipe calls that which these adapt."""
    own, words = _divided(found)
    return f"[{','.join([*(['net'] if own else []), *(['text'] if words else [])])}]"


@torch.no_grad()
def _copy(found: Mapping[str, LoraFactors], weights: Weights, scale: float) -> None:
    own = weights.trainable()
    for layer, factors in found.items():
        own[layer + LORA_A].copy_(factors.down)
        own[layer + LORA_B].copy_(factors.up * scale)
