"""HunyuanVideo (Kong et al. 2024): a flow-matching video transformer conditioned by Llama and CLIP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core.model_spec import PipelineLayout
from ..core.types import Placement
from .checkpoint_keys import reject_unknown_names
from .component_configs import CLIP_L, ComponentConfigs
from .pipeline_components import TINY, PipelineComponents, PublishedModel
from .pretrained import WeightsSource
from .text_encoders import CachedTextEncoder, TextEncoder, TextEncoders
from .video_backbone import (
    ConditioningTensors,
    DecodeFrames,
    FrozenVideoVae,
    TextTokenCount,
    VideoBackbone,
    VideoCompression,
    VideoSide,
    VideoSpec,
    check_video_size,
    decode_whole_clip,
)

COMPRESSION = VideoCompression(channels=16, spatial_ratio=8, temporal_ratio=4)
CLIP_MAX_TOKENS = 77
LLAMA_LAYER = -3  # index of the hidden states that condition the transformer
TEMPLATE_PREFIX_TOKENS = 95  # template tokens before the prompt, which the transformer does not get
TEMPLATE = (
    "<|start_header_id|>system<|end_header_id|>\n\nDescribe the video by detailing the following aspects: "
    "1. The main content and theme of the video."
    "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
    "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects."
    "4. background environment, light, style and atmosphere."
    "5. camera angles, movements, and transitions used in the video:<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
)
CONFIGS: ComponentConfigs = {
    "transformer": {
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "num_layers": 20,
        "num_single_layers": 40,
        "num_refiner_layers": 2,
        "guidance_embeds": True,
        "text_embed_dim": 4096,
        "pooled_projection_dim": 768,
        "rope_axes_dim": (16, 56, 56),
    },
    "vae": {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 16},
    "text_encoder": {
        "vocab_size": 128320,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "text_encoder_2": CLIP_L,
}
TINY_TEXT = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
TINY_CONFIGS: ComponentConfigs = {
    "transformer": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "num_refiner_layers": 1,
        "mlp_ratio": 2.0,
        "text_embed_dim": 16,
        "pooled_projection_dim": 16,
        "rope_axes_dim": (4, 6, 6),
    },
    "vae": {"block_out_channels": (4, 4, 4, 4), "layers_per_block": 1, "norm_num_groups": 2},
    "text_encoder": {
        **TINY_TEXT,
        "vocab_size": 99,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
    },
    "text_encoder_2": {**TINY_TEXT, "vocab_size": 600, "num_hidden_layers": 1, "bos_token_id": 0, "eos_token_id": 2},
}
SOURCE = WeightsSource("hunyuanvideo-community/HunyuanVideo", size="42 GB", license="Tencent Hunyuan Community License")
HUNYUANVIDEO = PublishedModel((SOURCE,), TINY_CONFIGS, {SOURCE.hub: CONFIGS})


class HunyuanPromptEncoder(TextEncoders):
    """Llama's features, words [B, L, D], their mask, seen [B, L], and CLIP's pooled output, pooled [B, P]."""

    def __init__(self, components: PipelineComponents, max_text_tokens: int) -> None:
        from transformers import CLIPTextModel, LlamaModel

        # Small random encoders read bytes: the template alone would exceed any length.
        self.template, self.prefix = ("{}", 0) if components.path is None else (TEMPLATE, TEMPLATE_PREFIX_TOKENS)
        length = max_text_tokens + self.prefix
        self.llama = components.load_text_encoder("text_encoder", LlamaModel, "tokenizer", length)
        self.clip = components.load_text_encoder("text_encoder_2", CLIPTextModel, "tokenizer_2", CLIP_MAX_TOKENS)

    @property
    def text_encoders(self) -> tuple[TextEncoder, ...]:
        return self.llama, self.clip

    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        texts = [self.template.format(prompt) for prompt in prompts]
        llama = self.llama(texts, use_attention_mask=True, output_hidden_states=True)
        return {
            "words": llama.hidden_states[LLAMA_LAYER][:, self.prefix :],
            "seen": self.llama.tokenize(texts)["attention_mask"].bool()[:, self.prefix :],
            "pooled": self.clip(prompts).pooler_output,
        }


def predict_velocity(
    guidance_scale: float | None, net: nn.Module, x: Tensor, t: Tensor, conditioning: ConditioningTensors
) -> Tensor:
    """Return the velocity noise - clean of latents [B, f, C, h, w]."""
    velocity: Tensor = net(
        hidden_states=x.transpose(1, 2),
        timestep=1000 * t,
        encoder_hidden_states=conditioning["words"],
        encoder_attention_mask=conditioning["seen"].to(x.dtype),
        pooled_projections=conditioning["pooled"],
        guidance=None if guidance_scale is None else torch.full_like(t, 1000 * guidance_scale),
        return_dict=False,
    )[0]
    return velocity.transpose(1, 2)


def hunyuan_decoder(net: Any) -> DecodeFrames:
    """Decode overlapping tiles in time, as published, each blended into the one before; only those that are needed."""
    tile_frames: int = net.tile_sample_min_num_frames
    stride: int = net.tile_sample_stride_num_frames
    ratio: int = net.temporal_compression_ratio
    overlap = tile_frames - stride

    def decode_tile(raw: Tensor, tile: int) -> Tensor:
        first = tile * stride // ratio
        pixels: Tensor = net.decoder(net.post_quant_conv(raw[:, :, first : first + tile_frames // ratio + 1]))
        return pixels[:, :, 1:] if tile else pixels

    def locate(frame: int) -> tuple[int, int]:
        """Return the tile of a frame and its index there; the first tile has one frame more."""
        return (0, frame) if frame <= stride else ((frame - 1) // stride, (frame - 1) % stride)

    def blend(tiles: dict[int, Tensor], frame: int) -> Tensor:
        tile, index = locate(frame)
        pixels = tiles[tile][:, :, index]
        blended = min(overlap, tiles[tile].shape[2])  # the last tile may be shorter than the overlap
        if tile == 0 or index >= blended:
            return pixels
        before = tiles[tile - 1][:, :, index - blended]
        return before * (1 - index / blended) + pixels * (index / blended)

    def decode_frames(raw: Tensor, frames: Sequence[int]) -> Tensor:
        if not net.use_framewise_decoding or raw.shape[2] <= tile_frames // ratio:
            return decode_whole_clip(net, raw, frames)
        places = {locate(frame) for frame in frames}
        needed = {tile for tile, _ in places} | {tile - 1 for tile, index in places if tile and index < overlap}
        tiles = {tile: decode_tile(raw, tile) for tile in sorted(needed)}
        return torch.stack([blend(tiles, frame) for frame in frames], 2)

    return decode_frames


@dataclass(frozen=True)
class HunyuanVideoSpec(VideoSpec):
    """HunyuanVideo, text to video: a flow with timestep shift 7 and distilled guidance."""

    weights: str = SOURCE.hub  # hub id, or folder in diffusers' layout
    height: VideoSide = 720
    width: VideoSide = 1280
    frames: int = 129  # 4 n + 1, at 24 frames per second
    guidance_scale: float = 6.0  # distilled guidance, an input of the network
    max_text_tokens: TextTokenCount = 256  # sequence length of prompts, truncated or padded
    checkpoint_decoder: bool = True  # recompute the decoder in the backward pass
    embeddings: Path | None = None  # folder written by `tastemaker embed`; text encoders are loaded only if needed
    seed: int = 0  # of random weights
    published: ClassVar[PublishedModel] = HUNYUANVIDEO
    layout: ClassVar[PipelineLayout] = PipelineLayout("HunyuanVideoPipeline", "transformer", "", reject_unknown_names)

    def __post_init__(self) -> None:
        check_video_size(
            self.frames, self.height, self.width, COMPRESSION.temporal_ratio, 2 * COMPRESSION.spatial_ratio
        )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return COMPRESSION.shape(self.frames, self.height, self.width)

    def cached_prompt_encoder(self, components: PipelineComponents) -> CachedTextEncoder:
        return components.cache_text_encoders(
            lambda: HunyuanPromptEncoder(components, self.max_text_tokens),
            ("text_encoder", "text_encoder_2"),
            {"model": "hunyuanvideo", "words": self.max_text_tokens},
            self.embeddings,
        )

    def load(self, placement: Placement) -> VideoBackbone:
        from diffusers import AutoencoderKLHunyuanVideo, HunyuanVideoTransformer3DModel

        components = self.components(placement)
        net: Any = components.load_trainable("transformer", HunyuanVideoTransformer3DModel)
        vae = components.load_frozen("vae", AutoencoderKLHunyuanVideo, gradient_checkpointing=self.checkpoint_decoder)
        autoencoder = FrozenVideoVae.from_network(vae, hunyuan_decoder(vae))
        call = partial(predict_velocity, self.guidance_scale if net.config.guidance_embeds else None)
        return VideoBackbone(net, call, autoencoder, self.cached_prompt_encoder(components), self)

    def tiny(self) -> HunyuanVideoSpec:
        tokens = min(self.max_text_tokens, 16)
        return replace(self, weights=TINY, height=32, width=32, frames=5, max_text_tokens=tokens, embeddings=None)
