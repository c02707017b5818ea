"""diffusers' AutoencoderKL: published or new, and exported to a folder of diffusers again."""

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

from ..core.autoencoder import AutoencoderSpec
from ..core.registry import ConfigError
from ..core.types import Placement
from .nets.vae import VariationalAutoencoder, check_divisible, split_batch, to_network_range, to_pixels
from .pipeline_components import load_pretrained
from .pretrained import WeightsSource, find_weights, silence_libraries

Count = Annotated[int, Field(ge=1, le=64)]
Width = Annotated[int, Field(ge=1, le=4096)]
INNER_PREFIX = "inner."  # of the tensors of diffusers' network in DiffusersVae


class DiffusersVae(VariationalAutoencoder):
    """Pixels in [0, 1] to latents and back with diffusers' network; shift and scale are one number each."""

    export_format = "diffusers"

    def __init__(self, inner: Any, kl_weight: float, *, measures_scale: bool) -> None:
        super().__init__()
        self.inner, self.kl_weight, self.measures_scale = inner, kl_weight, measures_scale
        config = inner.config
        self.channels, self.in_channels = int(config.latent_channels), int(config.in_channels)
        self.stride = 2 ** (len(config.block_out_channels) - 1)
        shift, scale = config.shift_factor or 0.0, config.scaling_factor or 1.0
        self.register_buffer("mean", torch.full((1, 1, 1, 1), float(shift)))
        self.register_buffer("std", torch.full((1, 1, 1, 1), 1 / float(scale)))

    def moments(self, pixels: Tensor) -> Tensor:
        x = to_network_range(check_divisible(pixels, self.stride), self.in_channels).to(self.inner.dtype)
        moments: Tensor = self.inner.encode(x).latent_dist.parameters
        return moments.float()

    def decode_unclamped(self, latents: Tensor) -> Tensor:
        return to_pixels(self.inner.decode(latents.to(self.inner.dtype), return_dict=False)[0])

    def last_layer(self) -> nn.Conv2d:
        layer: nn.Conv2d = self.inner.decoder.conv_out
        return layer

    @torch.no_grad()
    def measure_latents(self, pixels: Tensor) -> None:
        """Measure the scale of a new autoencoder; that of published weights stays, because generators rely on it."""
        if self.measures_scale:
            z = torch.cat([self.moments(part)[:, : self.channels] for part in split_batch(pixels)])
            self.std.fill_(z.std().clamp(min=1e-6).item())

    def export(self, out: Path, dtype: torch.dtype) -> None:
        """Write a folder that `from_pretrained` reads, with shift and scale in its config."""
        # Rounded to six digits, so that published numbers come out as they were.
        scale, shift = (float(f"{x:.6g}") for x in (1 / float(self.std), float(self.mean)))
        self.inner.register_to_config(scaling_factor=scale, shift_factor=shift or None)
        with silence_libraries():
            self.inner.to(dtype).save_pretrained(out)


@dataclass(frozen=True)
class AutoencoderKLSpec(AutoencoderSpec):
    """diffusers' AutoencoderKL, published or new; sizes have diffusers' names."""

    weights: str | None = None  # a diffusers folder (VAE or pipeline) or a hub id; sizes come with it
    in_channels: Literal[1, 3] = 3  # 1: only luma is reconstructed
    latent_channels: Annotated[int, Field(ge=1, le=256)] = 4
    block_out_channels: tuple[Width, ...] = (128, 256, 512, 512)  # each level but the last halves the size
    layers_per_block: Count = 2
    norm_num_groups: Count = 32
    mid_block_add_attention: bool = True
    use_quant_conv: bool = True  # 1x1 convolutions before and after the latents
    kl_weight: NonNegativeFloat = 1e-6  # of the KL divergence, summed over the latents of an image
    seed: int = 0

    def __post_init__(self) -> None:
        odd = [width for width in self.block_out_channels if width % self.norm_num_groups]
        if odd or not self.block_out_channels:
            reason = f"{self.norm_num_groups} does not divide {odd[0]}" if odd else "'block_out_channels' is empty"
            raise ValueError(
                f"'block_out_channels': {reason}; use widths that are multiples of 'norm_num_groups' [TM417]"
            )

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        return (WeightsSource(self.weights),) if self.weights and not Path(self.weights).expanduser().exists() else ()

    def load(self, placement: Placement) -> DiffusersVae:
        inner = load_published_vae(self.weights) if self.weights else self._new_network()
        return DiffusersVae(inner, self.kl_weight, measures_scale=self.weights is None).to(placement.device)

    def _new_network(self) -> Any:
        levels = len(self.block_out_channels)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            network_class: Any = diffusers.AutoencoderKL
            return network_class(
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

    def with_inferred_sizes(self, tensors: Mapping[str, Tensor]) -> Self:
        """The sizes of the tensors, because the settings of a run that started from a folder do not have them."""
        plain = {key.removeprefix(INNER_PREFIX): x for key, x in tensors.items()}
        levels = len({key.split(".")[2] for key in plain if key.startswith("encoder.down_blocks.")})
        widths = [plain[f"encoder.down_blocks.{i}.resnets.0.conv2.weight"].shape[0] for i in range(levels)]
        blocks = sum(bool(re.fullmatch(r"encoder\.down_blocks\.0\.resnets\.\d+\.conv2\.weight", key)) for key in plain)
        in_channels: Any = plain["encoder.conv_in.weight"].shape[1]
        return replace(
            self,
            in_channels=in_channels,
            latent_channels=plain["decoder.conv_in.weight"].shape[1],
            block_out_channels=tuple(widths),
            layers_per_block=blocks,
            mid_block_add_attention="encoder.mid_block.attentions.0.to_q.weight" in plain,
            use_quant_conv="quant_conv.weight" in plain,
        )

    def tiny(self) -> AutoencoderKLSpec:
        widths = (8,) * len(self.block_out_channels)
        return replace(self, weights=None, block_out_channels=widths, layers_per_block=1, norm_num_groups=4)


def load_published_vae(name: str) -> Any:
    """The network of a diffusers VAE folder, or of the folder `vae` of a pipeline."""
    path = find_weights(name, WeightsSource(name))
    vae_folder = next((folder for folder in (path, path / "vae") if (folder / "config.json").is_file()), None)
    if vae_folder is None:
        raise ConfigError(
            f"autoencoder.weights: '{name:.200}' is not a diffusers folder; give a folder with a config.json in "
            "it or in its subfolder `vae` [TM418]"
        )
    with silence_libraries():
        return load_pretrained(diffusers.AutoencoderKL, vae_folder, torch.float32).requires_grad_(True)
