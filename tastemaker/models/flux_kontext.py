"""FLUX.1 Kontext (Black Forest Labs 2025): FLUX with a reference image beside the prompt, for image editing."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from ..core.model_spec import PipelineLayout
from ..core.policy import Backbone
from ..core.types import Condition, Metadata, Placement, Prompts
from .flux import (
    DOWNSAMPLE_FACTOR,
    FLUX_DEV,
    LATENT_CHANNELS,
    TINY_CONFIGS,
    FluxBackbone,
    FluxSpec,
    Side,
    flux_to_original,
    pack_latents,
    unpack_latents,
)
from .image_backbone import condition_image_key, read_condition_image
from .pipeline_components import TINY, PipelineComponents, PublishedModel, PublishedSpec
from .pretrained import WeightsSource
from .text_encoders import CachedTextEncoder

SOURCE = WeightsSource(
    "black-forest-labs/FLUX.1-Kontext-dev", "", "34 GB", "FLUX.1 [dev] Non-Commercial License", gated=True
)
KONTEXT = PublishedModel((SOURCE,), TINY_CONFIGS, {SOURCE.hub: FLUX_DEV})


class KontextBackbone(Backbone):
    """Denoises latents [1, 16, h, w] beside the clean latents of the image in a prompt's metadata `image`.

    A batch without images is sampled from the prompts alone, as with FLUX.
    """

    forward_passes = 1

    def __init__(self, flux: FluxBackbone) -> None:
        self._wrap(flux)

    def _wrap(self, flux: FluxBackbone) -> None:
        self.flux, self.traits = flux, flux.traits
        self.shape, self.pixels = flux.shape, flux.pixels
        # The reference has the same rows and columns, and 1 in the first component of the position ids.
        reference_ids = torch.cat([torch.ones_like(flux.img_ids[:, :1]), flux.img_ids[:, 1:]], 1)
        self.img_ids = torch.cat([flux.img_ids, reference_ids])

    def with_size(self, height: int, width: int) -> KontextBackbone:
        other = copy(self)
        other._wrap(self.flux.with_size(height, width))
        return other

    def with_guidance_scale(self, scale: float | None) -> KontextBackbone:
        other = copy(self)
        other._wrap(self.flux.with_guidance_scale(scale))
        return other

    @property
    def net(self) -> nn.Module:
        return self.flux.net

    @net.setter
    def net(self, net: nn.Module) -> None:
        self.flux.net = net

    def embed(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        cond = self.flux.embed(prompts, metadata)
        images = [each.get("image") for each in metadata]
        if all(image is None for image in images):
            return cond
        encoded: dict[int | str, Tensor] = {}  # each image of a batch is encoded once
        for image, prompt in zip(images, prompts, strict=True):
            if (key := condition_image_key(image)) not in encoded:
                encoded[key] = self._encode_reference(image, prompt)
        reference = torch.stack([encoded[condition_image_key(image)] for image in images])
        return replace(cond, tensors={**cond.tensors, "reference": reference})

    def _encode_reference(self, image: object, prompt: str) -> Tensor:
        """Encode an image to packed latents: [n, 64]."""
        pixels = read_condition_image(image, *self.pixels[2:])
        if pixels is None:
            raise ValueError(
                f"'{prompt:.80}' has no `image` in its metadata, but others have; give a path or pixels [F, 3, H, W] "
                "for each prompt, or for none"
            )
        return pack_latents(self.flux.encode(pixels.to(self.img_ids.device)[None])[:, 0])[0]

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        reference = cond.tensors.get("reference")
        if reference is None:
            return self.flux.predict(x, t, cond)
        tokens = pack_latents(x[:, 0])
        both = torch.cat([tokens, reference.to(tokens.dtype)], 1)
        velocity = self.flux.predict_tokens(both, self.img_ids, t, cond)
        return unpack_latents(velocity[:, : tokens.shape[1]], *self.shape[2:])[:, None]

    def encode(self, pixels: Tensor) -> Tensor:
        return self.flux.encode(pixels)

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        return self.flux.decode(x, frames)


@dataclass(frozen=True)
class FluxKontextSpec(PublishedSpec):
    """FLUX.1 Kontext: edits the image in a prompt's metadata `image` (a path), resized to the size of its samples."""

    weights: str = SOURCE.hub  # hub id or folder in diffusers' layout
    transformer: str | None = None  # safetensors file with other weights, with diffusers' or the authors' keys
    height: Side = 1024
    width: Side = 1024
    guidance_scale: float = 2.5  # distilled guidance, an input of the network
    rollout_guidance_scale: float | None = None  # another scale where no gradient is computed
    max_text_tokens: Annotated[int, Field(ge=1, le=512)] = 512  # T5's sequence length
    truncate_timesteps: bool = False  # round timesteps down to three digits, as SRPO does
    checkpoint_decoder: bool = True  # recompute the decoder in the backward pass: a seventh of its memory
    embeddings: Path | None = None  # folder written by `tastemaker embed`; text encoders are loaded only if needed
    seed: int = 0  # of random weights
    frames: ClassVar[int] = 1
    published: ClassVar[PublishedModel] = KONTEXT
    layout: ClassVar[PipelineLayout] = PipelineLayout(
        "FluxKontextPipeline", "transformer", "lora_transformer", flux_to_original
    )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return 1, LATENT_CHANNELS, self.height // DOWNSAMPLE_FACTOR, self.width // DOWNSAMPLE_FACTOR

    def to_flux(self) -> FluxSpec:
        """Return the settings of the FLUX inside: all but the reference image."""
        return FluxSpec(
            weights=self.weights,
            transformer=self.transformer,
            height=self.height,
            width=self.width,
            guidance_scale=self.guidance_scale,
            rollout_guidance_scale=self.rollout_guidance_scale,
            max_text_tokens=self.max_text_tokens,
            truncate_timesteps=self.truncate_timesteps,
            checkpoint_decoder=self.checkpoint_decoder,
            embeddings=self.embeddings,
            seed=self.seed,
        )

    def cached_prompt_encoder(self, components: PipelineComponents) -> CachedTextEncoder:
        return self.to_flux().cached_prompt_encoder(components)

    def load(self, placement: Placement) -> KontextBackbone:
        return KontextBackbone(FluxBackbone(self.to_flux(), self.components(placement), SOURCE))

    def tiny(self) -> FluxKontextSpec:
        return replace(self, weights=TINY, transformer=None, height=32, width=32, max_text_tokens=16, embeddings=None)
