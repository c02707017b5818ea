"""A run's directory: its configuration is written once, and going on under another is refused."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml

from .. import __version__
from ..config.dump import config_to_yaml
from ..config.schema import AnyConfig
from ..core import output_paths
from ..core.registry import ConfigError
from . import checkpoint
from .device_precision import read_cpu
from .engine import Engine

C = TypeVar("C", bound=AnyConfig)
CONFIG_FILE = "config.yaml"
RECIPE_FILE = "recipe.yaml"  # that an exported folder can be generated from by its name alone
IGNORED_KEYS = ("output", "name", "data.skip")  # say where a run lies and what it bears, not what it is
FEW = 4  # settings worth naming one by one
LONGEST = 60  # characters of a setting worth repeating


def flatten_settings(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Settings by dotted name."""
    settings: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{above}{key}"
        settings.update(flatten_settings(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value})
    return settings


def diff_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """What differs, by dotted name: "old -> new"."""
    was, now = flatten_settings(old), flatten_settings(new)
    names = [name for name in sorted(was | now) if name not in IGNORED_KEYS and was.get(name) != now.get(name)]
    return {name: f"{_brief(was.get(name, 'absent'))} -> {_brief(now.get(name, 'absent'))}" for name in names}


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."  # or all prompts of a run would be told


def claim_run_directory(config: AnyConfig, directory: Path, allowed: Sequence[str]) -> Path | None:
    """Claim a directory for a configuration, and find the checkpoint to go on from if there is one."""
    output_paths.check_output_directory(directory, "output")
    refused = {
        name: change for name, change in diff_run_config(config, directory).items() if not _permitted(name, allowed)
    }
    if refused:
        told = "; ".join(f"{name}: {change}" for name, change in refused.items())
        way = f"add {suggest_allow_change(list(refused))}, choose another name, or remove the directory"
        raise ConfigError(f"{directory} holds a run with another configuration ({told}); {way}")
    return checkpoint.latest(directory)


def keep_precision(config: C, directory: Path, resume: Path | None = None) -> C:
    """Replace `engine.precision: auto` by what the run that is resumed computed in, on whatever device that was.

    The run is the one in `directory`, if it has a checkpoint, or the one that the checkpoint `resume` belongs to.
    """
    if config.engine.precision != "auto":
        return config
    owners = [resume.resolve().parents[1]] if resume is not None else []
    owners += [directory] if checkpoint.latest(directory) is not None else []
    for owner in owners:
        if (owner / CONFIG_FILE).is_file():
            written = yaml.safe_load((owner / CONFIG_FILE).read_text(encoding="utf-8"))
            kept = flatten_settings(written if isinstance(written, Mapping) else {}).get("engine.precision", "auto")
            return replace(config, engine=replace(config.engine, precision=kept))
    return config


def diff_run_config(config: AnyConfig, directory: Path) -> dict[str, str]:
    """Settings that differ from those of the run in a directory, as "old -> new"; none if it has no checkpoint."""
    written = directory / CONFIG_FILE
    if not written.exists() or checkpoint.latest(directory) is None:
        return {}
    kept = config_to_yaml(keep_precision(config, directory))
    return diff_settings(yaml.safe_load(written.read_text(encoding="utf-8")), yaml.safe_load(kept))


def suggest_allow_change(names: Sequence[str]) -> str:
    """What to add to a command so that these may change; of many, the sections they lie in."""
    keys = names if len(names) <= FEW else sorted({name.partition(".")[0] for name in names})
    return " ".join(f"--allow-change {key}" for key in keys)


def _permitted(name: str, allowed: Sequence[str]) -> bool:
    return any(name == key or name.startswith(f"{key}.") for key in allowed)


def write_run_config(config: AnyConfig, directory: Path) -> None:
    """Write the resolved configuration; the last word if a change was allowed."""
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / f"{CONFIG_FILE}.partial"
    partial.write_text(config_to_yaml(config), encoding="utf-8")
    partial.replace(directory / CONFIG_FILE)


def write_environment(engine: Engine, directory: Path) -> None:
    """Write what the run runs on, which its configuration leaves open, and why it computes in its precision."""
    device = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else engine.device.type
    path = directory / "environment.json"
    facts = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "tastemaker": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "system": platform.platform(),
        "device": device,
        "cpu": read_cpu()[0],
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "ranks": engine.comm.world,
        "precision": engine.config.precision,
        "precision_reason": _precision_reason(engine, path),
    }
    path.write_text(json.dumps(facts, indent=1), encoding="utf-8")


def _precision_reason(engine: Engine, path: Path) -> str:
    """Why the run computes in its precision; a resumed run keeps the reason of its first start."""
    chosen = engine.precision_choice
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        kept = before["precision"] == chosen.precision and str(before["precision_reason"]).startswith("auto")
        return str(before["precision_reason"]) if kept else chosen.reason
    except (OSError, ValueError, KeyError, TypeError):
        return chosen.reason
