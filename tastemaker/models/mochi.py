"""Mochi 1 (Genmo 2024): a flow-matching transformer of video and text tokens whose time runs from noise to data."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from ..core.model_spec import PipelineLayout
from ..core.types import Placement
from .checkpoint_keys import reject_unknown_names
from .component_configs import T5_XXL, TINY_T5, ComponentConfigs
from .pipeline_components import TINY, PipelineComponents, PublishedModel
from .pretrained import WeightsSource
from .text_encoders import CachedTextEncoder
from .video_backbone import (
    VIDEO_TRAITS,
    ConditioningTensors,
    DecodeFrames,
    FrozenVideoVae,
    T5PromptEncoder,
    TextTokenCount,
    VideoBackbone,
    VideoCompression,
    VideoSide,
    VideoSpec,
    check_video_size,
    decode_whole_clip,
    latents_needed,
)

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
MOCHI = PublishedModel((SOURCE,), TINY_CONFIGS, {SOURCE.hub: CONFIGS})


def predict_velocity(net: nn.Module, x: Tensor, t: Tensor, conditioning: ConditioningTensors) -> Tensor:
    """Return the velocity noise - clean; the network's own is clean - noise, at time 1 - t."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # it uses autocast to float32 for positions
        velocity: Tensor = net(
            hidden_states=x.transpose(1, 2),
            encoder_hidden_states=conditioning["words"],
            timestep=1000 * (1 - t),
            encoder_attention_mask=conditioning["seen"],
            return_dict=False,
        )[0]
    return -velocity.transpose(1, 2)


def mochi_decoder(net: Any) -> DecodeFrames:
    """Decode up to the last frame that is needed: the decoder is causal, and its norms are of each frame."""

    def decode_frames(raw: Tensor, frames: Sequence[int]) -> Tensor:
        return decode_whole_clip(net, raw[:, :, : latents_needed(frames, COMPRESSION.temporal_ratio)], frames)

    return decode_frames


@dataclass(frozen=True)
class MochiSpec(VideoSpec):
    """Mochi 1, text to video: a flow whose first half of steps removes a fortieth of the noise."""

    weights: str = SOURCE.hub  # hub id, or folder in diffusers' layout
    height: VideoSide = 480
    width: VideoSide = 848
    frames: int = 163  # 6 n + 1, at 30 frames per second
    max_text_tokens: TextTokenCount = 256  # sequence length of prompts, truncated or padded
    checkpoint_decoder: bool = True  # recompute the decoder in the backward pass
    embeddings: Path | None = None  # folder written by `tastemaker embed`; the text encoder is loaded only if needed
    seed: int = 0  # of random weights
    published: ClassVar[PublishedModel] = MOCHI
    layout: ClassVar[PipelineLayout] = PipelineLayout("MochiPipeline", "transformer", "", reject_unknown_names)

    def __post_init__(self) -> None:
        check_video_size(
            self.frames, self.height, self.width, COMPRESSION.temporal_ratio, 2 * COMPRESSION.spatial_ratio
        )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return COMPRESSION.shape(self.frames, self.height, self.width)

    def cached_prompt_encoder(self, components: PipelineComponents) -> CachedTextEncoder:
        return components.cache_text_encoders(
            lambda: T5PromptEncoder(components, self.max_text_tokens, use_attention_mask=True),
            ("text_encoder",),
            {"model": "mochi", "words": self.max_text_tokens},
            self.embeddings,
        )

    def load(self, placement: Placement) -> VideoBackbone:
        from diffusers import AutoencoderKLMochi, MochiTransformer3DModel

        components = self.components(placement)
        net: Any = components.load_trainable("transformer", MochiTransformer3DModel)
        last = f"transformer_blocks.{len(net.transformer_blocks) - 1}.attn1."
        # The queries of the text in the last block are not used.
        traits = replace(VIDEO_TRAITS, unused_parameters=(f"{last}add_q_proj.", f"{last}norm_added_q."))
        vae = components.load_frozen("vae", AutoencoderKLMochi, gradient_checkpointing=self.checkpoint_decoder)
        autoencoder = FrozenVideoVae.from_network(vae, mochi_decoder(vae))
        prompt_encoder = self.cached_prompt_encoder(components)
        return VideoBackbone(net, predict_velocity, autoencoder, prompt_encoder, self, traits)

    def tiny(self) -> MochiSpec:
        tokens = min(self.max_text_tokens, 16)
        return replace(self, weights=TINY, height=32, width=32, frames=7, max_text_tokens=tokens, embeddings=None)
