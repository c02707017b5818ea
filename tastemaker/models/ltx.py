"""LTX-Video (Lightricks 2024): a small flow-matching transformer of clips that are compressed far."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from ..core.policy import Process
from ..core.types import Placement
from ..processes.gaussian import GaussianProcess
from .cached_text_encoder import build_cached_text_encoder
from .pipeline_components import TINY
from .pipeline_layout import PipelineLayout, reject_unknown_names
from .pretrained import WeightsSource
from .releases import PublishedModel
from .text_encoders import CachedTextEncoder
from .video_backbone import (
    SMALL_T5,
    ConditioningTensors,
    FrozenVideoVae,
    T5PromptEncoder,
    TextTokenCount,
    VideoBackbone,
    VideoCompression,
    VideoSide,
    check_video_size,
)
from .video_decoding import ltx_decoder

SOURCE = WeightsSource("Lightricks/LTX-Video", size="26 GB", licence="LTX-Video Open Weights License")
COMPRESSION = VideoCompression(channels=128, factor=32, every=8)
SMALL: dict[str, dict[str, Any]] = {
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
    "text_encoder": SMALL_T5,
}
LTX = PublishedModel((SOURCE,), SMALL)


def predict_velocity(rate: float, net: nn.Module, x: Tensor, t: Tensor, told: ConditioningTensors) -> Tensor:
    """The velocity noise - clean, of one token a latent."""
    frames, channels, height, width = x.shape[1:]
    out: Tensor = net(
        hidden_states=x.movedim(2, -1).reshape(len(x), -1, channels),
        encoder_hidden_states=told["words"],
        timestep=1000 * t,
        encoder_attention_mask=told["seen"],
        num_frames=frames,
        height=height,
        width=width,
        rope_interpolation_scale=(COMPRESSION.every / rate, COMPRESSION.factor, COMPRESSION.factor),
        return_dict=False,
    )[0]
    return out.view(len(x), frames, height, width, channels).movedim(-1, 2)


@dataclass(frozen=True)
class Ltx:
    """LTX-Video, from text: a flow whose levels are shifted by the number of latents and stretched to end at 0.1."""

    weights: str = SOURCE.hub  # a hub id, or a folder in diffusers' layout
    height: VideoSide = 512
    width: VideoSide = 704
    frames: int = 161  # one more than a multiple of 8
    rate: float = 25.0  # frames a second, which it is told
    words: TextTokenCount = 128  # tokens a prompt is cut or filled up to
    recompute: bool = True  # the decoder in the backward pass
    embeddings: Path | None = None  # a folder `tastemaker embed` wrote; without others, no text encoder is loaded
    seed: int = 0  # of random weights
    suits: ClassVar[type[Process]] = GaussianProcess
    layout: ClassVar[PipelineLayout] = PipelineLayout("LTXPipeline", "transformer", "", reject_unknown_names)

    def __post_init__(self) -> None:
        check_video_size(self.frames, self.height, self.width, COMPRESSION.every, COMPRESSION.factor)
        if not 0 < self.rate <= 1000:
            raise ValueError(f"'rate' is {self.rate}; expected frames a second, above 0")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return COMPRESSION.shape(self.frames, self.height, self.width)

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        return LTX.sources(self.weights)

    def texts(self, placement: Placement) -> CachedTextEncoder:
        kit, settings = LTX.kit(self.weights, placement, self.seed), {"model": "ltx", "words": self.words}
        made = partial(T5PromptEncoder, kit, self.words, masked=False)
        return build_cached_text_encoder(kit, made, ("text_encoder",), settings, self.embeddings)

    def load(self, placement: Placement) -> VideoBackbone:
        from diffusers import AutoencoderKLLTXVideo, LTXVideoTransformer3DModel

        kit = LTX.kit(self.weights, placement, self.seed)
        net = kit.trained("transformer", LTXVideoTransformer3DModel)
        vae = kit.frozen("vae", AutoencoderKLLTXVideo, recompute=self.recompute)
        codec = FrozenVideoVae.of(vae, ltx_decoder(vae), vae.latents_mean, vae.latents_std)
        return VideoBackbone(net, partial(predict_velocity, self.rate), codec, self.texts(placement), self)

    def tiny(self) -> Ltx:
        words = min(self.words, 16)
        return replace(self, weights=TINY, height=32, width=32, frames=9, words=words, embeddings=None)
