"""Means of every score by tag and overall, with bootstrap confidence intervals over prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

BOOTSTRAP_DRAWS = 2000
IntervalDict = dict[str, float]


def bootstrap_interval(values: Tensor, draws: int = BOOTSTRAP_DRAWS, seed: int = 0) -> IntervalDict:
    """The mean of values [P], one a prompt, and the 95 % of means of prompts drawn again."""
    return _interval(values.mean(), bootstrap_means(values, draws, seed), len(values))


def bootstrap_overall(by_tag: Sequence[Tensor], draws: int = BOOTSTRAP_DRAWS, seed: int = 0) -> IntervalDict:
    """The unweighted mean over tags, as GenEval's, prompts drawn again within each."""
    mean = torch.stack([values.mean() for values in by_tag]).mean()
    again = torch.stack([bootstrap_means(values, draws, seed + place) for place, values in enumerate(by_tag)]).mean(0)
    return _interval(mean, again, sum(map(len, by_tag)))


def bootstrap_means(values: Tensor, draws: int, seed: int) -> Tensor:
    """Means of prompts drawn again: [draws]."""
    generator = torch.Generator().manual_seed(seed)
    return values[torch.randint(len(values), (draws, len(values)), generator=generator)].mean(1)


def _interval(mean: Tensor, means: Tensor, count: int) -> IntervalDict:
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=means.dtype)).tolist()
    return {"mean": mean.item(), "low": low, "high": high, "prompts": count}


def summarize_scores(rows: Sequence[Mapping[str, Any]], scores: Sequence[str]) -> dict[str, dict[str, IntervalDict]]:
    """Of each score every tag's interval and `overall`; pictures of one prompt count as one, for they are alike."""
    tags = list(dict.fromkeys(row["tag"] for row in rows))
    told: dict[str, dict[str, IntervalDict]] = {}
    for name in scores:
        by_tag = [_by_prompt([row for row in rows if row["tag"] == tag], name) for tag in tags]
        told[name] = {tag: bootstrap_interval(values) for tag, values in zip(tags, by_tag, strict=True)}
        told[name]["overall"] = bootstrap_overall(by_tag)
    return told


def _by_prompt(rows: Sequence[Mapping[str, Any]], name: str) -> Tensor:
    """The mean score of each prompt's pictures: [P]."""
    groups: dict[int, list[float]] = {}
    for row in rows:
        groups.setdefault(row["index"], []).append(float(row[name]))
    return torch.tensor([sum(group) / len(group) for group in groups.values()], dtype=torch.float64)
