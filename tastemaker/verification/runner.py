"""Verify several models and rewards, one after another: what their names mean, processes of their own, and resuming."""

from __future__ import annotations

import gc
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..config.dump import dataclass_to_dict, registered_name
from ..config.load import YAML_SUFFIXES, list_trainable_recipes, load_any_config
from ..config.registries import MODELS, REWARDS
from ..config.schema import RunConfig
from ..core.cards import WeightsSource
from ..core.errors import explain_error
from ..core.registry import IMPORTED_MODULES, ConfigError, import_modules, subprocess_path, suggest_name
from ..core.safe_files import read_json
from ..training.precision import choose_placement
from . import models, rewards
from .local_weights import missing_sources
from .report import (
    NEEDS_DOWNLOAD,
    Check,
    Entry,
    Kind,
    Settings,
    Status,
    combine_status,
    is_current,
    read_report,
    write_report,
)

LIBRARIES = ("tastemaker", "torch", "diffusers", "transformers")


@dataclass(frozen=True)
class Task:
    """A model or reward to verify."""

    kind: Kind
    name: str  # of a part, a recipe or a reward; of a reward with settings, these as JSON


def find_tasks(names: Sequence[str], *, everything: bool) -> list[Task]:
    """What the names on the command line mean: models, rewards, and recipes, which are a model and its rewards."""
    tasks = [task for name in names for task in _tasks_of(name)]
    if everything:
        tasks += [Task("model", name) for name in models.list_models()]
        tasks += [Task("reward", name) for name in rewards.list_rewards()]
    if not tasks:
        raise ConfigError("verify: nothing to verify; name models, rewards or recipes, or give --all [TM2254]")
    return list(dict.fromkeys(tasks))


def _tasks_of(name: str) -> list[Task]:
    part = name.removeprefix("models/")
    if part in models.list_models():
        return [Task("model", part)]
    if name in MODELS:
        return [Task("model", models.default_part(name))]
    if name in REWARDS or name.startswith("{"):
        return [Task("reward", name)]
    if name in list_trainable_recipes() or name.endswith(YAML_SUFFIXES):
        config = load_any_config(name)
        if not isinstance(config, RunConfig):
            raise ConfigError(
                f"verify: the recipe '{name:.60}' trains no generator; give one that does, or a model or reward "
                "[TM2255]"
            )
        return [Task("model", name), *(Task("reward", _reward_name(each.spec)) for each in config.rewards.values())]
    known = [*models.list_models(), *MODELS, *REWARDS, *list_trainable_recipes()]
    raise ConfigError(f"verify: '{name:.60}' is not a model, reward or recipe{suggest_name(name, known)} [TM2256]")


def _reward_name(spec: Any) -> str:
    """The name of a reward, or its settings as JSON if they are not the default ones."""
    settings = dataclass_to_dict(spec, terse=True)
    name = registered_name(type(spec))
    return json.dumps({"type": name, **settings}) if settings else name


def find_versions() -> dict[str, str]:
    """Versions of Python, of this package and of the libraries that it is compared with."""
    from .. import __version__

    found = {name: version(name) for name in LIBRARIES if name != "tastemaker"}
    return {"python": platform.python_version(), "tastemaker": __version__, **found}


def run_verification(
    tasks: Sequence[Task], settings: Settings, out: Path, *, isolate: bool
) -> Iterator[tuple[Entry, bool]]:
    """Verify the tasks, write the file after each, and yield each entry and whether it was known before."""
    versions = find_versions()
    entries = {(entry.kind, entry.name): entry for entry in (read_report(out).entries if out.is_file() else ())}
    verify = verify_in_process if isolate else verify_task
    for task in tasks:
        known = entries.get((task.kind, task.name))
        if known is not None and is_current(known, settings, versions):
            yield known, True
            continue
        entry = verify(task, settings)
        entries[task.kind, task.name] = entry
        write_report(out, list(entries.values()))
        yield entry, False


def verify_task(task: Task, settings: Settings) -> Entry:
    """Verify one model or reward in this process. No error of what is verified leaves this function."""
    started, placement = time.perf_counter(), choose_placement(settings.device, settings.precision)
    entry = Entry(
        name=task.name,
        kind=task.kind,
        status="not tried",
        tiny=settings.tiny,
        steps=settings.steps,
        sampling_steps=settings.sampling_steps,
        device=describe_device(placement.device),
        dtype=settings.precision,
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        versions=find_versions(),
    )
    reset_peak_memory(placement.device)
    try:
        with warnings.catch_warnings(action="ignore"):  # about settings that a user would not have chosen
            entry = _verify(task, settings, entry)
    except Exception as error:  # whatever a library raises is a result
        message = explain_error(error) or f"{type(error).__name__}: {error}"
        status: Status = "not tried" if NEEDS_DOWNLOAD in message else "failed"
        entry = replace(entry, status=status, reason=message[:500])
    finally:
        memory = peak_memory(placement.device)
        gc.collect()
        if placement.device.type == "cuda":
            torch.cuda.empty_cache()
    return replace(entry, seconds=round(time.perf_counter() - started, 2), peak_memory=memory)


def _verify(task: Task, settings: Settings, entry: Entry) -> Entry:
    """The entry with its checks, or with the reason why it was not tried."""
    sources: Sequence[WeightsSource] = ()
    if not settings.tiny:
        is_model = task.kind == "model"
        if not is_model and (brings := rewards.needs_from_user(task.name)):
            return replace(entry, reason=f"needs {brings}; give a recipe or '{{type: ...}}' that names it")
        sources = (models.model_sources if is_model else rewards.reward_sources)(task.name, settings)
        if missing := missing_sources(sources):
            part = f"models/{task.name}" if is_model and task.name in models.list_models() else task.name
            files = ", ".join(f"{source} ({source.size})" for source in missing)
            command = f"`tastemaker download {shlex.quote(part)}`"
            return replace(entry, reason=f"missing on this machine: {files}; run {command}")
    verify: Callable[[str, Settings], Iterator[Check]]
    verify = models.verify_model if task.kind == "model" else rewards.verify_reward
    checks = tuple(verify(task.name, settings))
    status, reason = combine_status(
        checks, models.COMPARED if task.kind == "model" else rewards.compared_checks(checks)
    )
    return replace(entry, status=status, reason=reason, checks=checks, weights=tuple(map(str, sources)))


def describe_device(device: torch.device) -> str:
    """The name of a GPU, or the kind of device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def reset_peak_memory(device: torch.device) -> None:
    """Begin to measure peak memory: of the GPU, or of this process where Linux can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_memory(device: torch.device) -> int:
    """Bytes at the peak since `reset_peak_memory`; 0 if this system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


# A process for each task, so that its memory is freed and a crash ends nothing else


def verify_in_process(task: Task, settings: Settings) -> Entry:
    """Verify one model or reward in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out, request = Path(folder) / "result.json", Path(folder) / "task.json"
        request.write_text(json.dumps({"task": asdict(task), "settings": asdict(settings)}), encoding="utf-8")
        command = [sys.executable, "-P", "-m", __name__, str(request), str(out), *IMPORTED_MODULES]
        done = subprocess.run(
            command, env=_environment(), stderr=subprocess.PIPE, text=True, errors="replace", check=False
        )
        if out.is_file():
            return read_report(out).entries[0]
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    reason = f"its process ended with code {done.returncode}: {last:.300}"
    return Entry(
        task.name, task.kind, "failed", reason, tiny=settings.tiny, steps=settings.steps, versions=find_versions()
    )


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": subprocess_path()}


def main(arguments: Sequence[str]) -> None:
    """Verify the task in a file and write its entry."""
    request, out, *modules = arguments
    import_modules(modules)
    data = read_json(Path(request))
    write_report(Path(out), [verify_task(Task(**data["task"]), Settings(**data["settings"]))])


if __name__ == "__main__":
    main(sys.argv[1:])
