"""Baseline: Show-o sampling as the published code does it.

Transformers' Phi over the whole sequence at every step, prompt and padding included, an additive float32 mask, logits
of every position and id, conditional and unconditional halves of guidance in one batch, and multinomial sampling.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def additive_mask(text: Tensor, total: int, padding_id: int) -> Tensor:
    """Return [B, 1, total, total]: 0 where a query may attend to a key, and -2^63 elsewhere."""
    positions, num_padding = (torch.arange(total, device=text.device), (text == padding_id).sum(1))
    query, key, padding = (positions[None, :, None], positions[None, None], num_padding[:, None, None])
    causal = (key <= query) & ((key >= padding) | (query < padding))
    allowed = torch.where(query >= text.shape[1], key >= padding, causal)
    return torch.zeros(allowed.shape, device=text.device).masked_fill(~allowed, -(2.0**63))[:, None]


@torch.no_grad()
def generate(phi: Any, text: Tensor, vocabulary: Any, tokens: int, steps: int, weight: float) -> Tensor:
    """Sample codes [B, tokens] for texts [2 B, length]: conditional prompts first, then unconditional ones."""
    batch_size = len(text) // 2
    start_token, end_token = (
        torch.full((batch_size, 1), token, device=text.device) for token in (vocabulary.soi_id, vocabulary.eoi_id)
    )
    ids = torch.full((batch_size, tokens), vocabulary.mask_id, device=text.device)
    mask = additive_mask(text, text.shape[1] + tokens + 2, vocabulary.pad_id).to(phi.dtype)
    temperature = 1.0
    for step in range(steps):
        image = torch.cat([start_token, ids, end_token], 1)
        sequence = torch.cat([text, torch.cat([image, image])], 1)
        cond, uncond = phi(input_ids=sequence, attention_mask=mask).logits.float().chunk(2)
        logits = ((1 + weight) * cond - weight * uncond)[:, -(tokens + 1) : -1, vocabulary.image_ids]
        probabilities = logits.softmax(-1)
        sampled = torch.multinomial(probabilities.flatten(0, 1), 1).view(batch_size, tokens)
        masked = ids == vocabulary.mask_id
        prediction = torch.where(masked, sampled, ids - vocabulary.image_ids.start)
        confidence = probabilities.gather(-1, prediction[..., None])[..., 0].where(
            masked, torch.finfo(torch.float32).max
        )
        ratio = (step + 1) / steps
        num_masked = torch.floor(tokens * torch.cos(torch.tensor(ratio) * math.pi / 2)).to(text.device)
        cutoff = torch.minimum(masked.sum(1, keepdim=True) - 1, num_masked).clamp(min=1).long()
        temperature *= 1 - ratio
        noise = torch.rand_like(confidence)
        noise = -(-noise.clamp(min=1e-20).log()).clamp(min=1e-20).log()
        confidence = confidence.clamp(min=1e-20).log() + temperature * noise
        remask = confidence < confidence.sort(1).values.gather(1, cutoff)
        ids = torch.where(remask, vocabulary.mask_id, prediction + vocabulary.image_ids.start)
    return prediction
