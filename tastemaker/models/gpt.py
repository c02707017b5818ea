"""LlamaGen's transformer as configurations name it: writes the tokens of a picture one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from ..core.distributions import TokenSampler
from ..core.guidance import batch_conditions
from ..core.policy import Guidance, Process, TokenDecoder
from ..core.types import Condition, Metadata, Placement, Prompts
from ..playground.captions import VOCABULARY
from ..processes.autoregressive import AutoregressiveProcess
from . import playground_prompts, weight_files
from .nets.decoder_pool import DecoderPool, hidden_states_and_head
from .nets.gpt import GPT, GPTConfig, KVCache
from .nets.token_decoder import DecodeRequest
from .pretrained import load_weights_into
from .vq import Codes, Count, load_image_tokenizer


class GptBackbone:
    """Reads a caption, then writes a square of tokens row by row."""

    passes = 1

    def __init__(self, spec: Gpt, placement: Placement) -> None:
        self.device, self.words, self.codes = placement.device, spec.words, spec.codes
        self.shape, self.pixels = spec.shape, (1, 3, spec.size, spec.size)
        self.codec = load_image_tokenizer(spec.codec, spec.codes, spec.side, spec.size, placement)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.seed)
            net = GPT(spec.sizes())
        if spec.weights:
            load_weights_into(net, weight_files.read_weights(spec.weights)[0], spec.weights)
        net.factors = net.factors.to(placement.device)
        self.net: nn.Module = net.to(placement.device)
        self.desk = DecoderPool()

    def embed(self, prompts: Prompts, facts: Sequence[Metadata] = ()) -> Condition:
        return playground_prompts.embed_playground_prompts(prompts, facts, self.words, self.device)

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        logits: Tensor
        logits, _ = self.net(x[:, :-1], cond.tensors["words"])
        return logits

    def states(self, x: Tensor, t: Tensor, cond: Condition) -> tuple[Tensor, Tensor] | None:
        return hidden_states_and_head(self.net, x, cond.tensors["words"])

    def begin(self, cond: Condition) -> KVCache:
        return ()

    def extend(self, ids: Tensor | None, cache: KVCache, cond: Condition) -> tuple[Tensor, KVCache]:
        fresh = None if ids is None else ids[:, None]
        logits, cache = self.net(fresh, cond.tensors["words"] if ids is None else None, cache)
        return logits[:, -1], cache

    def scribe(
        self, cond: Condition, uniform: Tensor, choice: TokenSampler, guidance: Guidance | None
    ) -> TokenDecoder | None:
        words = batch_conditions(cond).tensors["words"] if guidance else cond.tensors["words"]
        return self.desk.scribe(self.net, DecodeRequest(words, None, uniform, choice, guidance))

    def encode(self, pixels: Tensor) -> Tensor:
        return self.codec.encode(pixels[:, 0])

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        return self.codec.decode(x)[:, None]

    def vectors(self, ids: Tensor) -> Tensor:
        return self.codec.vectors(ids)

    def latents(self, pixels: Tensor) -> Tensor:
        with torch.autocast(pixels.device.type, enabled=False):
            return self.codec.latents(pixels[:, 0].float()).flatten(2).transpose(1, 2)


@dataclass(frozen=True)
class Gpt:
    """An autoregressive transformer in LlamaGen's layout that reads the words of the playground."""

    weights: str | None = None  # a file, a run or a name in the package; at random if not given
    codec: str | None = "playground/vq"  # likewise; without one, tokens are the colours of cells
    size: Annotated[int, Field(ge=8, le=1024)] = 64  # pixels a side
    side: Annotated[int, Field(ge=1, le=128)] = 8  # tokens a side
    codes: Codes = 2048  # of the codec
    width: Annotated[int, Field(ge=8, le=8192)] = 192
    depth: Count = 6
    heads: Count = 6
    kv_heads: Count | None = None  # heads of keys and values, as many as of queries if not given
    words: Annotated[int, Field(ge=1, le=256)] = 16  # tokens a prompt is filled up to
    seed: int = 0
    frames: ClassVar[int] = 1
    suits: ClassVar[type[Process]] = AutoregressiveProcess

    def __post_init__(self) -> None:
        self.sizes()
        if self.size % self.side:
            raise ValueError(f"'size' is {self.size}; expected a multiple of 'side', which is {self.side}")

    def sizes(self) -> GPTConfig:
        return GPTConfig(
            self.width,
            self.depth,
            self.heads,
            self.kv_heads,
            self.codes,
            self.side,
            told="words",
            prefix=self.words,
            vocabulary=len(VOCABULARY),
        )

    @property
    def shape(self) -> tuple[int]:
        return (self.side * self.side,)

    def load(self, placement: Placement) -> GptBackbone:
        return GptBackbone(self, placement)

    def tiny(self) -> Gpt:
        small = replace(self, weights=None, codec=None, side=4, codes=64, width=16, depth=1, heads=2)
        return replace(small, kv_heads=1 if self.kv_heads else None)
