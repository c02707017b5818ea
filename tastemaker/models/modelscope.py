"""ModelScope text-to-video (Wang et al. 2023): Stable Diffusion's UNet with temporal layers.

VideoCrafter2 has the same kind of network, so its backbone and the reading of UNet checkpoints are here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from ..core.model_spec import PipelineLayout
from ..core.registry import ConfigError
from ..core.types import Condition, Metadata, Placement, Prompts
from . import sd15
from .component_configs import CLIP_G, SD_VAE, ComponentConfigs
from .image_backbone import (
    DECODE_BATCH_LATENTS,
    DOWNSAMPLE_FACTOR,
    FrozenVae,
    TextConditionedBackbone,
    cast_to_network_dtype,
    check_image_size,
    unet_timestep,
)
from .lvdm_checkpoint import convert_unet, unet_to_original
from .pipeline_components import TINY, PipelineComponents, PublishedModel, parameters_on_meta
from .pretrained import WeightsSource, find_weights, load_state_dict, silence_libraries
from .sd15 import LATENT_CHANNELS, ClipPromptEncoder
from .text_encoders import CachedTextEncoder
from .video_backbone import VideoSpec, check_clip_shape

UNET_FILE = "diffusion_pytorch_model.safetensors"
MAX_FPS = 1000
MIN_FRAMES = 3  # of tiny clips: with two, oneDNN computes wrong bf16 gradients of convolutions over three frames
CONFIGS: ComponentConfigs = {
    "unet": {"block_out_channels": (320, 640, 1280, 1280), "attention_head_dim": 64, "cross_attention_dim": 1024},
    "vae": {**SD_VAE, "scaling_factor": 0.18215},
    "text_encoder": {  # CLIP H without its last layer
        **CLIP_G,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "projection_dim": 1024,
        "num_hidden_layers": 23,
        "num_attention_heads": 16,
    },
}
TINY_CONFIGS: ComponentConfigs = {
    "unet": {
        "block_out_channels": (8,),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "down_block_types": ("CrossAttnDownBlock3D",),
        "up_block_types": ("CrossAttnUpBlock3D",),
        "cross_attention_dim": 16,
        "attention_head_dim": 4,
    },
    "vae": sd15.TINY_CONFIGS["vae"],
    "text_encoder": sd15.TINY_CONFIGS["text_encoder"],
}
SOURCE = WeightsSource("damo-vilab/text-to-video-ms-1.7b", size="7 GB", license="CC-BY-NC-4.0")
MODELSCOPE = PublishedModel("modelscope", (SOURCE,), TINY_CONFIGS, {SOURCE.hub: CONFIGS})


class VideoUnetBackbone(TextConditionedBackbone):
    """Denoises latents [F, 4, h, w]; the UNet predicts noise.

    With `fps`, the frame rate is an input of the network; a prompt's metadata `fps` takes precedence.
    """

    def __init__(
        self,
        net: nn.Module,
        autoencoder: FrozenVae,
        prompt_encoder: CachedTextEncoder,
        spec: VideoSpec,
        fps: int | None = None,
    ) -> None:
        self.net = net.eval()  # otherwise its dropout layers would make log-probabilities irreproducible
        self.autoencoder, self.prompt_encoder, self.fps = autoencoder, prompt_encoder, fps
        self.shape, self.pixels = spec.shape, (spec.frames, 3, spec.height, spec.width)

    def embed(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        cond = super().embed(prompts, metadata)
        if self.fps is not None:
            rates = [self._prompt_fps(each) for each in metadata or ({},) * len(prompts)]
            cond.tensors["fps"] = torch.tensor(rates, device=cond.tensors["prompt_embeds"].device)
        return cond

    def _prompt_fps(self, metadata: Metadata) -> int:
        try:
            return check_fps(metadata.get("fps", self.fps))
        except ValueError as error:
            raise ConfigError(f"data: a prompt has a wrong value: {error} [TM468]") from error

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        latents, prompt_embeds = cast_to_network_dtype(self.net, x, cond.tensors["prompt_embeds"])
        out: Tensor = self.net(latents, unet_timestep(t), prompt_embeds, cond.tensors.get("fps"))
        return out

    def with_size(self, height: int, width: int) -> VideoUnetBackbone:
        other, frames = copy(self), self.pixels[0]
        other.shape, other.pixels = latent_shape(frames, height, width), (frames, 3, height, width)
        return other

    def encode(self, pixels: Tensor) -> Tensor:
        check_clip_shape(pixels, self.pixels)
        batch_size = max(1, DECODE_BATCH_LATENTS // (self.shape[2] * self.shape[3]))
        latents = [self.autoencoder.encode(batch) for batch in torch.split(pixels.flatten(0, 1), batch_size)]
        return torch.cat(latents).view(len(pixels), *self.shape)

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        latents = x if frames is None else x[:, list(frames)]
        return self.autoencoder.decode(latents.flatten(0, 1)).view(*latents.shape[:2], *self.pixels[1:])


def latent_shape(frames: int, height: int, width: int) -> tuple[int, int, int, int]:
    """Return the latent shape of a clip; lengths and sizes that are impossible are refused."""
    if not 1 <= frames <= 1024:
        raise ValueError(f"'frames': expected 1 to 1024, got {frames}; correct 'frames' [TM469]")
    check_image_size(height, width)
    return frames, LATENT_CHANNELS, height // DOWNSAMPLE_FACTOR, width // DOWNSAMPLE_FACTOR


def check_fps(fps: object) -> int:
    """Return a frame rate; refuse what is none."""
    if isinstance(fps, bool) or not isinstance(fps, int) or not 1 <= fps <= MAX_FPS:
        raise ValueError(f"'fps' is {fps!r:.60}; set it to an integer from 1 to {MAX_FPS} frames per second [TM470]")
    return fps


def build_empty_unet(config: Mapping[str, Any]) -> Any:
    """Build a VideoUnet without memory for its weights."""
    from .nets.unet3d import VideoUnet

    with silence_libraries(), parameters_on_meta():
        return VideoUnet.from_config(dict(config))


def read_video_unet_checkpoint(name: str | None, config: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """Read a UNet from a file, or from a folder that holds nothing else, with diffusers' or the authors' keys."""
    if name is None:
        return None
    path = find_weights(name, WeightsSource(name))
    path = path / UNET_FILE if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(
            f"model.unet: {path.parent} does not contain {UNET_FILE}; give the path of the file, or of its folder "
            "[TM471]"
        )
    return convert_unet(load_state_dict(path), build_empty_unet(config))


def check_video_unet_config(config: Mapping[str, Any], weights: str, *, has_fps: bool) -> None:
    """Refuse the UNet of another model; `has_fps` is whether the frame rate must be an input of the network."""
    if bool(config.get("fps_cond")) != has_fps:
        does, other_type = ("needs", "videocrafter") if not has_fps else ("does not take", "modelscope")
        raise ConfigError(
            f"model.weights: the network of '{weights:.200}' {does} frames per second as an input; set model.type "
            f"to {other_type} [TM472]"
        )
    if config.get("in_channels", LATENT_CHANNELS) != LATENT_CHANNELS:
        raise ConfigError(
            f"model.weights: the network of '{weights:.200}' has {config['in_channels']} input channels; expected "
            f"{LATENT_CHANNELS}, so use a text-to-video model [TM473]"
        )


class VideoUnetSpec(VideoSpec):
    """Settings of a text-to-video UNet."""

    embedding_settings = {}

    def __post_init__(self) -> None:
        latent_shape(self.frames, self.height, self.width)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return latent_shape(self.frames, self.height, self.width)

    def load_text_encoders(self, components: PipelineComponents) -> ClipPromptEncoder:
        return ClipPromptEncoder.load(components)

    def tiny(self) -> Self:
        size = {"frames": MIN_FRAMES, "height": 32, "width": 32}
        small: Self = replace(cast(Any, self), weights=TINY, unet=None, embeddings=None, **size)
        return small


@dataclass(frozen=True)
class ModelscopeSpec(VideoUnetSpec):
    """ModelScope's text-to-video model of 1.7 billion parameters, and its fine-tuned versions such as Zeroscope."""

    weights: str = SOURCE.hub  # hub id, or folder in diffusers' layout
    unet: str | None = None  # file, folder or hub id whose UNet replaces the pipeline's, with anyone's keys
    frames: int = 16
    height: int = 256
    width: int = 256
    checkpoint_decoder: bool = True  # recompute the decoder in the backward pass: a seventh of its memory
    embeddings: Path | None = None  # folder written by `tastemaker embed`; the text encoder is loaded only if needed
    seed: int = 0  # of random weights
    published: ClassVar[PublishedModel] = MODELSCOPE
    layout: ClassVar[PipelineLayout] = PipelineLayout(
        "TextToVideoSDPipeline", "unet", "lora_unet", unet_to_original, lora_loader="merge"
    )

    def load(self, placement: Placement) -> VideoUnetBackbone:
        from diffusers import AutoencoderKL

        from .nets.unet3d import VideoUnet

        components = self.components(placement)
        config = components.config("unet")
        check_video_unet_config(config, self.weights, has_fps=False)
        prompt_encoder = self.cached_prompt_encoder(components)
        vae = components.load_vae("vae", AutoencoderKL, gradient_checkpointing=self.checkpoint_decoder)
        net = components.load_trainable("unet", VideoUnet, read_video_unet_checkpoint(self.unet, config))
        return VideoUnetBackbone(net, vae, prompt_encoder, self)
