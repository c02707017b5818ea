"""Stable Diffusion XL (Podell et al. 2023): a larger UNet, two text encoders, and the image size as conditioning."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from ..core.model_spec import PipelineLayout
from ..core.types import Condition, Placement
from . import sd15
from .component_configs import CLIP_G, CLIP_L, SD_VAE, ComponentConfigs
from .image_backbone import cast_to_network_dtype, unet_timestep
from .pipeline_components import PipelineComponents, PublishedModel
from .pretrained import WeightsSource
from .sd15 import CLIP_MAX_TOKENS, Sd15Backbone, UnetImageSpec
from .text_encoders import TextEncoders

CONFIGS: ComponentConfigs = {
    "unet": {
        "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 10),
        "attention_head_dim": (5, 10, 20),
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
    "vae": {**SD_VAE, "scaling_factor": 0.13025},
    "text_encoder": CLIP_L,
    "text_encoder_2": CLIP_G,
}
TINY_CONFIGS: ComponentConfigs = {
    "unet": {
        **sd15.TINY_CONFIGS["unet"],
        "cross_attention_dim": 16 + 24,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 4,
        "projection_class_embeddings_input_dim": 6 * 4 + 20,
    },
    "vae": {**sd15.TINY_CONFIGS["vae"], "scaling_factor": 0.13025},
    "text_encoder": sd15.TINY_CONFIGS["text_encoder"],
    "text_encoder_2": {**sd15.TINY_CONFIGS["text_encoder"], "hidden_size": 24, "projection_dim": 20},
}
HUB_ID = "stabilityai/stable-diffusion-xl-base-1.0"
SOURCE = WeightsSource(HUB_ID, size="14 GB", license="CreativeML OpenRAIL++-M")
SDXL = PublishedModel("sdxl", (SOURCE,), TINY_CONFIGS, {HUB_ID: CONFIGS})


class SdxlPromptEncoder(TextEncoders):
    """Penultimate layers of both CLIPs, prompt_embeds [B, 77, D]; the second's pooled_prompt_embeds [B, P]."""

    def __init__(self, components: PipelineComponents, empty_prompt: str) -> None:
        from transformers import CLIPTextModel, CLIPTextModelWithProjection

        self.empty_prompt = empty_prompt
        self.first = components.load_text_encoder("text_encoder", CLIPTextModel, "tokenizer", CLIP_MAX_TOKENS)
        self.second = components.load_text_encoder(
            "text_encoder_2", CLIPTextModelWithProjection, "tokenizer_2", CLIP_MAX_TOKENS
        )
        self.text_encoders = self.first, self.second

    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        first, second = (encoder(prompts, output_hidden_states=True) for encoder in self.text_encoders)
        prompt_embeds = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], -1)
        nonzero = torch.tensor(
            [self.empty_prompt == "encoded" or prompt != "" for prompt in prompts], device=prompt_embeds.device
        )
        return {
            "prompt_embeds": prompt_embeds * nonzero[:, None, None],
            "pooled_prompt_embeds": second.text_embeds * nonzero[:, None],
        }


class SdxlBackbone(Sd15Backbone):
    """Stable Diffusion's UNet with the second CLIP's pooled output and the image size as further inputs."""

    def __init__(self, spec: SdxlSpec, placement: Placement) -> None:
        super().__init__(spec, placement)
        # Original size, crop offset and target size: as of an image that was not cropped.
        size = (spec.height, spec.width)
        self.time_ids = torch.tensor([*size, 0, 0, *size], dtype=torch.float32, device=placement.device)

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        latents, prompt_embeds, pooled = cast_to_network_dtype(
            self.net, x[:, 0], cond.tensors["prompt_embeds"], cond.tensors["pooled_prompt_embeds"]
        )
        added = {"text_embeds": pooled, "time_ids": self.time_ids.expand(len(x), -1)}
        out: Tensor = self.net(latents, unet_timestep(t), prompt_embeds, added_cond_kwargs=added, return_dict=False)[0]
        return out[:, None]

    def with_size(self, height: int, width: int) -> Self:
        other = super().with_size(height, width)
        other.time_ids = self.time_ids.new_tensor([height, width, 0, 0, height, width])
        return other


@dataclass(frozen=True)
class SdxlSpec(UnetImageSpec):
    """Stable Diffusion XL, without its refiner."""

    weights: str = HUB_ID  # hub id, or folder in diffusers' layout
    unet: str | None = None  # file whose UNet replaces the pipeline's, with diffusers' or the authors' keys
    height: int = 1024
    width: int = 1024
    empty_prompt: Literal["zeros", "encoded"] = "zeros"  # embedding of the empty prompt: zeros, or as encoded
    checkpoint_decoder: bool = True  # recompute the decoder in the backward pass: a seventh of its memory
    embeddings: Path | None = None  # folder written by `tastemaker embed`; text encoders are loaded only if needed
    seed: int = 0  # of random weights
    published: ClassVar[PublishedModel] = SDXL
    backbone_class = SdxlBackbone
    addition_embed_type = "text_time"
    text_encoders = ("text_encoder", "text_encoder_2")
    embedding_settings = {"empty": "empty_prompt"}
    layout: ClassVar[PipelineLayout] = PipelineLayout(
        "StableDiffusionXLPipeline", "unet", "lora_unet", sd15.sd_unet_to_original
    )

    def vae_components(self, components: PipelineComponents) -> PipelineComponents:
        placement = components.placement
        if placement.dtype == torch.float16 and components.config("vae").get("force_upcast", True):
            return self.components(replace(placement, dtype=torch.float32))  # the published VAE overflows in fp16
        return components

    def load_text_encoders(self, components: PipelineComponents) -> SdxlPromptEncoder:
        return SdxlPromptEncoder(components, self.empty_prompt)
