"""The tokenizer as configurations name it, and those trained with it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from ..core.registry import ConfigError
from ..core.types import Placement
from . import loading, weight_files
from .nets.color_tokenizer import ColorTokenizer
from .nets.vq import VQ, VQConfig, drop_usage_buffer
from .pretrained import WeightsSource

Count = Annotated[int, Field(ge=1, le=64)]
Channels = Annotated[int, Field(ge=8, le=1024, multiple_of=8)]
Codes = Annotated[int, Field(ge=8, le=2**18)]
EMA_FIRST_KEYS = (
    "ema",
    *loading.STATE_DICT_KEYS,
)  # the average before what it is of, as published code reads tokenizers
LLAMAGEN, LLAMAGEN_TEXT = "FoundationVision/LlamaGen", "peizesun/llamagen_t2i"
PUBLISHED = {
    file: WeightsSource(hub, f"{file}.pt", size="0.3 GB", licence="MIT")
    for file, hub in (("vq_ds16_c2i", LLAMAGEN), ("vq_ds8_c2i", LLAMAGEN), ("vq_ds16_t2i", LLAMAGEN_TEXT))
}  # by the names that `codec` takes


@dataclass(frozen=True)
class Vq:
    """LlamaGen's convolutional tokenizer, by a codebook or by signs alone (LFQ)."""

    channels: Channels = 32
    multipliers: tuple[Count, ...] = (1, 2, 2, 4)  # of the channels, one a level; each level but the first halves
    blocks: Count = 1  # a level
    latent: Channels = 64  # channels around the quantiser
    codes: Codes = 2048
    width: Count = 8  # of a code; signs need none
    quantizer: Literal["codebook", "signs"] = "codebook"
    groups: Count = 8  # of channels that are normalised together; published tokenizers have 32
    commitment: NonNegativeFloat = 0.25
    entropy: NonNegativeFloat = 0.0
    idle: NonNegativeFloat = 1.0  # weight of drawing codes that nothing uses to the pictures
    weights: str | None = None  # to start from
    seed: int = 0

    def __post_init__(self) -> None:
        self.shape()

    def shape(self) -> VQConfig:
        return VQConfig(
            self.channels, self.multipliers, self.blocks, self.latent, self.codes, self.width, self.quantizer,
            self.groups, self.commitment, self.entropy, self.idle,
        )  # fmt: skip

    def load(self, placement: Placement) -> VQ:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            net = VQ(self.shape())
        if self.weights:
            source = PUBLISHED.get(self.weights)
            tensors = loading.read_checkpoint(source.hub if source else self.weights, source, EMA_FIRST_KEYS)
            loading.assign_state_dict(net, drop_usage_buffer(tensors), torch.float32, self.weights)
        return net.to(placement.device)

    def tiny(self) -> Vq:
        return replace(self, channels=8, blocks=1, latent=8, groups=2, codes=64, weights=None)


def load_image_tokenizer(
    name: str | None, codes: int, side: int, size: int, placement: Placement
) -> VQ | ColorTokenizer:
    """The trained tokenizer of a name, frozen; without a name, the colours of cells in its place."""
    if name is None:
        return ColorTokenizer(codes, side, size).to(placement.device)
    shape, tensors = read_tokenizer(name)
    if (shape.codes, shape.stride * side) != (codes, size):
        raise ConfigError(
            f"model.codec: '{name:.200}' has {shape.codes} codes of {shape.stride} pixels a side, the model expects "
            f"{codes} of {size // side}; set model.codes={shape.codes} and {size // shape.stride} tokens a side, or"
            " another codec"
        )
    return build_frozen_tokenizer(shape, tensors, name, placement)


def read_tokenizer(name: str) -> tuple[VQConfig, weight_files.Tensors]:
    """The sizes and weights of a tokenizer, published or trained here."""
    source = PUBLISHED.get(name)
    if source is None and not is_external_checkpoint(name):
        return read_own_tokenizer(name)
    tensors = loading.read_checkpoint(source.hub if source else name, source, EMA_FIRST_KEYS)
    return infer_vq_config(tensors, name), drop_usage_buffer(tensors)


def build_frozen_tokenizer(shape: VQConfig, tensors: weight_files.Tensors, name: str, placement: Placement) -> VQ:
    with torch.device("meta"):
        net = VQ(shape)
    # In float32 whatever else computes in: rounded, other codes would be the nearest.
    loading.assign_state_dict(net, tensors, torch.float32, name)
    return net.requires_grad_(False).eval().to(placement.device)


def is_external_checkpoint(name: str) -> bool:
    """Whether a name is of a checkpoint as published, which says nothing of its sizes."""
    path = Path(name).expanduser()
    if path.suffix == ".safetensors":
        return path.is_file() and not loading.has_config_metadata(path)
    return path.exists() and not (path / "checkpoints").is_dir()


def read_own_tokenizer(name: str) -> tuple[VQConfig, weight_files.Tensors]:
    """A tokenizer trained here, by its file, its run or its name in the package."""
    tensors, config = weight_files.read_weights(name)
    settings: dict[str, Any] = dict(config.get("autoencoder", {}))
    if settings.pop("type", None) != "vq":
        raise ConfigError(f"model.codec: '{name:.200}' holds no vq; train one with `tastemaker train playground-vq`")
    spec = Vq(**{**settings, "multipliers": tuple(settings["multipliers"]), "weights": None})
    return spec.shape(), drop_usage_buffer(tensors)


def infer_vq_config(tensors: Mapping[str, Tensor], name: str) -> VQConfig:
    """The sizes of a published tokenizer, which its tensors tell."""
    if "quantize.embedding.weight" not in tensors or "encoder.conv_in.weight" not in tensors:
        raise ConfigError(
            f"model.codec: '{name:.200}' holds no tokenizer of LlamaGen; name one, such as vq_ds16_c2i.pt"
        )
    channels = tensors["encoder.conv_in.weight"].shape[0]
    widths: list[int] = []
    while (key := f"encoder.conv_blocks.{len(widths)}.res.0.conv1.weight") in tensors:
        widths.append(tensors[key].shape[0] // channels)
    blocks = sum(bool(re.fullmatch(r"encoder\.conv_blocks\.0\.res\.\d+\.conv1\.weight", key)) for key in tensors)
    codes, width = tensors["quantize.embedding.weight"].shape
    return VQConfig(channels, tuple(widths), blocks, tensors["encoder.conv_out.weight"].shape[0], codes, width)
