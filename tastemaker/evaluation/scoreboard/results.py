"""Results of measurements: their files, and the rows of the scoreboard that summarize them over seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from ...core.output_paths import write_text_atomically
from ...core.registry import ConfigError
from ...core.safe_files import read_json
from ...report.charts import downsample_curve
from ...report.run_record import Curve, RunRecord
from ..evaluate import SCORES, read_jsonl
from ..metrics import BOOTSTRAP_DRAWS, bootstrap_overall
from .plan import CellTarget, ScoreboardPlan

CELLS, RESULTS, FORMAT = "cells", "results.json", 1
Result = dict[str, Any]
ScoresByTask = dict[str, list[float]]  # one value per prompt, by task
BeforeAfter = tuple[float, float]
WHEN = ("before", "after")


# Contents of a result


def mean_scores_by_prompt(folder: Path, score_names: Sequence[str]) -> dict[str, ScoresByTask]:
    """Return the mean of each score over each prompt's samples, in the order of the benchmark."""
    rows = read_jsonl(folder / SCORES)
    scores: dict[str, ScoresByTask] = {}
    for name in score_names:
        groups: dict[tuple[str, int], list[float]] = {}
        for row in rows:
            groups.setdefault((row["tag"], row["index"]), []).append(float(row[name]))
        for (tag, _), values in groups.items():
            scores.setdefault(name, {}).setdefault(tag, []).append(round(fmean(values), 5))
    return scores


def score_differences(
    before: Mapping[str, ScoresByTask], after: Mapping[str, ScoresByTask]
) -> dict[str, dict[str, float]]:
    """Return the change of every score on the same prompts, with 95 % intervals."""
    return {name: bootstrap_overall(paired_differences(before[name], after[name])) for name in after}


def paired_differences(before: ScoresByTask, after: ScoresByTask) -> list[Tensor]:
    return [torch.tensor(after[tag], dtype=torch.float64) - torch.tensor(before[tag]) for tag in after]


def summarize_training(record: RunRecord) -> dict[str, Any]:
    """Return cost, rewards, guard metrics and warnings of a training run."""
    # Offline objectives have no reward per step.
    reward = record.curve("reward/mean") or record.curve("guard/reward/mean")
    guard_metrics = [name for name in record.metric_names() if name.startswith("guard/")]
    warnings = [{"step": row["step"], "warning": row["warning"]} for row in record.rows if row.get("warning")]
    return {
        "steps": record.steps,
        "samples": int(record.total("samples")),
        "seconds": round(record.total("time/step"), 2),
        "calls": int(record.total("network_calls")),
        "reward": first_and_last(reward),
        "guard": {name.removeprefix("guard/"): first_and_last(record.curve(name)) for name in guard_metrics},
        "warnings": warnings,
        "best": record.best_checkpoint,
        "curves": {
            "reward/mean": thin_curve(reward),
            **{name: thin_curve(record.curve(name)) for name in guard_metrics},
        },
    }


def first_and_last(curve: Curve) -> list[float]:
    """Return the start and end of a curve as means over a few steps, because single steps are noisy."""
    count = max(1, min(5, len(curve) // 4))
    values = [value for _, value in curve]
    return [fmean(values[:count]), fmean(values[-count:])] if values else []


def thin_curve(curve: Curve) -> list[list[float]]:
    return [[step, float(f"{value:.5g}")] for step, value in downsample_curve(curve)]


# Files


def write_result(result: Result, out: Path) -> Path:
    """Write the result of one measurement atomically."""
    return _write_json(result, out / CELLS / f"{result['key']}.json")


def read_result(out: Path, key: str) -> Result | None:
    """Read the result of one measurement, or None if it does not exist."""
    path = out / CELLS / f"{key}.json"
    return _read_json(path) if path.is_file() else None


def load_results(out: Path) -> list[Result]:
    """Load all results of a bench from its folder or from the merged file."""
    if out.is_file() or (not (out / CELLS).is_dir() and (out / RESULTS).is_file()):
        return list(_read_json(out if out.is_file() else out / RESULTS)["results"])
    return [_read_json(path) for path in sorted((out / CELLS).glob("*.json"))]


def merge_results(out: Path) -> Path:
    """Write all results into one file, which can be copied to another machine."""
    return _write_json({"format": FORMAT, "results": load_results(out)}, out / RESULTS)


def split_results(out: Path) -> None:
    """Restore one file per result from the merged file if only that was copied, so that the bench can resume."""
    if (out / RESULTS).is_file() and not (out / CELLS).is_dir():
        for result in load_results(out):
            write_result(result, out)


def _read_json(path: Path) -> Result:
    try:
        data = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read as results ({error}); remove the file and run the bench again [TM653]"
        ) from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} does not contain results; give a file that `tastemaker bench` wrote [TM654]")
    return data


def _write_json(data: Result, path: Path) -> Path:
    write_text_atomically(path, json.dumps(data) + "\n")
    return path


# Rows of the scoreboard


@dataclass(frozen=True)
class ConfidenceInterval:
    """A mean with its 95 % bootstrap interval over prompts and seeds."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class ScoreboardRow:
    """One cell over all its seeds. A search has a row for each number of candidates."""

    key: str  # the cell, with the number of candidates of a search
    cell: str
    objective: str
    family: str
    reward: str
    num_candidates: int | None
    is_search: bool
    seeds: int
    score: str  # name of the compared score
    before: float
    after: ConfidenceInterval
    change: ConfidenceInterval
    tasks: Mapping[str, float]  # score by task, after
    lenient: BeforeAfter | None  # score by the lenient rule, which can be gamed
    set_metrics: Mapping[str, BeforeAfter | None]  # diversity and frechet
    network_calls: float  # per sample, after
    judge_calls: float = 0.0  # per sample
    flops: float = 0.0  # per sample, of generator and judge
    training_reward: BeforeAfter | None = None
    samples: int = 0
    seconds: float = 0.0
    training_network_calls: int = 0
    warning_step: int | None = None  # first warning of the guard over all seeds
    warning: str = ""
    control_change: ConfidenceInterval | None = None  # change under shuffled rewards
    missed_targets: tuple[str, ...] | None = None  # None without a target


def build_rows(results: Sequence[Result], plan: ScoreboardPlan) -> list[ScoreboardRow]:
    """Return a row for each cell that has results, in the order of the plan, with missed targets."""
    rows: list[ScoreboardRow] = []
    for cell in plan.cells:
        trained = [result for result in results if result["cell"] == cell and result["kind"] == "after"]
        controls = [result for result in results if result["cell"] == cell and result["kind"] == "control"]
        for n in sorted({result["n"] for result in trained}, key=lambda n: n or 0):
            rows.append(build_row([result for result in trained if result["n"] == n], controls))
    by_key = {row.key: row for row in rows}
    targets = {name: cell.target for name, cell in plan.cells.items()}
    return [replace(row, missed_targets=find_missed_targets(row, targets[row.cell], by_key)) for row in rows]


def build_row(results: Sequence[Result], controls: Sequence[Result]) -> ScoreboardRow:
    """Summarize the seeds of one cell."""
    first = results[0]
    score = next(iter(first["after"]["scores"]))
    training = [result["training"] for result in results if result.get("training")]
    warning = min((w for each in training for w in each["warnings"]), key=lambda w: w["step"], default=None)
    tables = [result["after"]["scores"][score] for result in results]
    lenient = [[result[when]["scores"].get("lenient") for when in WHEN] for result in results]
    scores = [result["after"]["rows"][score] for result in results]  # by task and prompt, of each seed
    return ScoreboardRow(
        key=first["key"].rpartition("-")[0],
        cell=first["cell"],
        objective=first["about"]["objective"],
        family=first["about"]["family"],
        reward=first["about"]["reward"],
        num_candidates=first["n"],
        is_search="search" in first["about"],
        seeds=len(results),
        score=score,
        before=fmean(result["before"]["scores"][score]["overall"]["mean"] for result in results),
        after=bootstrap_interval_over_seeds(
            [torch.tensor([rows[tag] for rows in scores], dtype=torch.float64) for tag in scores[0]]
        ),
        change=change_interval(results, score),
        tasks={tag: fmean(table[tag]["mean"] for table in tables) for tag in first["after"]["rows"][score]},
        lenient=mean_before_after([[table["overall"]["mean"] for table in pair if table] for pair in lenient]),
        set_metrics={
            name: mean_before_after(
                [[result[when][name] for when in WHEN if name in result[when]] for result in results]
            )
            for name in ("diversity", "frechet")
        },
        network_calls=fmean(result["after"]["calls"] for result in results),
        judge_calls=_mean_if_known(results, "verifier_calls"),
        flops=_mean_if_known(results, "flops"),
        training_reward=mean_before_after([each["reward"] for each in training if each["reward"]]),
        samples=round(fmean(each["samples"] for each in training)) if training else 0,
        seconds=fmean(each["seconds"] for each in training) if training else 0.0,
        training_network_calls=round(fmean(each["calls"] for each in training)) if training else 0,
        warning_step=warning["step"] if warning else None,
        warning=warning["warning"] if warning else "",
        control_change=change_interval(controls, score) if controls else None,
    )


def _mean_if_known(results: Sequence[Result], name: str) -> float:
    """Mean over the results that have the value, which older measurements lack."""
    return fmean([result["after"][name] for result in results if name in result["after"]] or [0.0])


def mean_before_after(pairs: Sequence[Sequence[float]]) -> BeforeAfter | None:
    """Return the means of values before and after, or None if there are no pairs or one is incomplete."""
    if not pairs or any(len(pair) != 2 for pair in pairs):
        return None
    return fmean(before for before, _ in pairs), fmean(after for _, after in pairs)


def change_interval(results: Sequence[Result], score: str) -> ConfidenceInterval:
    """Return the interval of the change of a score on the same prompts."""
    seeds = [paired_differences(result["before"]["rows"][score], result["after"]["rows"][score]) for result in results]
    return bootstrap_interval_over_seeds([torch.stack(values) for values in zip(*seeds, strict=True)])


def bootstrap_interval_over_seeds(by_tag: Sequence[Tensor], draws: int = BOOTSTRAP_DRAWS) -> ConfidenceInterval:
    """Return the unweighted mean over tags of values [S, P], with seeds and prompts resampled together."""
    generator = torch.Generator().manual_seed(0)
    count = len(by_tag[0])
    seeds = torch.randint(count, (draws, count, 1), generator=generator)
    means = []
    for values in by_tag:
        prompts = torch.randint(values.shape[1], (draws, 1, values.shape[1]), generator=generator)
        means.append(values[seeds, prompts].mean((1, 2)))
    low, high = torch.quantile(torch.stack(means).mean(0), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return ConfidenceInterval(torch.stack([values.mean() for values in by_tag]).mean().item(), low, high)


def find_missed_targets(
    row: ScoreboardRow, target: CellTarget | None, rows: Mapping[str, ScoreboardRow]
) -> tuple[str, ...] | None:
    """Return which parts of a target a row misses, in words, or None without a target.

    Whatever the target, a score must rise beyond its interval and by more than in the control, unless the cell shows
    reward hacking, where the guard must warn.
    """
    if target is None:
        return None
    must_rise, falls = not target.guard_warns, target.no_regression and row.change.high < 0
    frechet, reward, control = row.set_metrics.get("frechet"), row.training_reward, row.control_change
    checks = [
        (row.after.mean < (target.min_score or 0), f"{row.score} is below the target of {target.min_score or 0:g}"),
        (row.change.mean < (target.min_gain or -1), f"the gain is below the target of {target.min_gain or 0:g}"),
        (target.frechet_falls and not (frechet and frechet[1] < frechet[0]), "the Frechet distance does not fall"),
        (target.reward_rises and not (reward and reward[1] > reward[0]), "the reward does not rise"),
        (falls, f"{row.score} falls"),
        (must_rise and not falls and not row.change.low > 0, f"{row.score} does not rise beyond its interval"),
        (must_rise and not falls and bool(control and control.mean >= row.change.mean), "its control rises as much"),
        (target.guard_warns and row.warning_step is None, "the guard does not warn"),
        *_compare_with_baseline(row, target, rows.get(target.baseline)),
    ]
    return tuple(text for missed, text in checks if missed)


def _compare_with_baseline(
    row: ScoreboardRow, target: CellTarget, baseline: ScoreboardRow | None
) -> list[tuple[bool, str]]:
    if not target.baseline:
        return []
    if baseline is None:
        return [(True, f"{target.baseline} is not measured")]
    if row.is_search:
        unit, ratio = "calls", row.network_calls / baseline.network_calls
    else:
        unit, ratio = "samples", row.samples / max(baseline.samples, 1)
    return [
        (row.after.mean < baseline.after.mean, f"below {target.baseline}'s {baseline.after.mean:.2f}"),
        (ratio > target.max_cost_ratio, f"with {ratio:.2f} of its {unit}"),
    ]
