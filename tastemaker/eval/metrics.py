"""Numbers of sets of pictures: how different they are from each other, and how far from real ones."""

from __future__ import annotations

import torch
from torch import Tensor


def diversity(groups: Tensor) -> float:
    """Mean root of the mean squared difference of two pictures of one prompt: of pixels [P, S, ...]."""
    flat = groups.flatten(2).double()
    count = flat.shape[1]
    if count < 2:
        raise ValueError(f"there is {count} picture of each prompt; diversity needs at least two")
    apart = torch.cdist(flat, flat) / flat.shape[2] ** 0.5  # [P, S, S]
    return float((apart.sum((1, 2)) / (count * (count - 1))).mean())


def frechet(a: Tensor, b: Tensor) -> float:
    """The distance of Gaussians fitted to features [N, C] and [M, C] (Heusel et al. 2017)."""
    if min(len(a), len(b)) < 2:
        raise ValueError(f"there are {len(a)} and {len(b)} pictures; a Frechet distance needs at least two of each")
    a, b = a.double(), b.double()
    apart = (a.mean(0) - b.mean(0)).square().sum()
    first, second = torch.cov(a.T).reshape(a.shape[1], -1), torch.cov(b.T).reshape(b.shape[1], -1)
    root = _root(first)
    # The eigenvalues of AB are those of A^1/2 B A^1/2, which is symmetric, so nothing complex can come of rounding.
    shared = torch.linalg.eigvalsh(root @ second @ root).clamp(min=0).sqrt().sum()
    return float((apart + first.trace() + second.trace() - 2 * shared).clamp(min=0))


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    root: Tensor = vectors * values.clamp(min=0).sqrt() @ vectors.T
    return root
