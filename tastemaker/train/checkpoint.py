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

from ..config.run import CheckpointConfig
from ..weights import Weights
from . import folders, ranks
from .engine import Engine
from .failures import explain
from .folders import latest
from .tensors import CheckpointError, Damaged, Entry, Reader, Seal, Source, load_pickled, writing

__all__ = ["CheckpointError", "initialise", "latest", "load", "save"]

Groups = dict[str, dict[str, Tensor]]


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
    target = folders.named(directory, step)
    partial = folders.partial(target)
    groups = _groups(engine, weights)
    json.dumps(dict(extra))  # what JSON cannot hold must fail here, on all ranks alike, and not while one writes
    _agree(engine, _begin(partial, groups) if engine.comm.rank == 0 else None, partial)
    seals, error = _write_groups(partial, groups, engine, config.form)
    _agree(engine, error, partial)
    found = dict(engine.comm.gather_objects(list(seals.items())))
    state = {
        "format": folders.FORMAT,
        "step": step,
        "form": config.form,
        "strategy": engine.config.strategy,
        "world": engine.comm.world,
        "versions": folders.versions(),
        "scaler": engine.scaler.state() if engine.scaler else None,
        "files": {name: asdict(seal) for name, seal in sorted(found.items())},
        "extra": dict(extra),
    }
    error = _finish(partial, target, state, config.keep, best=best) if engine.comm.rank == 0 else None
    _agree(engine, error, partial)
    return target


def _groups(engine: Engine, weights: Weights) -> Groups:
    """Every tensor of a checkpoint, by the file it goes to."""
    snapshots = {f"snapshots/{name}": dict(tensors) for name, tensors in weights.stored().items()}
    return {"weights": dict(weights.trainable()), **snapshots, "optimizer": engine.optimizer.state()}


def _begin(partial: Path, groups: Groups) -> OSError | None:
    try:
        folders.clean(partial.parent)
        for group in groups:
            (partial / group).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error
    return None


def _finish(partial: Path, target: Path, state: Mapping[str, Any], keep: int, *, best: bool) -> OSError | None:
    try:
        folders.publish(partial, target, state)
        if best:
            folders.point(target)
        folders.prune(target, keep)
    except OSError as error:
        return error
    return None


def _agree(engine: Engine, error: OSError | None, partial: Path) -> None:
    """Fail on all ranks if one failed, leaving no half-written directory and every older checkpoint."""
    sentences = engine.comm.gather_objects([] if error is None else [_sentence(error, partial)])
    if not sentences:
        return
    if engine.comm.rank == 0:
        folders.remove(partial)
    raise CheckpointError(sentences[0])


def _sentence(error: OSError, partial: Path) -> str:
    known = explain(error) or f"{error.filename or partial} cannot be written ({error.strerror or error})"
    return f"no checkpoint was saved, and older ones are untouched: {known}"


def _write_groups(partial: Path, groups: Groups, engine: Engine, form: str) -> tuple[dict[str, Seal], OSError | None]:
    seals: dict[str, Seal] = {}
    failed: OSError | None = None
    index, count, first = engine.shard
    for group, tensors in groups.items():
        if form == "consolidated":
            name, pieces = f"{group}.safetensors", (ranks.full(x) for x in tensors.values())
            entries = {key: Entry(x.dtype, tuple(x.shape)) for key, x in tensors.items()}
            mine = engine.comm.rank == 0
        else:
            local = {key: ranks.local(x) for key, x in tensors.items() if index == 0 or ranks.sharded(x)}
            name, pieces = folders.shard(group, index, count), (x for x in local.values())
            entries = {key: Entry(x.dtype, tuple(x.shape)) for key, x in local.items()}
            mine = first
        try:
            if seal := _write(partial / name, entries, pieces, mine=mine and failed is None):
                seals[name] = seal
        except OSError as error:
            failed = error
    return seals, failed


def _write(path: Path, entries: Mapping[str, Entry], pieces: Iterator[Tensor], *, mine: bool) -> Seal | None:
    try:
        if not mine:
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        with writing(path, entries) as file:
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
    except Damaged as error:
        problem = f"{error}; {folders.way_out(path)}"
    except CheckpointError as error:
        problem = str(error)
    problems = engine.comm.gather_objects([problem] if problem else [])
    if problems:
        raise CheckpointError(problems[0])
    return extra


def _restore(path: Path, engine: Engine, weights: Weights) -> dict[str, Any]:
    state = folders.read(path)
    folders.verify(path, state, engine.comm.rank, engine.comm.world)
    sources = {group: Reader(folders.files(path, state, group)) for group in _groups(engine, weights)}
    for group, tensors in _groups(engine, weights).items():
        _fill(tensors, sources[group], f"{path}/{group}")
    if engine.scaler and state.scaler:
        engine.scaler.restore(state.scaler)
    return state.extra


def initialise(path: Path, weights: Weights, group: str = "weights") -> None:
    """Start from the trained weights, or a snapshot, in a checkpoint or a file; snapshots start from them too."""
    _fill(dict(weights.trainable()), _source(path, group), str(path), spare=set(weights.net.state_dict()))
    for name in weights.stored():
        weights.blend(name)


def _source(path: Path, group: str) -> Source:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; expected a checkpoint directory, a .safetensors or a .pt file")
    if path.is_dir():
        chosen = latest(path) or path
        state = folders.read(chosen)
        folders.verify(chosen, state, 0, 1)
        return Reader(folders.files(chosen, state, group))
    if path.suffix == ".safetensors":
        return Reader([path])
    if path.suffix in (".pt", ".pth", ".bin"):
        return load_pickled(path)
    raise CheckpointError(f"{path} ends in '{path.suffix}'; expected a directory, .safetensors, .pt, .pth or .bin")


@torch.no_grad()
def _fill(tensors: Mapping[str, Tensor], source: Source, where: str, spare: set[str] | None = None) -> None:
    """Copy what a source holds into tensors of the same names and shapes, in place."""
    have, want = source.shapes, {key: tuple(x.shape) for key, x in tensors.items()}
    unknown = [key for key in have if key not in want and key not in (spare or ())]
    absent = [key for key in want if key not in have]
    if absent or unknown:
        raise CheckpointError(
            f"{where} does not fit this run: it lacks {_few(absent)} and has unknown {_few(unknown)}; "
            "use it with the model and tuning it was trained with"
        )
    for key, shape in want.items():
        if have[key] != shape:
            raise CheckpointError(
                f"{where} does not fit this run: '{key}' has shape {list(have[key])}, expected {list(shape)}; "
                "use it with the model and tuning it was trained with"
            )
    for key, x in tensors.items():
        mine = ranks.local(x)
        if mine.numel():
            mine.copy_(source.read(key, ranks.first_row(x), len(mine) if mine.ndim else 1))


def _few(keys: list[str]) -> str:
    shown = ", ".join(f"'{key}'" for key in keys[:3])
    return f"{shown} and {len(keys) - 3} more" if len(keys) > 3 else shown or "nothing"
