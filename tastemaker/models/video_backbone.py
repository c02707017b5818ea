"""Shared parts of the published video generators: backbone, frozen video VAE and T5 prompt encoder."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import torch
from pydantic import Field
from torch import Tensor, nn

from ..core.registry import ConfigError
from ..core.types import Condition, Metadata, Prompts
from ..data.embedding_store import PromptEncoder
from .pipeline_components import DECODE_BATCH_LATENTS, PipelineComponents
from .text_encoders import TextEncoder, disable_autocast

VideoSide = Annotated[int, Field(ge=16, le=4096)]
TextTokenCount = Annotated[int, Field(ge=1, le=1024)]
ConditioningTensors = Mapping[str, Tensor]
CallNetwork = Callable[
    [nn.Module, Tensor, Tensor, ConditioningTensors], Tensor
]  # of a network, latents, levels and what is told of prompts
DecodeFrames = Callable[
    [Tensor, Sequence[int]], Tensor
]  # of raw latents [B, C, f, h, w] and frames, [B, 3, frames, H, W]
ATTENTION_LAYERS = ("to_q", "to_k", "to_v", "to_out.0")  # what users of diffusers adapt
SMALL_T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}


@dataclass(frozen=True)
class FrozenVideoVae:
    """A frozen autoencoder of clips; latents (raw - shift) * scale, [B, f, C, h, w], of pixels [B, F, 3, H, W]."""

    net: Any
    shift: Tensor  # [C, 1, 1, 1], or of one number
    scale: Tensor
    show: DecodeFrames
    stills: bool = False  # its encoder sees each frame by itself

    @classmethod
    def of(
        cls, net: Any, show: DecodeFrames, shift: Any = None, spread: Any = None, *, stills: bool = False
    ) -> FrozenVideoVae:
        """By an autoencoder's own mean, spread and scale of latents, or those given in their place."""
        where, told = next(net.parameters()).device, net.config
        means, spreads = (told.get("latents_mean"), told.get("latents_std")) if shift is None else (shift, spread)
        scale = torch.tensor(told.get("scaling_factor") or 1.0, device=where)
        if means is None or spreads is None:
            return cls(net, torch.zeros((), device=where), scale, show, stills)
        middle, width = (torch.as_tensor(x, device=where).float().view(-1, 1, 1, 1) for x in (means, spreads))
        return cls(net, middle, scale / width, show, stills)

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """Encode pixels to the mode of the posterior, scaled and shifted."""
        seen = (2 * pixels - 1).to(self.net.dtype)
        given = seen.flatten(0, 1) if self.stills else seen.transpose(1, 2)
        with disable_autocast(seen):
            raw: Tensor = self.net.encode(given).latent_dist.mode().float()
        clips = raw.view(*seen.shape[:2], *raw.shape[1:]).transpose(1, 2) if self.stills else raw
        return ((clips - self.shift) * self.scale).transpose(1, 2)

    def decode(self, latents: Tensor, frames: Sequence[int]) -> Tensor:
        """Few clips at a time: each keeps little for its gradient, but the one being computed takes gigabytes."""
        rows = max(1, DECODE_BATCH_LATENTS // latents[0, :, 0].numel())
        return torch.cat([self._decode(part, frames) for part in torch.split(latents, rows)])

    def _decode(self, latents: Tensor, frames: Sequence[int]) -> Tensor:
        raw = (latents.transpose(1, 2) / self.scale + self.shift).to(self.net.dtype)
        with disable_autocast(raw):
            shown = self.show(raw, frames).float()
        return (shown / 2 + 0.5).clamp(0, 1).transpose(1, 2)


@dataclass(frozen=True)
class VideoCompression:
    """Latent channels and compression ratios of a video autoencoder."""

    channels: int  # that it has
    factor: int  # pixels a side
    every: int  # frames, after the first

    def shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Of the latents of a clip."""
        return 1 + (frames - 1) // self.every, self.channels, height // self.factor, width // self.factor


class VideoModelSize(Protocol):
    """What a configuration says of the clips to be made."""

    @property
    def frames(self) -> int: ...
    @property
    def height(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def shape(self) -> tuple[int, int, int, int]: ...


class VideoBackbone:
    """Denoiser of video latents [f, C, h, w]; each model file supplies the function that calls its network."""

    passes = 1

    def __init__(
        self, net: nn.Module, ask: CallNetwork, codec: FrozenVideoVae, texts: PromptEncoder, clip: VideoModelSize
    ) -> None:
        self.net, self.ask, self.codec, self.texts = set_default_lora_targets(net), ask, codec, texts
        self.shape, self.pixels = clip.shape, (clip.frames, 3, clip.height, clip.width)

    def embed(self, prompts: Prompts, facts: Sequence[Metadata] = ()) -> Condition:
        return Condition(tuple(prompts), self.texts(prompts), tuple(facts))

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        dtype = next(self.net.parameters()).dtype  # without autocast, all of them must be alike
        told = {name: y.to(dtype) if y.is_floating_point() else y for name, y in cond.tensors.items()}
        return self.ask(self.net, x.to(dtype), t, told)

    def encode(self, pixels: Tensor) -> Tensor:
        check_clip_shape(pixels, self.pixels)
        return self.codec.encode(pixels)

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        return self.codec.decode(x, range(self.pixels[0]) if frames is None else frames)


def set_default_lora_targets(net: Any) -> nn.Module:
    """Set the default LoRA target layers of a network."""
    net.usual = ATTENTION_LAYERS
    trained: nn.Module = net
    return trained


def check_clip_shape(pixels: Tensor, made: tuple[int, int, int, int]) -> None:
    """Refuse clips that are not as long and large as those the model makes."""
    if tuple(pixels.shape[1:]) != made:
        (found, _, high, wide), (frames, _, height, width) = pixels.shape[1:], made
        raise ConfigError(
            f"the clips are {found} frames of {wide}x{high} and the model makes {frames} of {width}x{height}; "
            "set data.size, or model.frames, model.height and model.width"
        )


def check_video_size(frames: int, height: int, width: int, every: int, side: int) -> None:
    """Refuse a length or size that an autoencoder cannot make."""
    if (frames - 1) % every or not 1 <= frames <= 1025:
        fitting = max(0, round((frames - 1) / every)) * every + 1
        raise ValueError(f"'frames' is {frames}; expected one more than a multiple of {every}, such as {fitting}")
    for name, length in (("height", height), ("width", width)):
        if length % side:
            raise ValueError(f"'{name}' is {length}; expected a multiple of {side}")


class T5PromptEncoder:
    """What T5 says of every token of a prompt, and which of them are no filling; `masked`, it does not read that."""

    def __init__(self, kit: PipelineComponents, length: int, *, masked: bool) -> None:
        from transformers import T5EncoderModel

        self.t5, self.masked = kit.reader("text_encoder", T5EncoderModel, "tokenizer", length), masked

    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        return encode_with_t5(self.t5, prompts, masked=self.masked)


def encode_with_t5(reader: TextEncoder, texts: list[str], *, masked: bool) -> dict[str, Tensor]:
    """What a T5 says of every token, and which of them are no filling."""
    return {
        "words": reader(texts, masked=masked).last_hidden_state,
        "seen": reader.tokens(texts)["attention_mask"].bool(),
    }


def clean_prompt(text: str) -> str:
    """A prompt without what a web page left in it."""
    return " ".join(html.unescape(html.unescape(text)).split())
