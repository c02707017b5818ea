"""diffusers' AutoencoderKL as configurations name it: published or made anew, and a folder of diffusers' again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import diffusers
import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor, nn

from ..core.registry import ConfigError
from ..core.types import Placement
from .nets.vae import clamp_keep_gradient
from .nets.vae_utils import check_divisible, sample_posterior, split_batch, to_network_range, to_pixels
from .pipeline_components import load_pretrained
from .pretrained import WeightsSource, find_weights
from .third_party_logging import silence_libraries

Count = Annotated[int, Field(ge=1, le=64)]
Width = Annotated[int, Field(ge=1, le=4096)]
INNER_PREFIX = "inner."  # before diffusers' names


class DiffusersVae(nn.Module):
    """Pixels in [0, 1] to latents and back by a network of diffusers, whose latents are scaled by one number."""

    mean: Tensor
    std: Tensor
    layout = "diffusers"

    def __init__(self, inner: Any, kl: float, *, measured: bool) -> None:
        super().__init__()
        self.inner, self.kl, self.measured = inner, kl, measured
        config = inner.config
        self.channels, self.colours = int(config.latent_channels), int(config.in_channels)
        self.stride = 2 ** (len(config.block_out_channels) - 1)
        shift, scale = config.shift_factor or 0.0, config.scaling_factor or 1.0
        self.register_buffer("mean", torch.full((1, 1, 1, 1), float(shift)))
        self.register_buffer("std", torch.full((1, 1, 1, 1), 1 / float(scale)))

    def moments(self, pixels: Tensor) -> Tensor:
        """What it believes of latents: means, then logarithms of variances, [N, 2C, h, w] of [N, 3, H, W]."""
        seen = to_network_range(check_divisible(pixels, self.stride), self.colours).to(self.inner.dtype)
        found: Tensor = self.inner.encode(seen).latent_dist.parameters
        return found.float()

    def render(self, latents: Tensor) -> Tensor:
        """As the network has it, which may leave [0, 1] a little."""
        return to_pixels(self.inner.decode(latents.to(self.inner.dtype), return_dict=False)[0])

    def forward(self, pixels: Tensor, chance: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The reconstruction and the price of the latents in each row; without chance, of their means once trained."""
        moments = self.moments(pixels)
        if chance is None:
            chance = torch.randn_like(moments[:, : self.channels]) * self.training
        latents, price = sample_posterior(moments, chance)
        return self.render(latents), self.kl * price

    def chances(self, pixels: Tensor) -> tuple[int, ...]:
        return self.channels, pixels.shape[-2] // self.stride, pixels.shape[-1] // self.stride

    def encode(self, pixels: Tensor) -> Tensor:
        """Latents of deviation 1, once settled; those of published weights as they are published."""
        return (self.moments(pixels)[:, : self.channels] - self.mean) / self.std

    def decode(self, z: Tensor) -> Tensor:
        raw = z * self.std + self.mean
        return clamp_keep_gradient(torch.cat([self.render(part) for part in split_batch(raw, self.stride)]))

    def ending(self) -> nn.Conv2d:
        """The layer that makes pixels."""
        last: nn.Conv2d = self.inner.decoder.conv_out
        return last

    @torch.no_grad()
    def settle(self, pixels: Tensor) -> None:
        """Measure the scale; that of published weights stays, for generators rely on it."""
        if self.measured:
            z = torch.cat([self.moments(part)[:, : self.channels] for part in split_batch(pixels)])
            self.std.fill_(z.std().clamp(min=1e-6).item())

    def leave(self, out: Path, dtype: torch.dtype) -> None:
        """Write a folder that `from_pretrained` reads, with the scale in its configuration."""
        # In as many digits as published ones have, which come out as they were.
        scale, shift = (float(f"{x:.6g}") for x in (1 / float(self.std), float(self.mean)))
        self.inner.register_to_config(scaling_factor=scale, shift_factor=shift or None)
        with silence_libraries():
            self.inner.to(dtype).save_pretrained(out)


@dataclass(frozen=True)
class AutoencoderKL:
    """diffusers' AutoencoderKL, of published weights or made anew; sizes by diffusers' names."""

    weights: str | None = None  # a folder of diffusers', its own or a pipeline's, or an id of the hub; sizes are theirs
    in_channels: Literal[1, 3] = 3  # with one, it copies how light pictures are
    latent_channels: Annotated[int, Field(ge=1, le=256)] = 4
    block_out_channels: tuple[Width, ...] = (128, 256, 512, 512)  # each level but the last halves
    layers_per_block: Count = 2
    norm_num_groups: Count = 32
    mid_block_add_attention: bool = True
    use_quant_conv: bool = True  # before and after the latents; newer ones have none
    kl: NonNegativeFloat = 1e-6  # weight of the divergence, summed over a picture's latents
    seed: int = 0

    def __post_init__(self) -> None:
        odd = [width for width in self.block_out_channels if width % self.norm_num_groups]
        if odd or not self.block_out_channels:
            found = f"{self.norm_num_groups} does not divide {odd[0]}" if odd else "'block_out_channels' is empty"
            raise ValueError(f"{found}; expected widths that are multiples of 'norm_num_groups'")

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        return (WeightsSource(self.weights),) if self.weights and not Path(self.weights).expanduser().exists() else ()

    def load(self, placement: Placement) -> DiffusersVae:
        inner = load_published_vae(self.weights) if self.weights else self._anew()
        return DiffusersVae(inner, self.kl, measured=self.weights is None).to(placement.device)

    def _anew(self) -> Any:
        levels = len(self.block_out_channels)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            kind: Any = diffusers.AutoencoderKL
            return kind(
                in_channels=self.in_channels,
                out_channels=self.in_channels,
                down_block_types=("DownEncoderBlock2D",) * levels,
                up_block_types=("UpDecoderBlock2D",) * levels,
                block_out_channels=self.block_out_channels,
                layers_per_block=self.layers_per_block,
                latent_channels=self.latent_channels,
                norm_num_groups=self.norm_num_groups,
                mid_block_add_attention=self.mid_block_add_attention,
                use_quant_conv=self.use_quant_conv,
                use_post_quant_conv=self.use_quant_conv,
                scaling_factor=1.0,
            )

    def fitted(self, tensors: Mapping[str, Tensor]) -> Self:
        """With the sizes that tensors tell, for those of a folder are written down nowhere else."""
        plain = {key.removeprefix(INNER_PREFIX): x for key, x in tensors.items()}
        levels = len({key.split(".")[2] for key in plain if key.startswith("encoder.down_blocks.")})
        widths = [plain[f"encoder.down_blocks.{i}.resnets.0.conv2.weight"].shape[0] for i in range(levels)]
        blocks = sum(bool(re.fullmatch(r"encoder\.down_blocks\.0\.resnets\.\d+\.conv2\.weight", key)) for key in plain)
        colours: Any = plain["encoder.conv_in.weight"].shape[1]
        return replace(
            self,
            in_channels=colours,
            latent_channels=plain["decoder.conv_in.weight"].shape[1],
            block_out_channels=tuple(widths),
            layers_per_block=blocks,
            mid_block_add_attention="encoder.mid_block.attentions.0.to_q.weight" in plain,
            use_quant_conv="quant_conv.weight" in plain,
        )

    def tiny(self) -> AutoencoderKL:
        widths = (8,) * len(self.block_out_channels)
        return replace(self, weights=None, block_out_channels=widths, layers_per_block=1, norm_num_groups=4)


def load_published_vae(name: str) -> Any:
    """The network of a folder, or of the folder `vae` in a pipeline's."""
    path = find_weights(name, WeightsSource(name))
    place = next((folder for folder in (path, path / "vae") if (folder / "config.json").is_file()), None)
    if place is None:
        raise ConfigError(
            f"autoencoder.weights: '{name:.200}' is no folder of diffusers'; expected a config.json in it, or in `vae`"
        )
    with silence_libraries():
        return load_pretrained(diffusers.AutoencoderKL, place, torch.float32).requires_grad_(True)
