"""A small masked transformer (MaskGIT, Chang et al. 2022) that reveals image tokens a few at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from ..core.policy import Process
from ..core.types import Condition, Placement
from ..playground.captions import VOCABULARY
from ..processes.masked import MaskedProcess
from .image_tokenizer import CodebookSize, Count, TokenGridSpec, load_image_tokenizer
from .nets.maskgit import MaskGIT, MaskGITConfig
from .playground_backbone import PlaygroundBackbone, load_network


class MaskgitBackbone(PlaygroundBackbone):
    """Predicts all image tokens [K] from the words of the prompt and the tokens that are not masked."""

    def __init__(self, spec: MaskgitSpec, placement: Placement) -> None:
        self.device, self.max_text_tokens = placement.device, spec.max_text_tokens
        self.shape, self.pixels = spec.shape, (1, 3, spec.image_size, spec.image_size)
        self.autoencoder = load_image_tokenizer(
            spec.autoencoder, spec.codebook_size, spec.grid_size, spec.image_size, placement
        )
        net = load_network(lambda: MaskGIT(spec.network_config()), spec.seed, spec.weights)
        self.net = net.to(placement.device)

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        logits: Tensor = self.net(x, cond.tensors["token_ids"])
        return logits

    def encode(self, pixels: Tensor) -> Tensor:
        return self.autoencoder.encode(pixels[:, 0])

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        return self.autoencoder.decode(x.clamp(min=0))[:, None]  # masked tokens are shown as the first code


@dataclass(frozen=True)
class MaskgitSpec(TokenGridSpec):
    """A bidirectional transformer over image tokens, conditioned on the playground's words."""

    weights: str | None = None  # file, run, or name of weights in the package; random if not given
    autoencoder: str | None = "playground/vq"  # likewise; without one, tokens are colors of grid cells
    image_size: Annotated[int, Field(ge=8, le=1024)] = 64  # pixels per side
    grid_size: Annotated[int, Field(ge=1, le=128)] = 8  # tokens per side
    codebook_size: CodebookSize = 2048  # of the autoencoder
    width: Annotated[int, Field(ge=8, le=8192)] = 192
    depth: Count = 6
    heads: Count = 6
    max_text_tokens: Annotated[int, Field(ge=1, le=256)] = 16  # sequence length of prompts, padded
    seed: int = 0
    process_type: ClassVar[type[Process]] = MaskedProcess

    def __post_init__(self) -> None:
        self.network_config()
        self.check_image_size("grid_size")

    def network_config(self) -> MaskGITConfig:
        return MaskGITConfig(
            self.width,
            self.depth,
            self.heads,
            self.codebook_size,
            self.grid_size,
            self.max_text_tokens,
            vocabulary=len(VOCABULARY),
        )

    def load(self, placement: Placement) -> MaskgitBackbone:
        return MaskgitBackbone(self, placement)

    def tiny(self) -> MaskgitSpec:
        return replace(self, weights=None, autoencoder=None, grid_size=4, codebook_size=64, width=16, depth=1, heads=2)
