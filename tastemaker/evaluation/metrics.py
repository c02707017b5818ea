"""Metrics of sets of images (FID, KID, Inception score, precision and recall, diversity) and bootstrap intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

BOOTSTRAP_DRAWS = 2000
IntervalDict = dict[str, float]  # mean, low, high and the number of prompts


def diversity(groups: Tensor) -> float:
    """Mean root-mean-square difference between two samples of the same prompt, of pixels [P, S, ...]."""
    flat = groups.flatten(2).double()
    count = flat.shape[1]
    if count < 2:
        raise ValueError(
            f"diversity needs at least two images per prompt, got {count}; generate more samples per prompt [TM635]"
        )
    distances = torch.cdist(flat, flat) / flat.shape[2] ** 0.5  # [P, S, S]
    return float((distances.sum((1, 2)) / (count * (count - 1))).mean())


def feature_moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [C] and covariance [C, C] of features [N, C], in float64."""
    x = features.double()
    return x.mean(0), torch.cov(x.T).reshape(x.shape[1], -1)


def frechet_distance(a: Tensor, b: Tensor) -> float:
    """Frechet distance between Gaussians fitted to features [N, C] and [M, C] (Heusel et al. 2017)."""
    if min(len(a), len(b)) < 2:
        raise ValueError(
            f"Frechet distance: expected at least two images on each side, got {len(a)} and {len(b)}; add more "
            "images [TM636]"
        )
    return frechet_distance_from_moments(*feature_moments(a), *feature_moments(b))


def frechet_distance_from_moments(
    mean: Tensor, covariance: Tensor, other_mean: Tensor, other_covariance: Tensor
) -> float:
    """Frechet distance |m - m'|^2 + tr(C + C' - 2 (C C')^1/2) of means [C] and covariances [C, C]."""
    mean_term = (mean.double() - other_mean.double()).square().sum()
    first, second = covariance.double(), other_covariance.double()
    values, vectors = torch.linalg.eigh(first)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T  # of the matrix `first`
    # AB has the eigenvalues of the symmetric A^1/2 B A^1/2, whose square roots stay real under rounding.
    cross_term = torch.linalg.eigvalsh(root @ second @ root).clamp(min=0).sqrt().sum()
    return float((mean_term + first.trace() + second.trace() - 2 * cross_term).clamp(min=0))


def kernel_distance(a: Tensor, b: Tensor, subsets: int = 100, size: int = 1000) -> tuple[float, float]:
    """KID (Binkowski et al. 2018) of features [N, C] and [M, C]: mean and standard deviation over random subsets."""
    size = min(size, len(a), len(b))
    if size < 2:
        raise ValueError(
            f"kernel distance: expected at least two images on each side, got {len(a)} and {len(b)}; add more "
            "images [TM637]"
        )
    generator = torch.Generator().manual_seed(0)
    distances = []
    for _ in range(subsets):
        first, second = (x[torch.randperm(len(x), generator=generator)[:size]].double() for x in (a, b))
        distances.append(_squared_mmd(first, second))
    values = torch.stack(distances)
    return float(values.mean()), float(values.std(correction=0))


def _squared_mmd(a: Tensor, b: Tensor) -> Tensor:
    """Unbiased squared maximum mean discrepancy of [N, C] and [N, C] under a cubic polynomial kernel."""
    count, width = a.shape
    within = sum(_cubic_kernel(x, x, width).sum() - _cubic_kernel(x, x, width).diagonal().sum() for x in (a, b))
    return within / (count * (count - 1)) - 2 * _cubic_kernel(a, b, width).mean()


def _cubic_kernel(a: Tensor, b: Tensor, width: int) -> Tensor:
    return (a @ b.T / width + 1) ** 3


def inception_score(probabilities: Tensor, splits: int = 10) -> tuple[float, float]:
    """Inception score (Salimans et al. 2016) of class probabilities [N, classes]: mean and deviation over splits."""
    if len(probabilities) < splits:
        raise ValueError(
            f"Inception score: expected at least {splits} images for {splits} splits, got {len(probabilities)}; "
            "add more images, or use fewer splits [TM638]"
        )
    scores = []
    for part in probabilities.double().tensor_split(splits):
        mean = part.mean(0, keepdim=True)
        # xlogy defines 0 log 0 as 0.
        scores.append((torch.xlogy(part, part) - torch.xlogy(part, mean)).sum(1).mean().exp())
    values = torch.stack(scores)
    return float(values.mean()), float(values.std(correction=0))


def precision_recall(
    real: Tensor, generated: Tensor, num_neighbors: int = 3, chunk_size: int = 2048
) -> tuple[float, float]:
    """Improved precision and recall (Kynkaanniemi et al. 2019) of features [N, C] and [M, C]."""
    if min(len(real), len(generated)) <= num_neighbors:
        raise ValueError(
            f"precision and recall: expected more than {num_neighbors} images on each side, got {len(real)} real "
            f"and {len(generated)} generated images; add more images [TM639]"
        )
    precision = _manifold_coverage(generated, real, num_neighbors, chunk_size)
    return precision, _manifold_coverage(real, generated, num_neighbors, chunk_size)


def _manifold_coverage(points: Tensor, manifold: Tensor, num_neighbors: int, chunk_size: int) -> float:
    """Share of points within the k-nearest-neighbor radius of at least one point of the manifold."""
    manifold, points = manifold.float(), points.float()
    # The nearest neighbor of a point within its own set is the point itself.
    chunks = torch.split(manifold, chunk_size)
    radii = torch.cat([torch.cdist(x, manifold).kthvalue(num_neighbors + 1).values for x in chunks])
    inside = [(torch.cdist(x, manifold) <= radii).any(1) for x in torch.split(points, chunk_size)]
    return float(torch.cat(inside).float().mean())


def bootstrap_interval(values: Tensor, draws: int = BOOTSTRAP_DRAWS, seed: int = 0) -> IntervalDict:
    """Mean of values [P], one per prompt, with the 95 % bootstrap interval over prompts."""
    return interval_of_draws(values.mean(), bootstrap_means(values, draws, seed), len(values))


def bootstrap_overall(
    by_tag: Sequence[Tensor], draws: int = BOOTSTRAP_DRAWS, seed: int = 0, weights: Sequence[float] = ()
) -> IntervalDict:
    """Mean over tags, unweighted as GenEval's overall score or with `weights`; prompts are resampled within tags."""
    tag_means = torch.stack([values.mean() for values in by_tag])
    means = torch.stack([bootstrap_means(values, draws, seed + i) for i, values in enumerate(by_tag)])
    count = sum(map(len, by_tag))
    if not weights:
        return interval_of_draws(tag_means.mean(), means.mean(0), count)
    shares = torch.tensor(weights, dtype=means.dtype) / sum(weights)
    return interval_of_draws((tag_means * shares).sum(), (means * shares[:, None]).sum(0), count)


def bootstrap_ratio(sums: Tensor, counts: Tensor, draws: int = BOOTSTRAP_DRAWS, seed: int = 0) -> IntervalDict:
    """Mean over all questions, given sums [P] and counts [P] of their scores by prompt; prompts are resampled."""
    if not bool((counts > 0).all()):
        raise ValueError("bootstrap_ratio: a prompt has no question; leave out prompts without questions [TM2153]")
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(sums), (draws, len(sums)), generator=generator)
    ratios = sums[chosen].sum(1) / counts[chosen].sum(1)
    return interval_of_draws(sums.sum() / counts.sum(), ratios, len(sums))


def bootstrap_means(values: Tensor, draws: int, seed: int) -> Tensor:
    """Means [draws] of values [P] resampled with replacement."""
    generator = torch.Generator().manual_seed(seed)
    return values[torch.randint(len(values), (draws, len(values)), generator=generator)].mean(1)


def interval_of_draws(mean: Tensor, means: Tensor, count: int) -> IntervalDict:
    """Return a mean with the 95 % interval of bootstrap means [draws] and the number of prompts."""
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=means.dtype)).tolist()
    return {"mean": mean.item(), "low": low, "high": high, "prompts": count}


def summarize_scores(
    rows: Sequence[Mapping[str, Any]],
    score_names: Sequence[str],
    overall: Literal["tags", "prompts"] = "tags",
    tag_weights: Mapping[str, float] | None = None,
) -> dict[str, dict[str, IntervalDict]]:
    """Return the interval of each score for each tag and `overall`: the mean over tags, or over prompts.

    Samples of one prompt are correlated, so their mean counts as one observation. A score of None does not apply to its
    sample and is left out.
    """
    summary: dict[str, dict[str, IntervalDict]] = {}
    for name in score_names:
        scored = [row for row in rows if row[name] is not None]
        tags = list(dict.fromkeys(row["tag"] for row in scored))
        by_tag = [mean_by_prompt([row for row in scored if row["tag"] == tag], name) for tag in tags]
        summary[name] = {tag: bootstrap_interval(values) for tag, values in zip(tags, by_tag, strict=True)}
        weights = [tag_weights[tag] for tag in tags] if tag_weights else []
        if by_tag:
            total = bootstrap_interval(torch.cat(by_tag)) if overall == "prompts" else None
            summary[name]["overall"] = total or bootstrap_overall(by_tag, weights=weights)
    return summary


def question_intervals(parts: Sequence[tuple[int, str, float]]) -> dict[str, IntervalDict]:
    """Return the mean score of each part with its interval, given prompt, part and score of every question."""
    intervals = {}
    for part in sorted({name for _, name, _ in parts}):
        by_prompt: dict[int, list[float]] = {}
        for prompt, name, score in parts:
            if name == part:
                by_prompt.setdefault(prompt, []).append(score)
        sums = torch.tensor([sum(scores) for scores in by_prompt.values()], dtype=torch.float64)
        counts = torch.tensor([len(scores) for scores in by_prompt.values()])
        intervals[part] = bootstrap_ratio(sums, counts)
    return intervals


def mean_by_prompt(rows: Sequence[Mapping[str, Any]], name: str) -> Tensor:
    """Mean score of each prompt's samples: [P]."""
    groups: dict[int, list[float]] = {}
    for row in rows:
        groups.setdefault(row["index"], []).append(float(row[name]))
    return torch.tensor([sum(group) / len(group) for group in groups.values()], dtype=torch.float64)
