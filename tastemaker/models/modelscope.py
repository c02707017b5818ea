"""ModelScope's text-to-video (Wang et al. 2023): Stable Diffusion's UNet with layers over time, by diffusers' names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from ..policy import Process
from ..pretrained import Source
from ..processes.gaussian import GaussianProcess
from ..types import Placement
from .layouts import Layout
from .lvdm import authors
from .published import TINY, Kit, sources
from .readers import Remembered
from .texts import remembered
from .unet3d import FEWEST, SMALL, ClipUnetBackbone, Size, fitting, network, reader

MODELSCOPE = Source("damo-vilab/text-to-video-ms-1.7b", size="7 GB", licence="CC-BY-NC-4.0")


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
    layout: ClassVar[Layout] = Layout("TextToVideoSDPipeline", "unet", "lora_unet", authors)

    def __post_init__(self) -> None:
        Size(self.frames, self.height, self.width)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return Size(self.frames, self.height, self.width).shape

    @property
    def sources(self) -> tuple[Source, ...]:
        return sources(self.weights, MODELSCOPE)

    def texts(self, placement: Placement) -> Remembered:
        kit = Kit(self.weights, MODELSCOPE, SMALL, placement, self.seed)
        return remembered(kit, lambda: reader(kit), ("text_encoder",), {"model": "modelscope"}, self.embeddings)

    def load(self, placement: Placement) -> ClipUnetBackbone:
        from diffusers import AutoencoderKL

        from .nets.unet3d import ClipUnet

        kit = Kit(self.weights, MODELSCOPE, SMALL, placement, self.seed)
        config = kit.config("unet")
        fitting(config, self.weights, fps=False)
        embedded, size = self.texts(placement), Size(self.frames, self.height, self.width)
        codec = kit.autoencoder("vae", AutoencoderKL, recompute=self.recompute)
        net = kit.trained("unet", ClipUnet, network(self.unet, config))
        return ClipUnetBackbone(net, codec, embedded, size)

    def tiny(self) -> Modelscope:
        return replace(self, weights=TINY, unet=None, frames=FEWEST, height=32, width=32, embeddings=None)
