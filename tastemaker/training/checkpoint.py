"""Checkpoints: atomic directories, written whole or in shards, read back on any number of ranks.

Shards are safetensors files of our own rather than torch.distributed.checkpoint, whose metadata is a pickle that
its reader trusts. FSDP2 cuts every tensor along dimension 0, so the shards of a tensor put end to end are the tensor,
and a whole file is the case of one shard: one reader serves both forms, every strategy and any number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config.schema import CheckpointConfig
from ..core.weights import Weights
from . import distributed, run_directory
from .engine import Engine
from .errors import explain_error
from .run_directory import latest
from .safetensors_io import (
    CheckpointError,
    DamagedCheckpointError,
    FileChecksum,
    ShardedTensorReader,
    TensorHeader,
    TensorSource,
    load_pickled,
    open_writer,
)

__all__ = ["CheckpointError", "initialize_weights", "latest", "load", "save"]

TensorGroups = dict[str, dict[str, Tensor]]


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
    """Write everything a resume needs; it appears complete or not at all. Every rank must call it.

    `extra` goes through JSON: tuples come back as lists, and keys as strings. The `best` so far is never pruned.
    """
    target = run_directory.checkpoint_path(directory, step)
    partial = run_directory.partial_path(target)
    groups = _groups(engine, weights)
    json.dumps(dict(extra))  # what JSON cannot hold must fail here, on all ranks alike, and not while one writes
    _raise_on_all_ranks(engine, _begin(partial, groups) if engine.comm.rank == 0 else None, partial)
    seals, error = _write_groups(partial, groups, engine, config.form)
    _raise_on_all_ranks(engine, error, partial)
    found = dict(engine.comm.gather_objects(list(seals.items())))
    state = {
        "format": run_directory.FORMAT,
        "step": step,
        "form": config.form,
        "strategy": engine.config.strategy,
        "world": engine.comm.world,
        "versions": run_directory.library_versions(),
        "scaler": engine.scaler.state() if engine.scaler else None,
        "files": {name: asdict(seal) for name, seal in sorted(found.items())},
        "extra": dict(extra),
    }
    error = _finish(partial, target, state, config.keep, best=best) if engine.comm.rank == 0 else None
    _raise_on_all_ranks(engine, error, partial)
    return target


def _groups(engine: Engine, weights: Weights) -> TensorGroups:
    """Every tensor of a checkpoint, by the file it goes to."""
    snapshots = {f"snapshots/{name}": dict(tensors) for name, tensors in weights.stored().items()}
    return {"weights": dict(weights.trainable()), **snapshots, "optimizer": engine.optimizer.state()}


def _begin(partial: Path, groups: TensorGroups) -> OSError | None:
    try:
        run_directory.remove_partial(partial.parent)
        for group in groups:
            (partial / group).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error
    return None


def _finish(partial: Path, target: Path, state: Mapping[str, Any], keep: int, *, best: bool) -> OSError | None:
    try:
        run_directory.publish(partial, target, state)
        if best:
            run_directory.link_best(target)
        run_directory.prune(target, keep)
    except OSError as error:
        return error
    return None


def _raise_on_all_ranks(engine: Engine, error: OSError | None, partial: Path) -> None:
    """Fail on all ranks if one failed, leaving no half-written directory and every older checkpoint."""
    sentences = engine.comm.gather_objects([] if error is None else [_error_message(error, partial)])
    if not sentences:
        return
    if engine.comm.rank == 0:
        run_directory.remove(partial)
    raise CheckpointError(sentences[0])


def _error_message(error: OSError, partial: Path) -> str:
    known = explain_error(error) or f"{error.filename or partial} cannot be written ({error.strerror or error})"
    return f"no checkpoint was saved, and older ones are untouched: {known}"


def _write_groups(
    partial: Path, groups: TensorGroups, engine: Engine, form: str
) -> tuple[dict[str, FileChecksum], OSError | None]:
    seals: dict[str, FileChecksum] = {}
    failed: OSError | None = None
    index, count, first = engine.shard
    for group, tensors in groups.items():
        if form == "consolidated":
            name, pieces = f"{group}.safetensors", (distributed.full_tensor(x) for x in tensors.values())
            entries = {key: TensorHeader(x.dtype, tuple(x.shape)) for key, x in tensors.items()}
            mine = engine.comm.rank == 0
        else:
            local = {
                key: distributed.local_shard(x) for key, x in tensors.items() if index == 0 or distributed.is_sharded(x)
            }
            name, pieces = run_directory.shard_name(group, index, count), (x for x in local.values())
            entries = {key: TensorHeader(x.dtype, tuple(x.shape)) for key, x in local.items()}
            mine = first
        try:
            if seal := _write(partial / name, entries, pieces, mine=mine and failed is None):
                seals[name] = seal
        except OSError as error:
            failed = error
    return seals, failed


def _write(
    path: Path, entries: Mapping[str, TensorHeader], pieces: Iterator[Tensor], *, mine: bool
) -> FileChecksum | None:
    try:
        if not mine:
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_writer(path, entries) as file:
            for piece in pieces:
                file.add(piece)
        return file.seal()
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        # Gathering takes all ranks: each goes through to the end, also one that writes nothing or whose disk is full.
        for _ in pieces:
            pass


def load(path: Path, engine: Engine, weights: Weights) -> dict[str, Any]:
    """Put everything back in place and return `extra`. Every rank must call it."""
    extra: dict[str, Any] = {}
    problem: str | None = None
    try:
        extra = _restore(path, engine, weights)
    except DamagedCheckpointError as error:
        problem = f"{error}; {run_directory.suggest_fallback(path)}"
    except CheckpointError as error:
        problem = str(error)
    problems = engine.comm.gather_objects([problem] if problem else [])
    if problems:
        raise CheckpointError(problems[0])
    return extra


def _restore(path: Path, engine: Engine, weights: Weights) -> dict[str, Any]:
    state = run_directory.read_state(path)
    run_directory.verify(path, state, engine.comm.rank, engine.comm.world)
    sources = {
        group: ShardedTensorReader(run_directory.group_files(path, state, group)) for group in _groups(engine, weights)
    }
    for group, tensors in _groups(engine, weights).items():
        _copy_tensors(tensors, sources[group], f"{path}/{group}")
    if engine.scaler and state.scaler:
        engine.scaler.restore(state.scaler)
    return state.extra


def initialize_weights(path: Path, weights: Weights, group: str = "weights") -> None:
    """Start from the trained weights, or a snapshot, in a checkpoint or a file; snapshots start from them too."""
    _copy_tensors(dict(weights.trainable()), _source(path, group), str(path), spare=set(weights.net.state_dict()))
    for name in weights.stored():
        weights.blend(name)


def _source(path: Path, group: str) -> TensorSource:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; expected a checkpoint directory, a .safetensors or a .pt file")
    if path.is_dir():
        chosen = latest(path) or path
        state = run_directory.read_state(chosen)
        run_directory.verify(chosen, state, 0, 1)
        return ShardedTensorReader(run_directory.group_files(chosen, state, group))
    if path.suffix == ".safetensors":
        return ShardedTensorReader([path])
    if path.suffix in (".pt", ".pth", ".bin"):
        return load_pickled(path)
    raise CheckpointError(f"{path} ends in '{path.suffix}'; expected a directory, .safetensors, .pt, .pth or .bin")


@torch.no_grad()
def _copy_tensors(
    tensors: Mapping[str, Tensor], source: TensorSource, where: str, spare: set[str] | None = None
) -> None:
    """Copy what a source holds into tensors of the same names and shapes, in place."""
    have, want = source.shapes, {key: tuple(x.shape) for key, x in tensors.items()}
    unknown = [key for key in have if key not in want and key not in (spare or ())]
    absent = [key for key in want if key not in have]
    if absent or unknown:
        raise CheckpointError(
            f"{where} does not fit this run: it lacks {_format_keys(absent)} and has unknown {_format_keys(unknown)}; "
            "use it with the model and tuning it was trained with"
        )
    for key, shape in want.items():
        if have[key] != shape:
            raise CheckpointError(
                f"{where} does not fit this run: '{key}' has shape {list(have[key])}, expected {list(shape)}; "
                "use it with the model and tuning it was trained with"
            )
    for key, x in tensors.items():
        mine = distributed.local_shard(x)
        if mine.numel():
            mine.copy_(source.read(key, distributed.shard_offset(x), len(mine) if mine.ndim else 1))


def _format_keys(keys: list[str]) -> str:
    shown = ", ".join(f"'{key}'" for key in keys[:3])
    return f"{shown} and {len(keys) - 3} more" if len(keys) > 3 else shown or "nothing"
