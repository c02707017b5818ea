"""Checkpoints: directories that appear complete or not at all, consolidated or sharded, for any number of ranks.

Shards are plain safetensors files rather than torch.distributed.checkpoint, whose metadata is a pickle that its reader
trusts. FSDP2 shards every tensor along dimension 0, so the concatenated shards of a tensor are the tensor, and a
consolidated file is the case of one shard: one reader serves both formats, every strategy and any number of ranks.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config.schema import CheckpointConfig
from ..core.errors import explain_error
from ..core.weights import Weights
from ..models.weight_files import SCALE_SUFFIX, read_weights
from . import distributed
from .engine import Engine
from .safetensors_io import (
    CheckpointError,
    DamagedCheckpointError,
    FileChecksum,
    InMemoryTensors,
    ShardedTensorReader,
    TensorHeader,
    TensorSource,
    compute_checksum,
    load_pickled,
    open_writer,
)

__all__ = ["CheckpointError", "initialize_weights", "latest_checkpoint", "load", "save"]

FORMAT = 1
BEST = "best"  # a link to the checkpoint with the highest held-out score
CHECKPOINT_NAME = re.compile(r"step-(\d+)(\.old)?")  # .old: renamed while the same step is saved again
TensorGroups = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class CheckpointState:
    """The contents of state.json."""

    step: int
    files: dict[str, FileChecksum]
    scaler: dict[str, float] | None
    extra: dict[str, Any]


def save(
    directory: Path,
    step: int,
    engine: Engine,
    weights: Weights,
    extra: Mapping[str, Any],
    config: CheckpointConfig,
    *,
    best: bool = False,
) -> Path:
    """Write everything a resume needs into a new directory and return it. Every rank must call this.

    `extra` is written as JSON: tuples come back as lists, and keys as strings. The `best` checkpoint is never pruned.
    """
    target = checkpoint_path(directory, step)
    partial = partial_path(target)
    groups = _tensor_groups(engine, weights)
    json.dumps(dict(extra))  # fail now, on all ranks alike, if JSON cannot represent it
    _raise_on_all_ranks(engine, _create_directories(partial, groups) if engine.comm.rank == 0 else None, partial)
    checksums, error = _write_groups(partial, groups, engine, config.format)
    _raise_on_all_ranks(engine, error, partial)
    all_checksums = dict(engine.comm.gather_objects(list(checksums.items())))
    state = {
        "format": FORMAT,
        "step": step,
        "form": config.format,
        "strategy": engine.config.strategy,
        "world": engine.comm.world_size,
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
        "scaler": engine.scaler.state_dict() if engine.scaler else None,
        "files": {name: asdict(checksum) for name, checksum in sorted(all_checksums.items())},
        "extra": dict(extra),
    }
    error = _publish_and_prune(partial, target, state, config.keep_last, best=best) if engine.comm.rank == 0 else None
    _raise_on_all_ranks(engine, error, partial)
    return target


def _tensor_groups(engine: Engine, weights: Weights) -> TensorGroups:
    """Return every tensor of a checkpoint by the file it is written to."""
    snapshots = {f"snapshots/{name}": dict(tensors) for name, tensors in weights.snapshot_tensors().items()}
    return {"weights": dict(weights.trainable()), **snapshots, "optimizer": engine.optimizer.state_dict()}


def _create_directories(partial: Path, groups: TensorGroups) -> OSError | None:
    try:
        remove_partial(partial.parent)
        for group in groups:
            (partial / group).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error
    return None


def _publish_and_prune(
    partial: Path, target: Path, state: Mapping[str, Any], keep_last: int, *, best: bool
) -> OSError | None:
    try:
        publish_checkpoint(partial, target, state)
        if best:
            link_best(target)
        prune_checkpoints(target, keep_last)
    except OSError as error:
        return error
    return None


def _raise_on_all_ranks(engine: Engine, error: OSError | None, partial: Path) -> None:
    """Raise on all ranks if one failed, and remove the partial checkpoint. Older checkpoints are not touched."""
    messages = engine.comm.gather_objects([] if error is None else [_error_message(error, partial)])
    if not messages:
        return
    if engine.comm.rank == 0:
        remove_directory(partial)
    raise CheckpointError(messages[0])


def _error_message(error: OSError, partial: Path) -> str:
    cause = explain_error(error) or f"{error.filename or partial} cannot be written ({error.strerror or error})"
    return f"no checkpoint was saved, but older ones are unchanged: {cause} [TM828]"


def _write_groups(
    partial: Path, groups: TensorGroups, engine: Engine, file_format: str
) -> tuple[dict[str, FileChecksum], OSError | None]:
    """Write this rank's files; return their checksums, and the error if one could not be written."""
    checksums: dict[str, FileChecksum] = {}
    failure: OSError | None = None
    index, count, saves_shard = engine.shard_info
    for group, tensors in groups.items():
        if file_format == "consolidated":
            name, values = f"{group}.safetensors", (distributed.full_tensor(x) for x in tensors.values())
            headers = {key: TensorHeader(x.dtype, tuple(x.shape)) for key, x in tensors.items()}
            writes = engine.comm.rank == 0
        else:
            local = {
                key: distributed.local_shard(x) for key, x in tensors.items() if index == 0 or distributed.is_sharded(x)
            }
            name, values = f"{group}/{index:05d}-of-{count:05d}.safetensors", (x for x in local.values())
            headers = {key: TensorHeader(x.dtype, tuple(x.shape)) for key, x in local.items()}
            writes = saves_shard
        try:
            if checksum := _write_file(partial / name, headers, values, writes=writes and failure is None):
                checksums[name] = checksum
        except OSError as error:
            failure = error
    return checksums, failure


def _write_file(
    path: Path, headers: Mapping[str, TensorHeader], values: Iterator[Tensor], *, writes: bool
) -> FileChecksum | None:
    try:
        if not writes:
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_writer(path, headers) as file:
            for value in values:
                file.add(value)
        return file.checksum()
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        # Gathering is a collective: every rank must consume all values, also if it writes nothing or its disk is full.
        for _ in values:
            pass


def load(path: Path, engine: Engine, weights: Weights) -> dict[str, Any]:
    """Restore weights, snapshots, optimizer and loss scale in place, and return `extra`. Every rank must call this."""
    extra: dict[str, Any] = {}
    problem: str | None = None
    try:
        extra = _restore(path, engine, weights)
    except DamagedCheckpointError as error:
        problem = f"{error}; {suggest_fallback(path)} [TM841]"
    except CheckpointError as error:
        problem = str(error)
    problems = engine.comm.gather_objects([problem] if problem else [])
    if problems:
        raise CheckpointError(problems[0])
    return extra


def _restore(path: Path, engine: Engine, weights: Weights) -> dict[str, Any]:
    state = read_state(path)
    verify_files(path, state, engine.comm.rank, engine.comm.world_size)
    groups = _tensor_groups(engine, weights)
    sources = {group: ShardedTensorReader(group_files(path, state, group)) for group in groups}
    for group, tensors in groups.items():
        _copy_tensors(tensors, sources[group], f"{path}/{group}")
    if engine.scaler and state.scaler:
        engine.scaler.load_state_dict(state.scaler)
    return state.extra


def initialize_weights(source: Path | Mapping[str, Tensor], weights: Weights, group: str = "weights") -> None:
    """Copy the trained weights (or another group) of a checkpoint or file into `weights` and all its snapshots.

    The source may also be the tensors themselves, by the names of the network.
    """
    tensors = _open_source(source, group) if isinstance(source, Path) else InMemoryTensors(dict(source))
    origin = str(source) if isinstance(source, Path) else "the exported folder"
    _copy_tensors(dict(weights.trainable()), tensors, origin, set(weights.net.state_dict()))
    for name in weights.snapshot_tensors():
        weights.update_snapshot(name)


def _open_source(path: Path, group: str) -> TensorSource:
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist; give a checkpoint directory, or a .safetensors or .pt file [TM254]"
        )
    if path.is_dir():
        directory = latest_checkpoint(path) or path
        state = read_state(directory)
        verify_files(directory, state, 0, 1)
        return ShardedTensorReader(group_files(directory, state, group))
    if path.suffix == ".safetensors":
        reader = ShardedTensorReader([path])
        is_quantized = any(key.endswith(SCALE_SUFFIX) for key in reader.shapes)  # `tastemaker export --bits 8`
        return InMemoryTensors(read_weights(path)[0]) if is_quantized else reader
    if path.suffix in (".pt", ".pth", ".bin"):
        return load_pickled(path)
    raise CheckpointError(
        f"{path} ends in '{path.suffix}'; give a directory, or a .safetensors, .pt, .pth or .bin file [TM255]"
    )


@torch.no_grad()
def _copy_tensors(
    tensors: Mapping[str, Tensor], source: TensorSource, origin: str, ignored: set[str] | None = None
) -> None:
    """Copy tensors of the same names and shapes in place. The source may hold more only if they are `ignored`."""
    have, want = source.shapes, {key: tuple(x.shape) for key, x in tensors.items()}
    unknown = [key for key in have if key not in want and key not in (ignored or ())]
    missing = [key for key in want if key not in have]
    if missing or unknown:
        raise CheckpointError(
            f"{origin} does not match this run: missing {_format_keys(missing)}, unexpected "
            f"{_format_keys(unknown)}; use the model and tuning of the checkpoint [TM256]"
        )
    for key, shape in want.items():
        if have[key] != shape:
            raise CheckpointError(
                f"{origin} does not match this run: '{key}' has shape {list(have[key])}, expected {list(shape)}; "
                "use the model and tuning of the checkpoint [TM257]"
            )
    for key, x in tensors.items():
        shard = distributed.local_shard(x)
        if shard.numel():
            shard.copy_(source.read(key, distributed.shard_offset(x), len(shard) if shard.ndim else 1))


def _format_keys(keys: list[str]) -> str:
    shown = ", ".join(f"'{key}'" for key in keys[:3])
    return f"{shown} and {len(keys) - 3} more" if len(keys) > 3 else shown or "nothing"


def checkpoint_path(directory: Path, step: int) -> Path:
    """Return the checkpoint directory of a step in the directory of a run."""
    return directory / "checkpoints" / f"step-{step:06d}"


def partial_path(target: Path) -> Path:
    """Return the directory that a checkpoint is written to before it gets its name."""
    return target.with_name(f"{target.name}.partial")


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    matches = [(match, path) for path in folder.glob("step-*") if (match := CHECKPOINT_NAME.fullmatch(path.name))]
    return [path for match, path in sorted(matches, key=lambda pair: (int(pair[0][1]), pair[0][2] is None))]


def latest_checkpoint(directory: Path) -> Path | None:
    """Return the newest complete checkpoint in the directory of a run."""
    checkpoints = list_checkpoints(directory / "checkpoints")
    return checkpoints[-1] if checkpoints else None


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


def publish_checkpoint(partial: Path, target: Path, state: Mapping[str, Any]) -> None:
    """Write state.json, sync everything to disk, and rename the directory to its final name."""
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


def prune_checkpoints(target: Path, keep_last: int) -> None:
    """Delete all but the newest `keep_last` checkpoints, `target` and the best one; 0 keeps all."""
    best = target.with_name(BEST).resolve().name
    others = [path for path in list_checkpoints(target.parent) if path != target and path.name != best]
    for path in others[: max(0, len(others) - keep_last + 1)] if keep_last else []:
        # Renamed first, so that a half-deleted checkpoint never looks complete.
        path.rename(partial_path(path))
        remove_directory(partial_path(path))


def read_state(path: Path) -> CheckpointState:
    """Read the state.json of a checkpoint."""
    file = path / "state.json"
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a checkpoint directory; give a directory such as checkpoints/step-000100 of a run [TM258]"
        )
    try:
        state = json.loads(file.read_text())
        if state["format"] != FORMAT:
            raise CheckpointError(
                f"{file} has format {state['format']}, but this version reads format {FORMAT}; use the version of "
                "tastemaker that wrote it [TM259]"
            )
        checksums = {name: FileChecksum(int(x["bytes"]), int(x["crc"])) for name, x in state["files"].items()}
        return CheckpointState(int(state["step"]), checksums, state["scaler"], dict(state["extra"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(
            f"{file} is missing or damaged ({type(error).__name__}: {error}) [TM260]"
        ) from error


def verify_files(path: Path, state: CheckpointState, rank: int, world_size: int) -> None:
    """Refuse a checkpoint with a missing, truncated or changed file; each rank reads a share of the files."""
    for number, (name, expected) in enumerate(state.files.items()):
        file = path / name
        if not file.is_file():
            raise DamagedCheckpointError(f"{file} is missing [TM261]")
        if (size := file.stat().st_size) != expected.bytes:
            raise DamagedCheckpointError(
                f"{file} has {size} bytes instead of {expected.bytes}, so it is truncated or damaged [TM262]"
            )
        if number % world_size == rank and compute_checksum(file) != expected:
            raise DamagedCheckpointError(
                f"{file} has another checksum than when it was saved, so it is damaged [TM263]"
            )


def group_files(path: Path, state: CheckpointState, group: str) -> list[Path]:
    """Return the files of a group of tensors, in the order of its shards."""
    consolidated, folder = f"{group}.safetensors", f"{group}/"
    files = [path / name for name in sorted(state.files) if name == consolidated or name.startswith(folder)]
    if not files:
        raise CheckpointError(
            f"{path} does not contain '{group}', which this run needs; resume with the configuration of the "
            "checkpoint, or start from its weights only (--init-from) [TM264]"
        )
    return files


def suggest_fallback(path: Path) -> str:
    """Suggest what to resume from instead of a damaged checkpoint."""
    older = [
        each for each in list_checkpoints(path.parent) if CHECKPOINT_NAME.fullmatch(path.name) and each.name < path.name
    ]
    if older:
        return f"resume from the older checkpoint {older[-1]} (--resume), or delete {path.name}"
    return f"no older checkpoint is in this folder, so restore {path.name} from a copy, or delete it and start over"
