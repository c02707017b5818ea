"""VideoCrafter2 (Chen et al. 2024): a UNet of clips that is told their speed, in its authors' file or diffusers'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.policy import Process
from ..core.types import Placement
from ..data.embedding_store import fingerprint_file
from ..processes.gaussian import GaussianProcess
from . import lvdm_checkpoint
from .cached_text_encoder import build_cached_text_encoder
from .component_configs import COMPONENT_CONFIGS
from .loading import trainable_dtype
from .pipeline_components import (
    RANDOM,
    TINY,
    FrozenVae,
    PipelineComponents,
    load_tensors,
    silence_libraries,
    weight_sources,
)
from .pipeline_layout import PipelineLayout
from .pretrained import WeightsSource, find_weights
from .text_encoders import CachedTextEncoder, TextEncoder
from .video_unet import (
    CLIP_MAX_TOKENS,
    MIN_FRAMES,
    SMALL,
    VideoSize,
    VideoUnetBackbone,
    VideoUnetPromptEncoder,
    build_prompt_encoder,
    check_fps,
    check_video_unet_config,
    init_empty,
    read_video_unet_checkpoint,
)

FILE = "model.ckpt"
VIDEOCRAFTER = WeightsSource("VideoCrafter/VideoCrafter2", FILE, licence="Apache-2.0, for research only")
CLIP_TOKENIZER = WeightsSource("openai/clip-vit-large-patch14", "tokenizer.json", "2.2 MB", "MIT")
SMALL_WITH_FPS = {**SMALL, "unet": {**SMALL["unet"], "fps_cond": True}}


class VideocrafterCheckpoint:
    """The parts of a model.ckpt, of the published sizes, called for as those of a folder are."""

    def __init__(self, path: Path, placement: Placement) -> None:
        self.path, self.placement = path, placement
        self.sizes, self.tensors = COMPONENT_CONFIGS[VIDEOCRAFTER.hub], lvdm_checkpoint.read_lvdm_checkpoint(path)

    def config(self, part: str) -> dict[str, Any]:
        return dict(self.sizes[part])

    def trained(self, part: str, kind: Any) -> Any:
        net = init_empty(lambda: kind(**self.sizes[part]))
        found = lvdm_checkpoint.unet_to_diffusers(
            lvdm_checkpoint.select_component(self.tensors, lvdm_checkpoint.UNET_PREFIX),
            list(net.state_dict()),
            net.config,
        )
        return _made(net, found, part, trainable_dtype(self.placement)).to(self.placement.device)

    def autoencoder(self, part: str, kind: Any, *, recompute: bool) -> FrozenVae:
        net = init_empty(lambda: kind(**self.sizes[part]))
        found = lvdm_checkpoint.vae_to_diffusers(
            lvdm_checkpoint.select_component(self.tensors, lvdm_checkpoint.VAE_PREFIX), net.config
        )
        net = _made(net, found, part, self.placement.dtype).to(self.placement.device).eval().requires_grad_(False)
        if recompute:
            net.enable_gradient_checkpointing()
        return FrozenVae.of(net, net.config, clips=False)

    def reader(self) -> VideoUnetPromptEncoder:
        from transformers import CLIPTextConfig, CLIPTextModel

        part = "text_encoder"
        settings = CLIPTextConfig(**self.sizes[part])
        net = init_empty(lambda: CLIPTextModel(settings))
        nested = "text_model." if any(key.startswith("text_model.") for key in net.state_dict()) else ""
        found = lvdm_checkpoint.text_encoder_to_transformers(
            lvdm_checkpoint.select_component(self.tensors, lvdm_checkpoint.TEXT_ENCODER_PREFIX),
            settings.num_hidden_layers,
        )
        net = _made(net, {nested + key: x for key, x in found.items()}, part, self.placement.dtype)
        words = load_clip_tokenizer(self.path.parent)
        return VideoUnetPromptEncoder(
            TextEncoder(net.eval().requires_grad_(False), words, CLIP_MAX_TOKENS, self.placement.device)
        )


def _made(net: Any, tensors: Mapping[str, Tensor], part: str, dtype: torch.dtype) -> Any:
    # Copied, for they may still lie in the file.
    return load_tensors(net, {key: x.to(dtype, copy=True) for key, x in tensors.items()}, part)


def load_clip_tokenizer(folder: Path) -> Any:
    """CLIP's, of a folder where it lies or else what was fetched; filling up with zeros, as the encoder was trained."""
    from transformers import CLIPTokenizer

    beside = [place for place in (folder, folder / "tokenizer") if (place / "tokenizer.json").is_file()]
    path = beside[0] if beside else find_weights(CLIP_TOKENIZER.hub, CLIP_TOKENIZER)
    loader: Any = CLIPTokenizer
    with silence_libraries():
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
    layout: ClassVar[PipelineLayout] = PipelineLayout(
        "TextToVideoSDPipeline",
        "unet",
        "lora_unet",
        lvdm_checkpoint.unet_to_original,
        layers=lvdm_checkpoint.original_lora_layers,
    )

    def __post_init__(self) -> None:
        VideoSize(self.frames, self.height, self.width)
        check_fps(self.fps)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return VideoSize(self.frames, self.height, self.width).shape

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        found = weight_sources(self.weights, VIDEOCRAFTER)
        words = (CLIP_TOKENIZER,) if self.weights == VIDEOCRAFTER.hub or self.weights.endswith(".ckpt") else ()
        return *found, *words, *(weight_sources(self.unet) if self.unet else ())

    def parts(self, placement: Placement) -> VideocrafterCheckpoint | PipelineComponents:
        if self.weights != TINY and self.weights.split(":")[0] != RANDOM:
            path = find_weights(self.weights, VIDEOCRAFTER)
            file = path / FILE if path.is_dir() else path
            if file.is_file():
                return VideocrafterCheckpoint(file, placement)
        return PipelineComponents(self.weights, VIDEOCRAFTER, SMALL_WITH_FPS, placement, self.seed)

    def texts(self, placement: Placement) -> CachedTextEncoder:
        return self._texts(self.parts(placement))

    def _texts(self, parts: VideocrafterCheckpoint | PipelineComponents) -> CachedTextEncoder:
        told = {"model": "videocrafter"}
        if isinstance(parts, PipelineComponents):
            return build_cached_text_encoder(
                parts, partial(build_prompt_encoder, parts), ("text_encoder",), told, self.embeddings
            )
        return CachedTextEncoder(
            parts.reader, parts.placement, {**told, FILE: fingerprint_file(parts.path)}, self.embeddings
        )

    def load(self, placement: Placement) -> VideoUnetBackbone:
        from diffusers import AutoencoderKL

        from .nets.unet3d import VideoUnet

        parts, part = self.parts(placement), "unet"
        config = parts.config(part) if self.unet is None else {**parts.config(part), "fps_cond": True}
        check_video_unet_config(config, self.weights, fps=True)
        given = read_video_unet_checkpoint(self.unet, config)
        embedded, size = self._texts(parts), VideoSize(self.frames, self.height, self.width)
        codec = parts.autoencoder("vae", AutoencoderKL, recompute=self.recompute)
        if given is None:
            return VideoUnetBackbone(parts.trained(part, VideoUnet), codec, embedded, size, self.fps)
        net = _made(init_empty(lambda: VideoUnet.from_config(config)), given, part, trainable_dtype(placement))
        return VideoUnetBackbone(net.to(placement.device), codec, embedded, size, self.fps)

    def tiny(self) -> Videocrafter:
        return replace(self, weights=TINY, unet=None, frames=MIN_FRAMES, height=32, width=32, embeddings=None)
