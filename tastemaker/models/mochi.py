"""Mochi 1 (Genmo 2024): a flow-matching transformer of video and text tokens whose time runs from noise to data."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from ..core.model_spec import PipelineLayout
from ..core.types import Placement
from .component_configs import T5_XXL, TINY_T5, ComponentConfigs
from .pipeline_components import PipelineComponents, PublishedModel
from .pretrained import WeightsSource
from .video_backbone import (
    ConditioningTensors,
    T5PromptEncoder,
    TextTokenCount,
    TileFrames,
    TileSize,
    VideoBackbone,
    VideoCompression,
    VideoSide,
    VideoTransformerSpec,
    latents_needed,
)
from .video_checkpoint_keys import mochi_to_original

COMPRESSION = VideoCompression(channels=12, spatial_ratio=8, temporal_ratio=6)
CONFIGS: ComponentConfigs = {
    "transformer": {
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "num_layers": 48,
        "pooled_projection_dim": 1536,
        "text_embed_dim": 4096,
        "max_sequence_length": 256,
    },
    "vae": {
        "encoder_block_out_channels": (64, 128, 256, 384),
        "decoder_block_out_channels": (128, 256, 512, 768),
        "layers_per_block": (3, 3, 4, 6, 3),
        "latent_channels": 12,
    },
    "text_encoder": T5_XXL,
}
TINY_CONFIGS: ComponentConfigs = {
    "transformer": {
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_layers": 2,
        "pooled_projection_dim": 16,
        "text_embed_dim": 32,
        "time_embed_dim": 4,
        "max_sequence_length": 16,
    },
    "vae": {
        "encoder_block_out_channels": (32, 32, 32, 32),
        "decoder_block_out_channels": (32, 32, 32, 32),
        "layers_per_block": (1, 1, 1, 1, 1),
        "add_attention_block": (False,) * 5,
    },
    "text_encoder": TINY_T5,
}
SOURCE = WeightsSource("genmo/mochi-1-preview", size="60 GB", license="Apache-2.0")
MOCHI = PublishedModel("mochi", (SOURCE,), TINY_CONFIGS, {SOURCE.hub: CONFIGS})


class MochiBackbone(VideoBackbone):
    """Predicts the velocity noise - clean of latents; the network's own is clean - noise, at time 1 - t."""

    network_class, vae_class = "MochiTransformer3DModel", "AutoencoderKLMochi"

    def __init__(self, spec: MochiSpec, placement: Placement) -> None:
        super().__init__(spec, placement)
        net: Any = self.net
        last = f"transformer_blocks.{len(net.transformer_blocks) - 1}.attn1."
        # The queries of the text in the last block are not used.
        self.traits = replace(self.traits, unused_parameters=(f"{last}add_q_proj.", f"{last}norm_added_q."))

    def call_network(self, x: Tensor, t: Tensor, conditioning: ConditioningTensors) -> Tensor:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # of its autocast to float32 for positions
            velocity: Tensor = self.net(
                hidden_states=x.transpose(1, 2),
                encoder_hidden_states=conditioning["prompt_embeds"],
                timestep=1000 * (1 - t),
                encoder_attention_mask=conditioning["attention_mask"],
                return_dict=False,
            )[0]
        return -velocity.transpose(1, 2)

    @staticmethod
    def decode_frames(vae: Any, raw: Tensor, frames: Sequence[int]) -> Tensor:
        """Decode up to the last frame that is needed: the decoder is causal, and its norms are of each frame."""
        return VideoBackbone.decode_frames(vae, raw[:, :, : latents_needed(frames, COMPRESSION.temporal_ratio)], frames)


@dataclass(frozen=True)
class MochiSpec(VideoTransformerSpec):
    """Mochi 1, text to video: a flow whose first half of steps removes a fortieth of the noise."""

    weights: str = SOURCE.hub  # hub id, or folder in diffusers' layout
    height: VideoSide = 480
    width: VideoSide = 848
    frames: int = 163  # 6 n + 1, at 30 frames per second
    max_text_tokens: TextTokenCount = 256  # sequence length of prompts, truncated or padded
    checkpoint_decoder: bool = True  # recompute the decoder in the backward pass
    decode_tile_size: TileSize | None = None  # pixels per side of tiles decoded one at a time; none: whole frames
    decode_tile_frames: TileFrames | None = None  # frames per tile decoded one at a time; none: whole clips
    embeddings: Path | None = None  # folder written by `tastemaker embed`; the text encoder is loaded only if needed
    seed: int = 0  # of random weights
    frame_rate: ClassVar[float] = 30.0
    published: ClassVar[PublishedModel] = MOCHI
    backbone_class = MochiBackbone
    compression = COMPRESSION
    layout: ClassVar[PipelineLayout] = PipelineLayout(
        "MochiPipeline", "transformer", "lora_unet", mochi_to_original, comfyui_layer=str
    )

    @property
    def decode_tile_latents(self) -> int | None:
        return COMPRESSION.tile_latents(self.decode_tile_frames)

    def load_text_encoders(self, components: PipelineComponents) -> T5PromptEncoder:
        return T5PromptEncoder(components, self.max_text_tokens, use_attention_mask=True)
