"""Pool of token decoders: CUDA-graph decoders on a GPU, reused between batches, and eager ones elsewhere."""

from __future__ import annotations

import weakref
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ...core.distributions import MAX_CHUNK_LOGITS
from ...core.policy import TokenDecoder
from . import decode_kernels_torch
from .decode_graph_runner import DecodeGraphRunner
from .gpt import GPT, RMSNorm
from .token_decoder import (
    DecodeRequest,
    StaticKVCacheDecoder,
    guided_rows,
    prefill,
    select_requests,
    transformer_blocks,
)

MAX_RUNNERS = 2  # typewriters at once: each holds a cache


class DecoderPool:
    """Create token decoders for a network, and keep CUDA-graph runners whose weights are still current."""

    def __init__(self, kernels: ModuleType | None = None) -> None:
        self.kernels = kernels  # to write by on any device; on GPUs the best there are if not given
        self.kept: dict[tuple[Any, ...], DecodeGraphRunner] = {}

    def scribe(self, net: nn.Module, order: DecodeRequest) -> TokenDecoder | None:
        """Return a decoder, or None if the network is sharded (FSDP) and only full calls gather its weights."""
        if not isinstance(net, GPT) or any(type(p.data) is not Tensor for p in net.parameters()):
            return None
        if net.factors.device != order.uniform.device:
            net.factors = net.factors.to(order.uniform.device)
        if (self.kernels or order.uniform.is_cuda) and has_standard_norms(net):
            return CudaGraphDecoder(self, net, order)
        return StaticKVCacheDecoder(net, order)

    def typewriter(self, net: GPT, order: DecodeRequest) -> DecodeGraphRunner:
        """Return a free CUDA-graph runner for a batch of this size, or capture a new one."""
        dtype, shown = compute_dtype(net, order.uniform.device), order.shown is not None
        key = (id(net), dtype, order.uniform.shape, len(order.cond), shown, order.choice, order.guidance)
        kept = self.kept.get(key)
        if kept is not None and kept.free and kept.net is net and kept.matrices.current():
            self.kept[key] = self.kept.pop(key)  # the last to be given up
            return kept
        self.kept.pop(key, None)
        for old in list(self.kept)[: max(len(self.kept) - MAX_RUNNERS + 1, 0)]:
            del self.kept[old]
        self.kept[key] = DecodeGraphRunner(net, order, dtype, self.kernels or fastest_kernels())
        return self.kept[key]


def hidden_states_and_head(
    net: nn.Module, ids: Tensor, cond: Tensor, shown: Tensor | None = None
) -> tuple[Tensor, Tensor] | None:
    """Return hidden states and the output matrix of sequences [B, K], or None if logits are few or sharded."""
    if (
        not isinstance(net, GPT)
        or ids.numel() * net.shape.codes <= MAX_CHUNK_LOGITS
        or type(net.output) is not nn.Linear
    ):
        return None
    if any(type(p.data) is not Tensor for p in net.parameters()):
        return None
    states, _ = net.states(ids[:, :-1], cond, None, shown)
    dtype, weight = compute_dtype(net, states.device), net.output.weight
    # Without a gradient the weights may be borrowed ones, which others will take the place of.
    return states.to(dtype), weight.to(dtype) if torch.is_grad_enabled() else weight.detach().to(dtype, copy=True)


def fastest_kernels() -> ModuleType:
    if find_spec("triton") is None:
        return decode_kernels_torch
    from . import decode_kernels_triton

    return decode_kernels_triton


def has_standard_norms(net: GPT) -> bool:
    """Whether what is no matrix is as the network was made."""
    norms = [net.norm, *(norm for block in transformer_blocks(net) for norm in (block.attention_norm, block.ffn_norm))]
    return type(net.tok_embeddings) is nn.Embedding and all(type(norm) is RMSNorm for norm in norms)


def compute_dtype(net: GPT, device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products, taking autocast into account."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return next(net.output.parameters()).dtype


class CudaGraphDecoder:
    """Token decoder that replays a captured CUDA graph for every token."""

    @torch.no_grad()
    def __init__(self, desk: DecoderPool, net: GPT, order: DecodeRequest) -> None:
        self.desk, self.net, self.order, self.written = desk, net, order, 0
        self.typewriter = desk.typewriter(net, order)
        self.typewriter.user = weakref.ref(self)
        self.logits, past, number = prefill(net, order)
        self.typewriter.load(order, past, number)
        self.modes = self.typewriter.modes()
        self.sheet: tuple[Tensor, Tensor] | None = None  # once it is full

    @property
    def finished(self) -> bool:
        return self.sheet is not None

    @property
    def ids(self) -> Tensor:
        return self.sheet[0] if self.sheet else self.typewriter.ids.clone()

    @property
    def log_prob(self) -> Tensor:
        return self.sheet[1] if self.sheet else self.typewriter.log_prob.clone()

    @torch.no_grad()
    def write(self) -> None:
        order, i = self.order, self.written
        if i:
            self.typewriter.press(self.modes[i - 1])
        else:
            self.typewriter.put(*order.choice.take(order.combined(self.logits, 0), order.uniform[:, 0]))
        self.written = i + 1
        if self.written == order.uniform.shape[1]:
            self.sheet = self.typewriter.ids.clone(), self.typewriter.log_prob.clone()

    @torch.no_grad()
    def amend(self, ids: Tensor) -> None:
        if not self.sheet:  # once all is written, the typewriter may be another's
            self.typewriter.read_on(ids)

    def select(self, rows: Tensor) -> CudaGraphDecoder:
        count = len(self.order.uniform)
        rows = torch.arange(count, device=rows.device)[rows].to(self.order.uniform.device)
        if self.sheet:
            self.sheet = self.sheet[0][rows], self.sheet[1][rows]
            return self
        return self._followed(select_requests(self.order, rows), rows)

    @torch.no_grad()
    def _followed(self, order: DecodeRequest, rows: Tensor) -> CudaGraphDecoder:
        before = self.typewriter
        self.logits = self.logits[guided_rows(rows, before.rows, len(self.logits))]
        self.order, self.typewriter = order, self.desk.typewriter(self.net, order)
        self.typewriter.user = weakref.ref(self)
        self.typewriter.follow(before, rows)
        before.user = None
        return self
