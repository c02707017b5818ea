"""Baseline: LlamaGen sampling as the published code does it.

Eager bfloat16 modules, rotary embeddings as complex pairs in float32, masked attention over the whole static KV cache,
conditional and unconditional halves of guidance in one batch, top-k by sorting, and multinomial sampling.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.wqkv = nn.Linear(width, 3 * width, bias=False)
        self.wo = nn.Linear(width, width, bias=False)
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.attention_norm, self.ffn_norm = RMSNorm(width), RMSNorm(width)
        self.keys = self.values = torch.empty(0)

    def forward(self, x: Tensor, rotary: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        b, n, width = x.shape
        parts = self.wqkv(self.attention_norm(x)).split([width] * 3, -1)
        q, k, v = (part.view(b, n, self.heads, width // self.heads) for part in parts)
        q, k = (apply_rotary(part, rotary).transpose(1, 2) for part in (q, k))
        self.keys[:, :, positions], self.values[:, :, positions] = k, v.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)
        h = x + self.wo(out.transpose(1, 2).reshape(b, n, width))
        normed = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(normed)) * self.w3(normed))


def apply_rotary(x: Tensor, rotary: Tensor) -> Tensor:
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    cosine, sine = rotary[None, :, None, :, 0], rotary[None, :, None, :, 1]
    rotated = (pairs[..., 0] * cosine - pairs[..., 1] * sine, pairs[..., 1] * cosine + pairs[..., 0] * sine)
    return torch.stack(rotated, -1).flatten(3).type_as(x)


class PlainGPT(nn.Module):
    def __init__(self, width: int, depth: int, heads: int, hidden: int, codes: int, side: int, classes: int) -> None:
        super().__init__()
        self.labels, self.tokens = (nn.Embedding(classes + 1, width), nn.Embedding(codes, width))
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(depth))
        self.norm, self.output = RMSNorm(width), nn.Linear(width, codes, bias=False)
        self.positions, self.head = side * side + 1, width // heads
        quarter = self.head // 4
        frequencies = 10000.0 ** (-torch.arange(quarter).float() * 2 / (self.head // 2))
        angles = torch.arange(side).float()[:, None] * frequencies
        grid = torch.cat([angles[:, None].expand(-1, side, -1), angles[None].expand(side, -1, -1)], -1).flatten(0, 1)
        rotary = torch.stack([grid.cos(), grid.sin()], -1)
        self.rotary = torch.cat([torch.zeros_like(rotary[:1]), rotary]).float()

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        rotary = self.rotary[positions]
        for block in self.blocks:
            x = block(x, rotary, positions, mask[:, :, positions])
        return self.output(self.norm(x)).float()[:, -1]


def sample_top_k(logits: Tensor, top_k: int) -> Tensor:
    threshold = torch.topk(logits, min(top_k, logits.shape[-1]))[0][..., -1, None]
    return torch.multinomial(logits.masked_fill(logits < threshold, -torch.inf).softmax(-1), 1)


@torch.no_grad()
def generate(net: PlainGPT, labels: Tensor, scale: float, top_k: int, tokens: int) -> Tensor:
    """Sample the first `tokens` tokens of each image."""
    batch_size, device = len(labels), labels.device
    classes = torch.cat([labels, torch.full_like(labels, net.labels.num_embeddings - 1)])
    net.rotary = net.rotary.to(device)
    for block in net.blocks:
        sizes = (2 * batch_size, block.heads, net.positions, net.head)
        block.keys, block.values = (torch.zeros(sizes, dtype=block.wo.weight.dtype, device=device) for _ in range(2))
    mask = torch.ones(net.positions, net.positions, dtype=torch.bool, device=device).tril()
    mask = mask[None, None].repeat(2 * batch_size, 1, 1, 1)
    samples, x = [], net.labels(classes)[:, None]
    for i in range(tokens):
        cond, uncond = net(x, torch.tensor([i], device=device), mask).chunk(2)
        samples.append(sample_top_k(uncond + scale * (cond - uncond), top_k))
        x = net.tokens(torch.cat([samples[-1], samples[-1]]))
    return torch.cat(samples, 1)


def measure(
    sizes: tuple[int, ...], device: torch.device, dtype: torch.dtype, batch_size: int, tokens: int
) -> dict[str, Any]:
    """Time `tokens` tokens of each image, and extrapolate to the whole image."""
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with torch.device(device):
        net = PlainGPT(*sizes)
    torch.set_default_dtype(default_dtype)
    labels = torch.arange(batch_size, device=device) % sizes[6]
    top_k = min(2000, sizes[4])
    generate(net, labels, 4.0, top_k, 3)
    times = []
    for _ in range(2):
        start = time.perf_counter()
        ids = generate(net, labels, 4.0, top_k, tokens)
        assert int(ids.max()) < sizes[4]  # also synchronizes with the device
        times.append(time.perf_counter() - start)
    length = sizes[5] ** 2
    return {"tokens measured": tokens, "seconds": min(times) * length / tokens}
