"""CogVideoX 2B and 5B (Zhipu AI 2024): a transformer of clips and words that predicts the velocity in levels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from ..core.policy import Process
from ..core.registry import ConfigError
from ..core.types import Placement
from ..processes.gaussian import GaussianProcess
from .cached_text_encoder import build_cached_text_encoder
from .pipeline_components import TINY, PipelineComponents
from .pipeline_layout import PipelineLayout, reject_unknown_names
from .pretrained import WeightsSource
from .releases import PublishedModel
from .text_encoders import CachedTextEncoder
from .unet_common import unet_timestep
from .video_backbone import (
    SMALL_T5,
    ConditioningTensors,
    FrozenVideoVae,
    TextTokenCount,
    VideoBackbone,
    VideoCompression,
    VideoSide,
    check_video_size,
    encode_with_t5,
)
from .video_decoding import cogvideox_decoder

SOURCES = (
    WeightsSource("zai-org/CogVideoX-2b", size="14 GB", licence="Apache-2.0"),
    WeightsSource("zai-org/CogVideoX-5b", size="22 GB", licence="CogVideoX licence"),
)
COMPRESSION = VideoCompression(channels=16, factor=8, every=4)
SMALL: dict[str, dict[str, Any]] = {
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
        "temporal_compression_ratio": COMPRESSION.every,
    },
    "text_encoder": SMALL_T5,
}
COGVIDEOX = PublishedModel(SOURCES, SMALL)


class CogVideoXPromptEncoder:
    """What T5 says of every token of a prompt, filling included."""

    def __init__(self, kit: PipelineComponents, length: int) -> None:
        from transformers import T5EncoderModel

        self.t5 = kit.reader("text_encoder", T5EncoderModel, "tokenizer", length)

    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        return {"words": encode_with_t5(self.t5, prompts, masked=False)["words"]}


def predict_velocity(
    places: tuple[Tensor, Tensor] | None, net: nn.Module, x: Tensor, t: Tensor, told: ConditioningTensors
) -> Tensor:
    """The velocity alpha noise - sigma clean."""
    out: Tensor = net(
        hidden_states=x,
        encoder_hidden_states=told["words"],
        timestep=unet_timestep(t),
        image_rotary_emb=places,
        return_dict=False,
    )[0]
    return out


def rotary_embedding(
    config: Any, shape: tuple[int, int, int, int], placement: Placement
) -> tuple[Tensor, Tensor] | None:
    """Where every token is, as 5B is told; 2B adds it to its latents."""
    if config.patch_size_t is not None:
        raise ConfigError("model.weights is CogVideoX 1.5, which takes frames by twos; expected 2B or 5B of 1.0")
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
class CogVideoX:
    """CogVideoX from text, which predicts the velocity on levels that end in the dark."""

    weights: str = SOURCES[0].hub  # a hub id, or a folder in diffusers' layout
    height: VideoSide = 480
    width: VideoSide = 720
    frames: int = 49  # one more than a multiple of 8, for latents are decoded by twos; 8 a second
    words: TextTokenCount = 226  # tokens a prompt is cut or filled up to
    recompute: bool = True  # the decoder in the backward pass
    embeddings: Path | None = None  # a folder `tastemaker embed` wrote; without others, no text encoder is loaded
    seed: int = 0  # of random weights
    suits: ClassVar[type[Process]] = GaussianProcess
    layout: ClassVar[PipelineLayout] = PipelineLayout("CogVideoXPipeline", "transformer", "", reject_unknown_names)

    def __post_init__(self) -> None:
        check_video_size(self.frames, self.height, self.width, 2 * COMPRESSION.every, 2 * COMPRESSION.factor)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return COMPRESSION.shape(self.frames, self.height, self.width)

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        return COGVIDEOX.sources(self.weights)

    def texts(self, placement: Placement) -> CachedTextEncoder:
        kit, settings = COGVIDEOX.kit(self.weights, placement, self.seed), {"model": "cogvideox", "words": self.words}
        return build_cached_text_encoder(
            kit, lambda: CogVideoXPromptEncoder(kit, self.words), ("text_encoder",), settings, self.embeddings
        )

    def load(self, placement: Placement) -> VideoBackbone:
        from diffusers import AutoencoderKLCogVideoX, CogVideoXTransformer3DModel

        kit = COGVIDEOX.kit(self.weights, placement, self.seed)
        net: Any = kit.trained("transformer", CogVideoXTransformer3DModel)
        vae = kit.frozen("vae", AutoencoderKLCogVideoX, recompute=self.recompute)
        codec = FrozenVideoVae.of(vae, cogvideox_decoder(vae))
        asked = partial(predict_velocity, rotary_embedding(net.config, self.shape, placement))
        return VideoBackbone(net, asked, codec, self.texts(placement), self)

    def tiny(self) -> CogVideoX:
        words = min(self.words, 16)
        return replace(self, weights=TINY, height=32, width=32, frames=9, words=words, embeddings=None)
