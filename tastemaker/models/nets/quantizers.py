"""Two ways to turn a latent vector into a token: the nearest entry of a codebook, or the signs of its channels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class QuantizerOutput:
    latent: Tensor  # [N, C, h, w], of the codes, with the gradient of what they stand for
    ids: Tensor  # [N, h * w]
    nearness: Tensor  # scalar: how far codes are from what they stand for
    commitment: Tensor  # scalar: how far what they stand for is from codes
    entropy: Tensor  # scalar: low where each choice is sure and all codes are chosen alike
    idle: Tensor  # scalar: how far unused codes are from anything they could stand for


def flatten_spatial(z: Tensor) -> Tensor:
    """[N, C, h, w] to [N * h * w, C], one row after the other."""
    return z.permute(0, 2, 3, 1).flatten(0, 2)


def unflatten_spatial(rows: Tensor, like: Tensor) -> Tensor:
    n, c, h, w = like.shape
    return rows.view(n, h, w, c).permute(0, 3, 1, 2)


def entropy_loss(logits: Tensor) -> Tensor:
    """Mean entropy of the choices less the entropy of their mean (MAGVIT, LlamaGen), of logits [n, codes]."""
    chance = logits.softmax(-1)
    each = -(chance * logits.log_softmax(-1)).sum(-1).mean()
    mean = chance.mean(0)
    return each + (mean * (mean + 1e-5).log()).sum()


class VectorQuantizer(nn.Module):
    """L2-normalised vectors, looked up by the nearest; those that nothing chooses are drawn to where something is."""

    def __init__(self, codes: int, width: int, temperature: float = 0.01) -> None:
        super().__init__()
        self.temperature = temperature
        self.embedding = nn.Embedding(codes, width)
        # Short, so that vectors first turn fast, but not so short that their gradients drown all others.
        nn.init.normal_(self.embedding.weight, std=0.02)

    def vectors(self) -> Tensor:
        return F.normalize(self.embedding.weight.float(), dim=-1)

    def look_up(self, ids: Tensor) -> Tensor:
        """Of tokens [...] the vectors [..., C]."""
        return F.normalize(self.embedding(ids).float(), dim=-1)

    def _distances(self, z: Tensor, codes: Tensor) -> Tensor:
        """Squared: [n, codes]; never in half precision, which would choose other tokens."""
        with torch.autocast(z.device.type, enabled=False):
            return z.square().sum(1, keepdim=True) + codes.square().sum(1) - 2 * z @ codes.T

    def choose(self, z: Tensor) -> Tensor:
        """Tokens [N, h * w] of latents [N, C, h, w]."""
        return (
            self._distances(F.normalize(flatten_spatial(z.float()), dim=-1), self.vectors()).argmin(1).view(len(z), -1)
        )

    def forward(self, z: Tensor) -> QuantizerOutput:
        rows, codes = F.normalize(flatten_spatial(z.float()), dim=-1), self.vectors()
        distances = self._distances(rows, codes)
        ids = distances.argmin(1)
        chosen = codes[ids]
        latent = rows + (chosen - rows).detach()
        used = torch.zeros(len(codes), device=z.device).index_fill_(0, ids, 1.0)
        # Gradients reach chosen codes alone, so that a codebook collapses; this is the others' share.
        alone = (codes - rows.detach()[distances.argmin(0)]).square().mean(1) * (1 - used)
        return QuantizerOutput(
            unflatten_spatial(latent, z),
            ids.view(len(z), -1),
            (chosen - rows.detach()).square().mean(),
            (chosen.detach() - rows).square().mean(),
            entropy_loss(-distances / self.temperature),
            alone.mean(),
        )


class LookupFreeQuantizer(nn.Module):
    """Look-up free: a bit is whether its channel is above 0, the first channel the most significant (MAGVIT-v2)."""

    def __init__(self, codes: int, temperature: float = 0.1) -> None:
        super().__init__()
        self.bits, self.temperature = int(math.log2(codes)), temperature

    def _powers(self, device: torch.device) -> Tensor:
        return 2 ** torch.arange(self.bits - 1, -1, -1, device=device)

    def look_up(self, ids: Tensor) -> Tensor:
        """Of tokens [...] the vectors [..., bits] of -1 and 1."""
        return (ids[..., None] & self._powers(ids.device)).ne(0).float() * 2 - 1

    def choose(self, z: Tensor) -> Tensor:
        """Tokens [N, h * w] of latents [N, bits, h, w]."""
        return ((flatten_spatial(z) > 0).long() * self._powers(z.device)).sum(1).view(len(z), -1)

    def forward(self, z: Tensor) -> QuantizerOutput:
        rows, ids = flatten_spatial(z.float()), self.choose(z)
        chosen = self.look_up(ids.flatten())
        every = self.look_up(torch.arange(2**self.bits, device=z.device))
        with torch.autocast(z.device.type, enabled=False):
            logits = 2 * rows @ every.T / self.temperature / self.bits
        far = (chosen - rows).square().mean()
        none = torch.zeros((), device=z.device)
        latent = rows + (chosen - rows).detach()
        return QuantizerOutput(unflatten_spatial(latent, z), ids, none, far, entropy_loss(logits), none)
