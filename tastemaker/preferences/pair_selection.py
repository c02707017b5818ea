"""Which pair to show next: at random, the least shown, or the one whose answer says most about the taste."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from .preference_model import Blocks, FittedPreference

Strategy = Literal["random", "balanced", "active"]
NUM_NODES = 16  # of Gauss-Hermite quadrature


def expected_information(mean: Tensor, variance: Tensor) -> Tensor:
    """How many nats a vote is expected to tell about the weights: [V] (BALD; Houlsby et al. 2011).

    The vote is 1 with probability sigmoid(f), f ~ N(mean, variance). The information is the entropy of the vote less
    its expected entropy once f is known: high for pairs that are uncertain because of the model, not because both
    samples are alike.
    """
    nodes, weights = _gauss_hermite()
    logits = mean[:, None] + variance.clamp(min=0).sqrt()[:, None] * nodes
    probabilities = logits.sigmoid()
    return _entropy((probabilities * weights).sum(1)) - (_entropy(probabilities) * weights).sum(1)


def select_pairs(
    fitted: FittedPreference | None,
    blocks: Blocks,
    pairs: Tensor,
    count: int = 1,
    *,
    strategy: Strategy = "active",
    shown: Tensor | None = None,
    seed: int = 0,
) -> list[int]:
    """Choose the next pairs to vote on; returns their places in `pairs`.

    Args:
        fitted: the model of the votes so far; without one, `active` is random.
        blocks: features of all samples; pairs: [P, 2] indices of samples.
        shown: [P] how often each pair was shown, for `balanced`.
    """
    generator, count = torch.Generator().manual_seed(seed), min(count, len(pairs))
    order = torch.randperm(len(pairs), generator=generator)
    if strategy == "balanced" and shown is not None:
        return [int(k) for k in order[shown[order].argsort(stable=True)][:count]]
    if strategy != "active" or fitted is None:
        return [int(k) for k in order[:count]]
    features = fitted.features(blocks)
    return choose_informative(fitted, features[pairs[:, 0]] - features[pairs[:, 1]], count)


def choose_informative(fitted: FittedPreference, differences: Tensor, count: int) -> list[int]:
    """Choose pairs greedily; each choice lowers the variance of the pairs like it, as its vote will."""
    posterior = fitted.posterior
    inside = differences @ posterior.basis
    mean, outside = inside @ posterior.mean, differences - inside @ posterior.basis.T
    solved = torch.linalg.solve_triangular(posterior.cholesky, inside.T, upper=False)
    covariance = solved.T @ solved + outside @ outside.T / posterior.l2
    chosen: list[int] = []
    for _ in range(count):
        information = expected_information(mean, covariance.diagonal())
        information[chosen] = -math.inf
        best = int(information.argmax())
        chosen.append(best)
        probability = mean[best].sigmoid()
        noise = 1 / (probability * (1 - probability)).clamp(min=1e-6)
        column = covariance[:, best].clone()
        covariance = covariance - torch.outer(column, column) / (column[best] + noise)
    return chosen


def _entropy(p: Tensor) -> Tensor:
    out: Tensor = -(torch.special.xlogy(p, p) + torch.special.xlogy(1 - p, 1 - p))
    return out


def _gauss_hermite() -> tuple[Tensor, Tensor]:
    """Nodes and weights of the expectation over a standard normal number, by Golub and Welsch."""
    off = torch.arange(1, NUM_NODES, dtype=torch.float64).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return nodes, vectors[0].square()
