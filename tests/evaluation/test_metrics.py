"""Metrics of image sets and bootstrap intervals against closed forms."""

from __future__ import annotations

import pytest
import torch

from tastemaker.core.randomness import Randomness
from tastemaker.evaluation.metrics import (
    bootstrap_interval,
    bootstrap_overall,
    diversity,
    frechet_distance,
    precision_recall,
    summarize_scores,
)


def normal(count: int, width: int, seed: int = 0) -> torch.Tensor:
    return Randomness(seed, 0, torch.arange(count)).normal("values", width).double()


def test_frechet_distance_of_gaussians_has_closed_form() -> None:
    draws = normal(4000, 3)
    white = (draws - draws.mean(0)) @ torch.linalg.inv(torch.linalg.cholesky(torch.cov(draws.T))).T
    scale, shift = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64), torch.tensor([0.5, 0.0, -1.0])
    # |shift|^2 + sum (1 - scale)^2, because the covariances are diagonal
    assert frechet_distance(white, white * scale + shift) == pytest.approx(1.25 + 1.0 + 0.25, rel=1e-6)
    assert frechet_distance(white, white) == pytest.approx(0, abs=1e-6)


def test_frechet_distance_is_invariant_under_rotation_and_symmetric() -> None:
    rotation = torch.linalg.qr(normal(4, 4, 5)).Q
    a, b = normal(500, 4, 1), normal(500, 4, 2) @ normal(4, 4, 3)
    assert frechet_distance(a @ rotation, b @ rotation) == pytest.approx(frechet_distance(a, b), rel=1e-8)
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(b, a), rel=1e-8)


def test_frechet_distance_works_with_fewer_images_than_features() -> None:
    assert frechet_distance(normal(5, 20, 1), normal(5, 20, 2)) > 0


def test_diversity_is_mean_distance_within_prompts() -> None:
    groups = torch.zeros(2, 3, 1, 2, 2)
    groups[0, 1], groups[1, :, 0] = 0.5, 1.0
    assert diversity(groups) == pytest.approx((0.5 + 0.5 + 0) / 3 / 2)
    with pytest.raises(ValueError, match=r"two.*TM635"):
        diversity(groups[:, :1])


def test_bootstrap_intervals_have_nominal_coverage() -> None:
    intervals = [bootstrap_interval(normal(100, 1, seed)[:, 0], draws=400, seed=seed) for seed in range(200)]
    coverage = sum(t["low"] <= 0 <= t["high"] for t in intervals) / len(intervals)
    assert 0.90 <= coverage <= 0.99


def test_overall_score_is_unweighted_mean_of_tags() -> None:
    tags = [torch.ones(10).double(), torch.zeros(90).double()]
    assert bootstrap_overall(tags) == {"mean": 0.5, "low": 0.5, "high": 0.5, "prompts": 100}


def test_samples_of_one_prompt_count_as_one_observation() -> None:
    rows = [{"tag": "a", "index": 0, "strict": 1.0}] * 3 + [{"tag": "a", "index": 1, "strict": 0.0}]
    interval = summarize_scores(rows, ["strict"])["strict"]["a"]
    assert interval["mean"] == 0.5 and interval["prompts"] == 2


def test_precision_radius_is_the_kth_other_neighbor() -> None:
    real = torch.tensor([[0.0], [1.0], [3.0], [7.0]])  # third neighbors at 7, 6, 4 and 7
    generated = torch.tensor([[13.5], [14.5], [-6.5], [-7.5]])
    precision, _ = precision_recall(real, generated, num_neighbors=3)
    assert precision == 0.5
