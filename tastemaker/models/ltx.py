"""LTX-Video (HaCohen et al. 2024): a small flow-matching transformer on highly compressed video latents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from ..core.model_spec import PipelineLayout
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
)
from .video_checkpoint_keys import LTX_RULES, ltx_to_original

COMPRESSION = VideoCompression(channels=128, spatial_ratio=32, temporal_ratio=8, patch_size=1)
CONFIGS: ComponentConfigs = {
    "transformer": {
        "num_attention_heads": 32,
        "attention_head_dim": 64,
        "cross_attention_dim": 2048,
        "num_layers": 28,
        "caption_channels": 4096,
    },
    "vae": {
        "latent_channels": 128,
        "block_out_channels": (128, 256, 512, 512),
        "decoder_block_out_channels": (128, 256, 512, 512),
        "layers_per_block": (4, 3, 3, 3, 4),
        "decoder_layers_per_block": (4, 3, 3, 3, 4),
    },
    "text_encoder": T5_XXL,
}
TINY_CONFIGS: ComponentConfigs = {
    "transformer": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "cross_attention_dim": 32,
        "caption_channels": 32,
        "num_layers": 2,
    },
    "vae": {
        "block_out_channels": (8, 8, 8, 8),
        "decoder_block_out_channels": (8, 8, 8, 8),
        "layers_per_block": (1, 1, 1, 1, 1),
        "decoder_layers_per_block": (1, 1, 1, 1, 1),
    },
    "text_encoder": TINY_T5,
}
SOURCE = WeightsSource("Lightricks/LTX-Video", size="26 GB", license="LTX-Video Open Weights License")
LTX = PublishedModel("ltx", (SOURCE,), TINY_CONFIGS, {SOURCE.hub: CONFIGS})


class LtxBackbone(VideoBackbone):
    """Predicts the velocity noise - clean of latents, one token per latent."""

    network_class, vae_class = "LTXVideoTransformer3DModel", "AutoencoderKLLTXVideo"
    key_rules = LTX_RULES
    spec: LtxSpec

    def call_network(self, x: Tensor, t: Tensor, conditioning: ConditioningTensors) -> Tensor:
        (frames, channels, height, width), ratio = x.shape[1:], COMPRESSION.spatial_ratio
        velocity: Tensor = self.net(
            hidden_states=x.movedim(2, -1).reshape(len(x), -1, channels),
            encoder_hidden_states=conditioning["prompt_embeds"],
            timestep=1000 * t,
            encoder_attention_mask=conditioning["attention_mask"],
            num_frames=frames,
            height=height,
            width=width,
            rope_interpolation_scale=(COMPRESSION.temporal_ratio / self.spec.fps, ratio, ratio),
            return_dict=False,
        )[0]
        return velocity.view(len(x), frames, height, width, channels).movedim(-1, 2)

    @staticmethod
    def decode_frames(vae: Any, raw: Tensor, frames: Sequence[int]) -> Tensor:
        """Decode the whole clip, because the decoder is not causal; later VAEs also take a timestep, which is zero."""
        timestep = raw.new_zeros(len(raw)) if vae.config.timestep_conditioning else None
        pixels: Tensor = vae.decode(raw, timestep, return_dict=False)[0]
        return pixels[:, :, list(frames)]


@dataclass(frozen=True)
class LtxSpec(VideoTransformerSpec):
    """LTX-Video, text to video: a flow whose timestep shift depends on the number of latents and which ends at 0.1."""

    weights: str = SOURCE.hub  # hub id, or folder in diffusers' layout
    transformer: str | None = None  # file with other weights of the network, with diffusers' or the authors' keys
    height: VideoSide = 512
    width: VideoSide = 704
    frames: int = 161  # 8 n + 1
    fps: float = 25.0  # frames per second, an input of the network
    max_text_tokens: TextTokenCount = 128  # sequence length of prompts, truncated or padded
    checkpoint_decoder: bool = True  # recompute the decoder in the backward pass
    decode_tile_size: TileSize | None = None  # pixels per side of tiles decoded one at a time; none: whole frames
    decode_tile_frames: TileFrames | None = None  # frames per tile decoded one at a time; none: whole clips
    embeddings: Path | None = None  # folder written by `tastemaker embed`; the text encoder is loaded only if needed
    seed: int = 0  # of random weights
    supports_context_parallel: ClassVar[bool] = True
    published: ClassVar[PublishedModel] = LTX
    backbone_class = LtxBackbone
    compression = COMPRESSION
    layout: ClassVar[PipelineLayout] = PipelineLayout(
        "LTXPipeline", "transformer", "lora_unet", ltx_to_original, comfyui_layer=str
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.fps <= 1000:
            raise ValueError(
                f"'fps': expected frames per second above 0 and at most 1000, got {self.fps}; correct 'fps' [TM465]"
            )

    @property
    def decode_tile_latents(self) -> int | None:
        return COMPRESSION.tile_latents(self.decode_tile_frames)

    def load_text_encoders(self, components: PipelineComponents) -> T5PromptEncoder:
        return T5PromptEncoder(components, self.max_text_tokens, use_attention_mask=False)
