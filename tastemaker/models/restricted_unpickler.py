"""Read pickles written by `torch.save` without running code: tensors, settings, and shards of tensors."""

from __future__ import annotations

import pickle
import zipfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.registry import ConfigError

LOADING_ERRORS: tuple[type[Exception], ...] = (
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    AttributeError,
    TypeError,
    LookupError,
    MemoryError,
)
LOADING_ERRORS += (ArithmeticError, ImportError, zipfile.BadZipFile)
SHARDED_TENSOR_MODULE = "torch.distributed._shard.sharded_tensor"


@dataclass
class InertRecord:
    """Stands in for an object whose class is not loaded; holds its pickled state."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        """A field of the object, from its `__dict__` or its slots."""
        parts = self.state if isinstance(self.state, tuple) else (self.state,)
        return next((part[name] for part in parts if isinstance(part, dict) and name in part), None)


class InertShardMetadata(InertRecord):
    """Stands in for torch's ShardMetadata: the offsets of a shard in the full tensor."""


class InertShard(InertRecord):
    """Stands in for torch's Shard: metadata and tensor."""


class RankShards(Tensor):
    """Stands in for torch's ShardedTensor: the shards of one rank by their first row."""

    shards: dict[int, Tensor]

    def __setstate__(self, state: Sequence[Any]) -> None:
        self.shards = {shard.get("metadata").get("shard_offsets")[0]: shard.get("tensor") for shard in state[0]}

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TypeError(
            "computing with the shards of a tensor is not possible; merge the shards of all ranks first [TM518]"
        )


def _inert_getattr(*_: Any) -> type[InertRecord]:
    """Stands in for `getattr`, which pickles of enums and nested classes call."""
    return InertRecord


# What checkpoints of trainers with sharded tensors refer to, and what is loaded instead. All else is refused.
TRAINER_GLOBALS: list[Any] = [
    Namespace,  # command-line arguments
    (RankShards, f"{SHARDED_TENSOR_MODULE}.api.ShardedTensor"),
    (InertShard, f"{SHARDED_TENSOR_MODULE}.shard.Shard"),
    (InertShardMetadata, "torch.distributed._shard.metadata.ShardMetadata"),
    *(
        (InertRecord, name)
        for name in (
            "torch.distributed.remote_device._remote_device",
            f"{SHARDED_TENSOR_MODULE}.metadata.ShardedTensorMetadata",
            f"{SHARDED_TENSOR_MODULE}.metadata.TensorProperties",
            f"{SHARDED_TENSOR_MODULE}.metadata.MEM_FORMAT_ENCODING",
            "torch.distributed._shard.sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
            "torch.distributed._shard.sharding_spec.api.EnumerableShardingSpec",
        )
    ),
    (_inert_getattr, "builtins.getattr"),
    (_inert_getattr, "__builtin__.getattr"),
]


def load_pickle(path: Path) -> Any:
    """The content of a file of tensors and plain containers."""
    return _load(path, [], mmap=False)


def load_trainer_pickle(path: Path) -> Any:
    """The content of a trainer's checkpoint, which may hold settings and shards; tensors stay memory-mapped."""
    return _load(path, TRAINER_GLOBALS, mmap=True)


def _load(path: Path, safe_globals: list[Any], *, mmap: bool) -> Any:
    try:
        with torch.serialization.safe_globals(safe_globals):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        lines = str(error).splitlines()
        reason = next((line for line in lines if "GLOBAL" in line), lines[0]).strip()
        raise ConfigError(
            f"{path} was not loaded, because it contains more than tensors and settings, which could run code "
            f"({reason:.200}); convert the file to safetensors if you trust it [TM519]"
        ) from error
    except LOADING_ERRORS as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{path} is not a readable checkpoint ({reason:.200}); download the file again [TM520]"
        ) from error


def merge_rank_shards(ranks: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Full tensors from the state dicts of all ranks; tensors that are not sharded are taken from the first rank."""
    merged: dict[str, Tensor] = {}
    for key, value in ranks[0].items():
        if isinstance(value, RankShards):
            shards = {row: shard for rank in ranks for row, shard in rank[key].shards.items()}
            merged[key] = torch.cat([shards[row] for row in sorted(shards)])
        else:
            merged[key] = value
    return merged
