"""A DiT over latents at full size without its weights, with the autoencoder that may first have to make them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ..config.schema import RunConfig
from ..core.autoencoder import ContinuousAutoencoder
from ..core.types import Condition, ImageBatch, Placement, PreferenceBatch
from ..models.autoencoder_kl import AutoencoderKL
from ..models.latent_dit.model import LatentDit, LatentDitBackbone, build_network
from ..models.pretrained import WeightsSource, find_cached
from ..models.vae import load_vae
from .fake_denoiser import FakeDenoiser

WIDTHS = (128, 256, 512)  # of Stable Diffusion's autoencoder, level by level, the last for all that follow
IMAGES_PER_ROW: dict[type, int] = {
    ImageBatch: 1,
    PreferenceBatch: 2,
}  # pictures of a row of data; latents are encoded already


def fake_autoencoder(spec: LatentDit, placement: Placement) -> ContinuousAutoencoder:
    """The codec of a model without its numbers: as it is where it is here, otherwise as large as Stable Diffusion's."""
    away = [
        source.hub
        for source in spec.sources
        if source.hub == spec.codec and find_cached(WeightsSource(source.hub)) is None
    ]
    if away:
        assumed = "it is taken to be as large as Stable Diffusion's"
        warnings.warn(f"plan: the autoencoder {spec.codec} is not here yet, so {assumed}", stacklevel=2)
        widths = tuple(WIDTHS[min(level, 2)] for level in range(spec.factor.bit_length()))
        net = AutoencoderKL(latent_channels=spec.channels, block_out_channels=widths).load(placement)
        return net.requires_grad_(False).eval()
    with unset_fake_temporarily():  # a file holds numbers
        known: Any = load_vae(spec.codec, spec.channels, spec.factor, placement)
    known._apply(torch.empty_like)
    found: ContinuousAutoencoder = known
    return found


class FakeLatentDit(FakeDenoiser):
    """Told nothing, classes, words or captions; of data that are pictures, latents are made at each step."""

    def __init__(self, config: RunConfig, placement: Placement) -> None:
        self.spec, self.dtype = cast(LatentDit, config.model), placement.dtype
        self.pictures = IMAGES_PER_ROW.get(config.data.yields, 0)
        net = build_network(replace(self.spec, weights=None), placement)
        self.backbone = LatentDitBackbone(self.spec, fake_autoencoder(self.spec, placement), net, None)

    def condition(self, rows: int) -> Condition:
        shape = self.spec.net()
        told = torch.empty(rows, dtype=torch.long) if shape.classes else None
        if shape.words:
            ids = torch.empty(rows, shape.words, dtype=torch.long)
            told = torch.empty(rows, shape.words, shape.features, dtype=self.dtype) if shape.features else ids
        return Condition(("",) * rows, {} if told is None else {"said": told})

    def frozen(self) -> Iterator[nn.Parameter]:
        net: Any = self.backbone.codec
        found: Iterator[nn.Parameter] = net.parameters()
        return found

    def read(self, rows: int) -> None:
        for _ in range(self.pictures):
            self.backbone.encode(torch.empty(rows, *self.backbone.pixels))
