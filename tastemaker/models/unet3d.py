"""What ModelScope and VideoCrafter have in common: one kind of UNet that denoises clips, and who reads for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..pretrained import Source, locate, read
from ..registry import ConfigError
from ..types import Condition, Facts, Prompts
from . import lvdm, sd15
from .clips import same_clip
from .published import AT_ONCE, Codec, Kit, silence
from .readers import Reader, Remembered
from .unet import CHANNELS, FACTOR, alike, level, sided

LENGTH = sd15.LENGTH
NETWORK = "diffusion_pytorch_model.safetensors"
FASTEST = 1000  # frames per second
FEWEST = 3  # frames of small clips: of two, a CPU makes up the gradient of bf16 convolutions over three (oneDNN)
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


class UnetTexts:
    """What CLIP says of every word of a prompt."""

    def __init__(self, clip: Reader) -> None:
        self.clip = clip

    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        return {"words": self.clip(prompts).last_hidden_state}


@dataclass(frozen=True)
class Size:
    """Of a clip."""

    frames: int
    height: int
    width: int

    def __post_init__(self) -> None:
        if not 1 <= self.frames <= 1024:
            raise ValueError(f"'frames' is {self.frames}; expected from 1 to 1024")
        sided(self.height, self.width)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.frames, CHANNELS, self.height // FACTOR, self.width // FACTOR

    @property
    def pixels(self) -> tuple[int, int, int, int]:
        return self.frames, 3, self.height, self.width


def speed(fps: object) -> int:
    """Frames per second, if a clip can have so many."""
    if isinstance(fps, bool) or not isinstance(fps, int) or not 1 <= fps <= FASTEST:
        raise ValueError(f"'fps' is {fps!r:.60}; expected a whole number of frames per second from 1 to {FASTEST}")
    return fps


class ClipUnetBackbone:
    """Denoises [F, 4, h, w] latents, predicting the noise; told frames per second where its network wants them.

    Of a row whose facts have an `fps`, that one.
    """

    passes = 1

    def __init__(self, net: nn.Module, codec: Codec, embedded: Remembered, size: Size, fps: int | None = None) -> None:
        self.net = net.eval()  # or layers inside it drop what they say, and no step could be scored again
        self.codec, self.embedded, self.fps = codec, embedded, fps
        self.shape, self.pixels = size.shape, size.pixels

    def embed(self, prompts: Prompts, facts: Sequence[Facts] = ()) -> Condition:
        told = self.embedded(prompts)
        if self.fps is not None:
            speeds = [self._speed(fact) for fact in facts or ({},) * len(prompts)]
            told["fps"] = torch.tensor(speeds, device=told["words"].device)
        return Condition(tuple(prompts), told, tuple(facts))

    def _speed(self, fact: Facts) -> int:
        try:
            return speed(fact.get("fps", self.fps))
        except ValueError as error:
            raise ConfigError(f"data: of a prompt {error}") from error

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        seen, words = alike(self.net, x, cond.tensors["words"])
        out: Tensor = self.net(seen, level(t), words, cond.tensors.get("fps"))
        return out

    def sized(self, height: int, width: int) -> ClipUnetBackbone:
        other, size = copy(self), Size(self.pixels[0], height, width)
        other.shape, other.pixels = size.shape, size.pixels
        return other

    def encode(self, pixels: Tensor) -> Tensor:
        same_clip(pixels, self.pixels)
        few = max(1, AT_ONCE // (self.shape[2] * self.shape[3]))
        parts = [self.codec.encode(part) for part in torch.split(pixels.flatten(0, 1), few)]
        return torch.cat(parts).view(len(pixels), *self.shape)

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        shown = x if frames is None else x[:, list(frames)]
        return self.codec.decode(shown.flatten(0, 1)).view(*shown.shape[:2], *self.pixels[1:])


def reader(kit: Kit) -> UnetTexts:
    """The text encoder of a folder."""
    from transformers import CLIPTextModel

    return UnetTexts(kit.reader("text_encoder", CLIPTextModel, "tokenizer", LENGTH))


def empty(make: Callable[[], Any]) -> Any:
    """A network without numbers, to be filled."""
    from accelerate import init_empty_weights

    with silence(), init_empty_weights():
        return make()


def network(name: str | None, config: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """The network in one file, or in a folder that holds nothing else, by any names; none without one."""
    from .nets.unet3d import ClipUnet

    if name is None:
        return None
    path = locate(name, Source(name))
    path = path / NETWORK if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"model.unet: {path.parent} holds no {NETWORK}; name the file itself, or its folder")
    return lvdm.translated(read(path), empty(lambda: ClipUnet.from_config(dict(config))))


def fitting(config: dict[str, Any], name: str, *, fps: bool) -> None:
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
