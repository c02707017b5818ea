"""What one measurement leaves: plain data in a file of its own, and all of them together in one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from ...core.registry import ConfigError
from ...report.charts import downsample_curve
from ...report.run_record import Curve, RunRecord
from ..confidence_intervals import bootstrap_overall
from ..evaluate import SCORES, read_jsonl

CELLS, RESULTS, FORMAT = "cells", "results.json", 1
Result = dict[str, Any]
ScoresByTask = dict[str, list[float]]  # one value a prompt, by task


def mean_scores_by_prompt(folder: Path, names: Sequence[str]) -> dict[str, ScoresByTask]:
    """Of each score the mean of every prompt's pictures, in the benchmark's order."""
    rows = read_jsonl(folder / SCORES)
    told: dict[str, ScoresByTask] = {}
    for name in names:
        groups: dict[tuple[str, int], list[float]] = {}
        for row in rows:
            groups.setdefault((row["tag"], row["index"]), []).append(float(row[name]))
        for (tag, _), values in groups.items():
            told.setdefault(name, {}).setdefault(tag, []).append(round(fmean(values), 5))
    return told


def score_differences(
    before: Mapping[str, ScoresByTask], after: Mapping[str, ScoresByTask]
) -> dict[str, dict[str, float]]:
    """By how much every score changed, the same prompts compared, with 95 % intervals."""
    return {name: bootstrap_overall(paired_differences(before[name], after[name])) for name in after}


def paired_differences(before: ScoresByTask, after: ScoresByTask) -> list[torch.Tensor]:
    return [torch.tensor(after[tag], dtype=torch.float64) - torch.tensor(before[tag]) for tag in after]


def summarize_training(record: RunRecord) -> dict[str, Any]:
    """What a run paid and earned, from what it left."""
    earned = record.curve("reward") or record.curve("guard/reward")  # an objective may have no samples to be paid for
    watched = [name for name in record.metrics() if name.startswith("guard/")]
    warnings = [{"step": row["step"], "warning": row["warning"]} for row in record.rows if row.get("warning")]
    return {
        "steps": record.steps,
        "samples": int(record.total("samples")),
        "seconds": round(record.total("seconds"), 2),
        "calls": int(record.total("calls")),
        "reward": first_and_last(earned),
        "guard": {name.removeprefix("guard/"): first_and_last(record.curve(name)) for name in watched},
        "warnings": warnings,
        "best": record.best,
        "curves": {"reward": thin_curve(earned), **{name: thin_curve(record.curve(name)) for name in watched}},
    }


def first_and_last(curve: Curve) -> list[float]:
    """Where a curve begins and ends: means over a few steps, for single ones are noisy."""
    few = max(1, min(5, len(curve) // 4))
    values = [value for _, value in curve]
    return [fmean(values[:few]), fmean(values[-few:])] if values else []


def thin_curve(curve: Curve) -> list[list[float]]:
    return [[step, float(f"{value:.5g}")] for step, value in downsample_curve(curve)]


def write_result(result: Result, out: Path) -> Path:
    """The result of one measurement, whole or not at all."""
    return _write(result, out / CELLS / f"{result['key']}.json")


def read_result(out: Path, key: str) -> Result | None:
    """The result of one measurement, if it is there."""
    path = out / CELLS / f"{key}.json"
    return _read(path) if path.is_file() else None


def load_results(out: Path) -> list[Result]:
    """All results of a bench: of its folder, or of the one file that holds them all."""
    if out.is_file() or (not (out / CELLS).is_dir() and (out / RESULTS).is_file()):
        return list(_read(out if out.is_file() else out / RESULTS)["results"])
    return [_read(path) for path in sorted((out / CELLS).glob("*.json"))]


def split_results(out: Path) -> None:
    """Where only the one file that holds all was carried here, a file for each again, so that the bench goes on."""
    if (out / RESULTS).is_file() and not (out / CELLS).is_dir():
        for result in load_results(out):
            write_result(result, out)


def merge_results(out: Path) -> Path:
    """All results in one file, to be carried elsewhere."""
    return _write({"format": FORMAT, "results": load_results(out)}, out / RESULTS)


def _read(path: Path) -> Result:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as results ({error}); remove it and run the bench again") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no results; expected what a bench wrote")
    return found


def _write(data: Result, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(data) + "\n", encoding="utf-8")
    partial.replace(path)
    return path
