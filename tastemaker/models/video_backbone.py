"""Shared parts of the published video generators: frozen video VAE, backbone and T5 prompt encoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..core.policy import Backbone
from ..core.registry import ConfigError
from ..core.types import Condition, Metadata, Prompts
from ..core.weights import NetworkTraits
from .image_backbone import DECODE_BATCH_LATENTS
from .pipeline_components import ATTENTION_LAYERS, PipelineComponents, PublishedSpec
from .text_encoders import CachedTextEncoder, TextEncoder, TextEncoders, disable_autocast

VideoSide = Annotated[int, Field(ge=16, le=4096)]
TextTokenCount = Annotated[int, Field(ge=1, le=1024)]
ConditioningTensors = Mapping[str, Tensor]
# Calls a network with latents [B, f, C, h, w], times [B] and conditioning; returns the prediction [B, f, C, h, w].
CallNetwork = Callable[[nn.Module, Tensor, Tensor, ConditioningTensors], Tensor]
# Decodes some frames of raw latents [B, C, f, h, w]: [B, 3, frames, H, W] in [-1, 1].
DecodeFrames = Callable[[Tensor, Sequence[int]], Tensor]
VIDEO_TRAITS = NetworkTraits(lora_targets=ATTENTION_LAYERS)


@dataclass(frozen=True)
class FrozenVideoVae:
    """A frozen video VAE: latents (raw - shift) * scale, [B, f, C, h, w], of clips [B, F, 3, H, W] in [0, 1]."""

    net: Any
    shift: Tensor  # scalar, or per channel [C, 1, 1, 1]
    scale: Tensor
    decode_frames: DecodeFrames
    per_frame_encoder: bool = False  # the encoder is that of an image VAE

    @classmethod
    def from_network(
        cls,
        net: Any,
        decode_frames: DecodeFrames,
        mean: Any = None,
        std: Any = None,
        *,
        per_frame_encoder: bool = False,
    ) -> FrozenVideoVae:
        """Take mean, deviation and scale of latents from the VAE's config; `mean` and `std` override the config's."""
        device, config = next(net.parameters()).device, net.config
        if mean is None:
            mean, std = config.get("latents_mean"), config.get("latents_std")
        scale = torch.tensor(config.get("scaling_factor") or 1.0, device=device)
        if mean is None or std is None:
            return cls(net, torch.zeros((), device=device), scale, decode_frames, per_frame_encoder)
        shift, width = (torch.as_tensor(x, device=device).float().view(-1, 1, 1, 1) for x in (mean, std))
        return cls(net, shift, scale / width, decode_frames, per_frame_encoder)

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """Encode clips to the mode of the posterior, shifted and scaled."""
        x = (2 * pixels - 1).to(self.net.dtype)
        with disable_autocast(x):
            posterior = self.net.encode(x.flatten(0, 1) if self.per_frame_encoder else x.transpose(1, 2))
            raw: Tensor = posterior.latent_dist.mode().float()
        clips = raw.view(*x.shape[:2], *raw.shape[1:]).transpose(1, 2) if self.per_frame_encoder else raw
        return ((clips - self.shift) * self.scale).transpose(1, 2)

    def decode(self, latents: Tensor, frames: Sequence[int]) -> Tensor:
        """Decode some frames of clips, few clips at a time: the activations of one decoder call take gigabytes."""
        batch_size = max(1, DECODE_BATCH_LATENTS // latents[0, :, 0].numel())
        return torch.cat([self._decode(batch, frames) for batch in torch.split(latents, batch_size)])

    def _decode(self, latents: Tensor, frames: Sequence[int]) -> Tensor:
        raw = (latents.transpose(1, 2) / self.scale + self.shift).to(self.net.dtype)
        with disable_autocast(raw):
            pixels = self.decode_frames(raw, frames).float()
        return (pixels / 2 + 0.5).clamp(0, 1).transpose(1, 2)


def checkpoint_if(function: Callable[..., Any], enabled: bool, *args: Any) -> Any:
    """Call a function, with activation checkpointing if it is enabled and gradients are computed."""
    return checkpoint(function, *args, use_reentrant=False) if enabled and torch.is_grad_enabled() else function(*args)


def latents_needed(frames: Sequence[int], temporal_ratio: int) -> int:
    """Count the latents before and at the last of `frames`: the first latent is one frame, each other several."""
    return 1 + -(-max(frames) // temporal_ratio)


def decode_whole_clip(net: Any, raw: Tensor, frames: Sequence[int]) -> Tensor:
    """Decode all latents and select frames."""
    pixels: Tensor = net.decode(raw, return_dict=False)[0]
    return pixels[:, :, list(frames)]


@dataclass(frozen=True)
class VideoCompression:
    """Latent channels and compression ratios of a video VAE."""

    channels: int
    spatial_ratio: int  # pixels per latent and side
    temporal_ratio: int  # frames per latent, after the first

    def shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Return the latent shape [f, C, h, w] of a clip."""
        return (
            1 + (frames - 1) // self.temporal_ratio,
            self.channels,
            height // self.spatial_ratio,
            width // self.spatial_ratio,
        )


class VideoSpec(PublishedSpec):
    """Settings of a published video generator."""

    frames: int
    height: int
    width: int


class VideoBackbone(Backbone):
    """Denoises video latents [f, C, h, w]; each model's file supplies the function that calls its network."""

    forward_passes = 1

    def __init__(
        self,
        net: nn.Module,
        call_network: CallNetwork,
        autoencoder: FrozenVideoVae,
        prompt_encoder: CachedTextEncoder,
        spec: VideoSpec,
        traits: NetworkTraits = VIDEO_TRAITS,
    ) -> None:
        self.net, self.call_network, self.traits = net, call_network, traits
        self.autoencoder, self.prompt_encoder = autoencoder, prompt_encoder
        self.shape, self.pixels = spec.shape, (spec.frames, 3, spec.height, spec.width)

    def enable_text_encoder_training(self) -> dict[str, nn.Module]:
        return self.prompt_encoder.enable_training()

    def embed(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        return Condition(tuple(prompts), self.prompt_encoder(prompts), tuple(metadata))

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        dtype = next(self.net.parameters()).dtype  # without autocast, all inputs need the dtype of the weights
        conditioning = {name: y.to(dtype) if y.is_floating_point() else y for name, y in cond.tensors.items()}
        return self.call_network(self.net, x.to(dtype), t, conditioning)

    def encode(self, pixels: Tensor) -> Tensor:
        check_clip_shape(pixels, self.pixels)
        return self.autoencoder.encode(pixels)

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        return self.autoencoder.decode(x, range(self.pixels[0]) if frames is None else frames)


def check_clip_shape(pixels: Tensor, expected: tuple[int, int, int, int]) -> None:
    """Refuse clips [B, F, 3, H, W] whose length or size differs from that of the model's samples."""
    if tuple(pixels.shape[1:]) != expected:
        (data_frames, _, data_height, data_width), (frames, _, height, width) = pixels.shape[1:], expected
        raise ConfigError(
            f"the clips are {data_frames} frames of {data_width}x{data_height} and the model makes {frames} of "
            f"{width}x{height}; set data.image_size, or model.frames, model.height and model.width"
        )


def check_video_size(frames: int, height: int, width: int, temporal_ratio: int, spatial_ratio: int) -> None:
    """Refuse a length or size that the VAE and the network's patches cannot represent."""
    if (frames - 1) % temporal_ratio or not 1 <= frames <= 1025:
        nearest = max(0, round((frames - 1) / temporal_ratio)) * temporal_ratio + 1
        raise ValueError(
            f"'frames' is {frames}; expected one more than a multiple of {temporal_ratio}, such as {nearest}"
        )
    for name, length in (("height", height), ("width", width)):
        if length % spatial_ratio:
            raise ValueError(f"'{name}' is {length}; expected a multiple of {spatial_ratio}")


class T5PromptEncoder(TextEncoders):
    """T5's features, words [B, L, D], and the mask of real tokens, seen [B, L].

    Without `use_attention_mask` the encoder attends to padding too, as some generators were trained.
    """

    def __init__(self, components: PipelineComponents, max_text_tokens: int, *, use_attention_mask: bool) -> None:
        from transformers import T5EncoderModel

        self.t5 = components.load_text_encoder("text_encoder", T5EncoderModel, "tokenizer", max_text_tokens)
        self.use_attention_mask = use_attention_mask

    @property
    def text_encoders(self) -> tuple[TextEncoder, ...]:
        return (self.t5,)

    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        return encode_with_t5(self.t5, prompts, use_attention_mask=self.use_attention_mask)


def encode_with_t5(t5: TextEncoder, texts: list[str], *, use_attention_mask: bool) -> dict[str, Tensor]:
    """Return T5's features, words [B, L, D], and the mask of real tokens, seen [B, L]."""
    return {
        "words": t5(texts, use_attention_mask=use_attention_mask).last_hidden_state,
        "seen": t5.tokenize(texts)["attention_mask"].bool(),
    }
