"""ModelScope's text-to-video (Wang et al. 2023): Stable Diffusion's UNet with layers over time, by diffusers' names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from ..core.policy import Process
from ..core.types import Placement
from ..processes.gaussian import GaussianProcess
from .cached_text_encoder import build_cached_text_encoder
from .lvdm_checkpoint import unet_to_original
from .pipeline_components import TINY, PipelineComponents, weight_sources
from .pipeline_layout import PipelineLayout
from .pretrained import WeightsSource
from .text_encoders import CachedTextEncoder
from .video_unet import (
    MIN_FRAMES,
    SMALL,
    VideoSize,
    VideoUnetBackbone,
    build_prompt_encoder,
    check_video_unet_config,
    read_video_unet_checkpoint,
)

MODELSCOPE = WeightsSource("damo-vilab/text-to-video-ms-1.7b", size="7 GB", licence="CC-BY-NC-4.0")


@dataclass(frozen=True)
class Modelscope:
    """ModelScope's text-to-video of 1.7 billion weights, and those trained from it, such as Zeroscope."""

    weights: str = MODELSCOPE.hub  # a hub id, or a folder in diffusers' layout
    unet: str | None = None  # a file, folder or hub id whose network replaces the folder's, by any names
    frames: int = 16
    height: int = 256
    width: int = 256
    recompute: bool = True  # the decoder in the backward pass, for a seventh of its memory
    embeddings: Path | None = None  # a folder `tastemaker embed` wrote; without others, no text encoder is loaded
    seed: int = 0  # of random weights
    suits: ClassVar[type[Process]] = GaussianProcess
    layout: ClassVar[PipelineLayout] = PipelineLayout("TextToVideoSDPipeline", "unet", "lora_unet", unet_to_original)

    def __post_init__(self) -> None:
        VideoSize(self.frames, self.height, self.width)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return VideoSize(self.frames, self.height, self.width).shape

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        return weight_sources(self.weights, MODELSCOPE)

    def texts(self, placement: Placement) -> CachedTextEncoder:
        kit = PipelineComponents(self.weights, MODELSCOPE, SMALL, placement, self.seed)
        return build_cached_text_encoder(
            kit, lambda: build_prompt_encoder(kit), ("text_encoder",), {"model": "modelscope"}, self.embeddings
        )

    def load(self, placement: Placement) -> VideoUnetBackbone:
        from diffusers import AutoencoderKL

        from .nets.unet3d import VideoUnet

        kit = PipelineComponents(self.weights, MODELSCOPE, SMALL, placement, self.seed)
        config = kit.config("unet")
        check_video_unet_config(config, self.weights, fps=False)
        embedded, size = self.texts(placement), VideoSize(self.frames, self.height, self.width)
        codec = kit.autoencoder("vae", AutoencoderKL, recompute=self.recompute)
        net = kit.trained("unet", VideoUnet, read_video_unet_checkpoint(self.unet, config))
        return VideoUnetBackbone(net, codec, embedded, size)

    def tiny(self) -> Modelscope:
        return replace(self, weights=TINY, unet=None, frames=MIN_FRAMES, height=32, width=32, embeddings=None)
