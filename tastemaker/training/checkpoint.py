"""Checkpoints: sealed directories that appear complete or not at all, consolidated or sharded, for any number of ranks.

Shards are plain safetensors files rather than torch.distributed.checkpoint, whose metadata is a pickle that its reader
trusts. FSDP2 shards every tensor along dimension 0, so the concatenated shards of a tensor are the tensor, and a
consolidated file is the case of one shard: one reader serves both formats, every strategy and any number of ranks.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from ..config.schema import CheckpointConfig
from ..core import checkpoint_files
from ..core.checkpoint_files import (
    FORMAT,
    MAX_STATE_BYTES,
    STATE_FILE,
    FileChecksum,
    Manifest,
    SealedModel,
    explain_damage,
    latest_checkpoint,
    read_manifest,
    validate_contents,
    verify_files,
)
from ..core.errors import CheckpointError, DamagedCheckpointError, explain_error
from ..core.objective import Comm
from ..core.weights import Weights
from ..models.weight_files import SCALE_SUFFIX, read_weights
from . import distributed
from .checkpoint_folder import (
    checkpoint_path,
    link_best,
    partial_path,
    prune_checkpoints,
    publish_checkpoint,
    remove_directory,
    remove_partial,
)
from .engine import Engine
from .run_lock import check_ownership
from .safetensors_io import (
    InMemoryTensors,
    ShardedTensorReader,
    TensorHeader,
    TensorSource,
    load_pickled,
    open_writer,
)

__all__ = ["CheckpointError", "initialize_weights", "latest_checkpoint", "load", "save", "stage", "write"]

TensorGroups = dict[str, dict[str, Tensor]]
Step = Annotated[int, Field(ge=0)]


class LossScale(SealedModel):
    """The state of fp16's loss scale."""

    scale: float
    good: int
    skipped: int


class CheckpointState(SealedModel):
    """The contents of state.json."""

    format: Literal[2]
    step: Step
    form: Literal["consolidated", "sharded"]
    strategy: str
    world: Annotated[int, Field(ge=1)]
    versions: dict[str, str]
    scaler: LossScale | None
    extra: dict[str, Any]


class ExtraState(BaseModel):
    """What a run adds to state.json. Kinds of runs extend it by the keys that they need; others are allowed."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    step: Step | None = None


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
    return write(stage(directory, step, engine, weights, extra, config, best=best), engine.comm)


@dataclass(frozen=True)
class StagedFile:
    """A file that this rank takes part in writing."""

    name: str
    headers: Mapping[str, TensorHeader]
    values: Iterable[Tensor]  # in the order of the headers; collectives, if they are still on the devices
    writes: bool  # False: this rank only takes part in gathering the values


@dataclass(frozen=True)
class StagedCheckpoint:
    """What is written to a checkpoint, and where."""

    target: Path
    files: Sequence[StagedFile]
    state: Mapping[str, Any]  # of state.json
    keep_last: int
    best: bool


def stage(
    directory: Path,
    step: int,
    engine: Engine,
    weights: Weights,
    extra: Mapping[str, Any],
    config: CheckpointConfig,
    *,
    best: bool,
) -> StagedCheckpoint:
    """Return what `write` will write: the tensors as they are then, everything else as it is now."""
    state = {
        "format": FORMAT,
        "step": step,
        "form": config.format,
        "strategy": engine.config.strategy,
        "world": engine.comm.world_size,
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
        "scaler": engine.scaler.state_dict() if engine.scaler else None,
        "extra": dict(extra),
    }
    frozen = json.loads(json.dumps(state))  # fails now, on all ranks alike, if JSON cannot represent it
    files = [_stage_file(group, x, engine, config.format) for group, x in _tensor_groups(engine, weights).items()]
    return StagedCheckpoint(checkpoint_path(directory, step), files, frozen, config.keep_last, best)


def _stage_file(group: str, tensors: Mapping[str, Tensor], engine: Engine, file_format: str) -> StagedFile:
    index, count, saves_shard = engine.shard_info
    if file_format == "consolidated":
        headers = {key: TensorHeader(x.dtype, tuple(x.shape)) for key, x in tensors.items()}
        values = (distributed.full_tensor(x) for x in tensors.values())
        return StagedFile(f"{group}.safetensors", headers, values, engine.comm.rank == 0)
    local = {key: distributed.local_shard(x) for key, x in tensors.items() if index == 0 or distributed.is_sharded(x)}
    headers = {key: TensorHeader(x.dtype, tuple(x.shape)) for key, x in local.items()}
    return StagedFile(f"{group}/{index:05d}-of-{count:05d}.safetensors", headers, local.values(), saves_shard)


def write(staged: StagedCheckpoint, comm: Comm) -> Path:
    """Write a checkpoint and return its directory. Every rank must call this, with the same ranks in `comm`."""
    target, partial = staged.target, partial_path(staged.target)
    _raise_on_all_ranks(comm, _create_directories(partial, staged.files) if comm.rank == 0 else None, partial)
    checksums, error = _write_files(partial, staged.files)
    _raise_on_all_ranks(comm, error, partial)
    files, problem = dict(comm.gather_objects(list(checksums.items()))), None
    if comm.rank == 0:
        problem = _publish_and_prune(partial, target, staged.state, files, staged.keep_last, best=staged.best)
    _raise_on_all_ranks(comm, problem, partial)
    return target


def _tensor_groups(engine: Engine, weights: Weights) -> TensorGroups:
    """Return every tensor of a checkpoint by the file it is written to."""
    snapshots = {f"snapshots/{name}": dict(tensors) for name, tensors in weights.snapshot_tensors().items()}
    return {"weights": dict(weights.trainable()), **snapshots, "optimizer": engine.optimizer.state_dict()}


def _create_directories(partial: Path, files: Sequence[StagedFile]) -> OSError | CheckpointError | None:
    try:
        check_ownership(partial.parent.parent)
        remove_partial(partial.parent)
        for file in files:
            (partial / file.name).parent.mkdir(parents=True, exist_ok=True)
    except (OSError, CheckpointError) as error:
        return error
    return None


def _publish_and_prune(
    partial: Path,
    target: Path,
    state: Mapping[str, Any],
    files: Mapping[str, FileChecksum],
    keep_last: int,
    *,
    best: bool,
) -> OSError | CheckpointError | None:
    try:
        check_ownership(target.parent.parent)
        publish_checkpoint(partial, target, state, files)
        if best:
            link_best(target)
        prune_checkpoints(target, keep_last)
    except (OSError, CheckpointError) as error:
        return error
    return None


def _raise_on_all_ranks(comm: Comm, error: OSError | CheckpointError | None, partial: Path) -> None:
    """Raise on all ranks if one failed, and remove the partial checkpoint. Older checkpoints are not touched.

    After the loss of the run's lock the partial checkpoint may be that of the new owner, so it stays.
    """
    messages = comm.gather_objects([] if error is None else [_error_message(error, partial)])
    if not messages:
        return
    if comm.rank == 0 and not isinstance(error, CheckpointError):
        remove_directory(partial)
    raise CheckpointError(messages[0])


def _error_message(error: OSError | CheckpointError, partial: Path) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    cause = explain_error(error) or f"{error.filename or partial} cannot be written ({error.strerror or error})"
    return f"no checkpoint was saved, but older ones are unchanged: {cause} [TM828]"


def _write_files(partial: Path, files: Sequence[StagedFile]) -> tuple[dict[str, FileChecksum], OSError | None]:
    """Write this rank's files; return their checksums, and the error if one could not be written."""
    checksums: dict[str, FileChecksum] = {}
    failure: OSError | None = None
    for file in files:
        try:
            writes = file.writes and failure is None
            if checksum := _write_file(partial / file.name, file.headers, iter(file.values), writes=writes):
                checksums[file.name] = checksum
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


def load(path: Path, engine: Engine, weights: Weights, extra_schema: type[ExtraState] = ExtraState) -> dict[str, Any]:
    """Restore weights, snapshots, optimizer and loss scale in place, and return `extra`. Every rank must call this.

    Nothing is restored on any rank before all files are verified, and their contents checked, on all ranks.
    """
    groups = _tensor_groups(engine, weights)
    problem: str | None = None
    try:
        manifest = read_manifest(path)
        verify_files(path, manifest, rank=engine.comm.rank, world_size=engine.comm.world_size)
        state = read_state(path, manifest, extra_schema)
        sources = {group: ShardedTensorReader(group_files(path, manifest, group)) for group in groups}
        for group, tensors in groups.items():
            _check_tensors(tensors, sources[group], f"{path}/{group}")
    except DamagedCheckpointError as error:
        problem = explain_damage(error, path)
    except CheckpointError as error:
        problem = str(error)
    problems = engine.comm.gather_objects([problem] if problem else [])
    if problems:
        raise CheckpointError(problems[0])
    for group, tensors in groups.items():
        _copy_tensors(tensors, sources[group])
    if engine.scaler and state.scaler:
        engine.scaler.load_state_dict(state.scaler.model_dump())
    return state.extra


def initialize_weights(source: Path | Mapping[str, Tensor], weights: Weights, group: str = "weights") -> None:
    """Copy the trained weights (or another group) of a checkpoint or file into `weights` and all its snapshots.

    The source may also be the tensors themselves, by the names of the network.
    """
    tensors = open_source(source, group) if isinstance(source, Path) else InMemoryTensors(dict(source))
    origin = str(source) if isinstance(source, Path) else "the exported folder"
    _check_tensors(weights.trainable(), tensors, origin, set(weights.net.state_dict()))
    _copy_tensors(weights.trainable(), tensors)
    for name in weights.snapshot_tensors():
        weights.update_snapshot(name)


def load_snapshot(source: Path | Mapping[str, Tensor], weights: Weights, name: str, group: str = "weights") -> None:
    """Copy the weights (or another group) of a checkpoint or file, or tensors, into one snapshot of `weights`."""
    tensors = open_source(source, group) if isinstance(source, Path) else InMemoryTensors(dict(source))
    snapshot, origin = weights.snapshot_tensors()[name], str(source) if isinstance(source, Path) else "the teacher"
    _check_tensors(snapshot, tensors, origin, set(weights.net.state_dict()))
    _copy_tensors(snapshot, tensors)


def open_source(path: Path, group: str) -> TensorSource:
    """Open a group of tensors of a run's last checkpoint, of a checkpoint, or all tensors of a file."""
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist; give a checkpoint directory, or a .safetensors or .pt file [TM254]"
        )
    if path.is_dir():
        return open_group(latest_checkpoint(path) or path, group)
    if path.suffix == ".safetensors":
        reader = ShardedTensorReader([path])
        is_quantized = any(key.endswith(SCALE_SUFFIX) for key in reader.shapes)  # `tastemaker export --bits 8`
        return InMemoryTensors(read_weights(path)[0]) if is_quantized else reader
    if path.suffix in (".pt", ".pth", ".bin"):
        return load_pickled(path)
    raise CheckpointError(
        f"{path} ends in '{path.suffix}'; give a directory, or a .safetensors, .pt, .pth or .bin file [TM255]"
    )


def open_group(path: Path, group: str) -> ShardedTensorReader:
    """Open a group of tensors of a checkpoint, such as "weights" or "snapshots/ema", after verifying its files."""
    try:
        manifest = read_manifest(path)
        files = group_files(path, manifest, group)
        verify_files(path, manifest, manifest.group_files(group))
        return ShardedTensorReader(files)
    except DamagedCheckpointError as error:
        raise CheckpointError(explain_damage(error, path)) from error


def _check_tensors(
    tensors: Mapping[str, Tensor], source: TensorSource, origin: str, ignored: set[str] | None = None
) -> None:
    """Refuse a source with other names or shapes. It may hold more tensors only if they are `ignored`."""
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


@torch.no_grad()
def _copy_tensors(tensors: Mapping[str, Tensor], source: TensorSource) -> None:
    """Copy this rank's rows of every tensor in place."""
    for key, x in tensors.items():
        shard = distributed.local_shard(x)
        if shard.numel():
            shard.copy_(source.read(key, distributed.shard_offset(x), len(shard) if shard.ndim else 1))


def _format_keys(keys: list[str]) -> str:
    shown = ", ".join(f"'{key}'" for key in keys[:3])
    return f"{shown} and {len(keys) - 3} more" if len(keys) > 3 else shown or "nothing"


def read_state(
    path: Path, manifest: Manifest | None = None, extra_schema: type[ExtraState] = ExtraState
) -> CheckpointState:
    """Read the state.json of a checkpoint, sealed and checked; `manifest` is that of the checkpoint if it is known."""
    file, manifest = path / STATE_FILE, manifest or read_manifest(path)
    if STATE_FILE not in manifest.files:
        raise DamagedCheckpointError(f"{path / checkpoint_files.MANIFEST_FILE} does not list {STATE_FILE} [TM1116]")
    verify_files(path, manifest, [STATE_FILE])
    state = validate_contents(CheckpointState, checkpoint_files.read_json(file, MAX_STATE_BYTES), file)
    extra = validate_contents(extra_schema, state.extra, file)
    if {state.step, state.step if extra.step is None else extra.step} != {manifest.step}:
        raise DamagedCheckpointError(
            f"{file} holds step {state.step} and {extra.step}, but the manifest says step {manifest.step} [TM1117]"
        )
    return state


def group_files(path: Path, manifest: Manifest, group: str) -> list[Path]:
    """Return the files of a group of tensors, in the order of its shards."""
    files = [path / name for name in manifest.group_files(group)]
    if not files:
        raise CheckpointError(
            f"{path} does not contain '{group}', which this run needs; resume with the configuration of the "
            "checkpoint, or start from its weights only (--init-from) [TM264]"
        )
    return files
