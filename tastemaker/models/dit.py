"""A words-conditioned diffusion transformer over the latents of an autoencoder; flow or noise, stills or clips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from ..core.policy import Process
from ..core.types import Condition, Metadata, Placement, Prompts
from ..playground.captions import VOCABULARY
from ..processes.gaussian import GaussianProcess
from . import playground_prompts, weight_files
from .nets.dit import DiT
from .pretrained import load_weights_into
from .vae import load_vae

Count = Annotated[int, Field(ge=1, le=64)]


def patchify(x: Tensor, size: int) -> Tensor:
    """[B, F, C, H, W] as [B, F, cells, C * size * size]."""
    b, f, c, h, w = x.shape
    cut = x.reshape(b, f, c, h // size, size, w // size, size)
    return cut.permute(0, 1, 3, 5, 2, 4, 6).reshape(b, f, (h // size) * (w // size), c * size * size)


def unpatchify(cut: Tensor, size: int, shape: Sequence[int]) -> Tensor:
    """What `patches` cut, put together again."""
    f, c, h, w = shape
    whole = cut.view(len(cut), f, h // size, w // size, c, size, size)
    return whole.permute(0, 1, 4, 2, 5, 3, 6).reshape(len(cut), f, c, h, w)


def adapt_weights(tensors: Mapping[str, Tensor], net: DiT) -> dict[str, Tensor]:
    """Weights of a generator of stills for one of clips or longer prompts; what they lack stays as it was made."""
    own = net.state_dict()
    added = {key: own[key] for key in ("frame_place",) if key in own and key not in tensors}
    placed, known = own["word_place"], tensors.get("word_place")  # [1, W, D]
    if known is not None and known.shape[-1] == placed.shape[-1]:
        added["word_place"] = torch.cat([known, placed[:, known.shape[1] :]], 1)[:, : placed.shape[1]]
    return {**tensors, **added}


class DitBackbone:
    """Denoises [F, C, h, w] latents."""

    passes = 1

    def __init__(self, spec: Dit, placement: Placement) -> None:
        self.device, self.words, self.patch = placement.device, spec.words, spec.patch
        self.shape, self.pixels = spec.shape, (spec.frames, 3, spec.size, spec.size)
        self.codec = load_vae(spec.codec, spec.channels, spec.factor, placement)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.seed)
            net = spec.net()
        if spec.weights:
            load_weights_into(net, weight_files.read_weights(spec.weights)[0], spec.weights)
        elif spec.start:
            load_weights_into(net, adapt_weights(weight_files.read_weights(spec.start)[0], net), spec.start)
        self.net: nn.Module = net.to(placement.device)

    def embed(self, prompts: Prompts, facts: Sequence[Metadata] = ()) -> Condition:
        return playground_prompts.embed_playground_prompts(prompts, facts, self.words, self.device)

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        out: Tensor = self.net(patchify(x, self.patch), t, cond.tensors["words"])
        return unpatchify(out, self.patch, self.shape)

    def encode(self, pixels: Tensor) -> Tensor:
        return self.codec.encode(pixels.flatten(0, 1)).float().view(-1, *self.shape)

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        shown = x if frames is None else x[:, list(frames)]
        return self.codec.decode(shown.flatten(0, 1)).view(*shown.shape[:2], *self.pixels[1:])


@dataclass(frozen=True)
class Dit:
    """A diffusion transformer that reads the words of the playground; what its output means is the path's affair."""

    weights: str | None = None  # a file, a run or a name in the package; at random if not given
    start: str | None = None  # likewise, of a generator that a new one begins with, one of stills for clips even
    codec: str | None = "playground/vae"  # likewise; without one, latents are coarse pixels
    size: Annotated[int, Field(ge=8, le=1024)] = 64  # pixels a side
    frames: Count = 1
    channels: Annotated[int, Field(ge=1, le=256)] = 16  # of the codec
    factor: Literal[4, 8] = 8  # of the codec
    patch: Count = 1  # latents a side that one token stands for
    width: Annotated[int, Field(ge=8, le=8192)] = 192
    depth: Count = 6
    heads: Count = 3
    words: Annotated[int, Field(ge=1, le=256)] = 16  # tokens a prompt is cut or filled up to
    seed: int = 0
    suits: ClassVar[type[Process]] = GaussianProcess

    def __post_init__(self) -> None:
        if self.size % (self.factor * self.patch):
            unit = self.factor * self.patch
            raise ValueError(f"'size' is {self.size}; expected a multiple of factor times patch, which is {unit}")
        if self.width % self.heads:
            raise ValueError(f"'width' is {self.width}; expected a multiple of 'heads', which is {self.heads}")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        side = self.size // self.factor
        return self.frames, self.channels, side, side

    def net(self) -> DiT:
        """The network with random weights."""
        return DiT(
            vocabulary=len(VOCABULARY),
            words=self.words,
            frames=self.frames,
            cells=(self.size // self.factor // self.patch) ** 2,
            inputs=self.channels * self.patch**2,
            width=self.width,
            depth=self.depth,
            heads=self.heads,
        )

    def load(self, placement: Placement) -> DitBackbone:
        return DitBackbone(self, placement)

    def tiny(self) -> Dit:
        return replace(
            self, weights=None, start=None, codec=None, patch=self.size // self.factor // 2, width=32, depth=1, heads=2
        )
