"""`tastemaker leaderboard`: compare the evaluations of several models, as JSON lines and as a table."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from ..console import Table
from ..core.output_paths import check_output_file, write_text_atomically
from ..core.registry import ConfigError
from ..core.safe_files import read_json_object
from .evaluate import MANIFEST, REPORT, SCORES, read_jsonl
from .metrics import IntervalDict, bootstrap_interval, bootstrap_overall, mean_by_prompt

FIELDS = ("id", "benchmark", "questions", "judge", "model", "score", "mean", "low", "high", "prompts", "images")
Entry = dict[str, Any]
GroupKey = tuple[str, str, str, str]  # benchmark, its prompts, judge and score: only equal ones are compared


def make_leaderboard(paths: Sequence[Path], out: Path, console: Console) -> list[Entry]:
    """Write the entries of evaluations and leaderboard files to `out`, and a Markdown table beside it; print the table.

    An evaluation replaces an earlier entry of the same model and settings.
    """
    check_output_file(out)
    entries: dict[tuple[str, ...], Entry] = {}
    for path in paths:
        for entry in [read_evaluation(path)] if path.is_dir() else read_entries(path):
            entries[(*group_key(entry), entry["id"])] = entry
    groups = group_entries(list(entries.values()))
    ordered = [entry for group in groups.values() for entry in group]
    write_text_atomically(out, "".join(json.dumps(entry) + "\n" for entry in ordered))
    write_text_atomically(out.with_suffix(".md"), "\n".join(map(format_markdown, groups.values())))
    for group in groups.values():
        console.print(make_table(group))
    console.print(f"{len(ordered)} evaluations are in {out}, the tables in {out.with_suffix('.md')}", markup=False)
    return ordered


def read_evaluation(folder: Path) -> Entry:
    """Return the entry of a directory that `tastemaker evaluate` has finished."""
    if not (folder / REPORT).is_file():
        raise ConfigError(
            f"leaderboard: {folder} has no {REPORT}; give a folder that `tastemaker evaluate` has finished, or a "
            "leaderboard file [TM2175]"
        )
    report, manifest = read_json_object(folder / REPORT), read_json_object(folder / MANIFEST)
    score = report.get("headline") or next(iter(report["scores"]))
    total: IntervalDict = report["scores"][score]["overall"]
    rows = [row for row in read_jsonl(folder / SCORES) if row.get(score) is not None]
    tags = list(dict.fromkeys(row["tag"] for row in rows))
    by_tag = {tag: mean_by_prompt([row for row in rows if row["tag"] == tag], score).tolist() for tag in tags}
    return {
        "id": hashlib.sha256(manifest["model"].encode()).hexdigest()[:8],  # of weights, settings and seed
        "benchmark": report["benchmark"],
        "questions": manifest["questions"],
        "judge": str(report.get("judge", "")),
        "model": describe_evaluated(report, folder),
        "score": score,
        **{key: total[key] for key in ("mean", "low", "high")},
        "prompts": report["prompts"],
        "images": report["images"],
        "tasks": {tag: interval["mean"] for tag, interval in report["scores"][score].items() if tag != "overall"},
        "tag_weights": report.get("tag_weights", {}),
        "overall": report.get("overall", "tags"),
        "by_prompt": {tag: [round(value, 6) for value in values] for tag, values in by_tag.items()},
    }


def describe_evaluated(report: Mapping[str, Any], folder: Path) -> str:
    """Return a short name of the model: recipe, checkpoint and search, or the folder of the samples."""
    settings = report.get("settings")
    if not settings:
        return folder.resolve().name
    checkpoint = Path(settings["checkpoint"]) if settings["checkpoint"] else None
    name = f"{checkpoint.parent.parent.name}/{checkpoint.name}" if checkpoint else str(settings["recipe"])
    weights = "" if checkpoint else f", {settings['weights']}"
    search = settings["search"]
    found = "" if search["type"] == "single" else f", {search['type']} of {search.get('n', 1)}"
    return f"{name}{weights}, {settings['snapshot']}{found}"


def read_entries(path: Path) -> list[Entry]:
    """Read a leaderboard file."""
    if not path.is_file():
        raise ConfigError(
            f"leaderboard: {path} does not exist; give folders that `tastemaker evaluate` wrote, or leaderboard files "
            "[TM2176]"
        )
    entries = read_jsonl(path)
    for number, entry in enumerate(entries, 1):
        missing = [name for name in FIELDS if not isinstance(entry, dict) or name not in entry]
        if missing:
            raise ConfigError(
                f"leaderboard: {path}, line {number} has no '{missing[0]}'; give a file that `tastemaker leaderboard` "
                "wrote [TM2177]"
            )
    return entries


def group_key(entry: Entry) -> GroupKey:
    return (entry["benchmark"], entry["questions"], entry["judge"], entry["score"])


def group_entries(entries: Sequence[Entry]) -> dict[GroupKey, list[Entry]]:
    """Group entries that may be compared, the best first."""
    groups: dict[GroupKey, list[Entry]] = {}
    for entry in sorted(entries, key=group_key):
        groups.setdefault(group_key(entry), []).append(entry)
    return {key: sorted(group, key=lambda entry: -entry["mean"]) for key, group in groups.items()}


def paired_difference(best: Entry, other: Entry) -> IntervalDict | None:
    """Difference to the best model with its interval; both saw the same prompts, so differences are resampled.

    None if the entries lack scores by prompt, or if their mean is not the overall score.
    """
    first, second = best.get("by_prompt", {}), other.get("by_prompt", {})
    if not first or {tag: len(values) for tag, values in first.items()} != {t: len(v) for t, v in second.items()}:
        return None
    for entry, scores in ((best, first), (other, second)):
        values = {tag: torch.tensor(each, dtype=torch.float64) for tag, each in scores.items()}
        if abs(_aggregate(entry, values)["mean"] - entry["mean"]) > 1e-4:
            return None
    pairs = {tag: torch.tensor(second[tag]).double() - torch.tensor(first[tag]).double() for tag in first}
    return _aggregate(best, pairs)


def _aggregate(entry: Entry, by_tag: Mapping[str, torch.Tensor]) -> IntervalDict:
    if entry.get("overall") == "prompts":
        return bootstrap_interval(torch.cat(list(by_tag.values())))
    weights = entry.get("tag_weights") or {}
    return bootstrap_overall(list(by_tag.values()), weights=[weights[tag] for tag in by_tag] if weights else ())


def describe_group(group: Sequence[Entry]) -> str:
    first = group[0]
    judge = f", judge {first['judge']}" if first["judge"] else ""
    return f"{first['benchmark']}: 100 x {first['score']}{judge}, {first['prompts']} prompts"


def format_cells(group: Sequence[Entry]) -> list[tuple[str, str, str, str, str]]:
    """Return model, score, interval, difference to the best and number of samples of each entry."""
    cells, models = [], [entry["model"] for entry in group]
    for entry in group:
        same = models.count(entry["model"]) > 1  # they differ in a setting or in the seed
        name = f"{entry['model']} ({entry['id']})" if same else str(entry["model"])
        difference = paired_difference(group[0], entry) if entry is not group[0] else None
        gap = "" if difference is None else "{mean:+.1f} ({low:+.1f} to {high:+.1f})".format(
            **{key: 100 * difference[key] for key in ("mean", "low", "high")}
        )  # fmt: skip
        interval = f"{100 * entry['low']:.1f} to {100 * entry['high']:.1f}"
        cells.append((name, f"{100 * entry['mean']:.1f}", interval, gap, str(entry["images"])))
    return cells


HEADER = ("model", "score", "95 % interval", "difference to the best", "samples")


def make_table(group: Sequence[Entry]) -> Table:
    table = Table(*HEADER, title=escape(describe_group(group)))
    for cells in format_cells(group):
        table.add_row(*map(escape, cells))
    return table


def format_markdown(group: Sequence[Entry]) -> str:
    """Return a heading and a Markdown table."""
    lines = [f"## {describe_group(group)}", "", f"| {' | '.join(HEADER)} |", f"|{'---|' * len(HEADER)}"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in format_cells(group)]
    return "\n".join([*lines, ""])
