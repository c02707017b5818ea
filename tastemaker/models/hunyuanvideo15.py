"""HunyuanVideo 1.5 (Tencent 2025): a flow-matching video transformer conditioned by Qwen2.5-VL and by quoted text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.model_spec import PipelineLayout
from ..core.types import Placement
from .component_configs import ComponentConfigs
from .pipeline_components import JOINT_ATTENTION_LAYERS, PipelineComponents, PublishedModel
from .pretrained import WeightsSource
from .sequential_offload import temporarily_on_device
from .text_encoders import TextEncoder, TextEncoders
from .video_backbone import (
    ConditioningTensors,
    FrozenVideoVae,
    TextTokenCount,
    TileFrames,
    TileSize,
    VideoBackbone,
    VideoCompression,
    VideoSide,
    VideoTransformerSpec,
    latents_needed,
)
from .video_checkpoint_keys import hunyuanvideo15_to_comfyui, hunyuanvideo_comfyui_layer

COMPRESSION = VideoCompression(channels=32, spatial_ratio=16, temporal_ratio=4, patch_size=1)
GLYPH_TOKENS = 256  # of the text in quotation marks
TINY_GLYPH_TOKENS = 8
QWEN_LAYER = -3  # index of the hidden states that condition the transformer
CONFIGS: ComponentConfigs = {
    "transformer": {"task_type": "t2v"},  # the other settings are diffusers' defaults
    "vae": {},
    "text_encoder": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "text_encoder_2": {
        "vocab_size": 1510,
        "d_model": 1472,
        "d_kv": 64,
        "d_ff": 3584,
        "num_layers": 12,
        "num_heads": 6,
        "feed_forward_proj": "gated-gelu",
    },
}
TINY_CONFIGS: ComponentConfigs = {
    "transformer": {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "num_layers": 2,
        "num_refiner_layers": 1,
        "mlp_ratio": 2.0,
        "text_embed_dim": 16,
        "text_embed_2_dim": 16,
        "image_embed_dim": 8,
        "rope_axes_dim": (4, 4, 4),
        "task_type": "t2v",
    },
    "vae": {"block_out_channels": (32, 32, 32, 32, 64), "layers_per_block": 1},
    "text_encoder": {
        "vocab_size": 99,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6},
        "pad_token_id": 0,
    },
    "text_encoder_2": {
        "vocab_size": 384,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 1,
        "num_heads": 2,
    },
}
LICENSE = "Tencent Hunyuan Community License"
SOURCES = tuple(
    WeightsSource(f"hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-{name}", size="35 GB", license=LICENSE)
    for name in ("480p_t2v", "720p_t2v")
)
HUNYUANVIDEO15 = PublishedModel("hunyuanvideo15", SOURCES, TINY_CONFIGS, {source.hub: CONFIGS for source in SOURCES})


class Hunyuan15PromptEncoder(TextEncoders):
    """Qwen2.5-VL's features of a prompt, and ByT5's of the text that the prompt quotes.

    prompt_embeds [B, L, D] and attention_mask [B, L]; glyph_embeds [B, 256, G] and glyph_mask [B, 256].
    """

    def __init__(self, components: PipelineComponents, max_text_tokens: int) -> None:
        from diffusers import HunyuanVideo15Pipeline
        from transformers import Qwen2_5_VLTextModel, T5EncoderModel

        self.published: Any = HunyuanVideo15Pipeline
        self.has_template = components.path is not None
        self.qwen = components.load_text_encoder("text_encoder", Qwen2_5_VLTextModel, "tokenizer", max_text_tokens)
        glyph_tokens = GLYPH_TOKENS if self.has_template else TINY_GLYPH_TOKENS
        self.byt5 = components.load_text_encoder("text_encoder_2", T5EncoderModel, "tokenizer_2", glyph_tokens)
        self.text_encoders = self.qwen, self.byt5

    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        embeds, mask = self._encode_prompts(prompts)
        glyphs, glyph_mask = self._encode_quotes(prompts)
        return {
            "prompt_embeds": embeds,
            "attention_mask": mask.bool(),
            "glyph_embeds": glyphs,
            "glyph_mask": glyph_mask.bool(),
        }

    def _encode_prompts(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        qwen = self.qwen
        if not self.has_template:  # small random encoders read bytes: the template alone would exceed any length
            states = qwen(prompts, use_attention_mask=True, output_hidden_states=True).hidden_states
            return states[QWEN_LAYER], qwen.tokenize(prompts)["attention_mask"]
        with encoder_on_device(qwen):
            embeds, mask = self.published._get_mllm_prompt_embeds(
                qwen.net, qwen.tokenizer, prompts, qwen.device, tokenizer_max_length=qwen.max_length
            )
        return embeds, mask

    def _encode_quotes(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        byt5 = self.byt5
        if not self.has_template:
            quotes = [f'"{prompt}"' for prompt in prompts]
            return byt5(quotes, use_attention_mask=True).last_hidden_state, byt5.tokenize(quotes)["attention_mask"]
        with encoder_on_device(byt5):
            embeds, mask = self.published._get_byt5_prompt_embeds(
                byt5.tokenizer, byt5.net, prompts, byt5.device, tokenizer_max_length=byt5.max_length
            )
        return embeds, mask


@contextmanager
def encoder_on_device(encoder: TextEncoder) -> Iterator[None]:
    """Within the block, a text encoder is on the device of the run and computes in its own dtype."""
    with torch.autocast(encoder.device.type, enabled=False), temporarily_on_device(encoder.net, encoder.device):
        yield


class HunyuanVideo15Backbone(VideoBackbone):
    """Predicts the velocity noise - clean of latents, from text alone: the channels of a source image are zero."""

    network_class, vae_class = "HunyuanVideo15Transformer3DModel", "AutoencoderKLHunyuanVideo15"

    def __init__(self, spec: HunyuanVideo15Spec, placement: Placement) -> None:
        super().__init__(spec, placement)
        net: Any = self.net
        last = f"transformer_blocks.{len(net.transformer_blocks) - 1}."
        # The text in the last block is not read; prompts have no image, and most of them quote no text.
        unused = ("attn.add_q_proj.", "attn.norm_added_q.", "attn.to_add_out.", "ff_context.")
        self.traits = replace(
            self.traits,
            lora_targets=JOINT_ATTENTION_LAYERS,
            unused_parameters=(*(last + layer for layer in unused), "image_embedder.", "context_embedder_2."),
        )

    def load_vae(self, components: PipelineComponents) -> FrozenVideoVae:
        """Load the VAE, to encode and decode clip by clip: its attention mask is that of one clip."""
        autoencoder = super().load_vae(components)
        autoencoder.net.enable_slicing()
        return autoencoder

    def call_network(self, x: Tensor, t: Tensor, conditioning: ConditioningTensors) -> Tensor:
        image = x.new_zeros(*x.shape[:2], x.shape[2] + 1, *x.shape[3:])  # latents of a source image and their mask
        net: Any = self.net
        velocity: Tensor = net(
            hidden_states=torch.cat([x, image], 2).transpose(1, 2),
            timestep=1000 * t,
            encoder_hidden_states=conditioning["prompt_embeds"],
            encoder_attention_mask=conditioning["attention_mask"],
            encoder_hidden_states_2=conditioning["glyph_embeds"],
            encoder_attention_mask_2=conditioning["glyph_mask"],
            # No tokens of an image: diffusers' pipeline passes 729, which are masked.
            image_embeds=x.new_zeros(len(x), 0, net.config.image_embed_dim),
            return_dict=False,
        )[0]
        return velocity.transpose(1, 2)

    @staticmethod
    def decode_frames(vae: Any, raw: Tensor, frames: Sequence[int]) -> Tensor:
        """Decode up to the last frame that is needed: the decoder is causal, and its norms are of each position."""
        return VideoBackbone.decode_frames(vae, raw[:, :, : latents_needed(frames, COMPRESSION.temporal_ratio)], frames)


@dataclass(frozen=True)
class HunyuanVideo15Spec(VideoTransformerSpec):
    """HunyuanVideo 1.5, text to video: a flow with timestep shift 5 at 480p and 9 at 720p."""

    weights: str = SOURCES[0].hub  # hub id, or folder in diffusers' layout
    height: VideoSide = 480
    width: VideoSide = 848
    frames: int = 121  # 4 n + 1, at 24 frames per second
    max_text_tokens: TextTokenCount = 1000  # sequence length of prompts, truncated or padded
    checkpoint_decoder: bool = True  # recompute the decoder in the backward pass
    decode_tile_size: TileSize | None = None  # pixels per side of tiles decoded one at a time; none: whole frames
    decode_tile_frames: TileFrames | None = None  # frames per tile decoded one at a time; none: whole clips
    embeddings: Path | None = None  # folder written by `tastemaker embed`; text encoders are loaded only if needed
    seed: int = 0  # of random weights
    frame_rate: ClassVar[float] = 24.0
    published: ClassVar[PublishedModel] = HUNYUANVIDEO15
    backbone_class = HunyuanVideo15Backbone
    compression = COMPRESSION
    text_encoders = ("text_encoder", "text_encoder_2")
    # diffusers' pipeline has no loader of adapters: they are added to its weights.
    layout: ClassVar[PipelineLayout] = PipelineLayout(
        "HunyuanVideo15Pipeline",
        "transformer",
        "lora_unet",
        hunyuanvideo15_to_comfyui,
        lora_loader="merge",
        comfyui_layer=hunyuanvideo_comfyui_layer,
    )

    @property
    def decode_tile_latents(self) -> int | None:
        return COMPRESSION.tile_latents(self.decode_tile_frames)

    def load_text_encoders(self, components: PipelineComponents) -> Hunyuan15PromptEncoder:
        return Hunyuan15PromptEncoder(components, self.max_text_tokens)
