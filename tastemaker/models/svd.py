"""Stable Video Diffusion (Blattmann et al. 2023): a UNet that continues an image as a clip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from ..core.model_spec import PipelineLayout
from ..core.policy import Backbone
from ..core.types import Condition, Metadata, Placement, Prompts
from ..processes.paths import karras_sigma
from ..rewards.backbones.preprocessing import CLIP_MEAN, CLIP_STD
from .checkpoint_keys import reject_unknown_names
from .component_configs import CLIP_H_VISION, ComponentConfigs
from .condition_images import ConditionImageEncoder, prompt_images
from .image_backbone import (
    DOWNSAMPLE_FACTOR,
    cast_to_network_dtype,
    check_image_size,
)
from .pipeline_components import TINY, PublishedModel
from .pretrained import WeightsSource
from .sd15 import LATENT_CHANNELS
from .sequential_offload import temporarily_on_device
from .text_encoders import disable_autocast
from .video_backbone import VIDEO_TRAITS, DecodeFrames, FrozenVideoVae, VideoSide, VideoSpec, check_clip_shape

CLIP_IMAGE_SIZE = 224
SVD_XT: ComponentConfigs = {
    "unet": {
        "block_out_channels": (320, 640, 1280, 1280),
        "num_attention_heads": (5, 10, 20, 20),
        "cross_attention_dim": 1024,
        "num_frames": 25,
    },
    "vae": {
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "block_out_channels": (128, 256, 512, 512),
        "layers_per_block": 2,
        "latent_channels": 4,
    },
    "image_encoder": CLIP_H_VISION,
}
TINY_CONFIGS: ComponentConfigs = {
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
        "latent_channels": LATENT_CHANNELS,
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
LICENSE = "Stability AI Community License"
XT, BASE = (
    WeightsSource(f"stabilityai/stable-video-diffusion-{name}", size="9 GB", license=LICENSE, gated=True)
    for name in ("img2vid-xt", "img2vid")
)
SVD = PublishedModel(
    "svd",
    (XT, BASE),
    TINY_CONFIGS,
    {XT.hub: SVD_XT, BASE.hub: {**SVD_XT, "unet": {**SVD_XT["unet"], "num_frames": 14}}},
)


@dataclass(frozen=True)
class SvdImageEncoder:
    """CLIP embedding of an image, and its VAE latents after noise augmentation. CLIP stays on the CPU between calls."""

    vision_encoder: Any
    vae: Any
    noise_aug_strength: float
    seed: int

    def __call__(self, image: Tensor) -> dict[str, Tensor]:
        """Encode pixels [1, 3, H, W]: look [1, D] and reference [C, h, w]."""
        from diffusers.pipelines.stable_video_diffusion import pipeline_stable_video_diffusion as published

        resize: Any = published._resize_with_antialiasing
        mean, std = (torch.tensor(x, device=image.device).view(3, 1, 1) for x in (CLIP_MEAN, CLIP_STD))
        clip_input = ((resize(2 * image - 1, (CLIP_IMAGE_SIZE, CLIP_IMAGE_SIZE)) + 1) / 2 - mean) / std
        noise = torch.randn(image.shape, generator=torch.Generator().manual_seed(self.seed)).to(image.device)
        with disable_autocast(image), temporarily_on_device(self.vision_encoder, image.device):
            look = self.vision_encoder(clip_input.to(self.vision_encoder.dtype)).image_embeds
            noisy = (2 * image - 1 + self.noise_aug_strength * noise).to(self.vae.dtype)
            return {"look": look.float(), "reference": self.vae.encode(noisy).latent_dist.mode()[0].float()}


class SvdBackbone(Backbone):
    """Denoises latents [F, 4, h, w] of a clip that continues the image in a prompt's metadata, or else the spec's.

    The UNet predicts the velocity at unit variance. Its guidance scale rises from the first frame to the last; the
    unconditional branch has zeros in place of the image.
    """

    has_unconditional = True

    def __init__(self, spec: SvdSpec, placement: Placement) -> None:
        from diffusers import AutoencoderKLTemporalDecoder, UNetSpatioTemporalConditionModel
        from transformers import CLIPVisionModelWithProjection

        components = spec.components(placement)
        self.net = components.load_trainable("unet", UNetSpatioTemporalConditionModel)
        self.traits = replace(VIDEO_TRAITS, unused_parameters=unused_cross_attention(self.net))
        vae = components.load_frozen(
            "vae", AutoencoderKLTemporalDecoder, gradient_checkpointing=spec.checkpoint_decoder
        )
        self.autoencoder = FrozenVideoVae.from_network(
            vae, svd_decoder(vae, spec.decode_chunk_size), per_frame_encoder=True
        )
        vision_encoder = components.load_encoder("image_encoder", CLIPVisionModelWithProjection)
        encoder = SvdImageEncoder(vision_encoder, vae, spec.noise_aug_strength, spec.seed)
        self.image_encoder = ConditionImageEncoder(encoder, (spec.height, spec.width), placement.device)
        self.spec, self.shape, self.pixels = spec, spec.shape, (spec.frames, 3, spec.height, spec.width)
        self.forward_passes = 1 if spec.guidance_scale is None else 2

    def embed(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        images = prompt_images(prompts, metadata, self.spec.image)
        return Condition(tuple(prompts), self.image_encoder(images), tuple(metadata))

    def without_prompt(self, cond: Condition) -> Condition:
        return replace(cond, tensors={name: torch.zeros_like(x) for name, x in cond.tensors.items()})

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        if self.spec.guidance_scale is None:
            return self._call_network(x, t, cond)
        unconditional = self.without_prompt(cond).tensors
        batch = {name: torch.cat([y, unconditional[name]]) for name, y in cond.tensors.items()}
        out = self._call_network(torch.cat([x, x]), torch.cat([t, t]), replace(cond, tensors=batch))
        with_image, without_image = out.chunk(2)
        scale = torch.linspace(*self.spec.guidance_scale, x.shape[1], device=x.device).view(-1, 1, 1, 1)
        return without_image + scale * (with_image - without_image)

    def _call_network(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        reference = cond.tensors["reference"][:, None].expand(-1, x.shape[1], -1, -1, -1)
        latents, look = cast_to_network_dtype(self.net, torch.cat([x, reference.to(x.dtype)], 2), cond.tensors["look"])
        time_ids = [self.spec.fps - 1, self.spec.motion_bucket_id, self.spec.noise_aug_strength]
        added = torch.tensor(time_ids, device=x.device).to(latents.dtype)
        timestep = karras_sigma(t).clamp(min=1e-10).log() / 4
        out: Tensor = self.net(latents, timestep, look, added.expand(len(x), -1), return_dict=False)[0]
        return out

    def encode(self, pixels: Tensor) -> Tensor:
        check_clip_shape(pixels, self.pixels)
        return self.autoencoder.encode(pixels)

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        return self.autoencoder.decode(x, range(self.pixels[0]) if frames is None else frames)


def unused_cross_attention(net: nn.Module) -> tuple[str, ...]:
    """Return prefixes of the cross-attention's queries and keys: with one context token, attention is constant."""
    layers = (".norm2.", ".attn2.to_q.", ".attn2.to_k.")
    keys = [key for key, _ in net.named_parameters() if any(layer in key for layer in layers)]
    return tuple(sorted({key.rpartition(".")[0] + "." for key in keys if "transformer_blocks" in key}))


def svd_decoder(net: Any, decode_chunk_size: int | None) -> DecodeFrames:
    """Decode chunks of frames with the temporal decoder, only those chunks that hold a needed frame."""

    def decode_chunk(raw: Tensor, first: int, size: int) -> Tensor:
        latents = raw[:, :, first : first + size].transpose(1, 2)
        pixels: Tensor = net.decode(latents.flatten(0, 1), latents.shape[1], return_dict=False)[0]
        return pixels.view(*latents.shape[:2], *pixels.shape[1:])

    def decode_frames(raw: Tensor, frames: Sequence[int]) -> Tensor:
        size = decode_chunk_size or raw.shape[2]
        chunks = {n: decode_chunk(raw, n * size, size) for n in sorted({frame // size for frame in frames})}
        return torch.stack([chunks[frame // size][:, frame % size] for frame in frames], 2)

    return decode_frames


@dataclass(frozen=True)
class SvdSpec(VideoSpec):
    """Stable Video Diffusion: continues the image in a prompt's metadata `image` (a path); prompts have no effect."""

    weights: str = XT.hub  # hub id, or folder in diffusers' layout
    height: VideoSide = 576
    width: VideoSide = 1024
    frames: Annotated[int, Field(ge=1, le=1024)] = 25  # 14 for img2vid without xt
    guidance_scale: tuple[float, float] | None = (1.0, 3.0)  # of the first and the last frame, linear in between
    image: Path | None = None  # image to continue for prompts that have none of their own
    fps: int = 7  # frames per second, an input of the network
    motion_bucket_id: float = 127  # amount of motion, an input of the network
    noise_aug_strength: float = 0.02  # noise added to the image, also an input of the network
    decode_chunk_size: int | None = None  # frames decoded together; all if not given, fewer for less memory
    checkpoint_decoder: bool = True  # recompute the decoder in the backward pass
    seed: int = 0  # of random weights and of the noise on the image
    reads_image: ClassVar[bool] = True
    published: ClassVar[PublishedModel] = SVD
    text_encoders = ()
    layout: ClassVar[PipelineLayout] = PipelineLayout(
        "StableVideoDiffusionPipeline", "unet", "", reject_unknown_names, lora_loader="merge"
    )

    def __post_init__(self) -> None:
        check_image_size(self.height, self.width)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.frames, LATENT_CHANNELS, self.height // DOWNSAMPLE_FACTOR, self.width // DOWNSAMPLE_FACTOR

    @property
    def needs_initial_image(self) -> bool:
        return self.image is None

    def load(self, placement: Placement) -> SvdBackbone:
        return SvdBackbone(self, placement)

    def tiny(self) -> SvdSpec:
        chunk = 2 if self.decode_chunk_size else None
        return replace(self, weights=TINY, height=32, width=32, frames=3, decode_chunk_size=chunk)
