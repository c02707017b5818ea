"""The preference model: a Bradley-Terry head on the features of a frozen image-text tower.

The head is linear: score = w . x, and sigmoid(score of A - score of B) is the probability that A is preferred to B.
Its weights are the maximum of the posterior with a Gaussian prior, found by Newton's method in the span of the votes,
so that a fit takes milliseconds and needs no learning rate. The prior's scale, for each block of features, is chosen
by cross-validation over prompts. The same posterior, in Laplace's approximation, says how uncertain a score is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.reward import ImageTextTower, TowerFeatures
from ..core.types import Prompts

FeatureLayer = Literal["pooled", "spatial", "all"]
# Blocks of features by layer. The pooled embedding hardly knows sizes, colors and places; maps before pooling do.
LAYER_BLOCKS: Mapping[FeatureLayer, tuple[str, ...]] = {
    "pooled": ("embedding", "match"),
    "spatial": ("average", "layout"),
    "all": ("average", "layout", "embedding", "match"),
}
L2_GRID = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # precision of the prior
FAINT = 0.05  # scale of a block that a candidate prior hardly uses
MAX_RANK = 256  # directions of the features in which votes differ; more are cut off
MAX_ITERATIONS = 50
TOLERANCE = 1e-8  # of Newton's step, squared
NUM_FOLDS = 5
TEMPERATURES: tuple[float, ...] = tuple(2.0 ** (k / 4) for k in range(-8, 9))  # from 1/4 to 4
Blocks = dict[str, Tensor]


def compute_blocks(features: TowerFeatures, layer: FeatureLayer) -> Blocks:
    """Blocks of features [B, C] of a layer.

    `average` is the mean of every map over the image, which grows with the area of what the map shows. `layout` is
    the difference of upper and lower half, and of left and right half. `embedding` is the image's unit embedding, and
    `match` its product with the prompt's.
    """
    blocks: Blocks = {}
    for name in LAYER_BLOCKS[layer]:
        if name == "average":
            blocks[name] = torch.cat([x.mean((2, 3)) for x in features.maps], 1)
        elif name == "layout":
            blocks[name] = torch.cat([_half_differences(x) for x in features.maps], 1)
        elif name == "embedding":
            blocks[name] = features.image
        else:
            blocks[name] = features.image * features.text
    return blocks


def _half_differences(x: Tensor) -> Tensor:
    """Upper less lower and left less right half of maps [B, C, h, w]: [B, 2 C]."""
    quarters = F.adaptive_avg_pool2d(x, 2)
    vertical, horizontal = quarters[:, :, 0] - quarters[:, :, 1], quarters[..., 0] - quarters[..., 1]
    return torch.cat([vertical.mean(2), horizontal.mean(2)], 1)


def encode_samples(tower: ImageTextTower, pixels: Tensor, prompts: Prompts, layer: FeatureLayer) -> Blocks:
    """Blocks of features of samples [B, F, 3, H, W], as the mean over their frames: {name: [B, C]}."""
    frames = pixels.shape[1]
    repeated = [prompt for prompt in prompts for _ in range(frames)]
    blocks = compute_blocks(tower.encode(pixels.flatten(0, 1)[:, None], repeated), layer)
    return {name: x.view(len(pixels), frames, -1).mean(1) for name, x in blocks.items()}


class PreferenceHead(nn.Module):
    """Scores of features: a weighted sum of standardized features, in logits of the probability of preference."""

    mean: Tensor
    scale: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("scale", torch.ones(width))  # the inverse of standard deviations, times that of the prior

    def forward(self, features: Tensor) -> Tensor:
        """Scores [B] of features [B, C]."""
        out: Tensor = ((features - self.mean) * self.scale) @ self.weight
        return out


@dataclass(frozen=True)
class Comparisons:
    """Votes as comparisons of samples by index, with the features of all samples."""

    blocks: Blocks  # {name: [N, C]} of all samples, in float64 on the CPU
    first: Tensor  # [V] index of a sample
    second: Tensor  # [V]
    target: Tensor  # [V] 1 if the first is preferred, 0 if the second, 0.5 for a tie
    prompt: Tensor  # [V] index of the prompt

    def __len__(self) -> int:
        return len(self.target)

    def select(self, votes: Tensor) -> Comparisons:
        """Only some of the votes, of the same samples."""
        return Comparisons(self.blocks, self.first[votes], self.second[votes], self.target[votes], self.prompt[votes])


@dataclass(frozen=True)
class Standardization:
    """Mean and inverse standard deviation of each block; every block has unit total variance."""

    mean: Blocks
    scale: Blocks

    @classmethod
    def of(cls, blocks: Blocks) -> Standardization:
        mean = {name: x.mean(0) for name, x in blocks.items()}
        deviation = {name: x.std(0, correction=0) for name, x in blocks.items()}
        # A feature that hardly varies has no say, rather than a huge one for a picture unlike those voted on.
        floor = {name: 0.05 * x.square().mean().sqrt().clamp(min=1e-12) for name, x in deviation.items()}
        scale = {name: 1 / (x.clamp(min=float(floor[name])) * math.sqrt(len(x))) for name, x in deviation.items()}
        return cls(mean, scale)

    def apply(self, blocks: Blocks, prior: Mapping[str, float]) -> Tensor:
        """Features [N, C] of all blocks, each scaled by its prior."""
        return torch.cat([(x - self.mean[k]) * self.scale[k] * prior[k] for k, x in blocks.items()], 1)


@dataclass(frozen=True)
class Prior:
    """The Gaussian prior of the weights: a precision, and a scale for each block."""

    l2: float
    scales: tuple[tuple[str, float], ...]


def candidate_scales(names: Sequence[str]) -> list[tuple[tuple[str, float], ...]]:
    """Scales of blocks to choose from: all alike, or all but one faint."""
    scales = [dict.fromkeys(names, 1.0)]
    if len(names) > 1:
        scales += [{name: 1.0 if name == chosen else FAINT for name in names} for chosen in names]
    return [tuple(each.items()) for each in scales]


@dataclass(frozen=True)
class LogisticPosterior:
    """Laplace's approximation of the posterior of a logistic regression without intercept."""

    basis: Tensor  # [C, R] orthonormal directions in which the votes differ
    mean: Tensor  # [R] coordinates of the weights with the highest posterior
    cholesky: Tensor  # [R, R] of the posterior's precision
    l2: float

    @property
    def weight(self) -> Tensor:
        out: Tensor = self.basis @ self.mean
        return out

    def predict(self, differences: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance [V] of the logits of comparisons with feature differences [V, C]."""
        inside = differences @ self.basis
        explained = torch.linalg.solve_triangular(self.cholesky, inside.T, upper=False).square().sum(0)
        # Outside of the directions of the votes, only the prior is known.
        outside = (differences.square().sum(1) - inside.square().sum(1)).clamp(min=0) / self.l2
        return inside @ self.mean, explained + outside


def fit_posterior(differences: Tensor, target: Tensor, l2: float, basis: Tensor | None = None) -> LogisticPosterior:
    """The posterior of weights w with prior N(0, 1 / l2), given P(target = 1) = sigmoid(differences @ w)."""
    basis = find_basis(differences) if basis is None else basis
    inputs = differences @ basis
    weight = inputs.new_zeros(inputs.shape[1])
    eye = torch.eye(inputs.shape[1], dtype=inputs.dtype)
    for _ in range(MAX_ITERATIONS):
        probability = (inputs @ weight).sigmoid()
        gradient = inputs.T @ (probability - target) + l2 * weight
        curvature = probability * (1 - probability)
        cholesky = torch.linalg.cholesky(inputs.T @ (inputs * curvature[:, None]) + l2 * eye)
        step = torch.cholesky_solve(gradient[:, None], cholesky)[:, 0]
        weight = weight - step
        if step.square().sum() < TOLERANCE:
            break
    return LogisticPosterior(basis, weight, cholesky, l2)


def find_basis(differences: Tensor) -> Tensor:
    """Orthonormal directions [C, R] of the rows of a matrix [V, C], of the largest variance, at most MAX_RANK."""
    _, size, directions = torch.linalg.svd(differences, full_matrices=False)
    kept = min(MAX_RANK, int((size > 1e-9 * size[:1].clamp(min=1e-30)).sum()) or 1)
    out: Tensor = directions[:kept].T
    return out


@dataclass(frozen=True)
class FittedPreference:
    """A fitted head with what its reward and the choice of the next pairs need."""

    standardization: Standardization
    prior: Prior
    posterior: LogisticPosterior
    temperature: float  # logits are divided by it, so that probabilities are calibrated

    def features(self, blocks: Blocks) -> Tensor:
        return self.standardization.apply(blocks, dict(self.prior.scales))

    def score(self, blocks: Blocks) -> Tensor:
        """Calibrated scores [N] of samples."""
        return self.features(blocks) @ self.posterior.weight / self.temperature

    def to_head(self) -> PreferenceHead:
        """The head in float32, for features as `torch.cat(list(blocks.values()), 1)`."""
        names, prior = list(self.standardization.mean), dict(self.prior.scales)
        head = PreferenceHead(sum(len(self.standardization.mean[name]) for name in names))
        with torch.no_grad():
            head.weight.copy_(self.posterior.weight / self.temperature)
            head.mean.copy_(torch.cat([self.standardization.mean[name] for name in names]))
            head.scale.copy_(torch.cat([self.standardization.scale[name] * prior[name] for name in names]))
        return head


def fit_preference(
    votes: Comparisons, prior: Prior | None = None, temperature: float | None = None, seed: int = 0
) -> FittedPreference:
    """Fit a head to votes; without a prior and a temperature, choose them by cross-validation over prompts."""
    standardization = Standardization.of(_voted_blocks(votes))
    if prior is None or temperature is None:
        prior, temperature = choose_prior(votes, standardization, seed)
    differences = feature_differences(votes, standardization, prior)
    return FittedPreference(standardization, prior, fit_posterior(differences, votes.target, prior.l2), temperature)


def feature_differences(votes: Comparisons, standardization: Standardization, prior: Prior) -> Tensor:
    """Features of the first less those of the second sample of each vote: [V, C]."""
    features = standardization.apply(votes.blocks, dict(prior.scales))
    return features[votes.first] - features[votes.second]


def choose_prior(votes: Comparisons, standardization: Standardization, seed: int = 0) -> tuple[Prior, float]:
    """The prior with the lowest cross-validated loss, and the temperature that calibrates its logits."""
    candidates = candidate_scales(list(votes.blocks))
    folds = split_prompts(votes.prompt, NUM_FOLDS, seed)
    if len(folds) < 2:  # votes on one prompt cannot be cross-validated
        return Prior(1.0, candidates[0]), 1.0
    results: list[tuple[float, Prior, Tensor]] = []
    for scales in candidates:
        differences = feature_differences(votes, standardization, Prior(1.0, scales))
        inputs = differences @ find_basis(differences)  # for all folds and precisions
        for l2 in L2_GRID:
            logits = predict_folds(inputs, votes.target, folds, l2)
            results.append((float(F.binary_cross_entropy_with_logits(logits, votes.target)), Prior(l2, scales), logits))
    _, prior, logits = min(results, key=lambda result: result[0])
    losses = [float(F.binary_cross_entropy_with_logits(logits / t, votes.target)) for t in TEMPERATURES]
    return prior, TEMPERATURES[losses.index(min(losses))]


def predict_folds(inputs: Tensor, target: Tensor, folds: Sequence[Tensor], l2: float) -> Tensor:
    """Logits [V] of all votes, each predicted from the votes of the other folds."""
    logits, everything = torch.zeros_like(target), torch.arange(len(target))
    eye = torch.eye(inputs.shape[1], dtype=inputs.dtype)
    for fold in folds:
        rest = everything[~torch.isin(everything, fold)]
        logits[fold] = inputs[fold] @ fit_posterior(inputs[rest], target[rest], l2, eye).mean
    return logits


def split_prompts(prompt: Tensor, count: int, seed: int) -> list[Tensor]:
    """Split votes into `count` parts of whole prompts; fewer if there are fewer prompts."""
    distinct = torch.unique(prompt)
    order = torch.randperm(len(distinct), generator=torch.Generator().manual_seed(seed))
    parts = [distinct[order[k::count]] for k in range(min(count, len(distinct)))]
    return [torch.isin(prompt, part).nonzero().flatten() for part in parts]


def _voted_blocks(votes: Comparisons) -> Blocks:
    used = torch.unique(torch.cat([votes.first, votes.second]))
    return {name: x[used] for name, x in votes.blocks.items()}
