"""From results to lines of a table: means over seeds, intervals over seeds and prompts, aims reached or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from ..confidence_intervals import BOOTSTRAP_DRAWS
from .plan import CellTarget, ScoreboardPlan
from .results import Result, ScoresByTask, paired_differences

BeforeAfter = tuple[float, float]  # before and after


@dataclass(frozen=True)
class ConfidenceInterval:
    """A mean and where 95 % of means of prompts and seeds drawn again lie."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class ScoreboardRow:
    """One cell over all its seeds."""

    key: str  # of the cell, with the number of candidates of a search
    cell: str
    objective: str
    family: str
    reward: str
    n: int | None
    searched: bool
    seeds: int
    score: str  # the name of what is compared
    before: float
    after: ConfidenceInterval
    change: ConfidenceInterval
    tasks: Mapping[str, float]  # after
    lenient: BeforeAfter | None  # by the rule that can be cheated
    pictures: Mapping[str, BeforeAfter | None]  # diversity and frechet of whole sets
    price: float  # network calls a picture, after
    judged: float = 0.0  # judgements a picture
    flops: float = 0.0  # floating-point operations of both a picture
    earned: BeforeAfter | None = None  # training reward
    samples: int = 0
    seconds: float = 0.0
    calls: int = 0  # of training
    warned: int | None = None  # the step of the guard's first warning, in the most cautious seed
    warning: str = ""
    control: ConfidenceInterval | None = None  # the change under shuffled rewards
    missed: tuple[str, ...] | None = None  # what of the aim was not reached; None without an aim


def build_rows(results: Sequence[Result], plan: ScoreboardPlan) -> list[ScoreboardRow]:
    """A line for each cell that has results, in the plan's order, aims held against them."""
    found: list[ScoreboardRow] = []
    for cell in plan.cells:
        own = [result for result in results if result["cell"] == cell and result["kind"] == "after"]
        shuffled = [result for result in results if result["cell"] == cell and result["kind"] == "control"]
        for n in sorted({result["n"] for result in own}, key=lambda n: n or 0):
            found.append(build_row([result for result in own if result["n"] == n], shuffled))
    by_key = {each.key: each for each in found}
    aims = {name: cell.aim for name, cell in plan.cells.items()}
    return [replace(each, missed=missed_targets(each, aims[each.cell], by_key)) for each in found]


def build_row(own: Sequence[Result], shuffled: Sequence[Result]) -> ScoreboardRow:
    """One cell, over its seeds."""
    first = own[0]
    score = next(iter(first["after"]["scores"]))
    trained = [result["training"] for result in own if result.get("training")]
    warned = min((w for t in trained for w in t["warnings"]), key=lambda w: w["step"], default=None)
    named = {name: first["about"][name] for name in ("objective", "family", "reward")}
    tasks = [result["after"]["scores"][score] for result in own]
    return ScoreboardRow(
        key=first["key"].rpartition("-")[0],
        cell=first["cell"],
        **named,
        n=first["n"],
        searched="search" in first["about"],
        seeds=len(own),
        score=score,
        before=fmean(result["before"]["scores"][score]["overall"]["mean"] for result in own),
        after=interval_over_seeds([result["after"]["rows"][score] for result in own]),
        change=change_interval(own, score),
        tasks={tag: fmean(task[tag]["mean"] for task in tasks) for tag in first["after"]["rows"][score]},
        lenient=_lenient(own),
        pictures={name: _before_after(own, name) for name in ("diversity", "frechet")},
        price=fmean(result["after"]["calls"] for result in own),
        judged=_mean_of_known(own, "judged"),
        flops=_mean_of_known(own, "flops"),
        earned=_reward_before_after(trained),
        samples=round(fmean(t["samples"] for t in trained)) if trained else 0,
        seconds=fmean(t["seconds"] for t in trained) if trained else 0.0,
        calls=round(fmean(t["calls"] for t in trained)) if trained else 0,
        warned=warned["step"] if warned else None,
        warning=warned["warning"] if warned else "",
        control=change_interval(shuffled, score) if shuffled else None,
    )


def _mean_of_known(own: Sequence[Result], name: str) -> float:
    """The mean of those that say it: older measurements do not."""
    return fmean([result["after"][name] for result in own if name in result["after"]] or [0.0])


def _before_after(own: Sequence[Result], name: str) -> BeforeAfter | None:
    if not all(name in result[when] for result in own for when in ("before", "after")):
        return None
    return fmean(result["before"][name] for result in own), fmean(result["after"][name] for result in own)


def _lenient(own: Sequence[Result]) -> BeforeAfter | None:
    scores = [[result[when]["scores"].get("lenient") for when in ("before", "after")] for result in own]
    if not all(score for pair in scores for score in pair):
        return None
    means = [[score["overall"]["mean"] for score in pair] for pair in scores]
    return fmean(before for before, _ in means), fmean(after for _, after in means)


def _reward_before_after(trained: Sequence[Mapping[str, Any]]) -> BeforeAfter | None:
    rewards = [t["reward"] for t in trained if t["reward"]]
    return (fmean(start for start, _ in rewards), fmean(end for _, end in rewards)) if rewards else None


def interval_over_seeds(seeds: Sequence[ScoresByTask]) -> ConfidenceInterval:
    """Of scores by task and prompt, one mapping a seed."""
    return bootstrap_interval_over_seeds(
        [torch.tensor([seed[tag] for seed in seeds], dtype=torch.float64) for tag in seeds[0]]
    )


def change_interval(own: Sequence[Result], score: str) -> ConfidenceInterval:
    """By how much the same prompts changed."""
    seeds = [paired_differences(result["before"]["rows"][score], result["after"]["rows"][score]) for result in own]
    return bootstrap_interval_over_seeds([torch.stack(values) for values in zip(*seeds, strict=True)])


def bootstrap_interval_over_seeds(by_tag: Sequence[Tensor], draws: int = BOOTSTRAP_DRAWS) -> ConfidenceInterval:
    """The unweighted mean over tags of values [S, P], seeds and prompts drawn again together."""
    generator = torch.Generator().manual_seed(0)
    count = len(by_tag[0])
    seeds = torch.randint(count, (draws, count, 1), generator=generator)
    means = []
    for values in by_tag:
        prompts = torch.randint(values.shape[1], (draws, 1, values.shape[1]), generator=generator)
        means.append(values[seeds, prompts].mean((1, 2)))
    low, high = torch.quantile(torch.stack(means).mean(0), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return ConfidenceInterval(torch.stack([values.mean() for values in by_tag]).mean().item(), low, high)


def missed_targets(
    found: ScoreboardRow, aim: CellTarget | None, others: Mapping[str, ScoreboardRow]
) -> tuple[str, ...] | None:
    """What of an aim was not reached, in words; None without an aim."""
    if aim is None:
        return None
    distance, earned = found.pictures.get("frechet"), found.earned
    told = [
        (found.after.mean < (aim.score or 0), f"{found.score} {aim.score or 0:g} was aimed at"),
        (found.change.mean < (aim.gain or -1), f"a gain of {aim.gain or 0:g} was aimed at"),
        (aim.frechet and not (distance and distance[1] < distance[0]), "the Frechet distance does not fall"),
        (aim.reward and not (earned and earned[1] > earned[0]), "the reward does not rise"),
        (aim.keeps and found.change.high < 0, f"{found.score} falls"),
        (aim.learns and not found.change.low > 0, f"{found.score} does not rise beyond its interval"),
        (aim.learns and bool(found.control and found.control.mean >= found.change.mean), "its control rises as much"),
        (aim.warns and found.warned is None, "the guard stays silent"),
        *_compared(found, aim, others.get(aim.like)),
    ]
    return tuple(words for wrong, words in told if wrong)


def _compared(found: ScoreboardRow, aim: CellTarget, other: ScoreboardRow | None) -> list[tuple[bool, str]]:
    if not aim.like:
        return []
    if other is None:
        return [(True, f"{aim.like} is not measured")]
    samples = "samples", found.samples / max(other.samples, 1)
    paid, price = ("calls", found.price / other.price) if found.searched else samples
    return [
        (found.after.mean < other.after.mean, f"below {aim.like}'s {other.after.mean:.2f}"),
        (price > aim.share, f"with {price:.2f} of its {paid}"),
    ]
