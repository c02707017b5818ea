"""Stable Video Diffusion (Stability AI 2023): a UNet that goes on from a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ..core.policy import Process
from ..core.types import Condition, Metadata, Placement, Prompts
from ..processes.gaussian import GaussianProcess
from ..processes.karras import noise_to_signal
from .pipeline_components import TINY, PipelineComponents, weight_sources
from .pipeline_layout import PipelineLayout, reject_unknown_names
from .pretrained import WeightsSource
from .svd_image_encoder import CLIP_IMAGE_SIZE, SvdImageEncoder, mark_unused_cross_attention
from .unet_common import CHANNELS, FACTOR, cast_to_network_dtype, check_image_size
from .video_backbone import FrozenVideoVae, VideoSide, check_clip_shape
from .video_decoding import svd_decoder

LICENCE = "Stability AI Community License"
SOURCES = {
    source.hub: source
    for source in (
        WeightsSource("stabilityai/stable-video-diffusion-img2vid-xt", size="9 GB", licence=LICENCE, gated=True),
        WeightsSource("stabilityai/stable-video-diffusion-img2vid", size="9 GB", licence=LICENCE, gated=True),
    )
}
SMALL: dict[str, dict[str, Any]] = {
    "unet": {
        "block_out_channels": (32, 32),
        "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        "layers_per_block": 1,
        "num_attention_heads": (2, 2),
        "cross_attention_dim": 16,
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 24,
        "num_frames": 3,
    },
    "vae": {
        "block_out_channels": (32, 32, 32, 32),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "latent_channels": CHANNELS,
    },
    "image_encoder": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "projection_dim": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": CLIP_IMAGE_SIZE,
        "patch_size": 56,
    },
}


class SvdBackbone:
    """Denoises [F, 4, h, w] latents that go on from the picture in the fact `image`, or else from the spec's.

    It predicts the velocity of samples at unit variance, guided more from frame to frame; what it is guided away from
    has noughts in the place of a picture.
    """

    def __init__(self, spec: Svd, placement: Placement) -> None:
        from diffusers import AutoencoderKLTemporalDecoder, UNetSpatioTemporalConditionModel
        from transformers import CLIPVisionModelWithProjection

        source = SOURCES.get(spec.weights, SOURCES[Svd.weights])
        kit = PipelineComponents(spec.weights, source, SMALL, placement, spec.seed)
        self.net = mark_unused_cross_attention(kit.trained("unet", UNetSpatioTemporalConditionModel))
        vae = kit.frozen("vae", AutoencoderKLTemporalDecoder, recompute=spec.recompute)
        self.codec = FrozenVideoVae.of(vae, svd_decoder(vae, spec.at_once), stills=True)
        eyes = kit.encoder("image_encoder", CLIPVisionModelWithProjection)
        self.glance = SvdImageEncoder(eyes, vae, (spec.height, spec.width), spec.grain, spec.seed, placement.device)
        self.spec, self.shape, self.pixels = spec, spec.shape, (spec.frames, 3, spec.height, spec.width)
        self.passes = 1 if spec.guidance is None else 2

    def embed(self, prompts: Prompts, facts: Sequence[Metadata] = ()) -> Condition:
        shown = [fact.get("image", self.spec.image) for fact in facts] or [self.spec.image] * len(prompts)
        return Condition(tuple(prompts), self.glance(shown), tuple(facts))

    def without(self, cond: Condition) -> Condition:
        return replace(cond, tensors={name: torch.zeros_like(x) for name, x in cond.tensors.items()})

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        if self.spec.guidance is None:
            return self._ask(x, t, cond)
        rows = [cond.tensors, self.without(cond).tensors]
        both = {name: torch.cat([told[name] for told in rows]) for name in cond.tensors}
        given, without = self._ask(torch.cat([x, x]), torch.cat([t, t]), replace(cond, tensors=both)).chunk(2)
        scale = torch.linspace(*self.spec.guidance, x.shape[1], device=x.device).view(-1, 1, 1, 1)
        return without + scale * (given - without)

    def _ask(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        told = cond.tensors["reference"][:, None].expand(-1, x.shape[1], -1, -1, -1)
        seen, look = cast_to_network_dtype(self.net, torch.cat([x, told.to(x.dtype)], 2), cond.tensors["look"])
        also = torch.tensor([self.spec.rate - 1, self.spec.motion, self.spec.grain], device=x.device).to(seen.dtype)
        level = noise_to_signal(t).clamp(min=1e-10).log() / 4
        out: Tensor = self.net(seen, level, look, also.expand(len(x), -1), return_dict=False)[0]
        return out

    def encode(self, pixels: Tensor) -> Tensor:
        check_clip_shape(pixels, self.pixels)
        return self.codec.encode(pixels)

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        return self.codec.decode(x, range(self.pixels[0]) if frames is None else frames)


@dataclass(frozen=True)
class Svd:
    """Stable Video Diffusion: goes on from the picture in the fact `image` (a path), whatever the prompt says."""

    weights: str = "stabilityai/stable-video-diffusion-img2vid-xt"  # a hub id, or a folder in diffusers' layout
    height: VideoSide = 576
    width: VideoSide = 1024
    frames: Annotated[int, Field(ge=1, le=1024)] = 25  # 14 for img2vid without xt
    guidance: tuple[float, float] | None = (1.0, 3.0)  # of the first frame and of the last, and evenly between
    image: Path | None = None  # the picture to go on from where a prompt has none of its own
    rate: int = 7  # frames a second, which it is told
    motion: float = 127  # how much is to move, which it is told
    grain: float = 0.02  # noise added to the picture, which it is told
    at_once: int | None = None  # frames decoded together; all if not given, fewer for less memory
    recompute: bool = True  # the decoder in the backward pass
    seed: int = 0  # of random weights and of the grain
    suits: ClassVar[type[Process]] = GaussianProcess
    layout: ClassVar[PipelineLayout] = PipelineLayout("StableVideoDiffusionPipeline", "unet", "", reject_unknown_names)

    def __post_init__(self) -> None:
        check_image_size(self.height, self.width)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.frames, CHANNELS, self.height // FACTOR, self.width // FACTOR

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        return weight_sources(self.weights, *SOURCES.values())

    def load(self, placement: Placement) -> SvdBackbone:
        return SvdBackbone(self, placement)

    def tiny(self) -> Svd:
        return replace(self, weights=TINY, height=32, width=32, frames=3, at_once=2 if self.at_once else None)
