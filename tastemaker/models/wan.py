"""Wan 2.1 and 2.2 (Alibaba 2025): a flow-matching video transformer, or two of them for high and low noise."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core.model_spec import PipelineLayout
from ..core.registry import ConfigError
from ..core.types import Placement
from .component_configs import T5_XXL, TINY_T5, ComponentConfigs
from .image_backbone import checkpoint_if
from .pipeline_components import PipelineComponents, PublishedModel
from .pretrained import WeightsSource
from .text_encoders import TextEncoders
from .video_backbone import (
    ConditioningTensors,
    DecodeFrames,
    FrozenVideoVae,
    TextTokenCount,
    TileSize,
    VideoBackbone,
    VideoCompression,
    VideoSide,
    VideoTransformerSpec,
    encode_with_t5,
    latents_needed,
)
from .video_checkpoint_keys import WAN_RULES, wan_to_original

TEMPORAL_RATIO = 4  # frames per latent, after the first
EXPERT_PREFIXES = (("transformer", "high."), ("transformer_2", "low."))  # components of 2.2, and their keys' prefixes
WAN_1B: ComponentConfigs = {
    "transformer": {
        "num_attention_heads": 12,
        "attention_head_dim": 128,
        "ffn_dim": 8960,
        "num_layers": 30,
        "text_dim": 4096,
    },
    "vae": {"base_dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2},
    "text_encoder": {**T5_XXL, "vocab_size": 256384},
}
WAN_14B: ComponentConfigs = {
    **WAN_1B,
    "transformer": {**WAN_1B["transformer"], "num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40},
}
WAN_5B: ComponentConfigs = {
    **WAN_1B,
    "transformer": {
        **WAN_1B["transformer"],
        "in_channels": 48,
        "out_channels": 48,
        "num_attention_heads": 24,
        "ffn_dim": 14336,
    },
    "vae": {
        **WAN_1B["vae"],
        "base_dim": 160,
        "decoder_base_dim": 256,
        "z_dim": 48,
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_spatial": 16,
        "latents_mean": [0.0] * 48,
        "latents_std": [1.0] * 48,
    },
}
TINY_TRANSFORMER = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "num_layers": 2,
    "rope_max_seq_len": 32,
    "text_dim": 32,
    "freq_dim": 16,
    "ffn_dim": 32,
}
TINY_CONFIGS: ComponentConfigs = {
    "transformer": TINY_TRANSFORMER,
    "transformer_2": TINY_TRANSFORMER,
    "vae": {"base_dim": 4, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1},
    "text_encoder": TINY_T5,
}
WAN = PublishedModel(
    "wan",
    (
        WeightsSource("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", size="29 GB", license="Apache-2.0"),
        WeightsSource("Wan-AI/Wan2.1-T2V-14B-Diffusers", size="80 GB", license="Apache-2.0"),
        WeightsSource("Wan-AI/Wan2.2-TI2V-5B-Diffusers", size="34 GB", license="Apache-2.0"),
        WeightsSource("Wan-AI/Wan2.2-T2V-A14B-Diffusers", size="126 GB", license="Apache-2.0"),
    ),
    TINY_CONFIGS,
    {
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": WAN_1B,
        "Wan-AI/Wan2.1-T2V-14B-Diffusers": WAN_14B,
        "Wan-AI/Wan2.2-TI2V-5B-Diffusers": WAN_5B,
        "Wan-AI/Wan2.2-T2V-A14B-Diffusers": {**WAN_14B, "transformer_2": WAN_14B["transformer"]},
    },
)


class NoiseLevelExperts(nn.Module):
    """The two experts of Wan 2.2: `high` for timesteps from 1000 * boundary up, `low` for the others."""

    def __init__(self, high: nn.Module, low: nn.Module, boundary: float) -> None:
        super().__init__()
        self.high, self.low, self.boundary = high, low, boundary

    def forward(
        self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, return_dict: bool = False
    ) -> tuple[Tensor]:
        is_high, parts, places = timestep >= 1000 * self.boundary, [], []
        for expert, mask in ((self.high, is_high), (self.low, ~is_high)):
            if bool(mask.any()):
                rows = mask.nonzero()[:, 0]
                parts += [
                    expert(hidden_states[rows], timestep[rows], encoder_hidden_states[rows], return_dict=False)[0]
                ]
                places += [rows]
        return (torch.cat(parts)[torch.cat(places).argsort()],)


class WanPromptEncoder(TextEncoders):
    """UMT5's features, zero at padding: prompt_embeds [B, L, D]."""

    def __init__(self, components: PipelineComponents, max_text_tokens: int) -> None:
        from transformers import UMT5EncoderModel

        self.t5 = components.load_text_encoder("text_encoder", UMT5EncoderModel, "tokenizer", max_text_tokens)
        self.text_encoders = (self.t5,)

    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        features = encode_with_t5(self.t5, [clean_prompt(prompt) for prompt in prompts], use_attention_mask=True)
        return {"prompt_embeds": features["prompt_embeds"] * features["attention_mask"][..., None]}


def clean_prompt(text: str) -> str:
    """Remove HTML entities and repeated spaces from a prompt, as diffusers' Wan pipeline does."""
    return " ".join(html.unescape(html.unescape(text)).split())


class WanBackbone(VideoBackbone):
    """Predicts the velocity noise - clean of latents, with one transformer or two that take turns."""

    key_rules = WAN_RULES
    spec: WanSpec

    def __init__(self, spec: WanSpec, placement: Placement) -> None:
        super().__init__(spec, placement)
        self.traits = replace(self.traits, data_dependent_forward=spec.boundary_ratio is not None)

    def load_network(self, components: PipelineComponents) -> nn.Module:
        from diffusers import WanTransformer3DModel

        boundary_ratio = self.spec.boundary_ratio
        if components.full_size and boundary_ratio is not None and "transformer_2" not in components.configs:
            raise ConfigError(
                f"model.boundary_ratio: '{self.spec.weights:.100}' has one transformer; remove model.boundary_ratio "
                "[TM542]"
            )
        if boundary_ratio is None and self.spec.transformer_2 is not None:
            raise ConfigError(
                f"model.transformer_2: '{self.spec.transformer_2:.200}' is for low noise, but the time of the switch "
                "between two transformers is not set; set model.boundary_ratio, or remove model.transformer_2 [TM2505]"
            )
        first = components.load_transformer(WanTransformer3DModel, self.spec.transformer, self.to_diffusers_keys)
        if boundary_ratio is not None:
            file = self.spec.transformer_2
            second = components.load_transformer(WanTransformer3DModel, file, self.to_diffusers_keys, "transformer_2")
            return NoiseLevelExperts(first, second, boundary_ratio)
        if components.path is not None and (components.path / "transformer_2").is_dir():
            raise ConfigError(
                f"model.boundary_ratio: {components.path} contains two transformers, so the time of the switch "
                "between them is needed; set model.boundary_ratio (0.875 for Wan 2.2 T2V-A14B) [TM543]"
            )
        return first

    def load_vae(self, components: PipelineComponents) -> FrozenVideoVae:
        """Load the VAE; refuse one of another size before its latents meet a network that cannot read them."""
        from diffusers import AutoencoderKLWan

        vae, spec = components.load_frozen("vae", AutoencoderKLWan), self.spec
        channels, factor = vae.config.z_dim, vae.config.scale_factor_spatial
        if (channels, factor) != (spec.latent_channels, spec.downsample_factor):
            raise ConfigError(
                f"model: the autoencoder of '{spec.weights:.200}' has {channels} channels and downsample factor "
                f"{factor}, but the settings are {spec.latent_channels} and {spec.downsample_factor}; set "
                f"model.latent_channels={channels} and model.downsample_factor={factor} [TM544]"
            )
        return FrozenVideoVae.from_network(vae, wan_decoder(vae, spec.checkpoint_decoder))

    def call_network(self, x: Tensor, t: Tensor, conditioning: ConditioningTensors) -> Tensor:
        velocity: Tensor = self.net(
            hidden_states=x.transpose(1, 2),
            timestep=1000 * t,
            encoder_hidden_states=conditioning["prompt_embeds"],
            return_dict=False,
        )[0]
        return velocity.transpose(1, 2)


def wan_decoder(net: Any, checkpoint_decoder: bool) -> DecodeFrames:
    """Decode latent by latent, as published, up to the last frame that is needed.

    The causal convolutions pass a large cache of features from latent to latent. With checkpointing, latents are
    recomputed in groups of about sqrt(n), and one by one within a group: caches are kept for the groups, and for the
    latents of the group in the backward pass, 2 sqrt(n) in all.
    """
    decoder, num_slots = net.decoder, net._cached_conv_counts["decoder"]

    def decode_latent(latent: Tensor, first: bool, *cache: Any) -> tuple[Any, ...]:
        new_cache = list(cache)  # replaced in place by the decoder
        return decoder(latent, feat_cache=new_cache, feat_idx=[0], first_chunk=first), *new_cache

    def decode_group(latents: Tensor, first: bool, *cache: Any) -> tuple[Any, ...]:
        return decode_chunks(decode_latent, latents, 1, first, cache)

    def decode_chunks(
        decode: Any, latents: Tensor, size: int, first: bool, initial_cache: Sequence[Any]
    ) -> tuple[Any, ...]:
        cache, chunks = list(initial_cache), []
        for i, chunk in enumerate(torch.split(latents, size, 2)):
            pixels, *cache = checkpoint_if(decode, checkpoint_decoder, chunk, first and i == 0, *cache)
            chunks.append(pixels)
        return torch.cat(chunks, 2), *cache

    def decode_frames(raw: Tensor, frames: Sequence[int]) -> Tensor:
        x = net.post_quant_conv(raw[:, :, : latents_needed(frames, TEMPORAL_RATIO)])
        pixels = decode_chunks(decode_group, x, math.isqrt(x.shape[2]), True, [None] * num_slots)[0][:, :, list(frames)]
        return unpatchify(pixels, net.config.patch_size or 1).clamp(-1, 1)

    return decode_frames


def unpatchify(x: Tensor, size: int) -> Tensor:
    """Move squares of pixels from channels to space: [B, C size^2, F, H, W] to [B, C, F, H size, W size]."""
    b, c, f, h, w = x.shape
    split = x.view(b, c // size**2, size, size, f, h, w)
    return split.permute(0, 1, 4, 5, 3, 6, 2).reshape(b, c // size**2, f, h * size, w * size)


@dataclass(frozen=True)
class WanSpec(VideoTransformerSpec):
    """Wan 2.1 or 2.2, text to video: a flow with timestep shift 3 at 480p and 5 at 720p."""

    weights: str = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"  # hub id, or folder in diffusers' layout
    transformer: str | None = None  # file with other weights of the network, with diffusers' or the authors' keys
    transformer_2: str | None = None  # the same for low noise, of 2.2; `transformer` is then that for high noise
    height: VideoSide = 480
    width: VideoSide = 832
    frames: int = 81  # 4 n + 1, at 16 frames per second
    boundary_ratio: float | None = None  # of 2.2: time below which the second transformer runs, 0.875 for T2V-A14B
    latent_channels: int = 16  # 48 for Wan2.2-TI2V-5B
    downsample_factor: int = 8  # pixels per latent and side; 16 for Wan2.2-TI2V-5B
    max_text_tokens: TextTokenCount = 512  # sequence length of prompts, truncated or padded
    checkpoint_decoder: bool = True  # recompute the decoder in the backward pass, latent by latent
    decode_tile_size: TileSize | None = None  # pixels per side of tiles decoded one at a time; none: whole frames
    embeddings: Path | None = None  # folder written by `tastemaker embed`; the text encoder is loaded only if needed
    seed: int = 0  # of random weights
    supports_context_parallel: ClassVar[bool] = True
    published: ClassVar[PublishedModel] = WAN
    backbone_class: ClassVar[type[VideoBackbone]] = WanBackbone

    @property
    def frame_rate(self) -> float:
        return 24.0 if "TI2V" in self.weights else 16.0

    @property
    def compression(self) -> VideoCompression:
        return VideoCompression(self.latent_channels, self.downsample_factor, TEMPORAL_RATIO)

    @property
    def layout(self) -> PipelineLayout:
        prefixes = () if self.boundary_ratio is None else EXPERT_PREFIXES
        return PipelineLayout(
            "WanPipeline",
            "transformer",
            "lora_unet",
            wan_to_original,
            comfyui_layer=str,
            component_prefixes=prefixes,
        )

    def load_text_encoders(self, components: PipelineComponents) -> WanPromptEncoder:
        return WanPromptEncoder(components, self.max_text_tokens)

    def tiny(self) -> WanSpec:
        return replace(super().tiny(), latent_channels=16, downsample_factor=8)
