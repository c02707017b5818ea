"""CogVideoX 2B and 5B (Yang et al. 2024): a diffusion transformer of video and text tokens that predicts velocity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from ..core.model_spec import PipelineLayout
from ..core.registry import ConfigError
from ..core.types import Placement
from .checkpoint_keys import reject_unknown_names
from .component_configs import T5_XXL, TINY_T5, ComponentConfigs
from .image_backbone import unet_timestep
from .pipeline_components import PipelineComponents, PublishedModel
from .pretrained import WeightsSource
from .video_backbone import (
    ConditioningTensors,
    T5PromptEncoder,
    TextTokenCount,
    TileSize,
    VideoBackbone,
    VideoCompression,
    VideoSide,
    VideoTransformerSpec,
    latents_needed,
)

COMPRESSION = VideoCompression(channels=16, spatial_ratio=8, temporal_ratio=4, chunk_size=2)
COGVIDEOX_2B: ComponentConfigs = {
    "transformer": {
        "num_attention_heads": 30,
        "attention_head_dim": 64,
        "num_layers": 30,
        "time_embed_dim": 512,
        "text_embed_dim": 4096,
        "max_text_seq_length": 226,
        "sample_width": 90,
        "sample_height": 60,
        "sample_frames": 49,
    },
    "vae": {"block_out_channels": (128, 256, 256, 512), "layers_per_block": 3, "latent_channels": 16},
    "text_encoder": T5_XXL,
}
COGVIDEOX_5B: ComponentConfigs = {
    **COGVIDEOX_2B,
    "transformer": {
        **COGVIDEOX_2B["transformer"],
        "num_attention_heads": 48,
        "num_layers": 42,
        "use_rotary_positional_embeddings": True,
    },
}
TINY_CONFIGS: ComponentConfigs = {
    "transformer": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": COMPRESSION.channels,
        "out_channels": COMPRESSION.channels,
        "time_embed_dim": 8,
        "text_embed_dim": 32,
        "num_layers": 2,
        "sample_width": 4,
        "sample_height": 4,
        "sample_frames": 9,
        "max_text_seq_length": 16,
        "use_rotary_positional_embeddings": True,
    },
    "vae": {
        "down_block_types": ("CogVideoXDownBlock3D",) * 4,
        "up_block_types": ("CogVideoXUpBlock3D",) * 4,
        "block_out_channels": (4, 4, 4, 4),
        "latent_channels": COMPRESSION.channels,
        "layers_per_block": 1,
        "norm_num_groups": 2,
        "temporal_compression_ratio": COMPRESSION.temporal_ratio,
    },
    "text_encoder": TINY_T5,
}
COGVIDEOX = PublishedModel(
    "cogvideox",
    (
        WeightsSource("zai-org/CogVideoX-2b", size="14 GB", license="Apache-2.0"),
        WeightsSource("zai-org/CogVideoX-5b", size="22 GB", license="CogVideoX license"),
    ),
    TINY_CONFIGS,
    {"zai-org/CogVideoX-2b": COGVIDEOX_2B, "zai-org/CogVideoX-5b": COGVIDEOX_5B},
)


class CogVideoXPromptEncoder(T5PromptEncoder):
    """T5's features of all tokens, padding included: prompt_embeds [B, L, D]."""

    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        return {"prompt_embeds": super().__call__(prompts)["prompt_embeds"]}


class CogVideoXBackbone(VideoBackbone):
    """Predicts the velocity alpha noise - sigma clean of latents."""

    network_class, vae_class = "CogVideoXTransformer3DModel", "AutoencoderKLCogVideoX"

    def __init__(self, spec: CogVideoXSpec, placement: Placement) -> None:
        super().__init__(spec, placement)
        self.rotary = rotary_embedding(self.net.config, spec.video_shape, placement)

    def call_network(self, x: Tensor, t: Tensor, conditioning: ConditioningTensors) -> Tensor:
        velocity: Tensor = self.net(
            hidden_states=x,
            encoder_hidden_states=conditioning["prompt_embeds"],
            timestep=unet_timestep(t),
            image_rotary_emb=self.rotary,
            return_dict=False,
        )[0]
        return velocity

    @staticmethod
    def decode_frames(vae: Any, raw: Tensor, frames: Sequence[int]) -> Tensor:
        """Decode in chunks of two latents, as published; the first chunk also holds the odd latent.

        Chunks are never cut, because norms are computed over a chunk; those after the last needed frame are left out.
        """
        chunk_size = vae.num_latent_frames_batch_size
        odd = raw.shape[2] % chunk_size
        chunks = -(-(latents_needed(frames, COMPRESSION.temporal_ratio) - odd) // chunk_size)
        return VideoBackbone.decode_frames(vae, raw[:, :, : odd + max(chunks, 1) * chunk_size], frames)


def rotary_embedding(
    config: Any, shape: tuple[int, int, int, int], placement: Placement
) -> tuple[Tensor, Tensor] | None:
    """Return cosines and sines of the rotary positions, which 5B has; 2B adds positions to its latents."""
    if config.patch_size_t is not None:
        raise ConfigError(
            "model.weights: CogVideoX 1.5 is not supported, because it groups frames in pairs; use CogVideoX 2B "
            "or 5B (version 1.0) [TM422]"
        )
    if not config.use_rotary_positional_embeddings:
        return None
    from diffusers.models.embeddings import get_3d_rotary_pos_embed
    from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid

    size = (shape[2] // config.patch_size, shape[3] // config.patch_size)
    base = (config.sample_width // config.patch_size, config.sample_height // config.patch_size)
    region: Any = get_resize_crop_region_for_grid
    table: Any = get_3d_rotary_pos_embed
    cosine, sine = table(config.attention_head_dim, region(size, *base), size, shape[0], device=placement.device)
    return cosine, sine


@dataclass(frozen=True)
class CogVideoXSpec(VideoTransformerSpec):
    """CogVideoX, text to video: predicts velocity, on a noise schedule with zero terminal SNR."""

    weights: str = "zai-org/CogVideoX-2b"  # hub id, or folder in diffusers' layout
    height: VideoSide = 480
    width: VideoSide = 720
    frames: int = 49  # 8 n + 1, because latents are decoded in pairs; at 8 frames per second
    max_text_tokens: TextTokenCount = 226  # sequence length of prompts, truncated or padded
    checkpoint_decoder: bool = True  # recompute the decoder in the backward pass
    decode_tile_size: TileSize | None = None  # pixels per side of tiles decoded one at a time; none: whole frames
    embeddings: Path | None = None  # folder written by `tastemaker embed`; the text encoder is loaded only if needed
    seed: int = 0  # of random weights
    frame_rate: ClassVar[float] = 8.0
    published: ClassVar[PublishedModel] = COGVIDEOX
    backbone_class = CogVideoXBackbone
    compression = COMPRESSION
    layout: ClassVar[PipelineLayout] = PipelineLayout("CogVideoXPipeline", "transformer", "", reject_unknown_names)

    def load_text_encoders(self, components: PipelineComponents) -> CogVideoXPromptEncoder:
        return CogVideoXPromptEncoder(components, self.max_text_tokens, use_attention_mask=False)
