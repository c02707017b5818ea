"""`tastemaker sweep`: train a recipe with every combination of some settings, one run after another, and compare them.

All runs are in one folder. Started again, finished runs are skipped and an interrupted one resumes.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console

from ..config.build import make_tiny_any
from ..config.check import require_valid, torchrun_world_size
from ..config.schema import AnyConfig
from ..console import format_remaining
from ..core.errors import ConfigError, TrainingError, pluralize
from ..core.output_paths import check_output_directory, write_text_atomically
from ..core.safe_files import read_json
from ..report.page import write_report
from ..report.run_record import RunRecord, read_run
from . import checkpoint, checkpoint_folder
from .events import Event, TrainingFinished
from .loop import interruption_reason
from .run_directory import claim_run_directory, keep_resolved_engine
from .run_lock import own_run_directory
from .trainer import load_run_config, run_training

SEED = "seed"  # runs that differ only in it are grouped
RESERVED = {"name": "sweep names the runs after their settings", "output_dir": "use --out"}
RESULTS_FILE, REPORT_FILE = "sweep.json", "report.html"
FINISHED, STOPPED, FAILED = "finished", "stopped by the guard", "failed"
LAST_FRACTION = 0.1  # of the steps: a metric of every step is averaged over these


@dataclass(frozen=True)
class SweepRun:
    """One combination of settings."""

    name: str  # of its directory
    settings: Mapping[str, str]  # those that differ between the runs
    config: AnyConfig


@dataclass(frozen=True)
class SweepResult:
    """The last values of a run's metrics; none if it failed before the first step."""

    name: str
    settings: Mapping[str, str]
    status: str
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class SettingSummary:
    """Mean and standard deviation of every metric over the runs that differ only in their seed."""

    settings: Mapping[str, str]
    runs: int
    metrics: Mapping[str, tuple[float, float | None]]  # the deviation is None for a single run


def split_values(text: str) -> list[str]:
    """Split `1e-4,2e-4` at its commas, except those within brackets, braces or quotes."""
    values, depth, quote = [""], 0, ""
    for mark in text:
        if mark == "," and not depth and not quote:
            values.append("")
            continue
        quote = (mark if mark in "'\"" else "") if not quote else ("" if mark == quote else quote)
        depth += 0 if quote else (mark in "[{(") - (mark in "]})")
        values[-1] += mark
    return [value.strip() for value in values]


def expand_grid(overrides: Sequence[str]) -> tuple[list[str], list[dict[str, str]]]:
    """Return the overrides that all runs share, and the settings of each run: every combination of listed values."""
    shared, varied = [], {}
    for override in overrides:
        key, equals, text = override.partition("=")
        values = split_values(text)
        if equals and key in RESERVED:
            raise ConfigError(f"sweep: '{key}' cannot be set; {RESERVED[key]} [TM296]")
        if not equals or len(values) == 1:
            shared.append(override)
            continue
        if not all(values) or len(set(values)) < len(values) or key in varied:
            raise ConfigError(
                f"sweep: '{override:.100}' has an empty or repeated value, or the key was given twice; list every "
                "value once [TM297]"
            )
        varied[key] = values
    if not varied:
        raise ConfigError(
            "sweep: no setting has several values; give for example optim.lr=1e-4,2e-4, or use `tastemaker "
            "train` [TM298]"
        )
    return shared, [dict(zip(varied, values, strict=True)) for values in itertools.product(*varied.values())]


def name_run(settings: Mapping[str, str]) -> str:
    """The directory of a run: `lr=1e-4_seed=0`, with whole keys if two end alike."""
    last = [key.rpartition(".")[2] for key in settings]
    keys = last if len(set(last)) == len(last) else list(settings)
    words = [f"{key}={value}" for key, value in zip(keys, settings.values(), strict=True)]
    return "_".join(re.sub(r"[^\w.+=-]+", "-", word) for word in words)[:200]


def plan_sweep(recipe: str, overrides: Sequence[str], out: Path, *, tiny: bool = False) -> list[SweepRun]:
    """Load and check the configuration of every run, so that a mistake is found before the first one starts."""
    check_output_directory(out)
    shared, grid = expand_grid(overrides)
    runs = []
    for settings in grid:
        config = load_run_config(recipe, [*shared, *(f"{key}={value}" for key, value in settings.items())])
        config = replace(config, output_dir=out, name=name_run(settings))
        runs.append(SweepRun(name_run(settings), settings, require_valid(make_tiny_any(config) if tiny else config)))
    if len({run.name for run in runs}) < len(runs):
        raise ConfigError(f"sweep: two runs would have the name '{runs[0].name}'; use shorter values [TM299]")
    for run in runs:
        claim_run_directory(keep_resolved_engine(run.config, run.config.directory), run.config.directory, ())
    return runs


def list_train_commands(recipe: str, overrides: Sequence[str], runs: Sequence[SweepRun]) -> list[str]:
    """The command that trains each run, for a scheduler that starts them."""
    shared, _ = expand_grid(overrides)
    return [
        shlex.join(
            [
                *("tastemaker", "train", recipe, *shared, *(f"{key}={value}" for key, value in run.settings.items())),
                *(f"output_dir={run.config.output_dir}", f"name={run.name}"),
            ]
        )
        for run in runs
    ]


def run_sweep(runs: Sequence[SweepRun], out: Path, console: Console) -> list[SweepResult] | None:
    """Train all runs and write sweep.json and one report. Returns None if it was asked to stop.

    A run that fails, such as one whose loss is not finite, does not end the sweep.
    """
    if torchrun_world_size() > 1:
        raise ConfigError(
            "sweep: all runs share one process, so torchrun is not supported; use `sweep --dry-run` and start the "
            "printed commands with torchrun [TM300]"
        )
    with own_run_directory(out):
        return _run_all(runs, out, console)


def _run_all(runs: Sequence[SweepRun], out: Path, console: Console) -> list[SweepResult] | None:
    results = {result.name: result for result in read_results(out)}
    times: list[float] = []  # seconds of each run
    for number, run in enumerate(runs, 1):
        words = " ".join(f"{key}={value}" for key, value in run.settings.items())
        previous = results.get(run.name)
        if is_finished(run.config) or (previous is not None and previous.status == STOPPED):
            status = STOPPED if previous is not None and previous.status == STOPPED else FINISHED
            _print(console, f"run {number} of {len(runs)}: {words}: already done")
        else:
            left = f" ({format_remaining(times, len(runs) - number + 1)})" if times else ""
            _print(console, f"run {number} of {len(runs)}: {words}{left}")
            start = time.monotonic()
            status = train_run(run.config, console)
            times.append(time.monotonic() - start)
        if not status:
            return None
        results[run.name] = SweepResult(run.name, run.settings, status, read_metrics(run.config.directory))
        write_results(out, [results[each.name] for each in runs if each.name in results])
    directories = [run.config.directory for run in runs if (run.config.directory / "metrics.jsonl").is_file()]
    if directories:
        _print(console, f"the report of all runs is {write_report(directories, out / REPORT_FILE)}")
    return [results[run.name] for run in runs]


def is_finished(config: AnyConfig) -> bool:
    """Whether the last checkpoint of a run is at its last step."""
    latest = checkpoint.latest_checkpoint(config.directory)
    return latest is not None and latest == checkpoint_folder.checkpoint_path(config.directory, config.steps)


def train_run(config: AnyConfig, console: Console) -> str:
    """Train one run and return its status; empty if the user interrupted it."""
    reasons: list[str] = []

    def note_end(event: Event) -> None:
        if isinstance(event, TrainingFinished):
            reasons.append("" if event.reason == interruption_reason(event.step) else STOPPED)

    try:
        done = run_training(config, console=console, on_event=note_end)
    except TrainingError as error:
        _print(console, f"failed: {error}", "red")
        return FAILED
    return FINISHED if done else reasons[-1]


def read_metrics(directory: Path) -> dict[str, float]:
    """The last training reward and held-out rewards of a run, or its loss if it has no rewards."""
    try:
        record = read_run(directory)
    except ConfigError:
        return {}
    metrics = {"reward": "guard/reward/mean" if record.curve("guard/reward/mean") else "reward/mean"}
    metrics |= {f"{name} (held out)": f"guard/rewards/{name}" for name in record.held_out}
    metrics |= {} if record.curve(metrics["reward"]) else {"loss": "loss"}
    last = {label: _last_value(record, metric) for label, metric in metrics.items()}
    return {label: value for label, value in last.items() if value is not None}


def _last_value(record: RunRecord, metric: str) -> float | None:
    """The last value of the guard's metrics, and the mean over the last tenth of the steps of others."""
    values = [value for _, value in record.curve(metric)]
    if not values:
        return None
    return values[-1] if metric.startswith("guard/") else fmean(values[-max(1, round(LAST_FRACTION * len(values))) :])


def summarize_seeds(results: Sequence[SweepResult]) -> list[SettingSummary]:
    """Group the runs that differ only in their seed, the highest reward first; failed runs are left out."""
    groups: dict[tuple[tuple[str, str], ...], list[SweepResult]] = {}
    for result in results:
        if result.status != FAILED and result.metrics:
            key = tuple((name, value) for name, value in result.settings.items() if name != SEED)
            groups.setdefault(key, []).append(result)
    summaries = []
    for settings, members in groups.items():
        metrics = {}
        for name in dict.fromkeys(name for member in members for name in member.metrics):
            values = [member.metrics[name] for member in members if name in member.metrics]
            metrics[name] = (fmean(values), stdev(values) if len(values) > 1 else None)
        summaries.append(SettingSummary(dict(settings), len(members), metrics))
    return sorted(summaries, key=lambda each: -each.metrics.get("reward", (float("-inf"), None))[0])


def format_sweep_table(results: Sequence[SweepResult]) -> str:
    """A table in plain text, one line per group of seeds: mean and standard deviation of each metric."""
    summaries = summarize_seeds(results)
    settings = list(dict.fromkeys(key for each in summaries for key in each.settings))
    metrics = list(dict.fromkeys(name for each in summaries for name in each.metrics))
    rows = [[*settings, "runs", *metrics]]
    for each in summaries:
        cells = [_format_spread(*each.metrics[name]) if name in each.metrics else "-" for name in metrics]
        rows.append([*(each.settings.get(key, "-") for key in settings), str(each.runs), *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    failed = [result.name for result in results if result.status == FAILED]
    lines += [f"{pluralize(len(failed), 'run')} failed: {', '.join(failed)}"] if failed else []
    return "\n".join(lines)


def _format_spread(mean: float, deviation: float | None) -> str:
    return f"{mean:.4g}" if deviation is None else f"{mean:.4g} +- {deviation:.2g}"


def read_results(out: Path) -> list[SweepResult]:
    """The results in a folder; none if there are none that can be read."""
    try:
        rows: Any = read_json(out / RESULTS_FILE)
        return [SweepResult(**row) for row in rows]
    except (OSError, ValueError, TypeError):
        return []


def write_results(out: Path, results: Sequence[SweepResult]) -> None:
    write_text_atomically(out / RESULTS_FILE, json.dumps([asdict(result) for result in results], indent=1) + "\n")


def _print(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
