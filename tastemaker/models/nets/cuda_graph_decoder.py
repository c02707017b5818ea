"""Decode tokens on a GPU: one CUDA graph per step, from the last token to the next, without host synchronization.

A graph holds the matrix products of the network and fused kernels for everything between them (`decode_kernels`).
On an H200 it is 2.33 times as fast for B, and 1.55 times for XL, as torch.compile with a static KV cache
(`bench/llamagen.py --sections compile-B,compile-XL`); Inductor cannot compile the sampler, which ran eagerly there.
"""

from __future__ import annotations

import weakref
from importlib.util import find_spec
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.policy import TokenDecoder
from ...core.quantization import Kind
from ...core.registry import ConfigError
from ...core.rollout_scope import ROLLOUTS
from .decode_weights import SQUARES_GROUP, DecodeMatrix, DecodeWeights, InputNorm
from .gpt import GPT, KVCache, RMSNorm, apply_rotary_emb, compute_dtype, is_sharded
from .token_decoder import (
    DecodeRequest,
    StaticKVCacheDecoder,
    allocate_kv_cache,
    fill_kv_cache,
    prefill,
    to_indices,
    transformer_blocks,
    with_unconditional,
)

MAX_RUNNERS = 2  # kept at once, because each holds a KV cache
CACHE_ALIGNMENT = 8  # elements of 2 bytes: every position of the cache starts at a multiple of 16 bytes


class DecodeKernels(Protocol):
    """The operations of a decoding step between its matrix products; all write into given buffers."""

    MAX_SAMPLED_CODES: int  # largest codebook that `sample` takes
    MAX_GATED_ROWS: int  # most rows for which `gated_linear` is faster than a product followed by `gate`
    MAX_FUSED_ROWS: int  # most rows for which norms and additions are part of products

    def embed(self, embeddings: Tensor, ids: Tensor, position: Tensor, h: Tensor, squares: Tensor) -> None: ...
    def add_norm(self, h: Tensor, delta: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None: ...
    def gate(self, both: Tensor, out: Tensor) -> None: ...
    def gated_linear(
        self, x: Tensor, weight: Tensor, out: Tensor, *, scale: Tensor | None = None, norm: InputNorm | None = None
    ) -> None: ...
    def linear(
        self, x: Tensor, weight: Tensor, out: Tensor, *, scale: Tensor | None = None, norm: InputNorm | None = None
    ) -> None: ...
    def add_linear(
        self, x: Tensor, weight: Tensor, h: Tensor, squares: Tensor, *, scale: Tensor | None = None
    ) -> None: ...
    def attend(
        self,
        qkv: Tensor,
        cache: Tensor,
        layer: int,
        prefix_mask: Tensor | None,
        factors: Tensor,
        position: Tensor,
        out: Tensor,
        heads: int,
    ) -> None: ...
    def sample(
        self,
        logits: Tensor,
        uniform: Tensor,
        ids: Tensor,
        log_prob: Tensor,
        last: Tensor,
        position: Tensor,
        *,
        prefix: int,
        scale: float | None,
        rescale: bool,
        temperature: float,
        top_k: int,
    ) -> None: ...


class TorchKernels:
    """The kernels in PyTorch, for machines without Triton and for tests.

    The position is a tensor on the device, so that a graph can be captured; attention therefore covers the whole cache.
    """

    MAX_SAMPLED_CODES = MAX_GATED_ROWS = MAX_FUSED_ROWS = 0  # no fusion is faster here

    def embed(self, embeddings: Tensor, ids: Tensor, position: Tensor, h: Tensor, squares: Tensor) -> None:
        """Write the embeddings of the ids [R] and their sums of squares, and advance the position."""
        torch.index_select(embeddings, 0, ids, out=h)
        squares.copy_(sum_squares(h))
        position.add_(1)

    def add_norm(self, h: Tensor, delta: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
        """Add `delta` to the residual stream [R, D] and write its RMS norm."""
        if delta is not None:
            h.add_(delta)
        out.copy_(F.rms_norm(h.float(), h.shape[-1:], eps=eps).to(h.dtype) * weight)

    def gate(self, both: Tensor, out: Tensor) -> None:
        """silu(first half) * second half of [R, 2 F]."""
        first, second = both.chunk(2, 1)
        torch.mul(F.silu(first), second, out=out)

    def gated_linear(
        self, x: Tensor, weight: Tensor, out: Tensor, *, scale: Tensor | None = None, norm: InputNorm | None = None
    ) -> None:
        """silu(x w1) * (x w3) of x [R, D], with w1 above w3 in one matrix [2 F, D]."""
        both = out.new_empty(len(x), len(weight))
        self.linear(x, weight, both, scale=scale, norm=norm)
        self.gate(both, out)

    def linear(
        self, x: Tensor, weight: Tensor, out: Tensor, *, scale: Tensor | None = None, norm: InputNorm | None = None
    ) -> None:
        """x W^T of x [R, K] and W [M, K]; with a scale per row of W [M, 1], its numbers have 8 bits. Sums are fp32."""
        if norm is not None:
            rms = (norm.squares.sum(1, keepdim=True) / x.shape[1] + norm.eps).sqrt()
            x = ((x.float() / rms).to(x.dtype) * norm.weight).to(out.dtype)
        product = x.float() @ weight.float().t()
        out.copy_(product if scale is None else product * scale.t())

    def add_linear(self, x: Tensor, weight: Tensor, h: Tensor, squares: Tensor, *, scale: Tensor | None = None) -> None:
        """Add x W^T to the residual stream [R, D], and write its sums of squares."""
        product = x.new_empty(h.shape)
        self.linear(x, weight, product, scale=scale)
        h.add_(product)
        squares.copy_(sum_squares(h))

    def attend(
        self,
        qkv: Tensor,
        cache: Tensor,
        layer: int,
        prefix_mask: Tensor | None,
        factors: Tensor,
        position: Tensor,
        out: Tensor,
        heads: int,
    ) -> None:
        """Rotate queries and keys of one new position, store keys and values, and attend to the cache: [R, D]."""
        rows, (_, _, _, kv_heads, room, _) = len(qkv), cache.shape
        head_dim = qkv.shape[1] // (heads + 2 * kv_heads)
        now = position.long()
        parts = qkv.view(rows, 1, heads + 2 * kv_heads, head_dim)
        rotated = apply_rotary_emb(parts[:, :, : heads + kv_heads], factors[:, now])
        q, k = (part.transpose(1, 2) for part in rotated.tensor_split([heads], 2))
        stored = cache[layer, :, :rows, :, :, :head_dim]
        stored.index_copy_(3, now, torch.stack([k, parts[:, :, heads + kv_heads :].transpose(1, 2)]).to(cache.dtype))
        mask = torch.arange(room, device=qkv.device) <= now
        if prefix_mask is not None:
            mask = mask & F.pad(prefix_mask[:rows].bool(), (0, room - prefix_mask.shape[1]), value=True)[:, None, None]
        mask = mask.expand(rows, 1, 1, room)
        mixed = F.scaled_dot_product_attention(q, stored[0], stored[1], mask, enable_gqa=heads != kv_heads)
        out.copy_(mixed.transpose(1, 2).reshape(rows, -1))

    def sample(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("sample is not implemented for this kernel; use the sampler itself [TM479]")


def sum_squares(h: Tensor) -> Tensor:
    """Sums of squares [R, D / SQUARES_GROUP] of groups of channels of the residual stream [R, D], in fp32."""
    padded = F.pad(h.float(), (0, -h.shape[1] % SQUARES_GROUP))
    return padded.square().reshape(len(h), -1, SQUARES_GROUP).sum(2)


def fastest_kernels(device: torch.device) -> DecodeKernels:
    """The Triton kernels on GPUs where Triton is installed."""
    if device.type != "cuda" or find_spec("triton") is None:
        return TorchKernels()
    from . import decode_kernels

    return decode_kernels


class DecodeGraphRunner:
    """Static buffers and captured CUDA graphs to decode batches of one size; elsewhere the same steps run eagerly."""

    @torch.no_grad()
    def __init__(self, weights: DecodeWeights, request: DecodeRequest, kernels: DecodeKernels) -> None:
        net, dtype = weights.net, weights.dtype
        self.net, self.kernels, self.request = net, kernels, request
        self.weights, config = weights, net.config
        self.batch_size, rows = len(request.uniform), len(request.cond)
        device = request.uniform.device
        stride = -(-config.head_dim // CACHE_ALIGNMENT) * CACHE_ALIGNMENT
        self.cache = allocate_kv_cache(config, rows, torch.empty(0, dtype=dtype, device=device), stride)
        self.uniform, self.log_prob = torch.zeros_like(request.uniform), torch.zeros_like(request.uniform)
        self.ids = torch.zeros_like(request.uniform, dtype=torch.long)
        self.last = torch.zeros(rows, dtype=torch.long, device=device)
        # Of the last token that was read; a step starts by advancing it.
        self.position = torch.full((1,), config.prefix_length - 1, dtype=torch.int32, device=device)
        self.prefix_mask = None if request.prefix_mask is None else request.prefix_mask.to(torch.uint8).clone()
        self.rotary_factors = net.rotary_factors.to(device)
        num_heads = config.heads + 2 * (config.kv_heads or config.heads)
        widths = (
            config.width,  # normalized residual stream
            num_heads * config.head_dim,  # queries, keys and values
            config.width,  # attention
            config.width,  # output of a half of a block
            2 * config.intermediate_size,  # w1 and w3
            config.intermediate_size,  # gated
            config.codebook_size,  # logits
        )
        self.residual = torch.empty(rows, config.width, dtype=self.weights.embeddings.dtype, device=device)
        self.squares = torch.empty(rows, -(-config.width // SQUARES_GROUP), device=device)  # sums, of the residual
        self.scratch = [torch.empty(rows, width, dtype=dtype, device=device) for width in widths]
        self.graphs: dict[tuple[bool, bool], torch.cuda.CUDAGraph] = {}
        self.user: weakref.ref[CudaGraphDecoder] | None = None
        self.weights.refresh()
        if device.type == "cuda":
            self._capture()

    def modes(self) -> list[tuple[bool, bool]]:
        """For every token after the first: whether the unconditional rows are read, and whether guidance applies."""
        request = self.request
        return [(i < request.num_guided_tokens, request.guided_tokens[i]) for i in range(1, self.uniform.shape[1])]

    def _capture(self) -> None:
        for mode in dict.fromkeys(self.modes()):
            stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step(*mode)  # compiles kernels and allocates workspaces, which must not happen during capture
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._step(*mode)
            self.graphs[mode] = graph
            self.position.fill_(self.net.config.prefix_length - 1)

    @torch.no_grad()
    def replay(self, mode: tuple[bool, bool]) -> None:
        """Decode one token with the graph of this mode."""
        if mode in self.graphs:
            self.graphs[mode].replay()
        else:
            self._step(*mode)

    def _step(self, unconditional: bool, guided: bool) -> None:
        rows = len(self.last) if unconditional else self.batch_size
        with torch.autocast(self.position.device.type, enabled=False):
            scratch = [buffer[:rows] for buffer in self.scratch]
            h, squares = self.residual[:rows], self.squares[:rows]
            self.kernels.embed(self.weights.embeddings, self.last[:rows], self.position, h, squares)
            fused = rows <= self.kernels.MAX_FUSED_ROWS
            logits = self._forward_fused(h, squares, scratch) if fused else self._forward(h, scratch)
            self._sample(logits, guided)

    def _forward_fused(self, h: Tensor, squares: Tensor, scratch: list[Tensor]) -> Tensor:
        """Logits of embeddings [R, D], with additions and norms in the products around them."""
        kernels, weights, eps = self.kernels, self.weights, self.net.norm.eps
        _, qkv, mixed, _, _, hidden, logits = scratch
        for i, layer in enumerate(weights.layers):
            norm = InputNorm(layer.attention_norm, squares, eps)
            kernels.linear(h, layer.wqkv.weight, qkv, scale=layer.wqkv.scale, norm=norm)
            self._attend(qkv, i, mixed)
            kernels.add_linear(mixed, layer.wo.weight, h, squares, scale=layer.wo.scale)
            norm = InputNorm(layer.ffn_norm, squares, eps)
            kernels.gated_linear(h, layer.w13.weight, hidden, scale=layer.w13.scale, norm=norm)
            kernels.add_linear(hidden, layer.w2.weight, h, squares, scale=layer.w2.scale)
        kernels.linear(h, weights.output.weight, logits, norm=InputNorm(weights.norm, squares, eps))
        return logits

    def _forward(self, h: Tensor, scratch: list[Tensor]) -> Tensor:
        """Logits of embeddings [R, D], with kernels for additions and norms."""
        kernels, weights, eps = self.kernels, self.weights, self.net.norm.eps
        normed, qkv, mixed, out, w13, hidden, logits = scratch
        delta = None
        for i, layer in enumerate(weights.layers):
            kernels.add_norm(h, delta, layer.attention_norm, normed, eps)
            self._multiply(normed, layer.wqkv, qkv)
            self._attend(qkv, i, mixed)
            self._multiply(mixed, layer.wo, out)
            kernels.add_norm(h, out, layer.ffn_norm, normed, eps)
            if len(h) <= kernels.MAX_GATED_ROWS:
                kernels.gated_linear(normed, layer.w13.weight, hidden, scale=layer.w13.scale)
            else:
                self._multiply(normed, layer.w13, w13)
                kernels.gate(w13, hidden)
            delta = self._multiply(hidden, layer.w2, out)
        kernels.add_norm(h, delta, weights.norm, normed, eps)
        return self._multiply(normed, weights.output, logits)

    def _attend(self, qkv: Tensor, layer: int, out: Tensor) -> None:
        factors, heads = self.rotary_factors, self.net.config.heads
        self.kernels.attend(qkv, self.cache, layer, self.prefix_mask, factors, self.position, out, heads)

    def _multiply(self, x: Tensor, matrix: DecodeMatrix, out: Tensor) -> Tensor:
        if matrix.scale is None:
            return torch.mm(x, matrix.weight.t(), out=out)
        self.kernels.linear(x, matrix.weight, out, scale=matrix.scale)
        return out

    def _sample(self, logits: Tensor, guided: bool) -> None:
        sampler, guidance, prefix = self.request.sampler, self.request.guidance, self.net.config.prefix_length
        scheduled = guidance is not None and guidance.power_schedule is not None  # the kernel takes one scale only
        if logits.shape[1] <= self.kernels.MAX_SAMPLED_CODES and sampler.top_p == 1 and not scheduled:
            scale = guidance.scale if guided and guidance else None
            rescale = bool(guidance and guidance.rescale)
            self.kernels.sample(
                logits, self.uniform, self.ids, self.log_prob, self.last, self.position,
                prefix=prefix, scale=scale, rescale=rescale, temperature=sampler.temperature, top_k=sampler.top_k,
            )  # fmt: skip
            return
        exact, index = logits.float(), (self.position - prefix + 1).long()
        combined = self.request.extrapolate(exact, index) if guided else exact[: self.batch_size]
        token, log_prob = sampler.sample(combined, self.uniform.index_select(1, index)[:, 0])
        self.ids.index_copy_(1, index, token[:, None])
        self.log_prob.index_copy_(1, index, log_prob[:, None])
        self.set_last_token(token)

    def load(self, request: DecodeRequest, prefilled: KVCache, index: Tensor) -> None:
        """Start a batch after its conditions were read."""
        self.weights.refresh()
        fill_kv_cache(self.cache, prefilled, index)
        self.uniform.copy_(request.uniform)
        self.ids.zero_()
        self.log_prob.zero_()
        self.position.fill_(self.net.config.prefix_length - 1)
        if self.prefix_mask is not None and request.prefix_mask is not None:
            self.prefix_mask.copy_(request.prefix_mask)

    def write_first_token(self, token: Tensor, log_prob: Tensor) -> None:
        """Store the first token [B], which is sampled from the logits of the prefill."""
        self.ids[:, 0], self.log_prob[:, 0] = token, log_prob
        self.set_last_token(token)

    def set_last_token(self, token: Tensor) -> None:
        """Set the token [B] that the next step reads, for both halves of guidance."""
        self.last.copy_(token.repeat(len(self.last) // self.batch_size))

    def copy_rows_from(self, other: DecodeGraphRunner, indices: Tensor) -> None:
        """Continue with some of the sequences of another runner."""
        rows = with_unconditional(indices, other.batch_size, len(other.last))
        self.weights.refresh()
        self.cache.copy_(other.cache[:, :, rows])
        self.last.copy_(other.last[rows])
        self.position.copy_(other.position)
        self.uniform.copy_(other.uniform[indices])
        self.ids.copy_(other.ids[indices])
        self.log_prob.copy_(other.log_prob[indices])
        if self.prefix_mask is not None and other.prefix_mask is not None:
            self.prefix_mask.copy_(other.prefix_mask[rows])

    @property
    def free(self) -> bool:
        """Whether no unfinished decoder uses the buffers."""
        user = self.user() if self.user else None
        return user is None or user.finished


class CudaGraphDecoder:
    """Token decoder that replays a captured CUDA graph for every token after the first."""

    @torch.no_grad()
    def __init__(self, pool: DecoderPool, net: GPT, request: DecodeRequest) -> None:
        self.pool, self.net, self.request, self.num_decoded = pool, net, request, 0
        self.kind = rollout_kind(net)
        self.graph_runner = pool.graph_runner(net, request, self.kind)
        self.graph_runner.user = weakref.ref(self)
        self.logits, prefilled, index = prefill(net, request)
        self.graph_runner.load(request, prefilled, index)
        self.modes = self.graph_runner.modes()
        self.output: tuple[Tensor, Tensor] | None = None  # ids and log-probabilities, once all tokens are decoded

    @property
    def finished(self) -> bool:
        return self.output is not None

    @property
    def low_precision(self) -> bool:
        return self.kind is not None

    @property
    def ids(self) -> Tensor:
        return self.output[0] if self.output else self.graph_runner.ids.clone()

    @property
    def log_prob(self) -> Tensor:
        return self.output[1] if self.output else self.graph_runner.log_prob.clone()

    @torch.no_grad()
    def decode_next(self) -> None:
        request, i = self.request, self.num_decoded
        if i:
            self.graph_runner.replay(self.modes[i - 1])
        else:
            logits = request.apply_guidance(self.logits, 0)
            self.graph_runner.write_first_token(*request.sampler.sample(logits, request.uniform[:, 0]))
        self.num_decoded = i + 1
        if self.num_decoded == request.uniform.shape[1]:
            self.output = self.graph_runner.ids.clone(), self.graph_runner.log_prob.clone()

    @torch.no_grad()
    def replace_last(self, ids: Tensor) -> None:
        if not self.output:  # afterwards the runner may belong to another decoder
            self.graph_runner.set_last_token(ids)

    @torch.no_grad()
    def select(self, rows: Tensor) -> CudaGraphDecoder:
        indices = to_indices(rows, len(self.request.uniform), self.request.uniform.device)
        if self.output:
            self.output = self.output[0][indices], self.output[1][indices]
            return self
        previous = self.graph_runner
        self.logits = self.logits[with_unconditional(indices, previous.batch_size, len(self.logits))]
        self.request = self.request.select(indices)
        self.graph_runner = self.pool.graph_runner(self.net, self.request, self.kind)
        self.graph_runner.user = weakref.ref(self)
        self.graph_runner.copy_rows_from(previous, indices)
        previous.user = None
        return self


class DecoderPool:
    """Creates token decoders for a network and keeps CUDA-graph runners for later batches of the same size."""

    def __init__(self, kernels: DecodeKernels | None = None) -> None:
        self.kernels = kernels  # if given, graph runners are used on any device; otherwise on GPUs, or for 8 bits
        self.runners: dict[tuple[Any, ...], DecodeGraphRunner] = {}
        # Shared by the runners of several sizes, and kept as long as one of them is.
        self.weights = weakref.WeakValueDictionary[tuple[Any, ...], DecodeWeights]()

    def make_decoder(self, net: nn.Module, request: DecodeRequest) -> TokenDecoder | None:
        """A decoder, or None if the network is sharded (FSDP), because only full calls gather its weights."""
        if not isinstance(net, GPT) or is_sharded(net):
            return None
        if net.rotary_factors.device != request.uniform.device:
            net.rotary_factors = net.rotary_factors.to(request.uniform.device)
        standard = has_standard_norms(net)
        if rollout_kind(net) and not standard:
            raise ConfigError(
                f"engine.rollout_precision: {rollout_kind(net)} decodes tokens with the network's own norms and "
                "embeddings, but adapters replaced some; remove these from tuning.target_modules, or set "
                "engine.rollout_precision=same [TM2690]"
            )
        if (self.kernels or request.uniform.is_cuda or rollout_kind(net)) and standard:
            return CudaGraphDecoder(self, net, request)
        return StaticKVCacheDecoder(net, request)

    def graph_runner(self, net: GPT, request: DecodeRequest, kind: Kind | None) -> DecodeGraphRunner:
        """A free runner for a batch of this size with current weights, or a newly captured one."""
        device = request.uniform.device
        dtype, masked = compute_dtype(net, device), request.prefix_mask is not None
        weights_key = (id(net), dtype, kind)
        key = (*weights_key, request.uniform.shape, len(request.cond), masked, request.sampler, request.guidance)
        runner = self.runners.pop(key, None)
        if runner is None or not runner.free or runner.net is not net or not runner.weights.is_current():
            for oldest in list(self.runners)[: max(len(self.runners) - MAX_RUNNERS + 1, 0)]:
                del self.runners[oldest]
            weights = self.weights.get(weights_key)
            if weights is None or weights.net is not net or not weights.is_current():
                weights = self.weights[weights_key] = DecodeWeights(net, dtype, kind)
            runner = DecodeGraphRunner(weights, request, self.kernels or fastest_kernels(device))
        self.runners[key] = runner  # last in order, so that it is evicted last
        return runner


def rollout_kind(net: GPT) -> Kind | None:
    """The 8 bits that a decoder of this network multiplies at the moment; None for the precision of the run."""
    return net.rollout_kind if ROLLOUTS.active else None


def has_standard_norms(net: GPT) -> bool:
    """Whether norms and embeddings are the network's own layers, not replaced or wrapped."""
    norms = [net.norm, *(norm for block in transformer_blocks(net) for norm in (block.attention_norm, block.ffn_norm))]
    return type(net.tok_embeddings) is nn.Embedding and all(type(norm) is RMSNorm for norm in norms)
