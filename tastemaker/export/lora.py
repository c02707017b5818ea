"""LoRA files of diffusers, ComfyUI and the original authors: write them, read them, and apply them as tunings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ..core.lora import Lora, LoraWeights
from ..core.model_spec import PipelineLayout
from ..core.registry import ConfigError
from ..core.weights import TrainableModel, Weights
from ..models.pretrained import (
    HUB_ID,
    PICKLE_SUFFIXES,
    WeightsSource,
    find_cached,
    find_weights,
    load_state_dict,
)
from ..models.restricted_unpickler import load_pickle
from .modelspec import save_safetensors

DIFFUSERS_LORA_FILE = "pytorch_lora_weights.safetensors"  # the name diffusers looks for in a folder
ADAPTER_FILE = "adapter_model.safetensors"  # the name peft looks for
METADATA_KEY = "lora_adapter_metadata"  # where diffusers, and no other program, stores rank and alpha
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
LORA_DOWN, LORA_UP, LORA_ALPHA = ".lora_down.weight", ".lora_up.weight", ".alpha"
ADAPTABLE_LAYERS = (nn.Linear, nn.Conv2d, nn.Conv3d)
PEFT_PREFIX = "base_model.model."
KNOWN_PREFIXES = (
    PEFT_PREFIX,
    "diffusion_model.",
    "transformer.",
    "unet.",
    "lora_transformer_",
    "lora_unet_",
    "lycoris_",
)
SECOND_TRANSFORMER_PREFIX = "transformer_2."  # only of pipelines with two transformers
TEXT_ENCODER_PREFIX = "text_encoder"
COMFYUI_TEXT_PREFIX = "lora_te"
LORA_SUFFIXES = (".safetensors", *sorted(PICKLE_SUFFIXES))
VADER_PREFIX = "zheyangqin/VADER_VideoCrafter_"
PUBLISHED_LORAS = {  # by the names that VADER uses
    "huggingface-pickscore": WeightsSource(
        f"{VADER_PREFIX}PickScore", "vader_videocrafter_pickscore.pt", "20 MB", "MIT"
    ),
    "huggingface-hps-aesthetic": WeightsSource(
        f"{VADER_PREFIX}HPS_Aesthetic", "vader_videocrafter_hps_aesthetic.pt", "10 MB", "MIT"
    ),
}


@dataclass(frozen=True)
class LoraFactors:
    """Adapter of one layer: alpha / rank * up @ down is added to its weight."""

    down: Tensor
    up: Tensor
    alpha: float


# Tunings


@dataclass(frozen=True)
class LoraFromFile:
    """The adapters of a file, on the layers, with the rank and with the alpha that the file has."""

    path: Path
    layout: PipelineLayout | None = field(default=None, repr=False)  # of the model, for the authors' layer names
    is_adapter: ClassVar[bool] = True

    def apply(self, model: TrainableModel, snapshots: Sequence[str]) -> Weights:
        adapters, rank, alpha = read_lora(self.path, model, self.layout)
        tuning = Lora(rank, alpha)
        net_layers, text_layers = _split_by_network(adapters)
        encoders = model.enable_text_encoder_training() if text_layers else {}
        text_encoders = {
            name: (encoders[name], tuning.config(encoders[name], layers)) for name, layers in text_layers.items()
        }
        config = tuning.config(model.net, net_layers) if net_layers else None
        weights = LoraWeights(model.net, config, snapshots, text_encoders, model.traits)
        _copy_factors(adapters, weights, 1.0)
        return weights


@dataclass(frozen=True)
class InitializedLora:
    """The adapters of a recipe, initialized from a file that has the same layers and rank."""

    tuning: Lora
    path: Path
    layout: PipelineLayout | None = field(default=None, repr=False)
    is_adapter: ClassVar[bool] = True

    def apply(self, model: TrainableModel, snapshots: Sequence[str]) -> Weights:
        adapters, rank, alpha = read_lora(self.path, model, self.layout)
        weights = self.tuning.apply(model, snapshots)
        layers = {key.removesuffix(LORA_A) for key in weights.trainable() if key.endswith(LORA_A)}
        if rank != self.tuning.rank or layers != set(adapters):
            raise ConfigError(
                f"{self.path} has LoRA adapters of rank {rank} on {len(adapters)} layers, but tuning has rank "
                f"{self.tuning.rank} on {len(layers)} layers; set tuning.rank={rank}, "
                f"tuning.modules={_modules(adapters)}, and tuning.target_modules to the layers in this file "
                "[TM678]"
            )
        tuning_alpha = 2 * rank if self.tuning.alpha is None else self.tuning.alpha
        _copy_factors(adapters, weights, alpha / tuning_alpha)
        for name in weights.snapshot_tensors():
            weights.update_snapshot(name)
        return weights


def _split_by_network(adapters: Mapping[str, LoraFactors]) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Return the adapted layers of the network, and those of each text encoder."""
    text_layers: dict[str, tuple[str, ...]] = {}
    for layer in adapters:
        if layer.startswith(TEXT_ENCODER_PREFIX):
            encoder, _, name = layer.partition(".")
            text_layers[encoder] = (*text_layers.get(encoder, ()), name)
    return tuple(layer for layer in adapters if not layer.startswith(TEXT_ENCODER_PREFIX)), text_layers


def _modules(adapters: Mapping[str, LoraFactors]) -> str:
    """Return the value of `tuning.modules` for these adapters."""
    net_layers, text_layers = _split_by_network(adapters)
    modules = [*(["backbone"] if net_layers else []), *(["text_encoder"] if text_layers else [])]
    return f"[{','.join(modules)}]"


@torch.no_grad()
def _copy_factors(adapters: Mapping[str, LoraFactors], weights: Weights, scale: float) -> None:
    parameters = weights.trainable()
    for layer, factors in adapters.items():
        parameters[layer + LORA_A].copy_(factors.down)
        parameters[layer + LORA_B].copy_(factors.up * scale)


# Writing


def write_diffusers_lora(
    weights: LoraWeights,
    layout: PipelineLayout,
    path: Path,
    dtype: torch.dtype,
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write adapters for diffusers. The scale is multiplied into B, because not every reader looks at the metadata."""
    rank, scale = weights.config.r, weights.config.lora_alpha / weights.config.r
    tensors = {}
    for key, x in weights.trainable().items():
        scaled = x.detach().float() * (scale if key.endswith(LORA_B) else 1)
        tensors[_pipeline_key(key, layout)] = scaled.to(dtype).contiguous()
    adapter_config: dict[str, object] = {}
    for component in sorted({key.partition(".")[0] for key in tensors}):
        prefix = f"{component}."
        targets = sorted(
            key.removesuffix(LORA_A).removeprefix(prefix)
            for key in tensors
            if key.startswith(prefix) and key.endswith(LORA_A)
        )
        config = {"r": rank, "lora_alpha": rank, "target_modules": targets, "lora_dropout": 0.0, "bias": "none"}
        adapter_config |= {f"{component}.{name}": value for name, value in config.items()}
    save_safetensors(tensors, path, {METADATA_KEY: json.dumps(adapter_config, sort_keys=True), **metadata})


def _pipeline_key(key: str, layout: PipelineLayout) -> str:
    """Prefix a key with the name of the pipeline's component that has the layer."""
    if key.startswith(TEXT_ENCODER_PREFIX):
        return key
    component, prefix = next(item for item in layout.components.items() if key.startswith(item[1]))
    return f"{component}.{key.removeprefix(prefix)}"


def write_comfyui_lora(
    weights: LoraWeights,
    layout: PipelineLayout,
    path: Path,
    dtype: torch.dtype,
    prefix: str = "",
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write adapters for ComfyUI: down, up and alpha of each layer, whose name has underscores for dots.

    With a `prefix`, only the adapters of the transformer whose layers begin with it.
    """
    parameters, alpha = weights.trainable(), float(weights.config.lora_alpha)
    named: dict[str, LoraFactors] = {}
    network: dict[str, LoraFactors] = {}
    for layer in (key.removesuffix(LORA_A) for key in parameters if key.endswith(LORA_A)):
        factors = LoraFactors(parameters[layer + LORA_A].detach(), parameters[layer + LORA_B].detach(), alpha)
        if layer.startswith(TEXT_ENCODER_PREFIX):
            encoder, _, inner = layer.partition(".")
            number = encoder.removeprefix(TEXT_ENCODER_PREFIX).removeprefix("_")
            named[f"{COMFYUI_TEXT_PREFIX}{number or 1}_{inner}"] = factors
        elif layer.startswith(prefix):
            network[layer.removeprefix(prefix)] = factors
    if layout.comfyui_layer is not None:
        network = join_fused_layers(network, layer_sizes(weights.net, prefix), layout)
    named |= {f"{layout.comfyui_lora_prefix}_{layer}": factors for layer, factors in network.items()}
    tensors: dict[str, Tensor] = {}
    for name, factors in named.items():
        stem = name.replace(".", "_")
        tensors[stem + LORA_DOWN] = factors.down.to(dtype).contiguous()
        tensors[stem + LORA_UP] = factors.up.to(dtype).contiguous()
        tensors[stem + LORA_ALPHA] = torch.tensor(factors.alpha)
    save_safetensors(tensors, path, metadata)


def layer_sizes(net: nn.Module, prefix: str = "") -> dict[str, int]:
    """Return the output sizes of the layers that can have adapters, by name without `prefix`."""
    layers = ((name.removesuffix(".base_layer"), module) for name, module in net.named_modules())
    return {
        name.removeprefix(prefix): len(module.weight)
        for name, module in layers
        if isinstance(module, ADAPTABLE_LAYERS) and name.startswith(prefix) and ".lora_" not in name
    }


def group_by_comfyui_layer(layers: Iterable[str], layout: PipelineLayout) -> dict[str, list[str]]:
    """Return the layers of ComfyUI's network, each with those of ours that its authors fuse into it."""
    groups: dict[str, list[str]] = {}
    for layer in layers:
        (key,) = layout.to_original({f"{layer}.weight": torch.empty(2, 1)}, {})
        assert layout.comfyui_layer is not None
        groups.setdefault(layout.comfyui_layer(key.removesuffix(".weight")), []).append(layer)
    return groups


def join_fused_layers(
    adapters: Mapping[str, LoraFactors], sizes: Mapping[str, int], layout: PipelineLayout
) -> dict[str, LoraFactors]:
    """Return adapters by ComfyUI's layers; those of layers that the authors fuse are joined without a change.

    With adapters B_i A_i of fused layers, A is the A_i stacked, [ranks, in], and B is block-diagonal, [outs, ranks]:
    its rows are put in the order of the authors' weight by the same conversion as the weight's.
    """
    joined = {}
    for name, layers in group_by_comfyui_layer(sizes, layout).items():
        parts = [adapters[layer] for layer in layers if layer in adapters]
        if not parts:
            continue
        rank = sum(len(part.down) for part in parts)
        rows, first = {}, 0
        for layer in layers:
            rows[f"{layer}.weight"] = parts[0].up.new_zeros(sizes[layer], rank, *parts[0].up.shape[2:])
            if layer in adapters:
                own = adapters[layer].up
                rows[f"{layer}.weight"][:, first : first + own.shape[1]] = own
                first += own.shape[1]
        (up,) = layout.to_original(rows, {}).values()
        alpha = parts[0].alpha * rank / len(parts[0].down)
        joined[name] = LoraFactors(torch.cat([part.down for part in parts]), up, alpha)
    return joined


def write_original_lora(weights: LoraWeights, layout: PipelineLayout, path: Path) -> None:
    """Write adapters as VADER does: peft's names on the authors' layers. Readers must know alpha.

    Adapters of text encoders are written only if diffusers has no pipeline for the model, under the names of their
    folders.
    """
    layers = {key.partition(".lora_")[0] for key in weights.trainable()}
    net_layers = {layer for layer in layers if not layer.startswith(TEXT_ENCODER_PREFIX)}
    if layout.original_lora_layers is None:
        raise ConfigError(
            "--layout: the authors of this network have not defined a layout for LoRA adapters; use --layout "
            "diffusers [TM679]"
        )
    if layout.pipeline_class and net_layers != layers:
        raise ConfigError(
            "--layout: the authors of this network have not defined names for text encoders; use --layout "
            "diffusers [TM680]"
        )
    names = {layer: layer for layer in layers - net_layers}
    names |= {layer: name for name, layer in layout.original_lora_layers(sorted(net_layers), weights.net).items()}
    scale, tensors = weights.config.lora_alpha / layout.original_lora_alpha, {}
    for key, x in weights.trainable().items():
        layer, dot, factor = key.partition(".lora_")
        factor_scale = scale if factor.startswith("B") else 1.0
        tensors[f"{PEFT_PREFIX}{names[layer]}{dot}{factor}"] = x.detach().float().cpu() * factor_scale
    torch.save(tensors, path)


# Reading


def read_lora(
    path: Path, model: TrainableModel, layout: PipelineLayout | None
) -> tuple[dict[str, LoraFactors], int, float]:
    """Read the adapters of a file in any layout. Returns them by the model's layer names, with rank and alpha."""
    data = load_pickle(path) if path.suffix in PICKLE_SUFFIXES else None
    if isinstance(data, list):
        adapters = match_unnamed_factors(data, model.net, path)
    else:
        tensors = load_state_dict(path)
        encoders = model.enable_text_encoder_training() if adapts_text_encoder(tensors) else {}
        adapters = match_layers(tensors, LoraLayerNames.from_model(model.net, encoders, layout), path)
    shapes = {(len(factors.down), factors.alpha) for factors in adapters.values()}
    if len(shapes) > 1:
        raise ConfigError(
            f"{path} has adapters with different ranks or alphas; use a file with one rank and one alpha for all "
            "layers [TM681]"
        )
    return adapters, *shapes.pop()


@dataclass(frozen=True)
class LoraLayerNames:
    """The layers of a model, by all names that files use for them."""

    names: Mapping[str, str]
    original_names: Mapping[str, str]  # the authors' names, of the network only
    component: str  # name of the network in a pipeline
    original_alpha: float | None  # alpha of adapters under the authors' names

    @classmethod
    def from_model(
        cls, net: nn.Module, encoders: Mapping[str, nn.Module], layout: PipelineLayout | None
    ) -> LoraLayerNames:
        layers = _adaptable_layers(net)
        names = {name: name for name in layers} | {name.replace(".", "_"): name for name in layers}
        for encoder_name, encoder in encoders.items():
            names |= _text_encoder_names(encoder_name, _adaptable_layers(encoder))
        if layout is None:
            return cls(names, {}, "", None)
        for component, prefix in layout.components.items():
            names |= {f"{component}.{name.removeprefix(prefix)}": name for name in layers if name.startswith(prefix)}
        if layout.comfyui_layer and not layout.component_prefixes:
            groups = group_by_comfyui_layer(layers, layout).items()
            names |= {name.replace(".", "_"): group[0] for name, group in groups if _is_one_layer(group, layout)}
        if layout.original_lora_layers is None:
            return cls(names, {}, layout.component, None)
        return cls(names, layout.original_lora_layers(layers, net), layout.component, layout.original_lora_alpha)

    def find(self, stem: str) -> str | None:
        """Return the model's name of a layer, given its name in a file."""
        name = _strip_prefixes(stem)
        return self.original_names.get(name) or self.names.get(stem) or self.names.get(name)

    def default_alpha(self, stem: str, rank: int) -> float:
        """Return the alpha of an adapter whose file does not contain it."""
        is_original = _strip_prefixes(stem) in self.original_names and not stem.startswith(f"{self.component}.")
        is_original |= stem.startswith(f"{PEFT_PREFIX}{TEXT_ENCODER_PREFIX}")
        return self.original_alpha if is_original and self.original_alpha is not None else rank


def _is_one_layer(layers: Sequence[str], layout: PipelineLayout) -> bool:
    """Whether a layer of ComfyUI's network is one of ours, with its rows in the same order."""
    rows = torch.tensor([[0.0], [1.0]])
    (converted,) = layout.to_original({f"{layers[0]}.weight": rows}, {}).values()
    return len(layers) == 1 and converted.equal(rows)


def _adaptable_layers(net: nn.Module) -> list[str]:
    return [name for name, module in net.named_modules() if isinstance(module, ADAPTABLE_LAYERS)]


def _text_encoder_names(encoder: str, layers: Sequence[str]) -> dict[str, str]:
    """Return the names of a text encoder's layers. ComfyUI numbers encoders; the number of the first is optional."""
    number = encoder.removeprefix(TEXT_ENCODER_PREFIX).removeprefix("_")
    names = {f"{encoder}.{layer}": f"{encoder}.{layer}" for layer in layers}
    for prefix in (f"{COMFYUI_TEXT_PREFIX}{number or 1}_", *(() if number else (f"{COMFYUI_TEXT_PREFIX}_",))):
        names |= {prefix + layer.replace(".", "_"): f"{encoder}.{layer}" for layer in layers}
    return names


def _strip_prefixes(name: str) -> str:
    for prefix in KNOWN_PREFIXES:
        name = name.removeprefix(prefix)
    return name


def adapts_text_encoder(names: Iterable[str]) -> bool:
    """Whether any of these adapters is on a text encoder."""
    return any(
        re.match(rf"{TEXT_ENCODER_PREFIX}(_\d)?\.|{COMFYUI_TEXT_PREFIX}\d?_", name.removeprefix(PEFT_PREFIX))
        for name in names
    )


def match_layers(tensors: Mapping[str, Tensor], layers: LoraLayerNames, path: Path) -> dict[str, LoraFactors]:
    """Return the adapters of a file by the model's layer names."""
    adapters: dict[str, LoraFactors] = {}
    for key, down in tensors.items():
        for down_suffix, up_suffix in ((LORA_A, LORA_B), (LORA_DOWN, LORA_UP)):
            if key.endswith(down_suffix):
                stem = key.removesuffix(down_suffix)
                layer = layers.find(stem)
                if layer is None:
                    raise ConfigError(
                        f"{path} has an adapter for '{stem}', which this network does not have; use the base "
                        "model that the adapters were trained on [TM682]"
                    )
                up, alpha = tensors.get(stem + up_suffix), tensors.get(stem + LORA_ALPHA)
                fits = up is not None and min(up.ndim, down.ndim) >= 2 and up.shape[1] == len(down)
                if not fits or (alpha is not None and alpha.numel() != 1):
                    raise ConfigError(
                        f"{path} has no complete adapter for '{stem}': expected {down_suffix} [rank, ...], {up_suffix} "
                        f"[..., rank] and one number as {LORA_ALPHA}; write or download the file again [TM1173]"
                    )
                alpha_value = layers.default_alpha(stem, len(down)) if alpha is None else float(alpha)
                adapters[layer] = LoraFactors(down, tensors[stem + up_suffix], alpha_value)
    if not adapters:
        raise ConfigError(
            f"{path} does not contain LoRA adapters; expected tensors such as transformer.X{LORA_A} or "
            f"lora_unet_X{LORA_DOWN}, so give another file [TM683]"
        )
    return adapters


def match_unnamed_factors(factors: Sequence[Tensor], net: nn.Module, path: Path) -> dict[str, LoraFactors]:
    """Match the list that VADER saves for ModelScope: up and down of each layer in order, with alpha equal to rank."""
    layers = {name: module.weight for name, module in net.named_modules() if type(module) in ADAPTABLE_LAYERS}
    pairs = list(zip(factors[::2], factors[1::2], strict=False))
    fits = len(factors) == 2 * len(layers) and all(
        (len(up), down.shape[1:]) == (len(weight), weight.shape[1:])
        for (up, down), weight in zip(pairs, layers.values(), strict=True)
    )
    if not fits:
        raise ConfigError(
            f"{path} contains {len(factors)} factors without names, and they do not match the {len(layers)} "
            "layers of this network in order; use the base model of this file, or a file with named layers "
            "[TM684]"
        )
    rank = max(len(down) for _, down in pairs)  # narrow layers have a lower rank and are padded with zeros
    return {
        layer: LoraFactors(_pad_with_zeros(down, rank, 0), _pad_with_zeros(up, rank, 1), rank)
        for layer, (up, down) in zip(layers, pairs, strict=True)
    }


def _pad_with_zeros(x: Tensor, size: int, dim: int) -> Tensor:
    shape = [size - x.shape[dim] if i == dim else length for i, length in enumerate(x.shape)]
    return torch.cat([x, x.new_zeros(shape)], dim)


def is_external_lora(path: Path) -> bool:
    """Whether a file holds adapters in the layout of diffusers, ComfyUI or VADER, and not of a run's checkpoint."""
    if not path.is_file() or path.suffix not in LORA_SUFFIXES:
        return False
    data = load_pickle(path) if path.suffix in PICKLE_SUFFIXES else None
    if isinstance(data, list):
        return True
    prefixes = (*KNOWN_PREFIXES, SECOND_TRANSFORMER_PREFIX, COMFYUI_TEXT_PREFIX)
    if any(key.startswith(prefixes) and key.endswith((LORA_A, LORA_DOWN)) for key in load_state_dict(path)):
        return True
    return path.suffix == ".safetensors" and _has_diffusers_metadata(path)


def _has_diffusers_metadata(path: Path) -> bool:
    """Whether a file has diffusers' metadata: adapters of text encoders have the same names in a run's checkpoint."""
    with safe_open(path, "pt") as file:
        return METADATA_KEY in (file.metadata() or {})


# Published adapters


def find_published_lora(name: str) -> WeightsSource | None:
    """Return the source of published adapters by VADER's name for them or by their id on the hub."""
    return next((source for short, source in PUBLISHED_LORAS.items() if name in (short, source.hub, str(source))), None)


def resolve_lora_path(path: Path) -> Path:
    """Return the downloaded file if a path is the name or hub id of published adapters, otherwise the path itself."""
    name = path.as_posix()
    source = find_published_lora(name)
    if path.exists() or not (source or HUB_ID.fullmatch(name)):
        return path
    if source is not None:
        return find_weights(source.hub, source)
    folder = find_cached(WeightsSource(name))
    return path if folder is None else only_lora_file(folder, name)


def only_lora_file(folder: Path, name: str) -> Path:
    """Return the only LoRA file in a folder, such as one that `tastemaker export` wrote; `name` is for errors."""
    files = sorted(file for file in folder.iterdir() if file.suffix in LORA_SUFFIXES and file.is_file())
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "no LoRA file"
        raise ConfigError(
            f"{name:.200} contains {names:.200}; expected exactly one LoRA file, so give the path of the file [TM685]"
        )
    return files[0]
