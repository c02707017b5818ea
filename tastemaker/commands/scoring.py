"""`tastemaker score`: any rewards over a folder of pictures and clips."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..config.build import judges
from ..config.run import RewardConfig
from ..config.validate import build as validated
from ..pictures import read_picture
from ..registry import ConfigError
from ..reward import RewardSpec, Rubric
from ..types import Facts, Placement

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".mp4"}


def asked(texts: Sequence[str]) -> dict[str, RewardConfig]:
    """Rewards by name, or as a mapping in YAML: jpeg, or {type: jpeg, quality: 80}."""
    rewards: dict[str, RewardConfig] = {}
    for text in texts:
        try:
            data = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"--reward {text!r} is not a name or a mapping; expected jpeg or '{{type: jpeg}}'"
            ) from error
        data = {"type": data} if isinstance(data, str) else data
        spec = validated(RewardSpec, data, "--reward")
        rewards[str(data["type"]) if str(data["type"]) not in rewards else f"{data['type']}-{len(rewards)}"] = (
            RewardConfig(spec)
        )
    return rewards


def pictures(path: Path) -> list[tuple[Path, str, Facts]]:
    """Files with their prompts: of metadata.jsonl beside them, or of their names."""
    files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.suffix.lower() in SUFFIXES)
    if not path.exists() or not files:
        raise ConfigError(f"{path}: no pictures found; expected a file or folder with {', '.join(sorted(SUFFIXES))}")
    known: dict[str, dict[str, Any]] = {}
    record = (path if path.is_dir() else path.parent) / "metadata.jsonl"
    if record.is_file():
        for number, line in enumerate(record.read_text(encoding="utf-8").splitlines(), 1):
            try:
                row = json.loads(line)
                known[row["file"]] = row
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{record}, line {number}: expected a JSON object with 'file' and 'prompt'"
                ) from error
        files = [f for f in files if f.name in known]
    rows: list[tuple[Path, str, Facts]] = []
    for file in files:
        fact = known.get(file.name, {"prompt": file.stem.replace("_", " ").replace("-", " ")})
        rows.append((file, str(fact.get("prompt", "")), fact))
    return rows


def score(path: Path, texts: Sequence[str], out: Path | None, console: Console) -> Path:
    """Write one line a picture and show the means."""
    rubric = judges(asked(texts), Placement())
    found: dict[str, list[float]] = {name: [] for name in rubric.rewards}
    target = out or (path if path.is_dir() else path.parent) / "scores.jsonl"
    rows = pictures(path)
    with target.open("w", encoding="utf-8") as record:
        for file, prompt, facts in track(rows, "scoring", console=console):
            values = one(rubric, file, prompt, facts)
            record.write(json.dumps({"file": str(file), "prompt": prompt, **values}) + "\n")
            for name, value in values.items():
                found[name].append(value)
    console.print(table(found))
    console.print(f"{len(rows)} pictures scored, line by line in {target}")
    return target


@torch.no_grad()
def one(rubric: Rubric, file: Path, prompt: str, facts: Facts) -> dict[str, float]:
    scores = rubric.score(read_picture(file)[None], [prompt], [facts])
    return {name: part.item() for name, part in scores.parts.items()}


def table(found: dict[str, list[float]]) -> Table:
    shown = Table("reward", "mean", "least", "most")
    for name, values in found.items():
        shown.add_row(name, f"{sum(values) / len(values):.4g}", f"{min(values):.4g}", f"{max(values):.4g}")
    return shown
