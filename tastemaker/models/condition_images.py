"""Source images of prompts (metadata `image`) for models that continue an image, each encoded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..core.registry import ConfigError
from ..core.types import Metadata, Prompts
from .image_backbone import condition_image_key, read_condition_image

MAX_CACHED_IMAGES = 64  # of Wan, the latents of one image take 8 MB of CPU memory
EncodeImage = Callable[[Tensor], dict[str, Tensor]]  # pixels [1, 3, H, W] in [0, 1] to tensors without batch dimension


class ConditionImageEncoder:
    """Encodes the images of a batch to tensors [B, ...] by name; recent images are cached on the CPU.

    Unlike prompts, images are not encoded ahead of time: their encoder is much smaller than a text encoder.
    """

    def __init__(self, encode: EncodeImage, size: tuple[int, int], device: torch.device) -> None:
        self.encode, self.size, self.device = encode, size, device
        # The image is kept beside its tensors, so that no other image can get its key. Least recently used first.
        self._cache: dict[int | str, tuple[object, dict[str, Tensor]]] = {}

    def __call__(self, images: Sequence[object]) -> dict[str, Tensor]:
        """Encode paths or pixels [F, 3, H, W], of which the first frame counts."""
        images = [single_image(image) for image in images]
        if all(image is None for image in images):
            raise ConfigError(
                "model.image: this model needs an image, and none was given; set model.image, or add an `image` to "
                "each prompt's metadata [TM535]"
            )
        rows = [self._encode_cached(image) for image in images]
        while len(self._cache) > MAX_CACHED_IMAGES:
            self._cache.pop(next(iter(self._cache)))
        return {name: torch.stack([row[name] for row in rows]).to(self.device) for name in rows[0]}

    def _encode_cached(self, image: object) -> dict[str, Tensor]:
        key = condition_image_key(image)
        if key not in self._cache:
            pixels = read_condition_image(image, *self.size)
            if pixels is None:
                raise ValueError(
                    "a prompt has no `image` in its metadata, but other prompts do; give each prompt a path "
                    "or pixels [TM536]"
                )
            # The cache outlives this call, so its tensors must be neither part of a graph nor inference tensors.
            with torch.inference_mode(False), torch.no_grad():
                tensors = {name: x.cpu() for name, x in self.encode(pixels.to(self.device).clone()).items()}
            self._cache[key] = image, tensors
        self._cache[key] = self._cache.pop(key)
        return self._cache[key][1]


def prompt_images(prompts: Prompts, metadata: Sequence[Metadata], default: Path | None) -> list[object]:
    """The image of each prompt: that in its metadata, or else `default`."""
    return [each.get("image", default) for each in metadata] or [default] * len(prompts)


def single_image(image: object) -> object:
    """Take the image out of a list of one; several are refused, because these models continue one image."""
    if not isinstance(image, (list, tuple)):
        return image
    if len(image) != 1:
        raise ConfigError(
            f"`image` in a prompt's metadata: this model continues one image, got {len(image)}; give one path or the "
            "pixels of one image [TM2500]"
        )
    return image[0]
