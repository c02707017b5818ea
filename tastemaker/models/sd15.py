"""Stable Diffusion 1 and 2 (Rombach et al. 2022): a UNet that denoises latents and reads prompts by CLIP."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from ..core.policy import Process
from ..core.types import Condition, Metadata, Placement, Prompts
from ..processes.gaussian import GaussianProcess
from .cached_text_encoder import build_cached_text_encoder
from .pipeline_components import ATTENTION_LAYERS, TINY, PipelineComponents, weight_sources
from .pipeline_layout import PipelineLayout, sd_unet_to_original
from .pretrained import WeightsSource
from .text_encoders import CachedTextEncoder
from .unet_common import (
    CHANNELS,
    FACTOR,
    cast_to_network_dtype,
    check_image_shape,
    check_image_size,
    check_unet_config,
    read_unet_checkpoint,
    unet_timestep,
)

SD15 = WeightsSource("stable-diffusion-v1-5/stable-diffusion-v1-5", size="4.3 GB", licence="CreativeML OpenRAIL-M")
CLIP_MAX_TOKENS = 77  # tokens of a prompt that are read
SMALL: dict[str, dict[str, Any]] = {
    "unet": {
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": 16,
        "attention_head_dim": 2,
    },
    "vae": {
        "block_out_channels": (4, 4, 8, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": 1,
        "norm_num_groups": 2,
        "latent_channels": CHANNELS,
    },
    "text_encoder": {
        "vocab_size": 600,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": CLIP_MAX_TOKENS,
        "bos_token_id": 0,
        "eos_token_id": 2,  # as in the published one, which means the highest
    },
}


class Sd15PromptEncoder:
    """What CLIP says of every word of a prompt."""

    def __init__(self, kit: PipelineComponents) -> None:
        from transformers import CLIPTextModel

        self.clip = kit.reader("text_encoder", CLIPTextModel, "tokenizer", CLIP_MAX_TOKENS)

    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        return {"words": self.clip(prompts).last_hidden_state}


class Sd15Backbone:
    """Denoises [1, 4, h, w] latents; predicts the noise, or the velocity where it was trained to, as the path says."""

    passes = 1

    def __init__(self, spec: Sd15, placement: Placement) -> None:
        from diffusers import AutoencoderKL, UNet2DConditionModel

        kit = PipelineComponents(spec.weights, SD15, SMALL, placement, spec.seed)
        config = kit.config("unet")
        check_unet_config(config, spec.weights, None, "sdxl")
        self.shape, self.pixels = spec.shape, (1, 3, spec.height, spec.width)
        self.embedded = spec.texts(placement)
        self.codec = kit.autoencoder("vae", AutoencoderKL, recompute=spec.recompute)
        self.net: nn.Module = kit.trained(
            "unet", UNet2DConditionModel, read_unet_checkpoint(spec.unet, SD15, config), ATTENTION_LAYERS
        )

    def embed(self, prompts: Prompts, facts: Sequence[Metadata] = ()) -> Condition:
        return Condition(tuple(prompts), self.embedded(prompts), tuple(facts))

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        seen, words = cast_to_network_dtype(self.net, x[:, 0], cond.tensors["words"])
        out: Tensor = self.net(seen, unet_timestep(t), words, return_dict=False)[0]
        return out[:, None]

    def sized(self, height: int, width: int) -> Sd15Backbone:
        other = copy(self)
        other.shape, other.pixels = (1, CHANNELS, height // FACTOR, width // FACTOR), (1, 3, height, width)
        return other

    def encode(self, pixels: Tensor) -> Tensor:
        check_image_shape(pixels, self.pixels)
        return self.codec.encode(pixels[:, 0])[:, None]

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        shown = x if frames is None else x[:, list(frames)]
        return self.codec.decode(shown.flatten(0, 1)).view(*shown.shape[:2], *self.pixels[1:])


@dataclass(frozen=True)
class Sd15:
    """Stable Diffusion 1.x, or 2.x, whose 768-pixel version wants `prediction: velocity` of its path."""

    weights: str = SD15.hub  # a hub id, or a folder in diffusers' layout
    unet: str | None = None  # one file whose network replaces the folder's, of diffusers' names or the authors'
    height: int = 512
    width: int = 512
    recompute: bool = True  # the decoder in the backward pass, for a seventh of its memory
    embeddings: Path | None = None  # a folder `tastemaker embed` wrote; without others, no text encoder is loaded
    seed: int = 0  # of random weights
    frames: ClassVar[int] = 1
    suits: ClassVar[type[Process]] = GaussianProcess
    layout: ClassVar[PipelineLayout] = PipelineLayout(
        "StableDiffusionPipeline", "unet", "lora_unet", sd_unet_to_original
    )

    def __post_init__(self) -> None:
        check_image_size(self.height, self.width)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return 1, CHANNELS, self.height // FACTOR, self.width // FACTOR

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        return weight_sources(self.weights, SD15)

    def texts(self, placement: Placement) -> CachedTextEncoder:
        kit = PipelineComponents(self.weights, SD15, SMALL, placement, self.seed)
        return build_cached_text_encoder(
            kit, lambda: Sd15PromptEncoder(kit), ("text_encoder",), {"model": "sd15"}, self.embeddings
        )

    def load(self, placement: Placement) -> Sd15Backbone:
        return Sd15Backbone(self, placement)

    def tiny(self) -> Sd15:
        return replace(self, weights=TINY, unet=None, height=32, width=32, embeddings=None)
