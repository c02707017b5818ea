"""Show-o's sampling written straight down, as published code does it: what a sampler has to beat.

Transformers' Phi over the whole sequence at every step, prompt and filling included, an additive float32 mask, logits
of every place and id, both halves of guidance in one batch, and multinomial sampling.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def additive(text: Tensor, total: int, filling: int) -> Tensor:
    """[B, 1, total, total]: 0 where a place sees another, and the least number there is elsewhere."""
    places, padding = torch.arange(total, device=text.device), (text == filling).sum(1)
    asks, seen, filled = places[None, :, None], places[None, None], padding[:, None, None]
    causal = (seen <= asks) & ((seen >= filled) | (asks < filled))
    allowed = torch.where(asks >= text.shape[1], seen >= filled, causal)
    return torch.zeros(allowed.shape, device=text.device).masked_fill(~allowed, -(2.0**63))[:, None]


@torch.no_grad()
def painted(phi: Any, text: Tensor, words: Any, tokens: int, steps: int, weight: float) -> Tensor:
    """Codes [B, tokens] of texts [2 B, length], those with and then those without their prompts."""
    rows = len(text) // 2
    opening, closing = (torch.full((rows, 1), mark, device=text.device) for mark in (words.opens, words.closes))
    ids = torch.full((rows, tokens), words.hidden, device=text.device)
    mask = additive(text, text.shape[1] + tokens + 2, words.filling).to(phi.dtype)
    heat = 1.0
    for step in range(steps):
        picture = torch.cat([opening, ids, closing], 1)
        whole = torch.cat([text, torch.cat([picture, picture])], 1)
        given, without = phi(input_ids=whole, attention_mask=mask).logits.float().chunk(2)
        logits = ((1 + weight) * given - weight * without)[:, -(tokens + 1) : -1, words.pictures]
        chances = logits.softmax(-1)
        drawn = torch.multinomial(chances.flatten(0, 1), 1).view(rows, tokens)
        hidden = ids == words.hidden
        guess = torch.where(hidden, drawn, ids - words.pictures.start)
        sure = chances.gather(-1, guess[..., None])[..., 0].where(hidden, torch.finfo(torch.float32).max)
        ratio = (step + 1) / steps
        wanted = torch.floor(tokens * torch.cos(torch.tensor(ratio) * math.pi / 2)).to(text.device)
        kept = torch.minimum(hidden.sum(1, keepdim=True) - 1, wanted).clamp(min=1).long()
        heat *= 1 - ratio
        noise = torch.rand_like(sure)
        noise = -(-noise.clamp(min=1e-20).log()).clamp(min=1e-20).log()
        chosen = sure.clamp(min=1e-20).log() + heat * noise
        stay = chosen < chosen.sort(1).values.gather(1, kept)
        ids = torch.where(stay, words.hidden, guess + words.pictures.start)
    return guess
