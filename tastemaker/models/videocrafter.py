"""VideoCrafter2 (Chen et al. 2024): a UNet of clips that is told their speed, in its authors' file or diffusers'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..embeddings import digest
from ..policy import Process
from ..pretrained import Source, locate
from ..processes.gaussian import GaussianProcess
from ..types import Placement
from . import lvdm
from .checkpoints import trained
from .layouts import Layout
from .published import RANDOM, TINY, Codec, Kit, filled, silence, sources
from .readers import Reader, Remembered
from .sizes import SIZES
from .texts import remembered
from .unet3d import FEWEST, LENGTH, SMALL, ClipUnetBackbone, Size, UnetTexts, empty, fitting, network, reader, speed

FILE = "model.ckpt"
VIDEOCRAFTER = Source("VideoCrafter/VideoCrafter2", FILE, licence="Apache-2.0, for research only")
CLIP_WORDS = Source("openai/clip-vit-large-patch14", "tokenizer.json", "2.2 MB", "MIT")
TOLD = {**SMALL, "unet": {**SMALL["unet"], "fps_cond": True}}


class Chest:
    """The parts of a model.ckpt, of the published sizes, called for as those of a folder are."""

    def __init__(self, path: Path, placement: Placement) -> None:
        self.path, self.placement = path, placement
        self.sizes, self.tensors = SIZES[VIDEOCRAFTER.hub], lvdm.read(path)

    def config(self, part: str) -> dict[str, Any]:
        return dict(self.sizes[part])

    def trained(self, part: str, kind: Any) -> Any:
        net = empty(lambda: kind(**self.sizes[part]))
        found = lvdm.unet(lvdm.part(self.tensors, lvdm.UNET), list(net.state_dict()), net.config)
        return _made(net, found, part, trained(self.placement)).to(self.placement.device)

    def autoencoder(self, part: str, kind: Any, *, recompute: bool) -> Codec:
        net = empty(lambda: kind(**self.sizes[part]))
        found = lvdm.vae(lvdm.part(self.tensors, lvdm.VAE), net.config)
        net = _made(net, found, part, self.placement.dtype).to(self.placement.device).eval().requires_grad_(False)
        if recompute:
            net.enable_gradient_checkpointing()
        return Codec.of(net, net.config, clips=False)

    def reader(self) -> UnetTexts:
        from transformers import CLIPTextConfig, CLIPTextModel

        part = "text_encoder"
        settings = CLIPTextConfig(**self.sizes[part])
        net = empty(lambda: CLIPTextModel(settings))
        nested = "text_model." if any(key.startswith("text_model.") for key in net.state_dict()) else ""
        found = lvdm.text(lvdm.part(self.tensors, lvdm.TEXT), settings.num_hidden_layers)
        net = _made(net, {nested + key: x for key, x in found.items()}, part, self.placement.dtype)
        words = tokenizer(self.path.parent)
        return UnetTexts(Reader(net.eval().requires_grad_(False), words, LENGTH, self.placement.device))


def _made(net: Any, tensors: Mapping[str, Tensor], part: str, dtype: torch.dtype) -> Any:
    # Copied, for they may still lie in the file.
    return filled(net, {key: x.to(dtype, copy=True) for key, x in tensors.items()}, part)


def tokenizer(folder: Path) -> Any:
    """CLIP's, of a folder where it lies or else what was fetched; filling up with zeros, as the encoder was trained."""
    from transformers import CLIPTokenizer

    beside = [place for place in (folder, folder / "tokenizer") if (place / "tokenizer.json").is_file()]
    path = beside[0] if beside else locate(CLIP_WORDS.hub, CLIP_WORDS)
    loader: Any = CLIPTokenizer
    with silence():
        found = loader.from_pretrained(path if path.is_dir() else path.parent, local_files_only=True)
    found.pad_token = "!"  # the sign whose id is 0
    return found


@dataclass(frozen=True)
class Videocrafter:
    """VideoCrafter2: its model.ckpt, or the parts of a pipeline's folder with its network in diffusers' layout."""

    weights: str = VIDEOCRAFTER.hub  # a hub id, a model.ckpt or its folder, or a folder in diffusers' layout
    unet: str | None = None  # a file, folder or hub id whose network replaces theirs, by diffusers' names or its own
    frames: int = 16
    height: int = 320
    width: int = 512
    fps: int = 28  # frames per second that the network is told, unless a prompt's own facts have an `fps`
    recompute: bool = True  # the decoder in the backward pass, for a seventh of its memory
    embeddings: Path | None = None  # a folder `tastemaker embed` wrote; without others, no text encoder is loaded
    seed: int = 0  # of random weights
    suits: ClassVar[type[Process]] = GaussianProcess
    layout: ClassVar[Layout] = Layout("TextToVideoSDPipeline", "unet", "lora_unet", lvdm.authors, layers=lvdm.layers)

    def __post_init__(self) -> None:
        Size(self.frames, self.height, self.width)
        speed(self.fps)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return Size(self.frames, self.height, self.width).shape

    @property
    def sources(self) -> tuple[Source, ...]:
        found = sources(self.weights, VIDEOCRAFTER)
        words = (CLIP_WORDS,) if self.weights == VIDEOCRAFTER.hub or self.weights.endswith(".ckpt") else ()
        return *found, *words, *(sources(self.unet) if self.unet else ())

    def parts(self, placement: Placement) -> Chest | Kit:
        if self.weights != TINY and self.weights.split(":")[0] != RANDOM:
            path = locate(self.weights, VIDEOCRAFTER)
            file = path / FILE if path.is_dir() else path
            if file.is_file():
                return Chest(file, placement)
        return Kit(self.weights, VIDEOCRAFTER, TOLD, placement, self.seed)

    def texts(self, placement: Placement) -> Remembered:
        return self._texts(self.parts(placement))

    def _texts(self, parts: Chest | Kit) -> Remembered:
        told = {"model": "videocrafter"}
        if isinstance(parts, Kit):
            return remembered(parts, partial(reader, parts), ("text_encoder",), told, self.embeddings)
        return Remembered(parts.reader, parts.placement, {**told, FILE: digest(parts.path)}, self.embeddings)

    def load(self, placement: Placement) -> ClipUnetBackbone:
        from diffusers import AutoencoderKL

        from .nets.unet3d import ClipUnet

        parts, part = self.parts(placement), "unet"
        config = parts.config(part) if self.unet is None else {**parts.config(part), "fps_cond": True}
        fitting(config, self.weights, fps=True)
        given = network(self.unet, config)
        embedded, size = self._texts(parts), Size(self.frames, self.height, self.width)
        codec = parts.autoencoder("vae", AutoencoderKL, recompute=self.recompute)
        if given is None:
            return ClipUnetBackbone(parts.trained(part, ClipUnet), codec, embedded, size, self.fps)
        net = _made(empty(lambda: ClipUnet.from_config(config)), given, part, trained(placement))
        return ClipUnetBackbone(net.to(placement.device), codec, embedded, size, self.fps)

    def tiny(self) -> Videocrafter:
        return replace(self, weights=TINY, unet=None, frames=FEWEST, height=32, width=32, embeddings=None)
