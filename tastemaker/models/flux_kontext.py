"""FLUX.1 Kontext (Black Forest Labs 2025): FLUX with a reference image beside the prompt, for image editing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from ..core.model_spec import PipelineLayout
from ..core.types import Condition, Metadata, Placement, Prompts
from .flux import FLUX_DEV, TINY_CONFIGS, FluxBackbone, FluxSpec, flux_to_original
from .image_backbone import condition_image_key, read_condition_image
from .latent_packing import pack_latents, unpack_latents
from .pipeline_components import PublishedModel
from .pretrained import WeightsSource

SOURCE = WeightsSource(
    "black-forest-labs/FLUX.1-Kontext-dev", "", "34 GB", "FLUX.1 [dev] Non-Commercial License", gated=True
)
KONTEXT = PublishedModel("flux", (SOURCE,), TINY_CONFIGS, {SOURCE.hub: FLUX_DEV})  # it has the text encoders of FLUX


class KontextBackbone(FluxBackbone):
    """Denoises latents [1, 16, h, w] beside the clean latents of the image in a prompt's metadata `image`.

    A batch without images is sampled from the prompts alone, as with FLUX.
    """

    def __init__(self, spec: FluxKontextSpec, placement: Placement) -> None:
        super().__init__(spec, placement)
        self.both_ids = with_reference_ids(self.img_ids)

    def enable_text_encoder_training(self) -> dict[str, nn.Module]:
        return {}  # the image of a prompt would be encoded again at every call

    def with_size(self, height: int, width: int) -> Self:
        other = super().with_size(height, width)
        other.both_ids = with_reference_ids(other.img_ids)
        return other

    def embed(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        cond = super().embed(prompts, metadata)
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
                f"prompt '{prompt:.80}' does not have an `image` in its metadata, but other prompts do; give a "
                "path or pixels [F, 3, H, W] for each prompt, or for none [TM431]"
            )
        return pack_latents(self.encode(pixels.to(self.img_ids.device)[None])[:, 0])[0]

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        reference = cond.tensors.get("reference")
        if reference is None:
            return super().predict(x, t, cond)
        tokens = pack_latents(x[:, 0])
        both = torch.cat([tokens, reference.to(tokens.dtype)], 1)
        velocity = self.predict_tokens(both, self.both_ids, t, cond)
        return unpack_latents(velocity[:, : tokens.shape[1]], *self.shape[2:])[:, None]


def with_reference_ids(img_ids: Tensor) -> Tensor:
    """Append the position ids of the reference: the same rows and columns, and 1 in the first component: [2 n, 3]."""
    return torch.cat([img_ids, torch.cat([torch.ones_like(img_ids[:, :1]), img_ids[:, 1:]], 1)])


@dataclass(frozen=True)
class FluxKontextSpec(FluxSpec):
    """FLUX.1 Kontext: edits the image in a prompt's metadata `image` (a path), resized to the size of its samples."""

    weights: str = SOURCE.hub  # hub id or folder in diffusers' layout
    guidance_scale: float = 2.5  # distilled guidance, an input of the network
    reads_image: ClassVar[bool] = True
    published: ClassVar[PublishedModel] = KONTEXT
    backbone_class = KontextBackbone
    layout: ClassVar[PipelineLayout] = PipelineLayout(
        "FluxKontextPipeline", "transformer", "lora_transformer", flux_to_original
    )
