"""Decode tokens on a GPU: one CUDA graph per step, from the last token to the next, without host sync."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .gpt import GPT, KVCache
from .token_decoder import DecodeRequest, allocate_kv_cache, fill_kv_cache, guided_rows, transformer_blocks


class GraphRunnerUser(Protocol):
    @property
    def finished(self) -> bool: ...


@dataclass(frozen=True)
class DecodeLayerWeights:
    first_norm: Tensor
    wqkv: Tensor
    wo: Tensor
    second_norm: Tensor
    opened: Tensor  # w1 and w3 in one
    w2: Tensor


class DecodeWeights:
    """A network's weights as a step multiplies by them, seen or copied.

    Where they are plain and of the right type they are the network's own, so that updates and borrowed weights, which
    are copied in place, show at once; w1 and w3 are moved into one storage for it, which takes no more memory. Where
    they are of another type, or adapted, they are copies, made anew before each batch.
    """

    def __init__(self, net: GPT, dtype: torch.dtype) -> None:
        self.dtype, self.copies, self.own = dtype, list[tuple[nn.Module, Tensor]](), list[Tensor]()
        width = net.shape.width
        self.layers = [
            DecodeLayerWeights(
                self._seen(block.attention_norm.weight),
                self._of((block.attention.wqkv,), width),
                self._of((block.attention.wo,), width),
                self._seen(block.ffn_norm.weight),
                self._of((block.feed_forward.w1, block.feed_forward.w3), width),
                self._of((block.feed_forward.w2,), net.shape.hidden),
            )
            for block in transformer_blocks(net)
        ]
        self.norm, self.output = self._seen(net.norm.weight), self._of((net.output,), width)
        self.embeddings = self._seen(net.tok_embeddings.weight)
        self.where = [x.data_ptr() for x in self.own]

    def _seen(self, weight: Tensor) -> Tensor:
        self.own.append(weight)
        return weight.detach()

    def _of(self, modules: tuple[nn.Module, ...], width: int) -> Tensor:
        linear = [module for module in modules if type(module) is nn.Linear and module.weight.dtype == self.dtype]
        if len(linear) == len(modules):
            seen = fuse_weights(linear)
            self.own += [module.weight for module in linear]
            return seen
        heights = [out_features(module) for module in modules]
        device = next(modules[0].parameters()).device
        made = torch.empty(sum(heights), width, dtype=self.dtype, device=device)
        self.copies += list(zip(modules, torch.split(made, heights), strict=True))
        return made

    def current(self) -> bool:
        """Whether the weights that are seen still lie where they did."""
        return self.where == [x.data_ptr() for x in self.own]

    @torch.no_grad()
    def refresh(self) -> None:
        for module, made in self.copies:
            if type(module) is nn.Linear:
                made.copy_(module.weight)
            else:  # whatever is added to it, what it does to unit vectors is its matrix
                made.copy_(module(torch.eye(made.shape[1], dtype=self.dtype, device=made.device)).t())


def out_features(module: Any) -> int:
    found: int = module.out_features
    return found


@torch.no_grad()
def fuse_weights(linear: list[nn.Linear]) -> Tensor:
    """The weights of linear layers as one, which they are views of from now on."""
    first = linear[0].weight
    if len(linear) == 1:
        return first.detach()
    heights = [len(layer.weight) for layer in linear]
    size = first.numel() * first.element_size()
    shape = (sum(heights), first.shape[1])
    if linear[1].weight.data_ptr() != first.data_ptr() + size or first.untyped_storage().nbytes() < 2 * size:
        both = torch.cat([layer.weight for layer in linear])
        for layer, part in zip(linear, torch.split(both, heights), strict=True):
            layer.weight.data = part
    return first.detach().as_strided(shape, (shape[1], 1))


class DecodeGraphRunner:
    """Static buffers and captured CUDA graphs to decode a batch of fixed size."""

    @torch.no_grad()
    def __init__(self, net: GPT, order: DecodeRequest, dtype: torch.dtype, kernels: ModuleType) -> None:
        self.net, self.kernels, self.order = net, kernels, order
        self.matrices, shape = DecodeWeights(net, dtype), net.shape
        self.rows, total = len(order.uniform), len(order.cond)
        device = order.uniform.device
        stride = -(-shape.head // 8) * 8  # so that a place begins where 16 bytes do
        self.cache = allocate_kv_cache(shape, total, torch.empty(0, dtype=dtype, device=device), stride)
        self.uniform, self.log_prob = torch.zeros_like(order.uniform), torch.zeros_like(order.uniform)
        self.ids = torch.zeros_like(order.uniform, dtype=torch.long)
        self.last = torch.zeros(total, dtype=torch.long, device=device)
        self.place = torch.full((1,), shape.prefix, dtype=torch.int32, device=device)
        self.shown = None if order.shown is None else order.shown.to(torch.uint8).clone()
        self.factors = net.factors.to(device)
        heads = shape.heads + 2 * (shape.kv_heads or shape.heads)
        widths = (
            shape.width,
            heads * shape.head,
            shape.width,
            shape.width,
            2 * shape.hidden,
            shape.hidden,
            shape.codes,
        )
        self.stream = torch.empty(total, shape.width, dtype=self.matrices.embeddings.dtype, device=device)
        self.sheets = [torch.empty(total, width, dtype=dtype, device=device) for width in widths]
        self.graphs: dict[tuple[bool, bool], torch.cuda.CUDAGraph] = {}
        self.user: weakref.ref[GraphRunnerUser] | None = None
        self.matrices.refresh()
        if device.type == "cuda":
            self._capture()

    def modes(self) -> list[tuple[bool, bool]]:
        """Which halves are read and whether they are guided, of every place after the first."""
        return [(i < self.order.guided, self.order.inside[i]) for i in range(1, self.uniform.shape[1])]

    def _capture(self) -> None:
        for mode in dict.fromkeys(self.modes()):
            beside: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                self._step(*mode)  # compiles and begins whatever must not be in a graph
            torch.cuda.current_stream().wait_stream(beside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._step(*mode)
            self.graphs[mode] = graph
            self.place.fill_(self.net.shape.prefix)

    @torch.no_grad()
    def press(self, mode: tuple[bool, bool]) -> None:
        """Decode one token by replaying the graph of this mode."""
        if mode in self.graphs:
            self.graphs[mode].replay()
        else:
            self._step(*mode)

    def _step(self, both: bool, guided: bool) -> None:
        rows = len(self.last) if both else self.rows
        with torch.autocast(self.place.device.type, enabled=False):
            logits = self._read(self.stream[:rows], self.last[:rows], [sheet[:rows] for sheet in self.sheets])
            self._choose(logits, guided)
            self.place.add_(1)

    def _read(self, h: Tensor, ids: Tensor, sheets: list[Tensor]) -> Tensor:
        kernels, matrices, heads, eps = self.kernels, self.matrices, self.net.shape.heads, self.net.norm.eps
        normed, qkv, mixed, out, opened, hidden, logits = sheets
        torch.index_select(matrices.embeddings, 0, ids, out=h)
        delta = None
        for i, layer in enumerate(matrices.layers):
            kernels.add_norm(h, delta, layer.first_norm, normed, eps)
            torch.mm(normed, layer.wqkv.t(), out=qkv)
            kernels.attend(qkv, self.cache, i, self.shown, self.factors, self.place, mixed, heads)
            torch.mm(mixed, layer.wo.t(), out=out)
            kernels.add_norm(h, out, layer.second_norm, normed, eps)
            if len(h) <= kernels.FEW:
                kernels.opened(normed, layer.opened, hidden)
            else:
                torch.mm(normed, layer.opened.t(), out=opened)
                kernels.gate(opened, hidden)
            delta = torch.mm(hidden, layer.w2.t(), out=out)
        kernels.add_norm(h, delta, matrices.norm, normed, eps)
        return torch.mm(normed, matrices.output.t(), out=logits)

    def _choose(self, logits: Tensor, guided: bool) -> None:
        choice, guidance, prefix = self.order.choice, self.order.guidance, self.net.shape.prefix
        rises = guidance is not None and guidance.rise is not None  # from place to place, and a kernel has one scale
        if logits.shape[1] <= self.kernels.WIDEST and choice.top_p == 1 and not rises:
            scale = guidance.scale if guided and guidance else None
            rescaled = bool(guidance and guidance.rescale)
            self.kernels.choose(
                logits, self.uniform, self.ids, self.log_prob, self.last, self.place,
                prefix=prefix, scale=scale, rescaled=rescaled, temperature=choice.temperature, top_k=choice.top_k,
            )  # fmt: skip
            return
        exact, at = logits.float(), (self.place - prefix + 1).long()
        combined = self.order.led(exact, at) if guided else exact[: self.rows]
        token, log_prob = choice.take(combined, self.uniform.index_select(1, at)[:, 0])
        self.ids.index_copy_(1, at, token[:, None])
        self.log_prob.index_copy_(1, at, log_prob[:, None])
        self.last.copy_(token.repeat(len(self.last) // self.rows))

    def load(self, order: DecodeRequest, past: KVCache, number: Tensor) -> None:
        """Begin with what was read of the conditions."""
        self.matrices.refresh()
        fill_kv_cache(self.cache, past, number)
        self.uniform.copy_(order.uniform)
        self.ids.zero_()
        self.log_prob.zero_()
        self.place.fill_(self.net.shape.prefix)
        if self.shown is not None and order.shown is not None:
            self.shown.copy_(order.shown)

    def put(self, token: Tensor, log_prob: Tensor) -> None:
        """Write the first token, which the conditions alone decide."""
        self.ids[:, 0], self.log_prob[:, 0] = token, log_prob
        self.read_on(token)

    def read_on(self, token: Tensor) -> None:
        """Say what is read next, by both halves."""
        self.last.copy_(token.repeat(len(self.last) // self.rows))

    def follow(self, other: DecodeGraphRunner, rows: Tensor) -> None:
        """Copy the state of selected rows from another runner."""
        both = guided_rows(rows, other.rows, len(other.last))
        self.matrices.refresh()
        self.cache.copy_(other.cache[:, :, both])
        self.last.copy_(other.last[both])
        self.place.copy_(other.place)
        self.uniform.copy_(other.uniform[rows])
        self.ids.copy_(other.ids[rows])
        self.log_prob.copy_(other.log_prob[rows])
        if self.shown is not None and other.shown is not None:
            self.shown.copy_(other.shown[both])

    @property
    def free(self) -> bool:
        user = self.user() if self.user else None
        return user is None or user.finished
