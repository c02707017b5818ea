"""Numbers of sets against what is known of Gaussians."""

from __future__ import annotations

import pytest
import torch

from tastemaker.core.randomness import Randomness
from tastemaker.evaluation.confidence_intervals import bootstrap_interval, bootstrap_overall, summarize_scores
from tastemaker.evaluation.metrics import diversity, frechet_distance, precision_recall


def normal(count: int, width: int, seed: int = 0) -> torch.Tensor:
    return Randomness(seed, 0, torch.arange(count)).normal("values", width).double()


def test_the_frechet_distance_of_known_gaussians() -> None:
    draws = normal(4000, 3)
    white = (draws - draws.mean(0)) @ torch.linalg.inv(torch.linalg.cholesky(torch.cov(draws.T))).T
    scale, shift = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64), torch.tensor([0.5, 0.0, -1.0])
    # |shift|^2 + sum (1 - scale)^2, for the covariances are diagonal
    assert frechet_distance(white, white * scale + shift) == pytest.approx(1.25 + 1.0 + 0.25, rel=1e-6)
    assert frechet_distance(white, white) == pytest.approx(0, abs=1e-6)


def test_the_frechet_distance_does_not_change_when_both_are_turned() -> None:
    turn = torch.linalg.qr(normal(4, 4, 5)).Q
    a, b = normal(500, 4, 1), normal(500, 4, 2) @ normal(4, 4, 3)
    assert frechet_distance(a @ turn, b @ turn) == pytest.approx(frechet_distance(a, b), rel=1e-8)
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(b, a), rel=1e-8)


def test_the_frechet_distance_bears_fewer_pictures_than_features() -> None:
    assert frechet_distance(normal(5, 20, 1), normal(5, 20, 2)) > 0


def test_diversity_is_the_mean_distance_within_prompts() -> None:
    groups = torch.zeros(2, 3, 1, 2, 2)
    groups[0, 1], groups[1, :, 0] = 0.5, 1.0
    assert diversity(groups) == pytest.approx((0.5 + 0.5 + 0) / 3 / 2)
    with pytest.raises(ValueError, match="at least two"):
        diversity(groups[:, :1])


def test_intervals_cover_the_mean_as_often_as_they_say() -> None:
    trials = [bootstrap_interval(normal(100, 1, seed)[:, 0], draws=400, seed=seed) for seed in range(200)]
    covered = sum(t["low"] <= 0 <= t["high"] for t in trials) / len(trials)
    assert 0.90 <= covered <= 0.99


def test_the_overall_score_is_the_unweighted_mean_of_the_tags() -> None:
    tags = [torch.ones(10).double(), torch.zeros(90).double()]
    assert bootstrap_overall(tags) == {"mean": 0.5, "low": 0.5, "high": 0.5, "prompts": 100}


def test_pictures_of_one_prompt_count_as_one() -> None:
    rows = [{"tag": "a", "index": 0, "strict": 1.0}] * 3 + [{"tag": "a", "index": 1, "strict": 0.0}]
    told = summarize_scores(rows, ["strict"])["strict"]["a"]
    assert told["mean"] == 0.5 and told["prompts"] == 2


def test_precision_reaches_to_the_kth_neighbor_that_is_another_image() -> None:
    real = torch.tensor([[0.0], [1.0], [3.0], [7.0]])  # third neighbors at 7, 6, 4 and 7
    made = torch.tensor([[13.5], [14.5], [-6.5], [-7.5]])
    precision, _ = precision_recall(real, made, neighbours=3)
    assert precision == 0.5
