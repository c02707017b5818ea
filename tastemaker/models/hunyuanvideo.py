"""HunyuanVideo (Kong et al. 2024): a flow-matching video transformer conditioned by Llama and CLIP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.model_spec import PipelineLayout
from ..core.types import Placement
from .component_configs import CLIP_L, ComponentConfigs
from .pipeline_components import PipelineComponents, PublishedModel
from .pretrained import WeightsSource
from .text_encoders import TextEncoders
from .video_backbone import (
    ConditioningTensors,
    TextTokenCount,
    TileSize,
    VideoBackbone,
    VideoCompression,
    VideoSide,
    VideoTransformerSpec,
)
from .video_checkpoint_keys import hunyuanvideo_comfyui_layer, hunyuanvideo_to_original

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
HUNYUANVIDEO = PublishedModel("hunyuanvideo", (SOURCE,), TINY_CONFIGS, {SOURCE.hub: CONFIGS})


class HunyuanPromptEncoder(TextEncoders):
    """Llama's prompt_embeds [B, L, D] and attention_mask [B, L], and CLIP's pooled_prompt_embeds [B, P]."""

    def __init__(self, components: PipelineComponents, max_text_tokens: int) -> None:
        from transformers import CLIPTextModel, LlamaModel

        # Small random encoders read bytes: the template alone would exceed any length.
        self.template, self.prefix = ("{}", 0) if components.path is None else (TEMPLATE, TEMPLATE_PREFIX_TOKENS)
        length = max_text_tokens + self.prefix
        self.llama = components.load_text_encoder("text_encoder", LlamaModel, "tokenizer", length)
        self.clip = components.load_text_encoder("text_encoder_2", CLIPTextModel, "tokenizer_2", CLIP_MAX_TOKENS)
        self.text_encoders = self.llama, self.clip

    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        texts = [self.template.format(prompt) for prompt in prompts]
        llama = self.llama(texts, use_attention_mask=True, output_hidden_states=True)
        return {
            "prompt_embeds": llama.hidden_states[LLAMA_LAYER][:, self.prefix :],
            "attention_mask": self.llama.tokenize(texts)["attention_mask"].bool()[:, self.prefix :],
            "pooled_prompt_embeds": self.clip(prompts).pooler_output,
        }


class HunyuanVideoBackbone(VideoBackbone):
    """Predicts the velocity noise - clean of latents."""

    network_class, vae_class = "HunyuanVideoTransformer3DModel", "AutoencoderKLHunyuanVideo"

    def __init__(self, spec: HunyuanVideoSpec, placement: Placement) -> None:
        super().__init__(spec, placement)
        net: Any = self.net
        self.guidance_scale = spec.guidance_scale if net.config.guidance_embeds else None

    def call_network(self, x: Tensor, t: Tensor, conditioning: ConditioningTensors) -> Tensor:
        velocity: Tensor = self.net(
            hidden_states=x.transpose(1, 2),
            timestep=1000 * t,
            encoder_hidden_states=conditioning["prompt_embeds"],
            encoder_attention_mask=conditioning["attention_mask"].to(x.dtype),
            pooled_projections=conditioning["pooled_prompt_embeds"],
            guidance=None if self.guidance_scale is None else torch.full_like(t, 1000 * self.guidance_scale),
            return_dict=False,
        )[0]
        return velocity.transpose(1, 2)

    @staticmethod
    def decode_frames(vae: Any, raw: Tensor, frames: Sequence[int]) -> Tensor:
        """Decode overlapping tiles in time, as published, each blended into the one before; only those needed."""
        tile_frames: int = vae.tile_sample_min_num_frames
        stride: int = vae.tile_sample_stride_num_frames
        ratio: int = vae.temporal_compression_ratio
        overlap = tile_frames - stride
        if not vae.use_framewise_decoding or raw.shape[2] <= tile_frames // ratio:
            return VideoBackbone.decode_frames(vae, raw, frames)

        def decode_tile(tile: int) -> Tensor:
            first = tile * stride // ratio
            pixels: Tensor = vae.decoder(vae.post_quant_conv(raw[:, :, first : first + tile_frames // ratio + 1]))
            return pixels[:, :, 1:] if tile else pixels

        def blend(tile: int, index: int) -> Tensor:
            pixels = tiles[tile][:, :, index]
            blended = min(overlap, tiles[tile].shape[2])  # the last tile may be shorter than the overlap
            if tile == 0 or index >= blended:
                return pixels
            before = tiles[tile - 1][:, :, index - blended]
            return before * (1 - index / blended) + pixels * (index / blended)

        # The tile of each frame, and its index there; the first tile has one frame more.
        places = [(0, k) if k <= stride else ((k - 1) // stride, (k - 1) % stride) for k in frames]
        needed = {tile for tile, _ in places} | {tile - 1 for tile, index in places if tile and index < overlap}
        tiles = {tile: decode_tile(tile) for tile in sorted(needed)}
        return torch.stack([blend(*place) for place in places], 2)


@dataclass(frozen=True)
class HunyuanVideoSpec(VideoTransformerSpec):
    """HunyuanVideo, text to video: a flow with timestep shift 7 and distilled guidance."""

    weights: str = SOURCE.hub  # hub id, or folder in diffusers' layout
    height: VideoSide = 720
    width: VideoSide = 1280
    frames: int = 129  # 4 n + 1, at 24 frames per second
    guidance_scale: float = 6.0  # distilled guidance, an input of the network
    max_text_tokens: TextTokenCount = 256  # sequence length of prompts, truncated or padded
    checkpoint_decoder: bool = True  # recompute the decoder in the backward pass
    decode_tile_size: TileSize | None = None  # pixels per side of tiles decoded one at a time; none: whole frames
    embeddings: Path | None = None  # folder written by `tastemaker embed`; text encoders are loaded only if needed
    seed: int = 0  # of random weights
    frame_rate: ClassVar[float] = 24.0
    published: ClassVar[PublishedModel] = HUNYUANVIDEO
    backbone_class = HunyuanVideoBackbone
    compression = COMPRESSION
    text_encoders = ("text_encoder", "text_encoder_2")
    layout: ClassVar[PipelineLayout] = PipelineLayout(
        "HunyuanVideoPipeline",
        "transformer",
        "lora_unet",
        hunyuanvideo_to_original,
        comfyui_layer=hunyuanvideo_comfyui_layer,
    )

    def load_text_encoders(self, components: PipelineComponents) -> HunyuanPromptEncoder:
        return HunyuanPromptEncoder(components, self.max_text_tokens)
