"""Image tokenizers of LlamaGen's architecture: settings to train one, and loading of trained and published ones."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from ..core.autoencoder import AutoencoderSpec
from ..core.model_spec import ModelSpec
from ..core.registry import ConfigError
from ..core.types import Placement
from . import loading, weight_files
from .nets.vq import VQ, ColorTokenizer, VQConfig, drop_usage_buffer
from .pretrained import WeightsSource

Count = Annotated[int, Field(ge=1, le=64)]
Channels = Annotated[int, Field(ge=8, le=1024, multiple_of=8)]
CodebookSize = Annotated[int, Field(ge=8, le=2**18)]
EMA_FIRST_KEYS = ("ema", *loading.STATE_DICT_KEYS)  # EMA weights are preferred, as in the published code
LLAMAGEN, LLAMAGEN_TEXT = "FoundationVision/LlamaGen", "peizesun/llamagen_t2i"
# Released tokenizers, by the names that `model.autoencoder` takes.
PUBLISHED_TOKENIZERS = {
    file: WeightsSource(hub, f"{file}.pt", size="0.3 GB", license="MIT")
    for file, hub in (("vq_ds16_c2i", LLAMAGEN), ("vq_ds8_c2i", LLAMAGEN), ("vq_ds16_t2i", LLAMAGEN_TEXT))
}


class TokenGridSpec(ModelSpec):
    """Settings of a generator of square images as tokens, row by row."""

    frames: ClassVar[int] = 1
    image_size: int

    @property
    @abstractmethod
    def grid_size(self) -> int:
        """Tokens per side."""

    @property
    def shape(self) -> tuple[int]:
        return (self.grid_size * self.grid_size,)

    def check_image_size(self, setting: str) -> None:
        """Refuse images whose sides are no multiple of a setting."""
        if self.image_size % (factor := getattr(self, setting)):
            raise ValueError(
                f"'image_size': expected a multiple of '{setting}' ({factor}), got {self.image_size}; change "
                "'image_size' [TM434]"
            )


@dataclass(frozen=True)
class VqSpec(AutoencoderSpec):
    """LlamaGen's convolutional tokenizer, with a codebook or with lookup-free quantization (LFQ)."""

    channels: Channels = 32
    channel_multipliers: tuple[Count, ...] = (1, 2, 2, 4)  # one per level; each level but the first halves the size
    num_res_blocks: Count = 1  # per level
    z_channels: Channels = 64  # channels before and after the quantizer's projections
    codebook_size: CodebookSize = 2048
    codebook_dim: Count = 8  # of a codebook vector; not used by lfq
    quantizer: Literal["codebook", "lfq"] = "codebook"
    norm_num_groups: Count = 8  # published tokenizers have 32
    commitment_weight: NonNegativeFloat = 0.25
    entropy_weight: NonNegativeFloat = 0.0
    dead_code_weight: NonNegativeFloat = 1.0  # of the loss that moves unused codebook vectors to the data
    weights: str | None = None  # initial weights
    seed: int = 0

    def __post_init__(self) -> None:
        self.network_config()

    def network_config(self) -> VQConfig:
        return VQConfig(**{field.name: getattr(self, field.name) for field in fields(VQConfig)})

    def load(self, placement: Placement) -> VQ:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            net = VQ(self.network_config())
        if self.weights:
            source = PUBLISHED_TOKENIZERS.get(self.weights)
            tensors = loading.read_checkpoint(source.hub if source else self.weights, source, EMA_FIRST_KEYS)
            loading.assign_state_dict(net, drop_usage_buffer(tensors), torch.float32, self.weights)
        return net.to(placement.device)

    def tiny(self) -> VqSpec:
        return replace(
            self, channels=8, num_res_blocks=1, z_channels=8, norm_num_groups=2, codebook_size=64, weights=None
        )


def load_image_tokenizer(
    name: str | None, codebook_size: int, grid_size: int, image_size: int, placement: Placement
) -> VQ | ColorTokenizer:
    """A frozen trained tokenizer; a ColorTokenizer if `name` is None."""
    if name is None:
        return ColorTokenizer(codebook_size, grid_size, image_size).to(placement.device)
    config, tensors = read_tokenizer(name)
    if (config.codebook_size, config.stride * grid_size) != (codebook_size, image_size):
        raise ConfigError(
            f"model.autoencoder: '{name:.200}' has {config.codebook_size} codes and {config.stride} pixels per "
            f"token, but the model expects {codebook_size} and {image_size // grid_size}; set "
            f"model.codebook_size={config.codebook_size} and {image_size // config.stride} tokens per side, or "
            "use another autoencoder [TM435]"
        )
    return build_frozen_tokenizer(config, tensors, name, placement)


def read_tokenizer(name: str) -> tuple[VQConfig, weight_files.Tensors]:
    """Sizes and weights of a tokenizer: a released name, a published checkpoint, or one of ours."""
    source = PUBLISHED_TOKENIZERS.get(name)
    if source is None and not is_external_checkpoint(name):
        return read_own_tokenizer(name)
    tensors = loading.read_checkpoint(source.hub if source else name, source, EMA_FIRST_KEYS)
    return infer_vq_config(tensors, name), drop_usage_buffer(tensors)


def build_frozen_tokenizer(config: VQConfig, tensors: weight_files.Tensors, name: str, placement: Placement) -> VQ:
    with torch.device("meta"):
        net = VQ(config)
    # Always in float32, because rounding would change the nearest codes.
    loading.assign_state_dict(net, tensors, torch.float32, name)
    return net.requires_grad_(False).eval().to(placement.device)


def is_external_checkpoint(name: str) -> bool:
    """Whether a path is a checkpoint without our configuration, whose sizes have to be inferred."""
    path = Path(name).expanduser()
    if path.suffix == ".safetensors":
        return path.is_file() and not loading.has_config_metadata(path)
    return path.exists() and not (path / "checkpoints").is_dir()


def read_own_tokenizer(name: str) -> tuple[VQConfig, weight_files.Tensors]:
    """Sizes and weights of a tokenizer trained with this package: a file, a run, or a name in the package."""
    tensors, config = weight_files.read_weights(name)
    settings: dict[str, Any] = dict(config.get("autoencoder", {}))
    if settings.pop("type", None) != "vq":
        raise ConfigError(
            f"model.autoencoder: '{name:.200}' does not contain a vq autoencoder; train one with `tastemaker "
            "train playground-vq` [TM436]"
        )
    spec = VqSpec(**{**settings, "channel_multipliers": tuple(settings["channel_multipliers"]), "weights": None})
    return spec.network_config(), drop_usage_buffer(tensors)


def infer_vq_config(tensors: Mapping[str, Tensor], name: str) -> VQConfig:
    """Sizes of a published tokenizer, from its tensors."""
    if "quantize.embedding.weight" not in tensors or "encoder.conv_in.weight" not in tensors:
        raise ConfigError(
            f"model.autoencoder: '{name:.200}' is not a tokenizer of LlamaGen; give a file such as vq_ds16_c2i.pt "
            "[TM437]"
        )
    channels = tensors["encoder.conv_in.weight"].shape[0]
    multipliers: list[int] = []
    while (key := f"encoder.conv_blocks.{len(multipliers)}.res.0.conv1.weight") in tensors:
        multipliers.append(tensors[key].shape[0] // channels)
    blocks = sum(bool(re.fullmatch(r"encoder\.conv_blocks\.0\.res\.\d+\.conv1\.weight", key)) for key in tensors)
    codebook_size, dim = tensors["quantize.embedding.weight"].shape
    z_channels = tensors["encoder.conv_out.weight"].shape[0]
    return VQConfig(channels, tuple(multipliers), blocks, z_channels, codebook_size, dim)
