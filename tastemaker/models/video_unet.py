"""What ModelScope and VideoCrafter have in common: one kind of UNet that denoises clips, and who reads for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.registry import ConfigError
from ..core.types import Condition, Metadata, Prompts
from . import lvdm_checkpoint, sd15
from .pipeline_components import DECODE_BATCH_LATENTS, FrozenVae, PipelineComponents, silence_libraries
from .pretrained import WeightsSource, find_weights, load_state_dict
from .text_encoders import CachedTextEncoder, TextEncoder
from .unet_common import CHANNELS, FACTOR, cast_to_network_dtype, check_image_size, unet_timestep
from .video_backbone import check_clip_shape

CLIP_MAX_TOKENS = sd15.CLIP_MAX_TOKENS
UNET_FILE = "diffusion_pytorch_model.safetensors"
MAX_FPS = 1000  # frames per second
MIN_FRAMES = 3  # frames of small clips: of two, a CPU makes up the gradient of bf16 convolutions over three (oneDNN)
SMALL: dict[str, dict[str, Any]] = {
    "unet": {
        "block_out_channels": (8,),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "down_block_types": ("CrossAttnDownBlock3D",),
        "up_block_types": ("CrossAttnUpBlock3D",),
        "cross_attention_dim": 16,
        "attention_head_dim": 4,
    },
    "vae": sd15.SMALL["vae"],
    "text_encoder": sd15.SMALL["text_encoder"],
}


class VideoUnetPromptEncoder:
    """What CLIP says of every word of a prompt."""

    def __init__(self, clip: TextEncoder) -> None:
        self.clip = clip

    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        return {"words": self.clip(prompts).last_hidden_state}


@dataclass(frozen=True)
class VideoSize:
    """Of a clip."""

    frames: int
    height: int
    width: int

    def __post_init__(self) -> None:
        if not 1 <= self.frames <= 1024:
            raise ValueError(f"'frames' is {self.frames}; expected from 1 to 1024")
        check_image_size(self.height, self.width)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.frames, CHANNELS, self.height // FACTOR, self.width // FACTOR

    @property
    def pixels(self) -> tuple[int, int, int, int]:
        return self.frames, 3, self.height, self.width


def check_fps(fps: object) -> int:
    """Frames per second, if a clip can have so many."""
    if isinstance(fps, bool) or not isinstance(fps, int) or not 1 <= fps <= MAX_FPS:
        raise ValueError(f"'fps' is {fps!r:.60}; expected a whole number of frames per second from 1 to {MAX_FPS}")
    return fps


class VideoUnetBackbone:
    """Denoises [F, 4, h, w] latents, predicting the noise; told frames per second where its network wants them.

    Of a row whose facts have an `fps`, that one.
    """

    passes = 1

    def __init__(
        self, net: nn.Module, codec: FrozenVae, embedded: CachedTextEncoder, size: VideoSize, fps: int | None = None
    ) -> None:
        self.net = net.eval()  # or layers inside it drop what they say, and no step could be scored again
        self.codec, self.embedded, self.fps = codec, embedded, fps
        self.shape, self.pixels = size.shape, size.pixels

    def embed(self, prompts: Prompts, facts: Sequence[Metadata] = ()) -> Condition:
        told = self.embedded(prompts)
        if self.fps is not None:
            speeds = [self._speed(fact) for fact in facts or ({},) * len(prompts)]
            told["fps"] = torch.tensor(speeds, device=told["words"].device)
        return Condition(tuple(prompts), told, tuple(facts))

    def _speed(self, fact: Metadata) -> int:
        try:
            return check_fps(fact.get("fps", self.fps))
        except ValueError as error:
            raise ConfigError(f"data: of a prompt {error}") from error

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        seen, words = cast_to_network_dtype(self.net, x, cond.tensors["words"])
        out: Tensor = self.net(seen, unet_timestep(t), words, cond.tensors.get("fps"))
        return out

    def sized(self, height: int, width: int) -> VideoUnetBackbone:
        other, size = copy(self), VideoSize(self.pixels[0], height, width)
        other.shape, other.pixels = size.shape, size.pixels
        return other

    def encode(self, pixels: Tensor) -> Tensor:
        check_clip_shape(pixels, self.pixels)
        few = max(1, DECODE_BATCH_LATENTS // (self.shape[2] * self.shape[3]))
        parts = [self.codec.encode(part) for part in torch.split(pixels.flatten(0, 1), few)]
        return torch.cat(parts).view(len(pixels), *self.shape)

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        shown = x if frames is None else x[:, list(frames)]
        return self.codec.decode(shown.flatten(0, 1)).view(*shown.shape[:2], *self.pixels[1:])


def build_prompt_encoder(kit: PipelineComponents) -> VideoUnetPromptEncoder:
    """The text encoder of a folder."""
    from transformers import CLIPTextModel

    return VideoUnetPromptEncoder(kit.reader("text_encoder", CLIPTextModel, "tokenizer", CLIP_MAX_TOKENS))


def init_empty(make: Callable[[], Any]) -> Any:
    """A network without numbers, to be filled."""
    from accelerate import init_empty_weights

    with silence_libraries(), init_empty_weights():
        return make()


def read_video_unet_checkpoint(name: str | None, config: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """The network in one file, or in a folder that holds nothing else, by any names; none without one."""
    from .nets.unet3d import VideoUnet

    if name is None:
        return None
    path = find_weights(name, WeightsSource(name))
    path = path / UNET_FILE if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"model.unet: {path.parent} holds no {UNET_FILE}; name the file itself, or its folder")
    return lvdm_checkpoint.convert_unet(load_state_dict(path), init_empty(lambda: VideoUnet.from_config(dict(config))))


def check_video_unet_config(config: dict[str, Any], name: str, *, fps: bool) -> None:
    """Refuse the network of another model."""
    if bool(config.get("fps_cond")) != fps:
        found, other = ("wants", "videocrafter") if not fps else ("is not told", "modelscope")
        raise ConfigError(
            f"model.weights: the network of '{name:.200}' {found} frames per second; set model.type to {other}"
        )
    if config.get("in_channels", CHANNELS) != CHANNELS:
        raise ConfigError(
            f"model.weights: the network of '{name:.200}' reads {config['in_channels']} channels; expected {CHANNELS}, "
            "so name a text-to-video model"
        )
