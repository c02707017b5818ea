"""LlamaGen's sampling written straight down, as published code does it: what a sampler has to beat.

Eager bfloat16 modules, rotary positions as complex pairs in float32, a static cache attended to as a whole under a
mask, both halves of guidance in one batch for all tokens, top-k by sorting, and multinomial sampling.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        exact = x.float()
        return (exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.wqkv = nn.Linear(width, 3 * width, bias=False)
        self.wo = nn.Linear(width, width, bias=False)
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.attention_norm, self.ffn_norm = Norm(width), Norm(width)
        self.keys = self.values = torch.empty(0)

    def forward(self, x: Tensor, turns: Tensor, places: Tensor, mask: Tensor) -> Tensor:
        b, n, width = x.shape
        parts = self.wqkv(self.attention_norm(x)).split([width] * 3, -1)
        q, k, v = (part.view(b, n, self.heads, width // self.heads) for part in parts)
        q, k = (turned(part, turns).transpose(1, 2) for part in (q, k))
        self.keys[:, :, places], self.values[:, :, places] = k, v.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)
        h = x + self.wo(out.transpose(1, 2).reshape(b, n, width))
        normed = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(normed)) * self.w3(normed))


def turned(x: Tensor, turns: Tensor) -> Tensor:
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    cosine, sine = turns[None, :, None, :, 0], turns[None, :, None, :, 1]
    both = (pairs[..., 0] * cosine - pairs[..., 1] * sine, pairs[..., 1] * cosine + pairs[..., 0] * sine)
    return torch.stack(both, -1).flatten(3).type_as(x)


class Plain(nn.Module):
    def __init__(self, width: int, depth: int, heads: int, hidden: int, codes: int, side: int, classes: int) -> None:
        super().__init__()
        self.labels, self.tokens = nn.Embedding(classes + 1, width), nn.Embedding(codes, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(depth))
        self.norm, self.output = Norm(width), nn.Linear(width, codes, bias=False)
        self.places, self.head = side * side + 1, width // heads
        quarter = self.head // 4
        steps = 10000.0 ** (-torch.arange(quarter).float() * 2 / (self.head // 2))
        angles = torch.arange(side).float()[:, None] * steps
        grid = torch.cat([angles[:, None].expand(-1, side, -1), angles[None].expand(side, -1, -1)], -1).flatten(0, 1)
        turns = torch.stack([grid.cos(), grid.sin()], -1)
        self.turns = torch.cat([torch.zeros_like(turns[:1]), turns]).float()

    def forward(self, x: Tensor, places: Tensor, mask: Tensor) -> Tensor:
        turns = self.turns[places]
        for block in self.blocks:
            x = block(x, turns, places, mask[:, :, places])
        return self.output(self.norm(x)).float()[:, -1]


def chosen(logits: Tensor, top: int) -> Tensor:
    bound = torch.topk(logits, min(top, logits.shape[-1]))[0][..., -1, None]
    return torch.multinomial(logits.masked_fill(logits < bound, -torch.inf).softmax(-1), 1)


@torch.no_grad()
def generate(net: Plain, labels: Tensor, scale: float, top: int, tokens: int) -> Tensor:
    """The first so many tokens of each row."""
    rows, device = len(labels), labels.device
    both = torch.cat([labels, torch.full_like(labels, net.labels.num_embeddings - 1)])
    net.turns = net.turns.to(device)
    for block in net.blocks:
        sizes = (2 * rows, block.heads, net.places, net.head)
        block.keys, block.values = (torch.zeros(sizes, dtype=block.wo.weight.dtype, device=device) for _ in range(2))
    mask = torch.ones(net.places, net.places, dtype=torch.bool, device=device).tril()
    mask = mask[None, None].repeat(2 * rows, 1, 1, 1)
    found, x = [], net.labels(both)[:, None]
    for i in range(tokens):
        with_, without = net(x, torch.tensor([i], device=device), mask).chunk(2)
        found.append(chosen(without + scale * (with_ - without), top))
        x = net.tokens(torch.cat([found[-1], found[-1]]))
    return torch.cat(found, 1)


def measure(sizes: tuple[int, ...], device: torch.device, dtype: torch.dtype, rows: int, tokens: int) -> dict[str, Any]:
    """Seconds of so many tokens, and what all would take at that rate."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with torch.device(device):
        net = Plain(*sizes)
    torch.set_default_dtype(before)
    labels = torch.arange(rows, device=device) % sizes[6]
    top = min(2000, sizes[4])
    generate(net, labels, 4.0, top, 3)
    spent = []
    for _ in range(2):
        began = time.perf_counter()
        ids = generate(net, labels, 4.0, top, tokens)
        assert int(ids.max()) < sizes[4]  # waits for the device too
        spent.append(time.perf_counter() - began)
    length = sizes[5] ** 2
    return {"tokens measured": tokens, "seconds": min(spent) * length / tokens}
