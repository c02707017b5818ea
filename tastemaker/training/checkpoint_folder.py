"""The folder of a run's checkpoints: how one appears there at once, which are kept, and which are set aside."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.checkpoint_files import (
    ASIDE_SUFFIX,
    STATE_FILE,
    FileChecksum,
    checkpoint_step,
    list_checkpoints,
    write_manifest,
    write_synced,
)
from ..core.errors import CheckpointError

BEST = "best"  # a link to the checkpoint with the highest held-out score


def checkpoint_path(directory: Path, step: int) -> Path:
    """Return the checkpoint directory of a step in the directory of a run."""
    return directory / "checkpoints" / f"step-{step:06d}"


def partial_path(target: Path) -> Path:
    """Return the directory that a checkpoint is written to before it gets its name."""
    return target.with_name(f"{target.name}.partial")


def remove_partial(folder: Path) -> None:
    """Remove what interrupted saves left behind."""
    for path in folder.glob("step-*.partial"):
        remove_directory(path)
    for path in folder.glob("step-*.old"):
        if path.with_suffix("").exists():
            remove_directory(path)


def remove_directory(path: Path) -> None:
    """Delete a directory if possible; a leftover is ignored by readers."""
    shutil.rmtree(path, ignore_errors=True)


def publish_checkpoint(
    partial: Path, target: Path, state: Mapping[str, Any], files: Mapping[str, FileChecksum]
) -> None:
    """Write state.json, seal all files, sync everything to disk, and rename the directory to its final name."""
    checksum = write_synced(partial / STATE_FILE, json.dumps(state, indent=1).encode())
    write_manifest(partial, int(state["step"]), {**files, STATE_FILE: checksum})
    for folder, _, _ in os.walk(partial):
        _sync(Path(folder))
    old = target.with_name(f"{target.name}.old")
    if target.exists():
        target.rename(old)
    partial.rename(target)
    _sync(target.parent)
    remove_directory(old)


def _sync(folder: Path) -> None:
    # File names are data of the directory, and lost with the power unless it is synced too.
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def link_best(target: Path) -> None:
    """Point the link `best` in the folder of checkpoints to a checkpoint."""
    link, new = target.with_name(BEST), partial_path(target.with_name(BEST))
    new.unlink(missing_ok=True)
    new.symlink_to(target.name)  # relative, so that the directory of the run can be moved
    new.replace(link)


def find_checkpoint(directory: Path, step: int) -> Path:
    """Return the checkpoint of a step in the directory of a run."""
    checkpoints = {checkpoint_step(path): path for path in list_checkpoints(directory / "checkpoints")}
    if step not in checkpoints:
        steps = ", ".join(map(str, checkpoints)) or "none"
        raise CheckpointError(
            f"--from-step: {directory} has no checkpoint of step {step}; choose one of its checkpoints ({steps}) "
            "[TM1118]"
        )
    return checkpoints[step]


def set_aside_newer(directory: Path, step: int, best_step: int | None = None) -> list[Path]:
    """Rename checkpoints after `step` and move samples after it, so that no command reads them; return the former.

    The newest is renamed first: interrupted, the run still has a newest checkpoint to continue from. The link `best`
    then points to the checkpoint of `best_step`, if that is left.
    """
    folder, renamed = directory / "checkpoints", []
    for path in reversed(list_checkpoints(folder)):
        if (checkpoint_step(path) or 0) > step:
            renamed.append(path.rename(_unused_name(path.with_name(path.name + ASIDE_SUFFIX))))
    if (link := folder / BEST).is_symlink() and not link.exists():
        link.unlink()
        if best_step is not None and checkpoint_path(directory, best_step).exists():
            link_best(checkpoint_path(directory, best_step))
    for path in directory.glob("samples/step-*"):
        number = path.stem.removeprefix("step-")
        if number.isdigit() and int(number) > step:
            (path.parent / "aside").mkdir(exist_ok=True)
            path.replace(path.parent / "aside" / path.name)
    return renamed


def _unused_name(path: Path) -> Path:
    candidates = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return path if not path.exists() else next(each for each in candidates if not each.exists())


def prune_checkpoints(target: Path, keep_last: int) -> None:
    """Delete all but the newest `keep_last` checkpoints, `target` and the best one; 0 keeps all."""
    best = target.with_name(BEST).resolve().name
    others = [path for path in list_checkpoints(target.parent) if path != target and path.name != best]
    for path in others[: max(0, len(others) - keep_last + 1)] if keep_last else []:
        # Renamed first, so that a half-deleted checkpoint never looks complete.
        path.rename(partial_path(path))
        remove_directory(partial_path(path))
