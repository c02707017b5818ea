"""Mochi 1 (Genmo 2024): a flow-matching transformer of clips and words, which counts time the other way."""

from __future__ import annotations

import warnings
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
from .video_decoding import mochi_decoder

SOURCE = WeightsSource("genmo/mochi-1-preview", size="60 GB", licence="Apache-2.0")
COMPRESSION = VideoCompression(channels=12, factor=8, every=6)
SMALL: dict[str, dict[str, Any]] = {
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
    "text_encoder": SMALL_T5,
}
MOCHI = PublishedModel((SOURCE,), SMALL)


def predict_velocity(net: nn.Module, x: Tensor, t: Tensor, told: ConditioningTensors) -> Tensor:
    """The velocity noise - clean; its own goes from noise to the clean sample, as its time does."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # it asks for places to be exact by autocast
        out: Tensor = net(
            hidden_states=x.transpose(1, 2),
            encoder_hidden_states=told["words"],
            timestep=1000 * (1 - t),
            encoder_attention_mask=told["seen"],
            return_dict=False,
        )[0]
    return -out.transpose(1, 2)


@dataclass(frozen=True)
class Mochi:
    """Mochi 1, from text: a flow whose first half of steps takes a fortieth of the noise away."""

    weights: str = SOURCE.hub  # a hub id, or a folder in diffusers' layout
    height: VideoSide = 480
    width: VideoSide = 848
    frames: int = 163  # one more than a multiple of 6; 30 a second
    words: TextTokenCount = 256  # tokens a prompt is cut or filled up to
    recompute: bool = True  # the decoder in the backward pass
    embeddings: Path | None = None  # a folder `tastemaker embed` wrote; without others, no text encoder is loaded
    seed: int = 0  # of random weights
    suits: ClassVar[type[Process]] = GaussianProcess
    layout: ClassVar[PipelineLayout] = PipelineLayout("MochiPipeline", "transformer", "", reject_unknown_names)

    def __post_init__(self) -> None:
        check_video_size(self.frames, self.height, self.width, COMPRESSION.every, 2 * COMPRESSION.factor)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return COMPRESSION.shape(self.frames, self.height, self.width)

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        return MOCHI.sources(self.weights)

    def texts(self, placement: Placement) -> CachedTextEncoder:
        kit, settings = MOCHI.kit(self.weights, placement, self.seed), {"model": "mochi", "words": self.words}
        made = partial(T5PromptEncoder, kit, self.words, masked=True)
        return build_cached_text_encoder(kit, made, ("text_encoder",), settings, self.embeddings)

    def load(self, placement: Placement) -> VideoBackbone:
        from diffusers import AutoencoderKLMochi, MochiTransformer3DModel

        kit = MOCHI.kit(self.weights, placement, self.seed)
        net: Any = kit.trained("transformer", MochiTransformer3DModel)
        last = f"transformer_blocks.{len(net.transformer_blocks) - 1}.attn1."
        net.idle = (f"{last}add_q_proj.", f"{last}norm_added_q.")  # what words ask for at the end is not used
        vae = kit.frozen("vae", AutoencoderKLMochi, recompute=self.recompute)
        return VideoBackbone(
            net, predict_velocity, FrozenVideoVae.of(vae, mochi_decoder(vae)), self.texts(placement), self
        )

    def tiny(self) -> Mochi:
        words = min(self.words, 16)
        return replace(self, weights=TINY, height=32, width=32, frames=7, words=words, embeddings=None)
