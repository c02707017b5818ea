"""A masked transformer as configurations name it: reveals the tokens of a picture a few at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from ..core.policy import Process
from ..core.types import Condition, Metadata, Placement, Prompts
from ..playground.captions import VOCABULARY
from ..processes.masked import MaskedProcess
from . import playground_prompts, weight_files
from .nets.maskgit import MaskGIT, MaskGITConfig
from .pretrained import load_weights_into
from .vq import Codes, Count, load_image_tokenizer


class MaskgitBackbone:
    """Reads a caption and what shows of a square of tokens, and predicts all of them."""

    passes = 1

    def __init__(self, spec: Maskgit, placement: Placement) -> None:
        self.device, self.words = placement.device, spec.words
        self.shape, self.pixels = spec.shape, (1, 3, spec.size, spec.size)
        self.codec = load_image_tokenizer(spec.codec, spec.codes, spec.side, spec.size, placement)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.seed)
            net = MaskGIT(spec.sizes())
        if spec.weights:
            load_weights_into(net, weight_files.read_weights(spec.weights)[0], spec.weights)
        self.net: nn.Module = net.to(placement.device)

    def embed(self, prompts: Prompts, facts: Sequence[Metadata] = ()) -> Condition:
        return playground_prompts.embed_playground_prompts(prompts, facts, self.words, self.device)

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        logits: Tensor = self.net(x, cond.tensors["words"])
        return logits

    def encode(self, pixels: Tensor) -> Tensor:
        return self.codec.encode(pixels[:, 0])

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        return self.codec.decode(x.clamp(min=0))[:, None]  # what is still hidden shows as the first code


@dataclass(frozen=True)
class Maskgit:
    """A bidirectional transformer over the tokens of a picture that reads the words of the playground."""

    weights: str | None = None  # a file, a run or a name in the package; at random if not given
    codec: str | None = "playground/vq"  # likewise; without one, tokens are the colours of cells
    size: Annotated[int, Field(ge=8, le=1024)] = 64  # pixels a side
    side: Annotated[int, Field(ge=1, le=128)] = 8  # tokens a side
    codes: Codes = 2048  # of the codec
    width: Annotated[int, Field(ge=8, le=8192)] = 192
    depth: Count = 6
    heads: Count = 6
    words: Annotated[int, Field(ge=1, le=256)] = 16  # tokens a prompt is filled up to
    seed: int = 0
    frames: ClassVar[int] = 1
    suits: ClassVar[type[Process]] = MaskedProcess

    def __post_init__(self) -> None:
        self.sizes()
        if self.size % self.side:
            raise ValueError(f"'size' is {self.size}; expected a multiple of 'side', which is {self.side}")

    def sizes(self) -> MaskGITConfig:
        return MaskGITConfig(
            self.width, self.depth, self.heads, self.codes, self.side, self.words, vocabulary=len(VOCABULARY)
        )

    @property
    def shape(self) -> tuple[int]:
        return (self.side * self.side,)

    def load(self, placement: Placement) -> MaskgitBackbone:
        return MaskgitBackbone(self, placement)

    def tiny(self) -> Maskgit:
        return replace(self, weights=None, codec=None, side=4, codes=64, width=16, depth=1, heads=2)
