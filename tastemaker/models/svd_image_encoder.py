"""Image conditioning of Stable Video Diffusion: CLIP embedding and VAE latent of the first frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.registry import ConfigError
from ..data.image_io import read_image
from ..rewards.backbones.preprocessing import CLIP_MEAN, CLIP_STD
from .flux_kontext import resize_and_center_crop
from .text_encoders import disable_autocast, temporarily_on_device
from .video_backbone import set_default_lora_targets

CLIP_IMAGE_SIZE = 224  # pixels a side that its eyes see
ImageConditioning = tuple[Tensor, Tensor]  # what the eyes say of a picture, [1, width], and its latents [C, h, w]


@dataclass(frozen=True)
class SvdImageEncoder:
    """CLIP vision encoder (on the CPU) and VAE encoder, which gets the image with augmentation noise."""

    eyes: Any
    vae: Any
    size: tuple[int, int]
    grain: float
    seed: int
    device: torch.device

    def __call__(self, shown: Sequence[object]) -> dict[str, Tensor]:
        """Of paths or pixels [F, 3, H, W], each looked at once."""
        if all(image is None for image in shown):
            raise ConfigError("found no picture for a prompt; set model.image, or give each prompt a fact `image`")
        known: dict[int | str, ImageConditioning] = {}
        look, latents = (torch.stack(x) for x in zip(*(self._known(image, known) for image in shown), strict=True))
        return {"look": look, "reference": latents}

    def _known(self, image: object, known: dict[int | str, ImageConditioning]) -> ImageConditioning:
        key = str(image) if isinstance(image, (str, Path)) else id(image)
        if key not in known:
            pixels = read_image(Path(image)) if isinstance(image, (str, Path)) else image
            if not isinstance(pixels, Tensor):
                raise ValueError(
                    "a prompt has no fact 'image', but others have; give a path or pixels [F, 3, H, W] for each"
                )
            known[key] = self._looked(resize_and_center_crop(pixels[:1], *self.size).to(self.device))
        return known[key]

    @torch.no_grad()
    def _looked(self, picture: Tensor) -> ImageConditioning:
        from diffusers.pipelines.stable_video_diffusion import pipeline_stable_video_diffusion as published

        smaller: Any = published._resize_with_antialiasing
        mean, std = (torch.tensor(x, device=self.device).view(3, 1, 1) for x in (CLIP_MEAN, CLIP_STD))
        near = ((smaller(2 * picture - 1, (CLIP_IMAGE_SIZE, CLIP_IMAGE_SIZE)) + 1) / 2 - mean) / std
        grain = torch.randn(picture.shape, generator=torch.Generator().manual_seed(self.seed)).to(self.device)
        with disable_autocast(picture), temporarily_on_device(self.eyes, self.device):
            look = self.eyes(near.to(self.eyes.dtype)).image_embeds
            rough = (2 * picture - 1 + self.grain * grain).to(self.vae.dtype)
            return look.float(), self.vae.encode(rough).latent_dist.mode()[0].float()


def mark_unused_cross_attention(net: Any) -> nn.Module:
    """Mark the cross-attention queries and keys as unused: with one context token attention is constant."""
    vain = (".norm2.", ".attn2.to_q.", ".attn2.to_k.")
    names = [key for key, _ in net.named_parameters() if any(part in key for part in vain)]
    net.idle = tuple(sorted({key.rpartition(".")[0] + "." for key in names if "transformer_blocks" in key}))
    return set_default_lora_targets(net)
