"""Stable Diffusion XL (Podell et al. 2023): a larger UNet, two text encoders, and pictures that know their size."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..core.policy import Process
from ..core.types import Condition, Metadata, Placement, Prompts
from ..processes.gaussian import GaussianProcess
from . import sd15
from .cached_text_encoder import build_cached_text_encoder
from .pipeline_components import ATTENTION_LAYERS, TINY, FrozenVae, PipelineComponents, weight_sources
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

SDXL = WeightsSource("stabilityai/stable-diffusion-xl-base-1.0", size="14 GB", licence="CreativeML OpenRAIL++-M")
SMALL: dict[str, dict[str, Any]] = {
    "unet": {
        **sd15.SMALL["unet"],
        "cross_attention_dim": 16 + 24,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 4,
        "projection_class_embeddings_input_dim": 6 * 4 + 20,
    },
    "vae": {**sd15.SMALL["vae"], "scaling_factor": 0.13025},
    "text_encoder": sd15.SMALL["text_encoder"],
    "text_encoder_2": {**sd15.SMALL["text_encoder"], "hidden_size": 24, "projection_dim": 20},
}


def load_sdxl_vae(spec: Sdxl, kit: PipelineComponents, placement: Placement) -> FrozenVae:
    """The published one overflows in fp16 and says so; then it computes in float32, as diffusers has it."""
    from diffusers import AutoencoderKL

    if placement.dtype == torch.float16 and kit.config("vae").get("force_upcast", True):
        kit = PipelineComponents(spec.weights, SDXL, SMALL, replace(placement, dtype=torch.float32), spec.seed)
    return kit.autoencoder("vae", AutoencoderKL, recompute=spec.recompute)


class SdxlPromptEncoder:
    """The last layer but one of both encoders, side by side, and the second's summary."""

    def __init__(self, kit: PipelineComponents, empty: str) -> None:
        from transformers import CLIPTextModel, CLIPTextModelWithProjection

        self.empty = empty
        self.first = kit.reader("text_encoder", CLIPTextModel, "tokenizer", sd15.CLIP_MAX_TOKENS)
        self.second = kit.reader("text_encoder_2", CLIPTextModelWithProjection, "tokenizer_2", sd15.CLIP_MAX_TOKENS)

    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        first, second = self.first(prompts, layers=True), self.second(prompts, layers=True)
        words = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], -1)
        said = torch.tensor([self.empty == "words" or prompt != "" for prompt in prompts], device=words.device)
        return {"words": words * said[:, None, None], "summary": second.text_embeds * said[:, None]}


class SdxlBackbone:
    """Denoises [1, 4, h, w] latents; predicts the noise, or the velocity where it was trained to, as the path says."""

    passes = 1

    def __init__(self, spec: Sdxl, placement: Placement) -> None:
        from diffusers import UNet2DConditionModel

        kit = PipelineComponents(spec.weights, SDXL, SMALL, placement, spec.seed)
        config = kit.config("unet")
        check_unet_config(config, spec.weights, "text_time", "sd15")
        self.shape, self.pixels = spec.shape, (1, 3, spec.height, spec.width)
        # The size it was before it was cut, where it was cut, and the size it is: all of a picture that was not cut.
        size = (spec.height, spec.width)
        self.told = torch.tensor([*size, 0, 0, *size], dtype=torch.float32, device=placement.device)
        self.embedded = spec.texts(placement)
        self.codec = load_sdxl_vae(spec, kit, placement)
        self.net: nn.Module = kit.trained(
            "unet", UNet2DConditionModel, read_unet_checkpoint(spec.unet, SDXL, config), ATTENTION_LAYERS
        )

    def embed(self, prompts: Prompts, facts: Sequence[Metadata] = ()) -> Condition:
        return Condition(tuple(prompts), self.embedded(prompts), tuple(facts))

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        seen, words, summary = cast_to_network_dtype(self.net, x[:, 0], cond.tensors["words"], cond.tensors["summary"])
        added = {"text_embeds": summary, "time_ids": self.told.expand(len(x), -1)}
        out: Tensor = self.net(seen, unet_timestep(t), words, added_cond_kwargs=added, return_dict=False)[0]
        return out[:, None]

    def sized(self, height: int, width: int) -> SdxlBackbone:
        other = copy(self)
        other.shape, other.pixels = (1, CHANNELS, height // FACTOR, width // FACTOR), (1, 3, height, width)
        size = (height, width)
        other.told = self.told.new_tensor([*size, 0, 0, *size])
        return other

    def encode(self, pixels: Tensor) -> Tensor:
        check_image_shape(pixels, self.pixels)
        return self.codec.encode(pixels[:, 0])[:, None]

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        shown = x if frames is None else x[:, list(frames)]
        return self.codec.decode(shown.flatten(0, 1)).view(*shown.shape[:2], *self.pixels[1:])


@dataclass(frozen=True)
class Sdxl:
    """Stable Diffusion XL, without its refiner."""

    weights: str = SDXL.hub  # a hub id, or a folder in diffusers' layout
    unet: str | None = None  # one file whose network replaces the folder's, of diffusers' names or the authors'
    height: int = 1024
    width: int = 1024
    empty: Literal["zeros", "words"] = "zeros"  # what the empty prompt is read as
    recompute: bool = True  # the decoder in the backward pass, for a seventh of its memory
    embeddings: Path | None = None  # a folder `tastemaker embed` wrote; without others, no text encoder is loaded
    seed: int = 0  # of random weights
    frames: ClassVar[int] = 1
    suits: ClassVar[type[Process]] = GaussianProcess
    layout: ClassVar[PipelineLayout] = PipelineLayout(
        "StableDiffusionXLPipeline", "unet", "lora_unet", sd_unet_to_original
    )

    def __post_init__(self) -> None:
        check_image_size(self.height, self.width)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return 1, CHANNELS, self.height // FACTOR, self.width // FACTOR

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        return weight_sources(self.weights, SDXL)

    def texts(self, placement: Placement) -> CachedTextEncoder:
        kit = PipelineComponents(self.weights, SDXL, SMALL, placement, self.seed)
        settings = {"model": "sdxl", "empty": self.empty}
        parts = ("text_encoder", "text_encoder_2")
        return build_cached_text_encoder(
            kit, lambda: SdxlPromptEncoder(kit, self.empty), parts, settings, self.embeddings
        )

    def load(self, placement: Placement) -> SdxlBackbone:
        return SdxlBackbone(self, placement)

    def tiny(self) -> Sdxl:
        return replace(self, weights=TINY, unet=None, height=32, width=32, embeddings=None)
