"""Read the files of a run directory. Missing or damaged files are skipped."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import CheckpointError, ConfigError
from ..core.output_paths import SOURCE_FILE
from ..core.safe_files import MAX_YAML_BYTES, parse_yaml_mapping, read_json_object, read_json_rows, read_text

if TYPE_CHECKING:
    from ..training.drift_statistics import GuardMeasurement

Row = Mapping[str, Any]
Box = tuple[int, int, int, int]  # left, top, right, bottom
Curve = list[tuple[int, float]]  # steps and values
EVALUATION_FOLDERS = ("eval", "evaluations")
VERDICTS = ("strict", "correct")  # scores of a sample that are 1 if it is right and 0 if it is wrong


@dataclass(frozen=True)
class SampleGrid:
    """The samples of one step: an image or video file, and the box of each sample in it."""

    step: int
    path: Path
    prompts: tuple[str, ...]
    scores: Mapping[str, float]  # mean scores by reward
    frames: int
    sample_size: tuple[int, int]  # width and height of a sample
    boxes: tuple[Box, ...]
    source_boxes: tuple[tuple[Box, ...], ...] = ()  # of the images that each prompt is about; empty if there are none


@dataclass(frozen=True)
class EvaluatedSample:
    """A sample of an evaluation with the verdict of its scorer."""

    prompt: str
    path: Path
    is_right: bool | None  # None if the benchmark has no verdict
    reasons: str  # why it is wrong
    source: Path | None = None  # the image that the prompt is about


@dataclass(frozen=True)
class RunRecord:
    """Everything a run directory contains."""

    name: str
    directory: Path
    rows: tuple[Row, ...]  # of metrics.jsonl, in order
    sample_grids: tuple[SampleGrid, ...]
    evaluations: Mapping[str, Row]  # reports by name
    config: Row
    config_text: str
    environment: Row
    guard_measurements: tuple[GuardMeasurement, ...] = ()  # per prompt, from the last checkpoint
    reconstruction: Row = field(default_factory=dict)  # final metrics of an autoencoder

    def curve(self, metric: str) -> Curve:
        return [(row["step"], float(row[metric])) for row in self.rows if _is_number(row.get(metric))]

    def metric_names(self) -> list[str]:
        """Return the names of all metrics that have a curve, in order of appearance."""
        names = dict.fromkeys(key for row in self.rows for key, value in row.items() if _is_number(value))
        hidden = ("step", "samples", "samples_per_second")
        return [name for name in names if name not in hidden and not name.startswith("time/")]

    def total(self, key: str) -> float:
        return sum(float(row[key]) for row in self.rows if _is_number(row.get(key)))

    @property
    def steps(self) -> int:
        return max((int(row["step"]) for row in self.rows), default=0)

    @property
    def held_out(self) -> tuple[str, ...]:
        """Names of the rewards with weight 0, which are measured but not trained on."""
        rewards = self.config.get("rewards")
        items = rewards.items() if isinstance(rewards, Mapping) else ()
        return tuple(name for name, reward in items if isinstance(reward, Mapping) and reward.get("weight") == 0)

    def reward_weight(self, name: str) -> float:
        rewards = self.config.get("rewards")
        reward = rewards.get(name) if isinstance(rewards, Mapping) else None
        weight = reward.get("weight") if isinstance(reward, Mapping) else None
        return float(weight) if isinstance(weight, int | float) else 1.0

    @property
    def best_checkpoint(self) -> str | None:
        """Name of the checkpoint with the highest held-out score, or None if the run did not mark one."""
        link = self.directory / "checkpoints" / "best"
        return link.resolve().name if link.exists() else None


def read_run(directory: Path) -> RunRecord:
    """Read a run directory, which must have a metrics.jsonl."""
    if not (directory / "metrics.jsonl").is_file():
        raise ConfigError(
            f"report: {directory} is not a run directory, because metrics.jsonl is missing; give the directory of "
            "a run, for example runs/demo [TM779]"
        )
    rows = tuple(row for row in read_json_rows(directory / "metrics.jsonl") if isinstance(row.get("step"), int))
    config_text = _read_config(directory / "config.yaml")
    grids = [grid for path in sorted(directory.glob("samples/step-*.json")) if (grid := read_sample_grid(path))]
    last_step = max((int(row["step"]) for row in rows), default=0)
    return RunRecord(
        name=directory.resolve().name,
        directory=directory,
        rows=rows,
        # Samples of later steps are left over from an earlier run in the same directory.
        sample_grids=tuple(grid for grid in grids if grid.step <= last_step),
        evaluations=read_evaluations(directory),
        config=parse_config(config_text),
        config_text=config_text,
        environment=_read_json(directory / "environment.json"),
        guard_measurements=tuple(each for each in _read_guard_measurements(directory) if each.step <= last_step),
        reconstruction=_read_json(directory / "reconstruction.json"),
    )


def read_evaluations(directory: Path) -> dict[str, Row]:
    """Read the reports of a run's evaluations, the oldest first."""
    paths = [path for folder in EVALUATION_FOLDERS for path in directory.glob(f"{folder}/*/report.json")]
    paths.sort(key=lambda path: (path.stat().st_mtime, path))
    reports = {path.parent.name: _read_json(path) for path in paths}
    return {name: report for name, report in reports.items() if report}


def read_evaluated_samples(record: RunRecord, evaluation: str) -> dict[tuple[int, int], EvaluatedSample]:
    """Read the samples of an evaluation by prompt number and seed, in the benchmark's order."""
    samples = {}
    for folder in (record.directory / parent / evaluation for parent in EVALUATION_FOLDERS):
        for row in read_json_rows(folder / "scores.jsonl"):
            try:
                verdict = next((row[name] for name in VERDICTS if row.get(name) in (0, 1)), None)
                reasons = "; ".join(map(str, row.get("reasons") or ()))
                if "read" in row:
                    reasons = f"read as '{row['read']}'"
                is_right = None if verdict is None else bool(verdict)
                path = folder / row["file"]
                source = path.with_name(SOURCE_FILE)
                shown = source if os.path.isfile(source) else None
                sample = EvaluatedSample(str(row["prompt"]), path, is_right, reasons, shown)
                samples[int(row["index"]), int(row["seed"])] = sample
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                continue
    return samples


def _read_config(path: Path) -> str:
    try:
        return read_text(path, MAX_YAML_BYTES, errors="replace")
    except ConfigError:
        return ""


def _read_json(path: Path) -> Row:
    try:
        return read_json_object(path)
    except ConfigError:
        return {}


def parse_config(text: str) -> Row:
    """Parse the text of a config.yaml; an empty mapping if it is damaged."""
    try:
        return parse_yaml_mapping(text, "config.yaml")
    except ConfigError:
        return {}


def _read_guard_measurements(directory: Path) -> list[GuardMeasurement]:
    # Imported here because it needs torch, which a reader of curves and scores does not.
    from ..training import checkpoint
    from ..training.drift_statistics import GuardHistory

    latest, history = checkpoint.latest_checkpoint(directory), GuardHistory()
    try:
        history.load_state_dict(checkpoint.read_state(latest).extra.get("guard", ()) if latest else ())
    except (CheckpointError, KeyError, TypeError, ValueError):
        return []
    return history.measurements


def read_sample_grid(path: Path) -> SampleGrid | None:
    """Read the description of a grid of samples; None if it is damaged or its image is missing."""
    data = _read_json(path)
    try:
        image = path.with_name(data["file"])
        prompts, boxes = tuple(map(str, data["prompts"])), tuple((a, b, c, d) for a, b, c, d in data["boxes"])
        scores = {str(name): float(score) for name, score in data["scores"].items() if _is_number(score)}
        sources = tuple(tuple((a, b, c, d) for a, b, c, d in each) for each in data.get("source_boxes", ()))
        width, height = data["size"]
        grid = SampleGrid(
            int(data["step"]), image, prompts, scores, int(data["frames"]), (width, height), boxes,
            sources if len(sources) == len(boxes) else (),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None
    return grid if os.path.isfile(image) else None  # pathlib raises an error if the name is too long


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
