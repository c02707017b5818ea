"""A small autoregressive transformer of LlamaGen's architecture (Sun et al. 2024) that generates image tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ..core.distributions import TokenSampler
from ..core.guidance import batch_conditions
from ..core.policy import Backbone, Guidance, Process, TokenDecoder
from ..core.types import Condition, Placement
from ..core.weights import NetworkTraits
from ..playground.captions import VOCABULARY
from ..processes.autoregressive import AutoregressiveProcess
from .image_tokenizer import CodebookSize, Count, TokenGridSpec, load_image_tokenizer
from .nets.cuda_graph_decoder import DecoderPool
from .nets.gpt import GPT, GPTConfig, KVCache, hidden_states_and_head
from .nets.token_decoder import DecodeRequest
from .nets.vq import VQ, ColorTokenizer
from .playground_backbone import PlaygroundBackbone, load_network


class CausalTokenBackbone(Backbone):
    """Predicts image tokens [K] one after the other, row by row, after the tokens of the condition."""

    forward_passes = 1
    traits = NetworkTraits(extra_forward_methods=(GPT.hidden_states.__name__,))
    autoencoder: VQ | ColorTokenizer
    decoder_pool: DecoderPool

    @abstractmethod
    def condition_tokens(self, cond: Condition) -> tuple[Tensor, Tensor | None]:
        """The input of the network's condition embedder, and which condition tokens are not padding."""

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        condition, mask = self.condition_tokens(cond)
        logits: Tensor = self.net(x[:, :-1], condition, None, mask)[0]
        return logits

    def hidden_states(self, x: Tensor, t: Tensor, cond: Condition) -> tuple[Tensor, Tensor] | None:
        return hidden_states_and_head(self.net, x, *self.condition_tokens(cond))

    def init_cache(self, cond: Condition) -> KVCache:
        return ()

    def decode_step(self, ids: Tensor | None, cache: KVCache, cond: Condition) -> tuple[Tensor, KVCache]:
        condition, mask = self.condition_tokens(cond)
        new_ids = None if ids is None else ids[:, None]
        logits, cache = self.net(new_ids, condition if ids is None else None, cache, mask)
        return logits[:, -1], cache

    def make_decoder(
        self, cond: Condition, uniform: Tensor, sampler: TokenSampler, guidance: Guidance | None
    ) -> TokenDecoder | None:
        condition, mask = self.condition_tokens(batch_conditions(cond) if guidance else cond)
        return self.decoder_pool.make_decoder(self.net, DecodeRequest(condition, mask, uniform, sampler, guidance))

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        return self.autoencoder.decode(x)[:, None]

    def token_embeddings(self, ids: Tensor) -> Tensor:
        return self.autoencoder.token_embeddings(ids)

    def encode_continuous(self, pixels: Tensor) -> Tensor:
        with torch.autocast(pixels.device.type, enabled=False):
            return self.autoencoder.encode_continuous(pixels[:, 0].float()).flatten(2).transpose(1, 2)


class GptBackbone(CausalTokenBackbone, PlaygroundBackbone):
    """LlamaGen's transformer, conditioned on the words of the prompt."""

    def __init__(self, spec: GptSpec, placement: Placement) -> None:
        self.device, self.max_text_tokens = placement.device, spec.max_text_tokens
        self.codebook_size = spec.codebook_size
        self.shape, self.pixels = spec.shape, (1, 3, spec.image_size, spec.image_size)
        self.autoencoder = load_image_tokenizer(
            spec.autoencoder, spec.codebook_size, spec.grid_size, spec.image_size, placement
        )
        net = load_network(lambda: GPT(spec.network_config()), spec.seed, spec.weights)
        net.rotary_factors = net.rotary_factors.to(placement.device)
        self.net = net.to(placement.device)
        self.decoder_pool = DecoderPool()

    def encode(self, pixels: Tensor) -> Tensor:
        return self.autoencoder.encode(pixels[:, 0])

    def condition_tokens(self, cond: Condition) -> tuple[Tensor, Tensor | None]:
        return cond.tensors["token_ids"], None


@dataclass(frozen=True)
class GptSpec(TokenGridSpec):
    """An autoregressive transformer over image tokens, conditioned on the playground's words."""

    weights: str | None = None  # file, run, or name of weights in the package; random if not given
    autoencoder: str | None = "playground/vq"  # likewise; without one, tokens are colors of grid cells
    image_size: Annotated[int, Field(ge=8, le=1024)] = 64  # pixels per side
    grid_size: Annotated[int, Field(ge=1, le=128)] = 8  # tokens per side
    codebook_size: CodebookSize = 2048  # of the autoencoder
    width: Annotated[int, Field(ge=8, le=8192)] = 192
    depth: Count = 6
    heads: Count = 6
    kv_heads: Count | None = None  # key and value heads; as many as query heads if not given
    max_text_tokens: Annotated[int, Field(ge=1, le=256)] = 16  # sequence length of prompts, padded
    seed: int = 0
    process_type: ClassVar[type[Process]] = AutoregressiveProcess
    supports_8bit_decoding: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.network_config()
        self.check_image_size("grid_size")

    def network_config(self) -> GPTConfig:
        return GPTConfig(
            self.width,
            self.depth,
            self.heads,
            self.kv_heads,
            self.codebook_size,
            self.grid_size,
            conditioning="words",
            prefix_length=self.max_text_tokens,
            vocabulary=len(VOCABULARY),
        )

    def load(self, placement: Placement) -> GptBackbone:
        return GptBackbone(self, placement)

    def tiny(self) -> GptSpec:
        small = replace(self, weights=None, autoencoder=None, grid_size=4, codebook_size=64, width=16, depth=1, heads=2)
        return replace(small, kv_heads=1 if self.kv_heads else None)
