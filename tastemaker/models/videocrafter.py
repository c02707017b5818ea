"""VideoCrafter2 (Chen et al. 2024): ModelScope's kind of UNet with the frame rate as input; model.ckpt or diffusers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.model_spec import PipelineLayout
from ..core.types import Placement
from ..data.embedding_store import fingerprint_file
from . import lvdm_checkpoint
from .component_configs import ComponentConfigs
from .image_backbone import FrozenVae
from .loading import trainable_dtype
from .modelscope import (
    CONFIGS,
    VideoUnetBackbone,
    VideoUnetSpec,
    build_empty_unet,
    check_fps,
    check_video_unet_config,
    read_video_unet_checkpoint,
)
from .modelscope import TINY_CONFIGS as TINY_MODELSCOPE
from .pipeline_components import (
    RANDOM,
    TINY,
    PipelineComponents,
    PublishedModel,
    load_tensors,
    parameters_on_meta,
    weight_sources,
)
from .pretrained import WeightsSource, find_weights, silence_libraries
from .sd15 import CLIP_MAX_TOKENS, ClipPromptEncoder
from .text_encoders import CachedTextEncoder, TextEncoder

CHECKPOINT_FILE = "model.ckpt"
SOURCE = WeightsSource("VideoCrafter/VideoCrafter2", CHECKPOINT_FILE, license="Apache-2.0, for research only")
CLIP_TOKENIZER = WeightsSource("openai/clip-vit-large-patch14", "tokenizer.json", "2.2 MB", "MIT")
TINY_CONFIGS: ComponentConfigs = {**TINY_MODELSCOPE, "unet": {**TINY_MODELSCOPE["unet"], "fps_cond": True}}
VIDEOCRAFTER = PublishedModel(
    "videocrafter", (SOURCE,), TINY_CONFIGS, {SOURCE.hub: {**CONFIGS, "unet": {**CONFIGS["unet"], "fps_cond": True}}}
)


class VideocrafterCheckpoint:
    """The components in a model.ckpt, which has the published sizes; same methods as PipelineComponents."""

    def __init__(self, path: Path, placement: Placement) -> None:
        self.path, self.placement = path, placement
        self.configs, self.tensors = VIDEOCRAFTER.configs[SOURCE.hub], lvdm_checkpoint.read_lvdm_checkpoint(path)

    def config(self, component: str) -> dict[str, Any]:
        return dict(self.configs[component])

    def load_trainable(self, component: str, network_class: Any) -> Any:
        net = build_empty(lambda: network_class(**self.configs[component]))
        unet = lvdm_checkpoint.select_component(self.tensors, lvdm_checkpoint.UNET_PREFIX)
        tensors = lvdm_checkpoint.unet_to_diffusers(unet, list(net.state_dict()), net.config)
        return copy_tensors(net, tensors, component, trainable_dtype(self.placement)).to(self.placement.device)

    def load_vae(self, component: str, network_class: Any, *, gradient_checkpointing: bool) -> FrozenVae:
        net = build_empty(lambda: network_class(**self.configs[component]))
        vae = lvdm_checkpoint.select_component(self.tensors, lvdm_checkpoint.VAE_PREFIX)
        tensors = lvdm_checkpoint.vae_to_diffusers(vae, net.config)
        net = copy_tensors(net, tensors, component, self.placement.dtype).to(self.placement.device)
        net.eval().requires_grad_(False)
        if gradient_checkpointing:
            net.enable_gradient_checkpointing()
        return FrozenVae.from_config(net, net.config, is_video=False)

    def load_prompt_encoder(self) -> ClipPromptEncoder:
        from transformers import CLIPTextConfig, CLIPTextModel

        config = CLIPTextConfig(**self.configs["text_encoder"])
        net = build_empty(lambda: CLIPTextModel(config))
        prefix = "text_model." if any(key.startswith("text_model.") for key in net.state_dict()) else ""
        open_clip = lvdm_checkpoint.select_component(self.tensors, lvdm_checkpoint.TEXT_ENCODER_PREFIX)
        tensors = lvdm_checkpoint.text_encoder_to_transformers(open_clip, config.num_hidden_layers)
        renamed = {prefix + key: x for key, x in tensors.items()}
        net = copy_tensors(net, renamed, "text_encoder", self.placement.dtype).eval().requires_grad_(False)
        tokenizer = load_clip_tokenizer(self.path.parent)
        return ClipPromptEncoder(TextEncoder(net, tokenizer, CLIP_MAX_TOKENS, self.placement.device))


def build_empty(build: Callable[[], Any]) -> Any:
    """Build a network without memory for its weights."""
    with silence_libraries(), parameters_on_meta():
        return build()


def copy_tensors(net: Any, tensors: Mapping[str, Tensor], component: str, dtype: torch.dtype) -> Any:
    """Load copies of tensors, which may be mapped from a file, into a network."""
    return load_tensors(net, {key: x.to(dtype, copy=True) for key, x in tensors.items()}, component)


def load_clip_tokenizer(folder: Path) -> Any:
    """Load CLIP's tokenizer from the checkpoint's folder or the download cache; padding is id 0, as in open_clip."""
    from transformers import CLIPTokenizer

    files = ("tokenizer.json", "vocab.json")
    local = [place for place in (folder, folder / "tokenizer") if any((place / file).is_file() for file in files)]
    path = local[0] if local else find_weights(CLIP_TOKENIZER.hub, CLIP_TOKENIZER)
    loader: Any = CLIPTokenizer
    with silence_libraries():
        folder = path if path.is_dir() else path.parent
        tokenizer = loader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    tokenizer.pad_token = "!"  # the token whose id is 0
    return tokenizer


@dataclass(frozen=True)
class VideocrafterSpec(VideoUnetSpec):
    """VideoCrafter2: its model.ckpt, or a pipeline folder with the network in diffusers' layout."""

    weights: str = SOURCE.hub  # hub id, a model.ckpt or its folder, or a folder in diffusers' layout
    unet: str | None = None  # file, folder or hub id whose UNet replaces the pipeline's, with anyone's keys
    frames: int = 16
    height: int = 320
    width: int = 512
    fps: int = 28  # frames per second, an input of the network; a prompt's metadata `fps` takes precedence
    checkpoint_decoder: bool = True  # recompute the decoder in the backward pass: a seventh of its memory
    embeddings: Path | None = None  # folder written by `tastemaker embed`; the text encoder is loaded only if needed
    seed: int = 0  # of random weights
    published: ClassVar[PublishedModel] = VIDEOCRAFTER
    layout: ClassVar[PipelineLayout] = PipelineLayout(
        "TextToVideoSDPipeline",
        "unet",
        "lora_unet",
        lvdm_checkpoint.unet_to_original,
        original_lora_layers=lvdm_checkpoint.original_lora_layers,
        lora_loader="tastemaker",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fps(self.fps)

    releases: ClassVar[tuple[WeightsSource, ...]] = (SOURCE,)

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        is_checkpoint = self.weights == SOURCE.hub or self.weights.endswith(".ckpt")
        return (
            *weight_sources(self.weights, SOURCE),
            *((CLIP_TOKENIZER,) if is_checkpoint else ()),
            *(weight_sources(self.unet) if self.unet else ()),
        )

    def checkpoint(self, placement: Placement) -> VideocrafterCheckpoint | None:
        """Open the authors' model.ckpt; None if the weights are a pipeline folder or random."""
        if self.weights == TINY or self.weights.split(":")[0] == RANDOM:
            return None
        path = find_weights(self.weights, SOURCE)
        file = path / CHECKPOINT_FILE if path.is_dir() else path
        return VideocrafterCheckpoint(file, placement) if file.is_file() else None

    def load_prompt_encoder(self, placement: Placement) -> CachedTextEncoder:
        checkpoint = self.checkpoint(placement)
        if checkpoint is None:
            return self.cached_prompt_encoder(self.components(placement))
        return self._checkpoint_prompt_encoder(checkpoint)

    def _checkpoint_prompt_encoder(self, checkpoint: VideocrafterCheckpoint) -> CachedTextEncoder:
        fingerprint = {"model": "videocrafter", CHECKPOINT_FILE: fingerprint_file(checkpoint.path)}
        return CachedTextEncoder(checkpoint.load_prompt_encoder, checkpoint.placement, fingerprint, self.embeddings)

    def load(self, placement: Placement) -> VideoUnetBackbone:
        from diffusers import AutoencoderKL

        from .nets.unet3d import VideoUnet

        checkpoint = self.checkpoint(placement)
        components = checkpoint or self.components(placement)
        config = components.config("unet") | ({} if self.unet is None else {"fps_cond": True})
        check_video_unet_config(config, self.weights, has_fps=True)
        tensors = read_video_unet_checkpoint(self.unet, config)
        if isinstance(components, PipelineComponents):
            prompt_encoder = self.cached_prompt_encoder(components)
        else:
            prompt_encoder = self._checkpoint_prompt_encoder(components)
        vae = components.load_vae("vae", AutoencoderKL, gradient_checkpointing=self.checkpoint_decoder)
        if tensors is None:
            net = components.load_trainable("unet", VideoUnet)
        else:
            net = copy_tensors(build_empty_unet(config), tensors, "unet", trainable_dtype(placement))
        return VideoUnetBackbone(net.to(placement.device), vae, prompt_encoder, self, self.fps)
