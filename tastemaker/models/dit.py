"""A small diffusion transformer on the latents of an autoencoder, conditioned on words; images or clips."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from ..core.model_spec import ModelSpec
from ..core.policy import Process
from ..core.types import Condition, Metadata, Placement, Prompts
from ..playground.captions import EDIT_VOCABULARY, VOCABULARY
from ..processes.gaussian import GaussianProcess
from . import weight_files
from .image_backbone import read_condition_image
from .nets.dit import DiT
from .playground_backbone import PlaygroundBackbone, load_network
from .pretrained import load_weights_into
from .pretrained_autoencoder import load_vae

Count = Annotated[int, Field(ge=1, le=64)]
NEW_KEYS = ("frame_place", "enter_source.weight", "keep.weight", "keep.bias")  # that video models and editors add
MAX_CACHED_SOURCES = 2**15  # 64 MB of the playground's latents in 16 bits


def patchify(x: Tensor, size: int) -> Tensor:
    """Cut latents [B, F, C, H, W] into patches: [B, F, H/size * W/size, C * size * size]."""
    b, f, c, h, w = x.shape
    patches = x.reshape(b, f, c, h // size, size, w // size, size)
    return patches.permute(0, 1, 3, 5, 2, 4, 6).reshape(b, f, (h // size) * (w // size), c * size * size)


def unpatchify(patches: Tensor, size: int, shape: Sequence[int]) -> Tensor:
    """Undo `patchify` for latents of shape [F, C, H, W]."""
    f, c, h, w = shape
    grid = patches.view(len(patches), f, h // size, w // size, c, size, size)
    return grid.permute(0, 1, 4, 2, 5, 3, 6).reshape(len(patches), f, c, h, w)


def adapt_weights(tensors: Mapping[str, Tensor], net: DiT) -> dict[str, Tensor]:
    """Adapt weights of an image model to videos, edits or longer prompts; new positions and words stay random."""
    state = net.state_dict()
    added = {key: state[key] for key in NEW_KEYS if key in state and key not in tensors}
    new, trained = state["word_place"], tensors.get("word_place")  # [1, L, D]
    if trained is not None and trained.shape[-1] == new.shape[-1]:
        added["word_place"] = torch.cat([trained, new[:, trained.shape[1] :]], 1)[:, : new.shape[1]]
    new, trained = state["word.weight"], tensors.get("word.weight")  # [V, D]
    if trained is not None and trained.shape[-1] == new.shape[-1] and len(trained) < len(new):
        added["word.weight"] = torch.cat([trained, new[len(trained) :]])
    return {**tensors, **added}


class SourceCache:
    """Latents of source images by their pixels, because an editor meets the same sources again."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.latents = device, OrderedDict[bytes, Tensor]()

    @torch.no_grad()
    def get_or_encode(self, images: Sequence[Tensor], encode: Callable[[Tensor], Tensor]) -> Tensor:
        """Latents [B, F, C, h, w] of images [1, 3, H, W]; only those that are not cached are encoded."""
        keys = [blake2b(image.contiguous().numpy().tobytes(), digest_size=16).digest() for image in images]
        new = {key: image for key, image in zip(keys, images, strict=True) if key not in self.latents}
        if new:
            encoded = encode(torch.stack([*new.values()]).to(self.device)).float()
            self.latents.update(zip(new, encoded.half().unbind(), strict=True))
        latents = torch.stack([self.latents[key].float() for key in keys])  # autocast cannot stack half precision
        while len(self.latents) > MAX_CACHED_SOURCES:
            self.latents.popitem(last=False)
        return latents


class DitBackbone(PlaygroundBackbone):
    """Denoises latents [F, C, h, w]; the path's prediction type says what the output is."""

    def __init__(self, spec: DitSpec, placement: Placement) -> None:
        self.device, self.max_text_tokens, self.patch_size = placement.device, spec.max_text_tokens, spec.patch_size
        self.shape, self.pixels = spec.shape, (spec.frames, 3, spec.image_size, spec.image_size)
        self.edits, self.source_cache = spec.edits, SourceCache(placement.device)
        self.autoencoder = load_vae(spec.autoencoder, spec.latent_channels, spec.downsample_factor, placement)
        net = load_network(spec.build_network, spec.seed, spec.weights)
        if spec.init_weights and not spec.weights:
            tensors = adapt_weights(weight_files.read_weights(spec.init_weights)[0], net)
            load_weights_into(net, tensors, spec.init_weights)
        self.net = net.to(placement.device)

    def embed(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        """Token ids and, for an editor, the latents of the source; a batch without sources is sampled from words."""
        cond = super().embed(prompts, metadata)
        if not self.edits or all(known.get("image") is None for known in metadata):
            return cond
        pixels = [self._read_source(*pair) for pair in zip(prompts, metadata, strict=True)]
        return replace(cond, tensors={**cond.tensors, "source": self.source_cache.get_or_encode(pixels, self.encode)})

    def _read_source(self, prompt: str, metadata: Metadata) -> Tensor:
        """The image to edit: [1, 3, H, W]."""
        image = metadata.get("image")
        images = list(image) if isinstance(image, (list, tuple)) else [image]
        pixels = read_condition_image(images[0], *self.pixels[2:]) if len(images) == 1 else None
        if pixels is None:
            found = (
                "no image" if image is None else f"{len(images)} images" if len(images) != 1 else "no readable image"
            )
            raise ValueError(
                f"the prompt '{prompt:.80}' has {found}, but this editor needs one source for each prompt; add a path "
                "or pixels as `image` to its metadata, or give the sources with --image [TM2351]"
            )
        return pixels.cpu()

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        source = cond.tensors.get("source")
        patches = None if source is None else patchify(source, self.patch_size)
        out: Tensor = self.net(patchify(x, self.patch_size), t, cond.tensors["token_ids"], patches)
        return unpatchify(out, self.patch_size, self.shape)

    def encode(self, pixels: Tensor) -> Tensor:
        return self.autoencoder.encode(pixels.flatten(0, 1)).float().view(-1, *self.shape)

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        latents = x if frames is None else x[:, list(frames)]
        return self.autoencoder.decode(latents.flatten(0, 1)).view(*latents.shape[:2], *self.pixels[1:])


@dataclass(frozen=True)
class DitSpec(ModelSpec):
    """A diffusion transformer conditioned on the playground's words; flow or noise prediction, as the path says."""

    weights: str | None = None  # file, run, or name of weights in the package; random if not given
    init_weights: str | None = None  # likewise, to start training from; an image model can start a video model
    autoencoder: str | None = "playground/vae"  # likewise; without one, latents are coarse pixels
    image_size: Annotated[int, Field(ge=8, le=1024)] = 64  # pixels per side
    frames: Count = 1
    # The source image of a prompt is an input, prompts may have the words of instructions; for a rectified flow.
    edits: bool = False
    latent_channels: Annotated[int, Field(ge=1, le=256)] = 16  # of the autoencoder
    downsample_factor: Literal[4, 8] = 8  # of the autoencoder
    patch_size: Count = 1  # latents per token and side
    width: Annotated[int, Field(ge=8, le=8192)] = 192
    depth: Count = 6
    heads: Count = 3
    max_text_tokens: Annotated[int, Field(ge=1, le=256)] = 16  # sequence length of prompts, padded
    seed: int = 0
    process_type: ClassVar[type[Process]] = GaussianProcess

    def __post_init__(self) -> None:
        if self.image_size % (self.downsample_factor * self.patch_size):
            unit = self.downsample_factor * self.patch_size
            raise ValueError(
                f"'image_size': expected a multiple of downsample_factor * patch_size = {unit}, got "
                f"{self.image_size}; change 'image_size' [TM423]"
            )
        if self.width % self.heads:
            raise ValueError(
                f"'width': expected a multiple of 'heads' ({self.heads}), got {self.width}; change 'width' or 'heads' "
                "[TM424]"
            )
        if self.edits and self.frames > 1:
            raise ValueError(
                f"'edits': true is for images, but 'frames' is {self.frames}; set 'frames' to 1, or 'edits' to false "
                "[TM2352]"
            )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        side = self.image_size // self.downsample_factor
        return self.frames, self.latent_channels, side, side

    @property
    def reads_image(self) -> bool:
        return self.edits

    def build_network(self) -> DiT:
        """Build the network with random weights."""
        return DiT(
            vocabulary=len(EDIT_VOCABULARY if self.edits else VOCABULARY),
            max_text_tokens=self.max_text_tokens,
            frames=self.frames,
            num_patches=(self.image_size // self.downsample_factor // self.patch_size) ** 2,
            patch_dim=self.latent_channels * self.patch_size**2,
            width=self.width,
            depth=self.depth,
            heads=self.heads,
            has_source=self.edits,
        )

    def load(self, placement: Placement) -> DitBackbone:
        return DitBackbone(self, placement)

    def tiny(self) -> DitSpec:
        return replace(
            self,
            weights=None,
            init_weights=None,
            autoencoder=None,
            patch_size=self.image_size // self.downsample_factor // 2,
            width=32,
            depth=1,
            heads=2,
        )
