"""GCPO's critical tokens (Zhang et al. 2025): which tokens of an image train, and how much each of them counts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.objective import Context
from ..core.types import Trajectory, select_rows
from ..processes.autoregressive import AutoregressiveProcess, predict_tokens

EDGE, MIDDLE = 0.1, 0.8  # shares of the sequence: entropy gradients of the last tokens are not compared


@torch.no_grad()
def find_critical_tokens(
    ctx: Context[AutoregressiveProcess], trajectory: Trajectory, group_size: int, fraction: float
) -> Tensor:
    """Which tokens of the samples are critical: [B, K], 1 or 0.

    The entropy is that of the distribution that was sampled from, with guidance. The embeddings are codebook vectors.
    """
    policy, tokens, entropies = ctx.policy, trajectory.final, []
    for rows in ctx.chunks(len(tokens)):
        chunk, cond = select_rows((tokens, trajectory.cond), rows)
        t = torch.ones(len(chunk), device=chunk.device)
        entropies.append(predict_tokens(policy.model, chunk, t, cond, policy.process.temperature).entropy())
    similarity = group_similarity(policy.model.unguided.token_embeddings(tokens), group_size)
    return critical_token_mask(torch.cat(entropies), similarity, fraction)


def critical_token_mask(entropy: Tensor, similarity: Tensor, fraction: float) -> Tensor:
    """The union of three sets of n = fraction * K tokens without overlap, of entropies and similarities [B, K]: [B, K].

    The sets are the first tokens, of the others those with the highest entropy gradient, and of the rest those that
    differ most within the group.
    """
    length = entropy.shape[1]
    n = int(fraction * length + 1e-9)
    mask = torch.zeros_like(entropy, dtype=torch.bool)
    mask[:, :n] = True
    gradient = entropy_gradient(entropy)
    gradient[:, :n] = -math.inf
    gradient[:, int(EDGE * length) + int(MIDDLE * length) :] = -math.inf
    mask = mask.scatter(1, gradient.topk(n).indices, True)
    return mask.scatter(1, similarity.masked_fill(mask, math.inf).topk(n, largest=False).indices, True).float()


def entropy_gradient(entropy: Tensor) -> Tensor:
    """Norm of the spatial gradient of the smoothed entropy of tokens on a square grid: [B, K] of [B, K].

    A cell is the mean over itself and its neighbors left, above left, above and above right. Differences are central,
    and one-sided at the border.
    """
    side = math.isqrt(entropy.shape[1])
    padded = F.pad(torch.stack([entropy, torch.ones_like(entropy)]).view(2, -1, side, side), (1, 1, 1, 0))
    rows, columns = slice(1, None), slice(1, -1)
    above = [padded[:, :, :-1, i : i + side] for i in range(3)]
    total, count = padded[:, :, rows, columns] + padded[:, :, rows, :-2] + torch.stack(above).sum(0)
    vertical, horizontal = torch.gradient(total / count, dim=(1, 2))
    return torch.hypot(vertical, horizontal).flatten(1)


def group_similarity(embeddings: Tensor, group_size: int) -> Tensor:
    """Mean cosine between the tokens of all pairs of samples of a group, by position: [B, K] of [B, K, C]."""
    unit = F.normalize(embeddings.float(), dim=-1).reshape(-1, group_size, *embeddings.shape[1:])  # [groups, G, K, C]
    # The squared norm of the sum is the sum of all cosines, of each vector with itself too.
    pairs = unit.sum(1).square().sum(-1) - unit.square().sum((1, 3))
    return (pairs / (group_size * (group_size - 1))).repeat_interleave(group_size, 0)


def confidence_weights(log_prob: Tensor, reference_log_prob: Tensor, clip: float) -> Tensor:
    """Weights of advantages: means of exp(clip(log policy / reference)) over the tokens so far: [B, K], no gradient."""
    ratio = (log_prob - reference_log_prob).detach().clamp(-clip, clip).exp()
    return ratio.cumsum(1) / torch.arange(1, ratio.shape[1] + 1, device=ratio.device)
