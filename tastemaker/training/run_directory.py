"""The directory of a run: config.yaml and environment.json. Resuming with another configuration is refused."""

from __future__ import annotations

import json
import os
import platform
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console

from .. import __version__
from ..config.dump import config_to_dict, config_to_yaml
from ..config.load import YAML_SUFFIXES
from ..config.schema import AnyConfig, AutoencoderRunConfig, PreferenceRunConfig, RunConfig
from ..config.settings_diff import IGNORED_KEYS as IGNORED_KEYS
from ..config.settings_diff import diff_settings as diff_settings
from ..config.settings_diff import flatten_settings as flatten_settings
from ..config.validate import validate_config
from ..core import output_paths
from ..core.output_paths import write_text_atomically
from ..core.registry import ConfigError
from ..core.safe_files import parse_yaml_mapping, read_json, read_yaml_mapping
from . import checkpoint
from .device_precision import read_cpu
from .engine import Engine

C = TypeVar("C", bound=AnyConfig)
CONFIG_FILE = "config.yaml"
RECIPE_FILE = "recipe.yaml"  # in exported folders, so that `tastemaker generate FOLDER` works
RESOLVED_KEYS = ("precision", "activation_memory")  # of the engine, which may be auto until the run starts
NETWORK_SECTIONS = ("model", "tuning", "autoencoder", "judge")  # that the tensors of a checkpoint depend on
MAX_NAMED_KEYS = 4  # more differing settings are summarized by their sections


def claim_run_directory(config: AnyConfig, directory: Path, allowed: Sequence[str]) -> Path | None:
    """Check that a directory can be used with a configuration, and return its latest checkpoint if it has one.

    Raises ConfigError if it holds a run whose settings differ, except in the keys or sections in `allowed`. More
    steps than before are always allowed.
    """
    output_paths.check_output_directory(directory, "output_dir")
    changes = diff_run_config(config, directory)
    if "steps" in changes and config.steps > _read_steps(directory):
        del changes["steps"]
    refused = {name: change for name, change in changes.items() if not _is_allowed(name, allowed)}
    if refused:
        listed = "; ".join(f"{name}: {change}" for name, change in refused.items())
        advice = f"add {suggest_allow_change(list(refused))}, choose another name, or remove the directory"
        raise ConfigError(f"{directory} contains a run with another configuration ({listed}); {advice} [TM291]")
    return checkpoint.latest_checkpoint(directory)


def keep_resolved_engine(config: C, directory: Path, resume: Path | None = None) -> C:
    """Replace `auto` in the engine's precision and activation memory by what the resumed run chose, on any device.

    This is the run that the checkpoint `resume` belongs to, or the one in `directory` if it has a checkpoint.
    """
    unresolved = [key for key in RESOLVED_KEYS if getattr(config.engine, key) == "auto"]
    if not unresolved:
        return config
    owners = [resume.resolve().parents[1]] if resume is not None else []
    owners += [directory] if checkpoint.latest_checkpoint(directory) is not None else []
    for owner in owners:
        if (owner / CONFIG_FILE).is_file():
            written = flatten_settings(read_yaml_mapping(owner / CONFIG_FILE))
            keys = [*unresolved, *(["checkpointed_blocks"] if "activation_memory" in unresolved else [])]
            kept = {key: written[f"engine.{key}"] for key in keys if f"engine.{key}" in written}
            return replace(config, engine=replace(config.engine, **kept))
    return config


def diff_run_config(config: AnyConfig, directory: Path) -> dict[str, str]:
    """Return the settings that differ from the run in a directory, as "old -> new"; none if it has no checkpoint.

    Settings that did not exist when the run was started have their default.
    """
    file = directory / CONFIG_FILE
    if not file.exists() or checkpoint.latest_checkpoint(directory) is None:
        return {}
    new = config_to_yaml(keep_resolved_engine(config, directory))
    old = read_yaml_mapping(file)
    with suppress(ConfigError):  # settings that exist no longer are shown as they are
        old = parse_yaml_mapping(config_to_yaml(validate_config(old)), CONFIG_FILE)
    return diff_settings(old, parse_yaml_mapping(new, CONFIG_FILE))


def find_run_checkpoint(
    config: AnyConfig, source: str, overrides: Sequence[str], console: Console | None, *, tiny: bool = False
) -> Path | None:
    """Return the newest checkpoint of a configuration's own run, for commands that use its model; None if it has none.

    Every command that takes a configuration instead of a run decides by this function which weights it uses. It prints
    the checkpoint. The weights that the configuration names come first if an override sets them, or if `source` is the
    name of a recipe, which stands for the model before training: a warning then names the run. A run with another
    network is refused; with `tiny`, for which `config` is the tiny one, it is ignored.
    """
    latest, named = checkpoint.latest_checkpoint(config.directory), find_named_weights(config)
    if latest is None or not (config.directory / CONFIG_FILE).is_file():
        return None
    keys = {override.partition("=")[0].strip() for override in overrides}
    if any(f"{section}.{part}" in keys for section in NETWORK_SECTIONS for part in ("weights", "init_weights")):
        return None
    if named and not tiny and not source.endswith(YAML_SUFFIXES):
        warnings.warn(
            f"{source:.200} uses {named:.200}, not what its run learned; for that, pass {config.directory} [TM847]",
            stacklevel=3,
        )
        return None
    changes = {
        name: change
        for name, change in diff_run_config(config, config.directory).items()
        if name.partition(".")[0] in NETWORK_SECTIONS and (tiny or not _is_allowed(name, [*keys]))
    }
    if changes and not tiny:
        listed = "; ".join(f"{name}: {change}" for name, change in changes.items())
        raise ConfigError(
            f"{source:.200}: {config.directory} holds a run with another network ({listed}); pass that directory to "
            "use it, or set another name=..."
            " [TM859]"
        )
    if changes:
        return None
    if console is not None and os.environ.get("RANK", "0") == "0":
        console.print(f"weights of {latest}", markup=False, highlight=False, soft_wrap=True)
    return latest


def find_named_weights(config: AnyConfig) -> str:
    """Return the trained weights that a configuration names, as "model.weights=..."; empty if they are random."""
    if isinstance(config, PreferenceRunConfig):
        return ""
    section = "model" if isinstance(config, RunConfig) else "autoencoder"
    if not isinstance(config, RunConfig | AutoencoderRunConfig):
        return f"judge.weights={config.judge.weights}"
    settings = config_to_dict(config)[section]
    weights = {"weights": config.model.weights if isinstance(config, RunConfig) else settings.get("weights")}
    weights |= {"init_weights": settings.get("init_weights")}
    return next((f"{section}.{key}={value}" for key, value in weights.items() if value is not None), "")


def _read_steps(directory: Path) -> int:
    """Return the number of steps of the run in a directory; a very large one if it is not written."""
    steps = read_yaml_mapping(directory / CONFIG_FILE).get("steps")
    return steps if isinstance(steps, int) else sys.maxsize


def suggest_allow_change(names: Sequence[str]) -> str:
    """Return the options that allow these settings to change; if they are many, the options for their sections."""
    keys = names if len(names) <= MAX_NAMED_KEYS else sorted({name.partition(".")[0] for name in names})
    return " ".join(f"--allow-change {key}" for key in keys)


def _is_allowed(name: str, allowed: Sequence[str]) -> bool:
    return any(name == key or name.startswith(f"{key}.") for key in allowed)


def write_run_config(config: AnyConfig, directory: Path) -> None:
    """Write the resolved configuration, with the changes that were allowed."""
    directory.mkdir(parents=True, exist_ok=True)
    write_text_atomically(directory / CONFIG_FILE, config_to_yaml(config))


def write_environment(engine: Engine, directory: Path) -> None:
    """Write versions, hardware and precision of the run to environment.json."""
    device = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else engine.device.type
    path = directory / "environment.json"
    environment = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "tastemaker": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "system": platform.platform(),
        "device": device,
        "cpu": read_cpu()[0],
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "ranks": engine.comm.world_size,
        "precision": engine.config.precision,
        "precision_reason": _precision_reason(engine, path),
    }
    path.write_text(json.dumps(environment, indent=1), encoding="utf-8")


def _precision_reason(engine: Engine, path: Path) -> str:
    """Return why the run uses its precision; a resumed run keeps the reason of its first start."""
    choice = engine.precision_choice
    try:
        previous = read_json(path)
        kept = previous["precision"] == choice.precision and str(previous["precision_reason"]).startswith("auto")
        return str(previous["precision_reason"]) if kept else choice.reason
    except (OSError, ValueError, KeyError, TypeError):
        return choice.reason
