"""The directory side of checkpoints: names, what is complete, publishing by rename, pruning."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .safetensors_io import CheckpointError, DamagedCheckpointError, FileChecksum, compute_checksum

FORMAT = 1
BEST = "best"  # a link to the checkpoint with the highest held-out score
CHECKPOINT_NAME = re.compile(r"step-(\d+)(\.old)?")  # .old: set aside while the step was saved anew


def checkpoint_path(directory: Path, step: int) -> Path:
    return directory / "checkpoints" / f"step-{step:06d}"


def partial_path(target: Path) -> Path:
    return target.with_name(f"{target.name}.partial")


def shard_name(group: str, index: int, count: int) -> str:
    return f"{group}/{index:05d}-of-{count:05d}.safetensors"


def library_versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": str(torch.__version__)}


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first; a directory bears such a name only once all of it is on the disk."""
    found = [(match, path) for path in folder.glob("step-*") if (match := CHECKPOINT_NAME.fullmatch(path.name))]
    return [path for match, path in sorted(found, key=lambda pair: (int(pair[0][1]), pair[0][2] is None))]


def latest(directory: Path) -> Path | None:
    """The newest complete checkpoint of a run's directory."""
    found = list_checkpoints(directory / "checkpoints")
    return found[-1] if found else None


def remove_partial(folder: Path) -> None:
    """Remove what interrupted saves left behind."""
    for path in folder.glob("step-*.partial"):
        remove(path)
    for path in folder.glob("step-*.old"):
        if path.with_suffix("").exists():
            remove(path)


def remove(path: Path) -> None:
    """Delete a directory; one that cannot be deleted is in nobody's way."""
    shutil.rmtree(path, ignore_errors=True)


def publish(partial: Path, target: Path, state: Mapping[str, Any]) -> None:
    """Let a finished directory appear under its name."""
    with (partial / "state.json").open("w") as file:
        json.dump(state, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    for folder, _, _ in os.walk(partial):
        _sync(Path(folder))
    old = target.with_name(f"{target.name}.old")
    if target.exists():
        target.rename(old)
    partial.rename(target)
    _sync(target.parent)
    remove(old)


def _sync(folder: Path) -> None:
    # The names in a directory are data of the directory, and lost with the power unless it is synced too.
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def link_best(target: Path) -> None:
    """Let `best` beside a checkpoint lead to it."""
    link, new = target.with_name(BEST), partial_path(target.with_name(BEST))
    new.unlink(missing_ok=True)
    new.symlink_to(target.name)  # relative, so that a run's directory can be moved
    new.replace(link)


def prune(target: Path, keep: int) -> None:
    """Keep the newest so many checkpoints, and always the one just written and the best; 0 keeps all."""
    best = target.with_name(BEST).resolve().name
    found = [path for path in list_checkpoints(target.parent) if path != target and path.name != best]
    for path in found[: max(0, len(found) - keep + 1)] if keep else []:
        # Renamed first, so that a half-deleted one never looks complete.
        path.rename(partial_path(path))
        remove(partial_path(path))


@dataclass(frozen=True)
class CheckpointState:
    """What a checkpoint says of itself."""

    step: int
    files: dict[str, FileChecksum]
    scaler: dict[str, float] | None
    extra: dict[str, Any]


def read_state(path: Path) -> CheckpointState:
    """The state of a checkpoint."""
    file = path / "state.json"
    if not path.is_dir():
        raise CheckpointError(f"{path} is no checkpoint directory")
    try:
        state = json.loads(file.read_text())
        if state["format"] != FORMAT:
            raise CheckpointError(f"{file} is of format {state['format']}, but this version reads format {FORMAT}")
        seals = {name: FileChecksum(int(noted["bytes"]), int(noted["crc"])) for name, noted in state["files"].items()}
        return CheckpointState(int(state["step"]), seals, state["scaler"], dict(state["extra"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{file} is missing or damaged ({type(error).__name__}: {error})") from error


def verify(path: Path, state: CheckpointState, rank: int, world: int) -> None:
    """Refuse a checkpoint with a file that is missing, short or changed; ranks share the reading."""
    for number, (name, wanted) in enumerate(state.files.items()):
        file = path / name
        if not file.is_file():
            raise DamagedCheckpointError(f"{file} is missing")
        if (size := file.stat().st_size) != wanted.bytes:
            raise DamagedCheckpointError(
                f"{file} has {size} bytes instead of {wanted.bytes}, so it is truncated or damaged"
            )
        if number % world == rank and compute_checksum(file) != wanted:
            raise DamagedCheckpointError(f"{file} has other contents than were saved, so it is damaged")


def group_files(path: Path, state: CheckpointState, group: str) -> list[Path]:
    """The files a group of tensors lies in, in the order of its shards."""
    whole, folder = f"{group}.safetensors", f"{group}/"
    found = [path / name for name in sorted(state.files) if name == whole or name.startswith(folder)]
    if not found:
        raise CheckpointError(
            f"{path} holds no '{group}', which this run needs; go on with the configuration it was saved with, "
            "or start from its weights alone (--init-from)"
        )
    return found


def suggest_fallback(path: Path) -> str:
    """Suggest what to resume from instead."""
    older = [
        each for each in list_checkpoints(path.parent) if CHECKPOINT_NAME.fullmatch(path.name) and each.name < path.name
    ]
    if older:
        return f"resume from the older checkpoint {older[-1]} (--resume), or delete {path.name}"
    return f"there is no older checkpoint beside it: delete {path.name} and start anew, or restore it from a copy"
