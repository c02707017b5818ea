"""Results of `tastemaker verify`: their JSON file, the table that the command prints, and what counts as done."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from ..console import Table, format_bytes
from ..core.output_paths import write_text_atomically
from ..core.registry import ConfigError
from ..core.safe_files import read_json

Status = Literal["matched", "runs", "failed", "not tried"]
Kind = Literal["model", "reward"]
FORMAT = 1  # of the file
NEEDS_DOWNLOAD = "`tastemaker download"  # in the message of a loader that did not find published weights
DONE = ("matched", "runs")
COLORS: dict[Status, str] = {"matched": "green", "runs": "cyan", "failed": "red", "not tried": "yellow"}


@dataclass(frozen=True)
class Check:
    """One comparison or test of an entry: what was measured, and why it failed or was left out."""

    name: str
    verdict: Literal["pass", "fail", "skip"]
    number: str = ""  # in words, such as "latents off by 2.1e-06"
    reason: str = ""
    values: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Settings:
    """What a verification does; results with other settings are not comparable."""

    tiny: bool = False  # small random weights
    steps: int = 2  # of training
    sampling_steps: int = 4
    device: str = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"  # of the comparison; training uses what the device does best
    full: bool = False  # train all weights instead of LoRA adapters
    weights: str = ""  # folder with published weights; the hub's cache otherwise
    references: str = ""  # folder with the images of published scores


@dataclass(frozen=True)
class Entry:
    """The result for one model or reward."""

    name: str
    kind: Kind
    status: Status
    reason: str = ""  # why it failed or was not tried, or why nothing was compared
    weights: tuple[str, ...] = ()  # published ones that were used
    tiny: bool = False
    steps: int = 0
    sampling_steps: int = 0
    device: str = ""
    dtype: str = ""
    seconds: float = 0.0
    peak_memory: int = 0  # bytes: of the GPU, or of the process on a CPU; 0 if unknown
    date: str = ""  # UTC
    versions: Mapping[str, str] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()


@dataclass(frozen=True)
class Report:
    """The content of a file: one entry for each model and reward."""

    entries: tuple[Entry, ...] = ()
    format: int = FORMAT


def read_report(path: Path) -> Report:
    """Read a file that `verify` wrote."""
    try:
        report: Report = TypeAdapter(Report).validate_python(read_json(path))
    except (ValidationError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{path} is not a result of `tastemaker verify` ({reason:.200}); give another file, or remove it to "
            "start over [TM2250]"
        ) from error
    if report.format != FORMAT:
        raise ConfigError(
            f"{path} has format {report.format}, and this version reads format {FORMAT}; run `tastemaker verify` "
            "again [TM2251]"
        )
    return report


def write_report(path: Path, entries: Sequence[Entry]) -> None:
    """Write the entries, sorted by kind and name."""
    ordered = sorted(entries, key=lambda entry: (entry.kind, entry.name))
    write_text_atomically(path, json.dumps(asdict(Report(tuple(ordered))), indent=1, ensure_ascii=False) + "\n")


def is_current(entry: Entry, settings: Settings, versions: Mapping[str, str]) -> bool:
    """Whether an entry of an earlier call need not be verified again."""
    same = (entry.tiny, entry.steps, entry.sampling_steps, dict(entry.versions)) == (
        settings.tiny,
        settings.steps,
        settings.sampling_steps,
        dict(versions),
    )
    return entry.status in DONE and same


def combine_status(checks: Sequence[Check], compared: Sequence[str]) -> tuple[Status, str]:
    """Return status and reason of an entry: `matched` if every check named in `compared` was made and passed."""
    failed = [check for check in checks if check.verdict == "fail"]
    if failed:
        return "failed", "; ".join(f"{check.name}: {check.number or check.reason}" for check in failed)[:500]
    by_name = {check.name: check for check in checks}
    missing = [name for name in compared if name not in by_name or by_name[name].verdict != "pass"]
    if not compared or missing:
        return "runs", next((by_name[name].reason for name in missing if name in by_name), "nothing to compare with")
    return "matched", ", ".join(by_name[name].number for name in compared)[:500]


def result_table(entries: Sequence[Entry]) -> Table:
    """One line per entry, with the reason beside its status."""
    table = Table("", "", "status", "seconds", "memory", "what was found", title="verification")
    for entry in entries:
        memory = format_bytes(entry.peak_memory) if entry.peak_memory else "-"
        status = f"[{COLORS[entry.status]}]{entry.status}[/]"
        reason = entry.reason.replace("[", "\\[")
        table.add_row(entry.kind, entry.name.replace("[", "\\["), status, f"{entry.seconds:.1f}", memory, reason)
    return table


def count_statuses(entries: Sequence[Entry]) -> str:
    """A line such as "20 matched, 41 runs, 0 failed, 6 not tried"."""
    counts = {status: sum(entry.status == status for entry in entries) for status in COLORS}
    return ", ".join(f"{count} {status}" for status, count in counts.items())
