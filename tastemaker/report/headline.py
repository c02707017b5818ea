"""The headline of a report: the held-out evaluation before and after training, or the training reward."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from .charts import OVERALL, ScoreInterval, curve_ends, format_number, parse_scores
from .groups import RunGroup, mean_and_spread
from .metric_names import HIGHER, LOWER, Direction, name_benchmark, name_score
from .run_record import RunRecord

MAIN_SCORES = ("strict", "correct")  # scores of a benchmark that a headline prefers
NOT_HELD_OUT = "This is no held-out score; the command tastemaker evaluate measures one."


@dataclass(frozen=True)
class EvaluationPair:
    """The latest evaluation of a run, and the comparable evaluation before training if there is one."""

    before: str | None  # name in RunRecord.evaluations
    after: str
    step: int  # training step of the latest evaluation


@dataclass(frozen=True)
class Headline:
    """A quantity before and after training."""

    quantity: str
    after: float
    before: float | None = None
    spread: float | None = None  # standard deviation of `after` over seeds
    better: Direction = HIGHER
    source: str = ""  # where the values come from, in sentences
    detail: str = ""  # the confidence intervals, as a sentence

    @property
    def change(self) -> str:
        """The values in words, such as '.30 to .61'."""
        start = f"{format_score(self.before)} to " if self.before is not None else ""
        rounded = format_number if self.spread is None or self.spread < 0.005 else format_score
        spread = f" ± {rounded(self.spread)}" if self.spread is not None else ""
        return f"{start}{format_score(self.after)}{spread}"

    @property
    def text(self) -> str:
        return f"{self.quantity} {self.change}"


def format_score(value: float) -> str:
    """Format a score between 0 and 1 as '.30', and other numbers with three significant digits."""
    return f"{value:.2f}".removeprefix("0") if 0 <= round(value, 2) < 1 else format_number(value)


def make_headline(group: RunGroup) -> Headline | None:
    """Return the headline of a group: from the evaluation if its runs have one, else from the reward or the loss."""
    headlines = [headline for record in group.records if (headline := _headline_of_run(record))]
    headlines = [each for each in headlines if each.quantity == headlines[0].quantity]
    if len(headlines) < 2:
        return headlines[0] if headlines else None
    after = mean_and_spread([each.after for each in headlines])
    starts = [each.before for each in headlines if each.before is not None]
    before = fmean(starts) if len(starts) == len(headlines) else None
    source = f"Mean and standard deviation over {len(headlines)} seeds. {headlines[0].source}"
    return Headline(headlines[0].quantity, after.mean, before, after.spread, headlines[0].better, source)


def _headline_of_run(record: RunRecord) -> Headline | None:
    return (
        _evaluation_headline(record)
        or _reconstruction_headline(record)
        or _reward_headline(record)
        or _loss_headline(record)
    )


def _evaluation_headline(record: RunRecord) -> Headline | None:
    pair = find_evaluation_pair(record)
    if pair is None:
        return None
    reports = [record.evaluations[name] for name in (pair.before, pair.after) if name is not None]
    metric, after = _main_score(reports[-1]) or ("", ScoreInterval(0.0))
    before = parse_scores(reports[0])[metric][OVERALL] if pair.before is not None else None
    benchmark = name_benchmark(str(reports[-1].get("benchmark", "")) or "evaluation")
    size = f", {reports[-1]['prompts']} prompts" if reports[-1].get("prompts") else ""
    intervals = [
        f"{format_score(each.low)} to {format_score(each.high)}"
        for each in (before, after)
        if each is not None and each.low is not None and each.high is not None
    ]
    known = f"95 % intervals: {' before, '.join(intervals)} after." if len(intervals) == 2 else ""
    missing = "" if before else " The model was not evaluated before training."
    source = f"Held-out evaluation{size}.{missing}"
    short = metric if metric in (*MAIN_SCORES, "lenient") else name_score(metric).title
    return Headline(
        f"{short} {benchmark}",
        after.mean,
        before.mean if before else None,
        better=name_score(metric).better,
        source=source,
        detail=known,
    )


def _reconstruction_headline(record: RunRecord) -> Headline | None:
    """Return the PSNR of an autoencoder."""
    psnr = record.reconstruction.get("psnr")
    if not isinstance(psnr, int | float):
        return None
    count = record.reconstruction.get("images", "Some")
    return Headline("reconstruction PSNR", float(psnr), source=f"{count} held-out images, in dB.")


def _reward_headline(record: RunRecord) -> Headline | None:
    for metric, source in (
        ("guard/reward/mean", "Mean training reward on the guard's fixed prompts, at the first and the last check."),
        ("reward/mean", "Mean training reward of the first and the last steps."),
    ):
        if curve := record.curve(metric):
            first, last = curve_ends(curve)
            return Headline("training reward", last, first, source=f"{source} {NOT_HELD_OUT}")
    return None


def _loss_headline(record: RunRecord) -> Headline | None:
    if not (curve := record.curve("loss")):
        return None
    first, last = curve_ends(curve)
    return Headline("loss", last, first, better=LOWER, source="Mean training loss of the first and the last steps.")


def find_evaluation_pair(record: RunRecord) -> EvaluationPair | None:
    """Return the latest evaluation of a run, if possible one that was also done before training in the same way."""
    steps = {
        name: _evaluated_step(name, report, record.steps)
        for name, report in record.evaluations.items()
        if _main_score(report)
    }
    latest_first = sorted(steps, key=lambda name: steps[name])[::-1]  # the newest of equal steps first
    for after in latest_first:
        for before in latest_first:
            if steps[before] == 0 < steps[after] and _is_comparable(record.evaluations, before, after):
                return EvaluationPair(before, after, steps[after])
    trained = [name for name in latest_first if steps[name] > 0]
    return EvaluationPair(None, trained[0], steps[trained[0]]) if trained else None


def _main_score(report: Mapping[str, Any]) -> tuple[str, ScoreInterval] | None:
    scores = {metric: table[OVERALL] for metric, table in parse_scores(report).items() if OVERALL in table}
    for metric in (*MAIN_SCORES, *scores):
        if metric in scores:
            return metric, scores[metric]
    return None


def _evaluated_step(name: str, report: Mapping[str, Any], last_step: int) -> int:
    """Return the training step of an evaluation, from the description of its model or its name."""
    checkpoint = [*str(report.get("model", "")).split(", "), ""][1]
    if name == "before" or checkpoint == "untrained":
        return 0
    match = re.search(r"step-(\d+)", f"{checkpoint} {name}")
    return int(match[1]) if match else last_step


def _is_comparable(evaluations: Mapping[str, Mapping[str, Any]], first: str, second: str) -> bool:
    """Whether two evaluations have the same benchmark, score, number of samples, search, seed and detector."""
    return _evaluation_settings(evaluations[first]) == _evaluation_settings(evaluations[second])


def _evaluation_settings(report: Mapping[str, Any]) -> list[object]:
    metric, _ = _main_score(report) or ("", None)
    # The description lists the model, checkpoint, weights, search, seed, detector, and a hash of the model's settings.
    settings = str(report.get("model", "")).split(", ")[3:-1]
    return [metric, *(report.get(key) for key in ("benchmark", "prompts", "images")), *settings]
