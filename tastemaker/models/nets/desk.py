"""Where sequences are written: with typewriters on a GPU, which are kept for the next batch, and by hand elsewhere."""

from __future__ import annotations

import weakref
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ...distributions import MANY
from ...policy import Scribe
from . import steps
from .decoding import Ledger, Order, begun, blocks, chosen, halves
from .gpt import GPT, RMSNorm
from .typewriter import Typewriter

KEPT = 2  # typewriters at once: each holds a cache


class Desk:
    """Gives out scribes for a network, whichever it is just now: weights may have been updated or borrowed."""

    def __init__(self, kernels: ModuleType | None = None) -> None:
        self.kernels = kernels  # to write by on any device; on GPUs the best there are if not given
        self.kept: dict[tuple[Any, ...], Typewriter] = {}

    def scribe(self, net: nn.Module, order: Order) -> Scribe | None:
        """None where the network is cut into shards, which only whole calls of it put together."""
        if not isinstance(net, GPT) or any(type(p.data) is not Tensor for p in net.parameters()):
            return None
        if net.factors.device != order.uniform.device:
            net.factors = net.factors.to(order.uniform.device)
        if (self.kernels or order.uniform.is_cuda) and plain(net):
            return Typist(self, net, order)
        return Ledger(net, order)

    def typewriter(self, net: GPT, order: Order) -> Typewriter:
        """One that nobody uses, for so many rows."""
        dtype, shown = computed(net, order.uniform.device), order.shown is not None
        key = (id(net), dtype, order.uniform.shape, len(order.cond), shown, order.choice, order.guidance)
        kept = self.kept.get(key)
        if kept is not None and kept.free and kept.net is net and kept.matrices.current():
            self.kept[key] = self.kept.pop(key)  # the last to be given up
            return kept
        self.kept.pop(key, None)
        for old in list(self.kept)[: max(len(self.kept) - KEPT + 1, 0)]:
            del self.kept[old]
        self.kept[key] = Typewriter(net, order, dtype, self.kernels or fastest())
        return self.kept[key]


def projected(net: nn.Module, ids: Tensor, cond: Tensor, shown: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
    """What logits of whole sequences [B, K] are made of, and the matrix; none if they are few or weights are apart."""
    if not isinstance(net, GPT) or ids.numel() * net.shape.codes <= MANY or type(net.output) is not nn.Linear:
        return None
    if any(type(p.data) is not Tensor for p in net.parameters()):
        return None
    states, _ = net.states(ids[:, :-1], cond, None, shown)
    dtype, weight = computed(net, states.device), net.output.weight
    # Without a gradient the weights may be borrowed ones, which others will take the place of.
    return states.to(dtype), weight.to(dtype) if torch.is_grad_enabled() else weight.detach().to(dtype, copy=True)


def fastest() -> ModuleType:
    if find_spec("triton") is None:
        return steps
    from . import kernels

    return kernels


def plain(net: GPT) -> bool:
    """Whether what is no matrix is as the network was made."""
    norms = [net.norm, *(norm for block in blocks(net) for norm in (block.attention_norm, block.ffn_norm))]
    return type(net.tok_embeddings) is nn.Embedding and all(type(norm) is RMSNorm for norm in norms)


def computed(net: GPT, device: torch.device) -> torch.dtype:
    """What the network multiplies in just now."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return next(net.output.parameters()).dtype


class Typist:
    """Writes with a typewriter, until the last token is written."""

    @torch.no_grad()
    def __init__(self, desk: Desk, net: GPT, order: Order) -> None:
        self.desk, self.net, self.order, self.written = desk, net, order, 0
        self.typewriter = desk.typewriter(net, order)
        self.typewriter.user = weakref.ref(self)
        self.logits, past, number = begun(net, order)
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

    def select(self, rows: Tensor) -> Typist:
        count = len(self.order.uniform)
        rows = torch.arange(count, device=rows.device)[rows].to(self.order.uniform.device)
        if self.sheet:
            self.sheet = self.sheet[0][rows], self.sheet[1][rows]
            return self
        return self._followed(chosen(self.order, rows), rows)

    @torch.no_grad()
    def _followed(self, order: Order, rows: Tensor) -> Typist:
        before = self.typewriter
        self.logits = self.logits[halves(rows, before.rows, len(self.logits))]
        self.order, self.typewriter = order, self.desk.typewriter(self.net, order)
        self.typewriter.user = weakref.ref(self)
        self.typewriter.follow(before, rows)
        before.user = None
        return self
