"""The picture that a clip goes on from, as Stable Video Diffusion is shown it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..pictures import read_picture
from ..preprocessing import CLIP_MEAN, CLIP_STD
from ..registry import ConfigError
from .clips import accustomed
from .flux_kontext import covering
from .readers import alone, lent

LOOK = 224  # pixels a side that its eyes see
Seen = tuple[Tensor, Tensor]  # what the eyes say of a picture, [1, width], and its latents [C, h, w]


@dataclass(frozen=True)
class Glance:
    """Eyes on the host and the encoder of a codec, which sees the picture with some grain."""

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
        known: dict[int | str, Seen] = {}
        look, latents = (torch.stack(x) for x in zip(*(self._known(image, known) for image in shown), strict=True))
        return {"look": look, "reference": latents}

    def _known(self, image: object, known: dict[int | str, Seen]) -> Seen:
        key = str(image) if isinstance(image, (str, Path)) else id(image)
        if key not in known:
            pixels = read_picture(Path(image)) if isinstance(image, (str, Path)) else image
            if not isinstance(pixels, Tensor):
                raise ValueError(
                    "a prompt has no fact 'image', but others have; give a path or pixels [F, 3, H, W] for each"
                )
            known[key] = self._looked(covering(pixels[:1], *self.size).to(self.device))
        return known[key]

    @torch.no_grad()
    def _looked(self, picture: Tensor) -> Seen:
        from diffusers.pipelines.stable_video_diffusion import pipeline_stable_video_diffusion as published

        smaller: Any = published._resize_with_antialiasing
        mean, std = (torch.tensor(x, device=self.device).view(3, 1, 1) for x in (CLIP_MEAN, CLIP_STD))
        near = ((smaller(2 * picture - 1, (LOOK, LOOK)) + 1) / 2 - mean) / std
        grain = torch.randn(picture.shape, generator=torch.Generator().manual_seed(self.seed)).to(self.device)
        with alone(picture), lent(self.eyes, self.device):
            look = self.eyes(near.to(self.eyes.dtype)).image_embeds
            rough = (2 * picture - 1 + self.grain * grain).to(self.vae.dtype)
            return look.float(), self.vae.encode(rough).latent_dist.mode()[0].float()


def unasked(net: Any) -> nn.Module:
    """A network that says what it has in vain: who looks at one thing alone need not ask where to look."""
    vain = (".norm2.", ".attn2.to_q.", ".attn2.to_k.")
    names = [key for key, _ in net.named_parameters() if any(part in key for part in vain)]
    net.idle = tuple(sorted({key.rpartition(".")[0] + "." for key in names if "transformer_blocks" in key}))
    return accustomed(net)
