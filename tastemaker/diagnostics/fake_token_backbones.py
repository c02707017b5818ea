"""Autoregressive generators on fake tensors: decoders that take the memory of the real ones and run only one token.

LlamaGen's CUDA-graph decoder needs a GPU, and hundreds of calls of Janus-Pro's would all measure the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from typing_extensions import override

from ..core.distributions import MAX_CHUNK_LOGITS, TokenSampler
from ..core.policy import Guidance, TokenDecoder
from ..core.types import Condition, Placement
from ..models.janus.model import JanusBackbone, JanusSpec
from ..models.llamagen.model import LlamagenBackbone, LlamagenSpec
from ..models.loading import init_random
from ..models.nets import janus, token_decoder
from ..models.nets.cuda_graph_decoder import rollout_kind
from ..models.nets.gpt import GPT
from ..models.nets.janus import JanusNet
from ..models.nets.vq import VQ, VQConfig

ConditioningSpec = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shape without batch dimension, and dtype
LLAMAGEN_VQ_LEVELS = {8: (1, 2, 2, 4), 16: (1, 1, 2, 2, 4)}  # channel multipliers by downsampling factor


def load_llamagen(spec: LlamagenSpec, placement: Placement, *, sharded: bool) -> tuple[Any, ConditioningSpec]:
    backbone, config = FakeLlamagenBackbone(spec, placement, sharded=sharded), spec.network_config()
    if config.conditioning == "class":
        return backbone, {"label": ((), torch.long)}
    length = config.prefix_length
    return backbone, {
        "features": ((length, config.vocabulary), placement.dtype),
        "attention_mask": ((length,), torch.bool),
    }


class FakeLlamagenBackbone(LlamagenBackbone):
    """LlamaGen with decoders that need no GPU. Its hidden states are used as on a GPU, unless weights are sharded."""

    def __init__(self, spec: LlamagenSpec, placement: Placement, *, sharded: bool) -> None:
        super().__init__(replace(spec, weights=None, autoencoder=None), placement)
        self.sharded, self.dtype = sharded, placement.dtype
        if spec.autoencoder is not None:
            levels = LLAMAGEN_VQ_LEVELS.get(spec.downsample_factor, (1,) * spec.downsample_factor.bit_length())
            self.autoencoder = VQ(VQConfig(128, levels, 2, 256, spec.codebook_size, 8)).requires_grad_(False)
        assert isinstance(self.net, GPT)
        self.fake_pool = FakeGPTDecoderPool(self.net, sharded)

    @override
    def make_decoder(
        self, cond: Condition, uniform: Tensor, choice: TokenSampler, guidance: Guidance | None
    ) -> TokenDecoder | None:
        return self.fake_pool.make_decoder(len(cond), uniform, guided=guidance is not None)

    @override
    def hidden_states(self, x: Tensor, t: Tensor, cond: Condition) -> tuple[Tensor, Tensor] | None:
        net: Any = self.net
        many = x.numel() * net.config.codebook_size > MAX_CHUNK_LOGITS
        if self.sharded or not many or type(net.output) is not nn.Linear:
            return None
        tokens, attention_mask = self.condition_tokens(cond)
        states = net.hidden_states(x[:, :-1], tokens, None, attention_mask)[0]
        return states.to(self.dtype), net.output.weight.to(self.dtype)


def load_janus(spec: JanusSpec, placement: Placement, *, sharded: bool) -> tuple[Any, ConditioningSpec]:
    """Janus-Pro with prompts as long as they may be."""
    length = (spec.max_text_tokens,)
    return FakeJanusBackbone(spec, placement, sharded=sharded), {
        "text": (length, torch.long),
        "attention_mask": (length, torch.bool),
    }


class FakeJanusBackbone(JanusBackbone):
    """Janus-Pro of the sizes of its weights, which are not read."""

    def __init__(self, spec: JanusSpec, placement: Placement, *, sharded: bool) -> None:
        super().__init__(spec, placement)
        assert isinstance(self.net, JanusNet)
        self.fake_pool = FakeJanusDecoderPool(self.net, sharded)

    @override
    def load_networks(self, spec: JanusSpec, placement: Placement) -> None:
        sizes = spec.sizes
        self.net = init_random(lambda: JanusNet(sizes), spec.seed, placement)
        self.autoencoder = VQ(sizes.vq).requires_grad_(False)

    @override
    def without_prompt(self, cond: Condition) -> Condition:
        return cond  # of the same shapes; there is no tokenizer

    @override
    def make_decoder(
        self, cond: Condition, uniform: Tensor, sampler: TokenSampler, guidance: Guidance | None
    ) -> TokenDecoder | None:
        return self.fake_pool.make_decoder(len(cond), uniform, guided=guidance is not None)


class FakeDecoderPool(ABC):
    """Memory and work of token decoders with a KV cache.

    Sharded weights (FSDP) can only be reached by whole calls: no cache is kept, it grows with each token.
    """

    net: GPT | JanusNet

    def __init__(self, net: GPT | JanusNet, sharded: bool) -> None:
        self.net, self.sharded = net, sharded
        self.kept: list[Tensor] = []  # cache and copied weights, which stay while the network learns
        self.sequence_tokens, self.length, self.rows = 0, 0, 0  # tokens decoded in all, in a sequence, and sequences
        self.bytes_read, self.dtype = 0.0, torch.float32

    @abstractmethod
    def allocate_cache(self, rows: int, dtype: torch.dtype) -> Tensor: ...
    @abstractmethod
    def matrix_weights(self) -> int:
        """Weights that decoding one token multiplies by: all but the embeddings."""

    def quantized_weights(self) -> int:
        """Weights among them that are multiplied in 8 bits in the rollout that runs."""
        return 0

    @abstractmethod
    def read_token(self, ids: Tensor, cache: Tensor, place: int) -> None:
        """Run one token of every row at a place of the sequence, with a preallocated cache."""

    @abstractmethod
    def prefix_mask(self, rows: int) -> Tensor | None:
        """Which tokens of prompts are not padding; None if prompts have no padding."""

    def make_decoder(self, prompts: int, uniform: Tensor, *, guided: bool) -> FakeTokenDecoder:
        rows = prompts * (2 if guided else 1)
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else self._param_dtype()
        self.length, self.rows, self.dtype = uniform.shape[1], rows, dtype
        self.sequence_tokens += rows * self.length
        self.bytes_read += self._bytes_read(rows, self.length, dtype)
        cache = None if self.sharded else self.provide_cache(rows, dtype)
        return FakeTokenDecoder(self, rows, uniform, dtype, cache, self.quantized_weights() > 0)

    def provide_cache(self, rows: int, dtype: torch.dtype) -> Tensor:
        """The cache of a decoder, which is freed with it."""
        with fake_mode_of(self.net):
            return self.allocate_cache(rows, dtype)

    def _param_dtype(self) -> torch.dtype:
        return next(self.net.parameters()).dtype

    def _is_adapted(self) -> bool:
        return any(not p.requires_grad for p in self.net.parameters())

    def _bytes_read(self, rows: int, length: int, dtype: torch.dtype) -> float:
        """All matrices once per token, and the keys and values of half of the places on average."""
        shape = self.net.config
        place = 2.0 * shape.depth * (shape.kv_heads or shape.heads) * -(-shape.head_dim // 8) * 8 * dtype.itemsize
        weights = self.matrix_weights() * dtype.itemsize - self.quantized_weights() * (dtype.itemsize - 1)
        return length * (weights + rows * (shape.prefix_length + length / 2) * place)

    def decode_token(self, rows: int, place: int, dtype: torch.dtype, cache: Tensor | None = None) -> None:
        """Run one token of every row at a place of the sequence."""
        shape = self.net.config
        with fake_mode_of(self.net):
            ids = torch.empty(rows, dtype=torch.long)
            if not self.sharded:
                self.read_token(ids, self.allocate_cache(rows, dtype) if cache is None else cache, place)
                return
            heads = shape.kv_heads or shape.heads
            keys, values = (torch.empty(rows, heads, place, shape.head_dim, dtype=dtype) for _ in range(2))
            past = tuple((keys.clone(), values.clone()) for _ in range(shape.depth))
            self.net(ids[:, None], None, past, self.prefix_mask(rows))


def block_matrices(net: GPT) -> list[tuple[int, int]]:
    """Rows and columns of every matrix of the blocks."""
    shapes = []
    for block in token_decoder.transformer_blocks(net):
        attention, feed_forward = block.attention, block.feed_forward
        layers = (attention.wqkv, attention.wo, feed_forward.w1, feed_forward.w3, feed_forward.w2)
        shapes += [(layer.out_features, layer.in_features) for layer in layers]
    return shapes


class FakeGPTDecoderPool(FakeDecoderPool):
    """LlamaGen's decoders: a KV cache allocated once and, where dtypes differ, a copy of the weights."""

    net: GPT

    def allocate_cache(self, rows: int, dtype: torch.dtype) -> Tensor:
        stride = -(-self.net.config.head_dim // 8) * 8
        return token_decoder.allocate_kv_cache(self.net.config, rows, torch.empty(0, dtype=dtype), stride)

    def provide_cache(self, rows: int, dtype: torch.dtype) -> Tensor:
        if not self.kept:
            with fake_mode_of(self.net):
                copied = self._is_adapted() or self._param_dtype() != dtype
                count = self.matrix_weights() - self.quantized_weights()
                copy = torch.empty(count if copied else 0, dtype=dtype)
                self.kept = [self.allocate_cache(rows, dtype), copy]
        return self.kept[0] if self.kept[0].shape[2] == rows else super().provide_cache(rows, dtype)

    def matrix_weights(self) -> int:
        blocks = sum(p.numel() for block in token_decoder.transformer_blocks(self.net) for p in block.parameters())
        return blocks + self.net.output.weight.numel()

    def quantized_weights(self) -> int:
        return sum(rows * columns for rows, columns in block_matrices(self.net)) if rollout_kind(self.net) else 0

    def read_token(self, ids: Tensor, cache: Tensor, place: int) -> None:
        cache = cache[..., : self.net.config.head_dim]
        token_decoder.decode_step(self.net, ids, self.prefix_mask(len(ids)), cache, place)

    def prefix_mask(self, rows: int) -> Tensor | None:
        shape = self.net.config
        return None if shape.conditioning == "class" else torch.ones(rows, shape.prefix_length, dtype=torch.bool)


class FakeJanusDecoderPool(FakeDecoderPool):
    """Janus-Pro's decoders, each with a KV cache of its own."""

    net: JanusNet

    def allocate_cache(self, rows: int, dtype: torch.dtype) -> Tensor:
        sizes = self.net.config
        return janus.allocate_kv_cache(sizes, rows, torch.empty(0, dtype=dtype), sizes.prefix_length)

    def matrix_weights(self) -> int:
        embeddings = (self.net.language_model.embed_tokens, self.net.model["generation_embeddings"])
        total = sum(p.numel() for p in self.net.parameters())
        return total - sum(p.numel() for module in embeddings for p in module.parameters())

    def read_token(self, ids: Tensor, cache: Tensor, place: int) -> None:
        janus.decode_step(self.net, ids, self.prefix_mask(len(ids)), cache, place)

    def prefix_mask(self, rows: int) -> Tensor:
        return torch.ones(rows, self.net.config.prefix_length, dtype=torch.bool)


@dataclass
class FakeTokenDecoder:
    """A `TokenDecoder` that computes only the last token, when the cache is full."""

    pool: FakeDecoderPool
    rows: int
    uniform: Tensor  # [B, L]
    dtype: torch.dtype
    cache: Tensor | None
    low_precision: bool = False
    written: int = field(default=0)

    @property
    def ids(self) -> Tensor:
        return torch.zeros_like(self.uniform, dtype=torch.long)

    @property
    def log_prob(self) -> Tensor:
        return torch.zeros_like(self.uniform)

    def decode_next(self) -> None:
        self.written += 1
        if self.written == self.uniform.shape[1]:
            place = self.pool.net.config.prefix_length + self.written - 1
            self.pool.decode_token(self.rows, place, self.dtype, self.cache)

    def replace_last(self, ids: Tensor) -> None:
        pass

    def select(self, rows: Tensor) -> Self:
        return self


def fake_mode_of(net: nn.Module) -> FakeTensorMode:
    """The mode that the parameters of a fake network were created in."""
    mode: FakeTensorMode = next(p for p in net.parameters()).fake_mode  # type: ignore[attr-defined]
    return mode
