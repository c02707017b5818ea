"""Shared parts of the published video generators: frozen video VAE, backbone and T5 prompt encoders."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Protocol, Self, cast

import torch
from pydantic import Field
from torch import Tensor

from ..core.model_spec import Tensors
from ..core.registry import ConfigError
from ..core.types import Condition, Placement
from ..core.weights import NetworkTraits
from .checkpoint_keys import KEEP_OTHER_NAMES, KeyRules, TensorShapes, split_and_rename
from .decoder_tiles import decode_in_tiles, decode_in_time_tiles
from .image_backbone import DECODE_BATCH_LATENTS, TextConditionedBackbone
from .pipeline_components import ATTENTION_LAYERS, PipelineComponents, PublishedSpec
from .text_encoders import TextEncoder, TextEncoders, disable_autocast

VideoSide = Annotated[int, Field(ge=16, le=4096)]
TextTokenCount = Annotated[int, Field(ge=1, le=1024)]
ConditioningTensors = Mapping[str, Tensor]


class DecodeFrames(Protocol):
    """Decodes some frames of raw latents [B, C, f, h, w]: [B, 3, frames, H, W] in [-1, 1]."""

    def __call__(self, raw: Tensor, /, frames: Sequence[int]) -> Tensor: ...


TileSize = Annotated[int, Field(ge=64)]  # pixels per side
TileFrames = Annotated[int, Field(ge=9)]  # frames per tile
VIDEO_TRAITS = NetworkTraits(lora_targets=ATTENTION_LAYERS)


@dataclass(frozen=True)
class FrozenVideoVae:
    """A frozen video VAE: latents (raw - shift) * scale, [B, f, C, h, w], of clips [B, F, 3, H, W] in [0, 1]."""

    net: Any
    shift: Tensor  # scalar, or per channel [C, 1, 1, 1]
    scale: Tensor
    decode_frames: DecodeFrames
    per_frame_encoder: bool = False  # the encoder is that of an image VAE
    tile: int | None = None  # latents per side of the tiles that are decoded one at a time; None: whole frames
    time_tile: int | None = None  # latents in time of these tiles; None: whole clips
    temporal_ratio: int = 1  # frames per latent, after the first

    @classmethod
    def from_network(cls, net: Any, decode_frames: DecodeFrames, *, per_frame_encoder: bool = False) -> FrozenVideoVae:
        """Take mean, deviation and scale of latents from the VAE's config, or from its buffers, where LTX has them."""
        device, config = next(net.parameters()).device, {**net.config, **dict(net.named_buffers(recurse=False))}
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

        def decode_tile(part: Tensor) -> Tensor:
            return decode_in_time_tiles(self.decode_frames, part, frames, self.time_tile, self.temporal_ratio)

        with disable_autocast(raw):
            pixels = decode_in_tiles(decode_tile, raw, self.tile).float()
        return (pixels / 2 + 0.5).clamp(0, 1).transpose(1, 2)


def latents_needed(frames: Sequence[int], temporal_ratio: int) -> int:
    """Count the latents before and at the last of `frames`: the first latent is one frame, each other several."""
    return 1 + -(-max(frames) // temporal_ratio)


@dataclass(frozen=True)
class VideoCompression:
    """Latent channels and compression ratios of a video VAE, and the sizes that VAE and network can represent."""

    channels: int
    spatial_ratio: int  # pixels per latent and side
    temporal_ratio: int  # frames per latent, after the first
    patch_size: int = 2  # latents per token and side
    chunk_size: int = 1  # latents, after the first, that are decoded together

    @property
    def chunk_frames(self) -> int:
        """Clips have one frame more than a multiple of this."""
        return self.temporal_ratio * self.chunk_size

    def tile_latents(self, frames: int | None) -> int | None:
        """Return the latents of a tile of that many frames: at least three, so that tiles overlap and move on."""
        return None if frames is None else max(3, 1 + -(-(frames - 1) // self.temporal_ratio))

    def shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Return the latent shape [f, C, h, w] of a clip."""
        latents, ratio = 1 + (frames - 1) // self.temporal_ratio, self.spatial_ratio
        return latents, self.channels, height // ratio, width // ratio

    def check_size(self, frames: int, height: int, width: int) -> None:
        """Refuse a length or size that the VAE and the network's patches cannot represent."""
        if (frames - 1) % self.chunk_frames or not 1 <= frames <= 1025:
            nearest = max(0, round((frames - 1) / self.chunk_frames)) * self.chunk_frames + 1
            raise ValueError(
                f"'frames': expected one more than a multiple of {self.chunk_frames}, got {frames}; set for "
                f"example frames: {nearest} [TM539]"
            )
        unit = self.patch_size * self.spatial_ratio
        for name, length in (("height", height), ("width", width)):
            if length % unit:
                raise ValueError(f"'{name}': expected a multiple of {unit}, got {length}; change '{name}' [TM540]")


class VideoSpec(PublishedSpec):
    """Settings of a published video generator."""

    frames: int
    height: int
    width: int


class VideoTransformerSpec(VideoSpec):
    """Settings of a text-to-video transformer."""

    backbone_class: ClassVar[type[VideoBackbone]]
    transformer: str | None = None  # single file of the network, of models that have this setting
    checkpoint_decoder: bool
    decode_tile_size: int | None
    max_text_tokens: int

    @property
    @abstractmethod
    def compression(self) -> VideoCompression:
        """How the VAE compresses clips."""

    def __post_init__(self) -> None:
        self.compression.check_size(self.frames, self.height, self.width)

    @property
    def video_shape(self) -> tuple[int, int, int, int]:
        """Latents of a clip: [f, C, h, w]."""
        return self.compression.shape(self.frames, self.height, self.width)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.video_shape

    @property
    def decode_tile_latents(self) -> int | None:
        """Latents in time of the tiles that are decoded one at a time; None: whole clips, or as the VAE does."""
        return None

    def load(self, placement: Placement) -> VideoBackbone:
        return self.backbone_class(self, placement)

    def tiny(self) -> Self:
        small: Self = replace(cast(Any, super().tiny()), frames=1 + self.compression.chunk_frames)
        return small


class VideoBackbone(TextConditionedBackbone):
    """Denoises video latents [f, C, h, w] with a transformer of diffusers.

    A model's class names its networks, and says how to call the transformer and how to decode some of the frames.
    """

    network_class: ClassVar[str]  # of diffusers
    vae_class: ClassVar[str]  # of diffusers
    key_rules: ClassVar[KeyRules] = (KEEP_OTHER_NAMES,)  # the authors' names in single files
    spec: VideoTransformerSpec

    def __init__(self, spec: VideoTransformerSpec, placement: Placement) -> None:
        components = spec.components(placement)
        self.spec, self.traits = spec, VIDEO_TRAITS
        tile_size = spec.decode_tile_size
        tile = None if tile_size is None else max(1, tile_size // spec.compression.spatial_ratio)
        self.autoencoder = replace(
            self.load_vae(components),
            tile=tile,
            time_tile=spec.decode_tile_latents,
            temporal_ratio=spec.compression.temporal_ratio,
        )
        self.net = self.load_network(components)
        self.prompt_encoder = spec.cached_prompt_encoder(components)
        self.shape, self.pixels = spec.shape, (spec.frames, 3, spec.height, spec.width)

    def load_network(self, components: PipelineComponents) -> Any:
        """Load the transformer."""
        import diffusers

        network_class = getattr(diffusers, self.network_class)
        return components.load_transformer(network_class, self.spec.transformer, self.to_diffusers_keys)

    def to_diffusers_keys(self, tensors: Tensors, shapes: TensorShapes) -> Tensors:
        """Rename the tensors of a single file to diffusers' keys."""
        return split_and_rename(tensors, shapes, self.key_rules)

    def load_vae(self, components: PipelineComponents) -> FrozenVideoVae:
        """Load the VAE."""
        import diffusers

        network_class, checkpointing = getattr(diffusers, self.vae_class), self.spec.checkpoint_decoder
        vae = components.load_frozen("vae", network_class, gradient_checkpointing=checkpointing)
        return FrozenVideoVae.from_network(vae, partial(self.decode_frames, vae))

    @abstractmethod
    def call_network(self, x: Tensor, t: Tensor, conditioning: ConditioningTensors) -> Tensor:
        """Predict from latents [B, f, C, h, w] at times [B], in the dtype of the weights: [B, f, C, h, w]."""

    @staticmethod
    def decode_frames(vae: Any, raw: Tensor, frames: Sequence[int]) -> Tensor:
        """Decode raw latents [B, C, f, h, w] and select some frames: [B, 3, frames, H, W] in [-1, 1]."""
        pixels: Tensor = vae.decode(raw, return_dict=False)[0]
        return pixels[:, :, list(frames)]

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        dtype = next(self.net.parameters()).dtype  # without autocast, all inputs need the dtype of the weights
        conditioning = {name: y.to(dtype) if y.is_floating_point() else y for name, y in cond.tensors.items()}
        return self.call_network(x.to(dtype), t, conditioning)

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
            f"the videos are {data_frames} frames of {data_width}x{data_height}, but the model generates {frames} "
            f"of {width}x{height}; set data.image_size, or model.frames, model.height and model.width [TM541]"
        )


class T5PromptEncoder(TextEncoders):
    """T5's features, prompt_embeds [B, L, D], and the mask of real tokens, attention_mask [B, L].

    Without `use_attention_mask` the encoder attends to padding too, as some generators were trained.
    """

    def __init__(self, components: PipelineComponents, max_text_tokens: int, *, use_attention_mask: bool) -> None:
        from transformers import T5EncoderModel

        self.t5 = components.load_text_encoder("text_encoder", T5EncoderModel, "tokenizer", max_text_tokens)
        self.text_encoders, self.use_attention_mask = (self.t5,), use_attention_mask

    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        return encode_with_t5(self.t5, prompts, use_attention_mask=self.use_attention_mask)


def encode_with_t5(t5: TextEncoder, texts: list[str], *, use_attention_mask: bool) -> dict[str, Tensor]:
    """Return T5's features, prompt_embeds [B, L, D], and the mask of real tokens, attention_mask [B, L]."""
    return {
        "prompt_embeds": t5(texts, use_attention_mask=use_attention_mask).last_hidden_state,
        "attention_mask": t5.tokenize(texts)["attention_mask"].bool(),
    }
