"""What `torch.save` wrote, read without running code: tensors, settings, and pieces of tensors that ranks held."""

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

SHARDED_TENSOR_MODULE = "torch.distributed._shard.sharded_tensor"


@dataclass
class InertRecord:
    """Stands for an object of a class whose code is not run; holds what was written of it."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        """A field, however the object keeps its fields."""
        parts = self.state if isinstance(self.state, tuple) else (self.state,)
        return next((part[name] for part in parts if isinstance(part, dict) and name in part), None)


class InertShardMetadata(InertRecord):
    """Where a piece lies in the whole."""


class InertShard(InertRecord):
    """One piece that a rank held."""


class RankShards(Tensor):
    """What one rank held of a tensor, by the first row of each piece; a tensor only because torch makes it so."""

    found: dict[int, Tensor]

    def __setstate__(self, state: Sequence[Any]) -> None:
        self.found = {piece.get("metadata").get("shard_offsets")[0]: piece.get("tensor") for piece in state[0]}

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TypeError("pieces of a tensor cannot be computed with; join them first")


def _record(*_: Any) -> type[InertRecord]:
    """In place of looking up a class within another."""
    return InertRecord


# By the names that a pickle of torch's sharded tensors mentions. What is not here, nor torch's own, is refused.
SAFE_GLOBALS: list[Any] = [
    Namespace,  # of the command line that a checkpoint was trained by
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
    (_record, "builtins.getattr"),
    (_record, "__builtin__.getattr"),
]


def load_pickle(path: Path) -> Any:
    """What a file holds; tensors stay in the file until they are used, where its format allows it."""
    try:
        with torch.serialization.safe_globals(SAFE_GLOBALS):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        lines = str(error).splitlines()
        reason = next((line for line in lines if "GLOBAL" in line), lines[0]).strip()
        raise ConfigError(
            f"{path} holds more than tensors and settings, which could run code, so it was not read "
            f"({reason:.200}); convert it to safetensors where you trust it"
        ) from error
    except (OSError, EOFError, RuntimeError, ValueError, AttributeError, TypeError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{path} is not a readable checkpoint ({reason:.200}); fetch it again") from error


def merge_rank_shards(ranks: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Whole tensors of what every rank held; what is no piece, each of them holds whole."""
    whole: dict[str, Tensor] = {}
    for key, first in ranks[0].items():
        if isinstance(first, RankShards):
            found = {row: x for rank in ranks for row, x in rank[key].found.items()}
            whole[key] = torch.cat([found[row] for row in sorted(found)])
        else:
            whole[key] = first
    return whole
