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


def frechet_distance(a: Tensor, b: Tensor) -> float:
    """The distance of Gaussians fitted to features [N, C] and [M, C] (Heusel et al. 2017)."""
    if min(len(a), len(b)) < 2:
        raise ValueError(f"there are {len(a)} and {len(b)} pictures; a Frechet distance needs at least two of each")
    return frechet_distance_from_moments(*feature_moments(a), *feature_moments(b))


def feature_moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [C] and covariance [C, C] of features [N, C]."""
    x = features.double()
    return x.mean(0), torch.cov(x.T).reshape(x.shape[1], -1)


def _matrix_sqrt(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    root: Tensor = vectors * values.clamp(min=0).sqrt() @ vectors.T
    return root


def kernel_distance(a: Tensor, b: Tensor, subsets: int = 100, size: int = 1000) -> tuple[float, float]:
    """KID (Binkowski et al. 2018) of features [N, C] and [M, C]: the mean over random subsets, and its deviation."""
    size = min(size, len(a), len(b))
    if size < 2:
        raise ValueError(f"there are {len(a)} and {len(b)} pictures; a kernel distance needs at least two of each")
    chance = torch.Generator().manual_seed(0)
    found = []
    for _ in range(subsets):
        one, other = (x[torch.randperm(len(x), generator=chance)[:size]].double() for x in (a, b))
        found.append(_discrepancy(one, other))
    each = torch.stack(found)
    return float(each.mean()), float(each.std(correction=0))


def _discrepancy(a: Tensor, b: Tensor) -> Tensor:
    """The squared maximum mean discrepancy under a cubic kernel, without bias, of as many rows each."""
    count, width = a.shape
    within = sum(_kernel(x, x, width).sum() - _kernel(x, x, width).diagonal().sum() for x in (a, b))
    return within / (count * (count - 1)) - 2 * _kernel(a, b, width).mean()


def _kernel(a: Tensor, b: Tensor, width: int) -> Tensor:
    return (a @ b.T / width + 1) ** 3


def inception_score(probabilities: Tensor, splits: int = 10) -> tuple[float, float]:
    """How sure each is and how varied all are (Salimans et al. 2016), of [N, classes]: mean and deviation of parts."""
    if len(probabilities) < splits:
        raise ValueError(f"there are {len(probabilities)} pictures; an Inception score in {splits} parts needs more")
    scores = []
    for part in probabilities.double().tensor_split(splits):
        mean = part.mean(0, keepdim=True)
        # Nought times the logarithm of nought is nought.
        scores.append((torch.xlogy(part, part) - torch.xlogy(part, mean)).sum(1).mean().exp())
    each = torch.stack(scores)
    return float(each.mean()), float(each.std(correction=0))


def precision_recall(real: Tensor, made: Tensor, neighbours: int = 3, chunk: int = 2048) -> tuple[float, float]:
    """How many of those made lie among real ones, and the reverse (Kynkaanniemi et al. 2019), of features [N, C]."""
    if min(len(real), len(made)) <= neighbours:
        raise ValueError(f"there are {len(real)} and {len(made)} pictures; expected more than {neighbours} of each")
    return _coverage(made, real, neighbours, chunk), _coverage(real, made, neighbours, chunk)


def _coverage(points: Tensor, others: Tensor, neighbours: int, chunk: int) -> float:
    """How many points are nearer to some other than that is to its own k-th neighbour."""
    others, points = others.float(), points.float()
    # The nearest of all is each itself.
    radii = torch.cat([torch.cdist(x, others).kthvalue(neighbours + 1).values for x in torch.split(others, chunk)])
    inside = [(torch.cdist(x, others) <= radii).any(1) for x in torch.split(points, chunk)]
    return float(torch.cat(inside).float().mean())


def frechet_distance_from_moments(
    mean: Tensor, covariance: Tensor, other_mean: Tensor, other_covariance: Tensor
) -> float:
    """The same distance as `frechet`, of means [C] and covariances [C, C] that are known."""
    apart = (mean.double() - other_mean.double()).square().sum()
    first, second = covariance.double(), other_covariance.double()
    root = _matrix_sqrt(first)
    # The eigenvalues of AB are those of A^1/2 B A^1/2, which is symmetric, so nothing complex can come of rounding.
    shared = torch.linalg.eigvalsh(root @ second @ root).clamp(min=0).sqrt().sum()
    return float((apart + first.trace() + second.trace() - 2 * shared).clamp(min=0))
