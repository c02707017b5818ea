"""Checkpoints of any tensors, in both formats, saved on any number of ranks and loaded on any other, to the bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tastemaker.config.schema import CheckpointConfig
from tastemaker.core.checkpoint_files import is_sound
from tastemaker.training import checkpoint, distributed
from tastemaker.training.safetensors_io import DTYPE_CODES

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda name: name != "__metadata__")
SNAPSHOTS = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=8,
)


@dataclass(frozen=True)
class TensorSpec:
    """A tensor with random bits; `sharded` over ranks along its first dimension, as by FSDP2."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    seed: int
    sharded: bool

    def build(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        count = self.dtype.itemsize * torch.Size(self.shape).numel()
        raw = torch.randint(0, 2 if self.dtype == torch.bool else 256, (count,), generator=generator).byte()
        return raw.view(self.dtype).reshape(self.shape) if count else torch.empty(self.shape, dtype=self.dtype)


SPECS = st.builds(
    TensorSpec,
    st.sampled_from(list(DTYPE_CODES)),
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.integers(0, 1 << 30),
    st.booleans(),
)
TENSORS = st.dictionaries(NAMES, SPECS, max_size=5)


@dataclass
class ShardedTensor:
    """What the code sees of a DTensor: the whole shape, and this rank's rows."""

    whole: Tensor
    local: Tensor
    offset: int
    shape: torch.Size = field(init=False)
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        self.shape, self.dtype = self.whole.shape, self.whole.dtype


def shard(spec: TensorSpec, tensor: Tensor, rank: int, world_size: int) -> Any:
    if not spec.sharded or not spec.shape:
        return tensor.clone()
    rows = -(-spec.shape[0] // world_size)
    first, last = (min(n * rows, spec.shape[0]) for n in (rank, rank + 1))
    return ShardedTensor(tensor, tensor[first:last].clone(), first)


class ThreadRanks:
    """Ranks that are threads: what they gather is exchanged through a barrier."""

    def __init__(self, world_size: int, strategy: str) -> None:
        self.strategy = strategy
        self.world_size, self.barrier, self.lists = world_size, threading.Barrier(world_size), [[]] * world_size

    def gather(self, rank: int, items: list[Any]) -> list[Any]:
        self.lists[rank] = list(items)
        self.barrier.wait(60)
        gathered = [item for each in self.lists for item in each]
        self.barrier.wait(60)
        return gathered

    def shard_info(self, rank: int) -> tuple[int, int, bool]:
        """The index of a rank's shard, the number of shards, and whether the rank saves it, as of an engine."""
        replicas = next((n for n in range(2, self.world_size + 1) if self.world_size % n == 0), 1)
        count = {"replicated": 1, "fsdp": self.world_size, "hsdp": self.world_size // replicas}[self.strategy]
        return rank % count, count, rank < count

    def shard(self, spec: TensorSpec, tensor: Tensor, rank: int) -> Any:
        index, count, _ = self.shard_info(rank)
        return tensor.clone() if self.strategy == "replicated" else shard(spec, tensor, index, count)

    def run(self, work: Callable[[int], None]) -> None:
        with ThreadPoolExecutor(self.world_size) as pool:
            for each in [pool.submit(work, rank) for rank in range(self.world_size)]:
                each.result()

    def engine(self, rank: int, optimizer: Mapping[str, Any]) -> Any:
        comm = SimpleNamespace(
            rank=rank, world_size=self.world_size, gather_objects=lambda items: self.gather(rank, items)
        )
        config = SimpleNamespace(strategy=self.strategy)
        states = SimpleNamespace(state_dict=lambda: dict(optimizer))
        info = self.shard_info(rank)
        return SimpleNamespace(comm=comm, config=config, scaler=None, optimizer=states, shard_info=info)


Tree = dict[str, dict[str, TensorSpec]]


def build_run(ranks: ThreadRanks, rank: int, tree: Tree, *, zeros: bool) -> tuple[Any, Any, dict[str, dict[str, Any]]]:
    tensors = {
        group: {
            name: ranks.shard(spec, torch.zeros_like(spec.build()) if zeros else spec.build(), rank)
            for name, spec in specs.items()
        }
        for group, specs in tree.items()
    }
    snapshots = {group: values for group, values in tensors.items() if group not in ("weights", "optimizer")}
    weights = SimpleNamespace(trainable=lambda: tensors["weights"], snapshot_tensors=lambda: snapshots)
    return ranks.engine(rank, tensors["optimizer"]), weights, tensors


def bits(x: Tensor) -> bytes:
    return bytes(x.contiguous().flatten().view(torch.uint8).tolist()) if x.numel() else b""


def check_round_trip(
    directory: Path,
    tree: Tree,
    form: str,
    saved_on: tuple[int, str],
    loaded_on: tuple[int, str],
    extra: Any,
) -> None:
    """Save on some ranks with a strategy, load on others with another, and compare every rank's rows."""
    config, writers, readers = CheckpointConfig(format=form), ThreadRanks(*saved_on), ThreadRanks(*loaded_on)  # type: ignore[arg-type]

    def save(rank: int) -> None:
        engine, weights, _ = build_run(writers, rank, tree, zeros=False)
        checkpoint.save(directory, 7, engine, weights, {"extra": extra}, config)

    def load(rank: int) -> None:
        engine, weights, tensors = build_run(readers, rank, tree, zeros=True)
        assert checkpoint.load(directory / "checkpoints/step-000007", engine, weights) == {"extra": extra}
        for group, specs in tree.items():
            for name, spec in specs.items():
                expected, found = readers.shard(spec, spec.build(), rank), tensors[group][name]
                local = [distributed.local_shard(x) for x in (found, expected)]
                assert local[0].dtype == local[1].dtype and bits(local[0]) == bits(local[1]), (group, name, spec)

    written: list[Path] = []
    opened: Any = checkpoint.open_writer
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(distributed, "is_sharded", lambda x: isinstance(x, ShardedTensor))
        patched.setattr(distributed, "local_shard", lambda x: x.local if isinstance(x, ShardedTensor) else x)
        patched.setattr(distributed, "full_tensor", lambda x: x.whole if isinstance(x, ShardedTensor) else x)
        patched.setattr(distributed, "shard_offset", lambda x: x.offset if isinstance(x, ShardedTensor) else 0)
        patched.setattr("os.fsync", lambda handle: None)
        patched.setattr(checkpoint, "open_writer", lambda path, headers: written.append(path) or opened(path, headers))
        writers.run(save)
        assert len(written) == len(set(written)), "several ranks wrote one file"
        assert is_sound(directory / "checkpoints/step-000007")
        readers.run(load)


RANKS = st.tuples(st.integers(1, 4), st.sampled_from(["replicated", "fsdp", "hsdp"]))
ROUND_TRIPS = {
    "tree": st.fixed_dictionaries({"weights": TENSORS, "optimizer": TENSORS}).flatmap(
        lambda tree: st.dictionaries(SNAPSHOTS, TENSORS, max_size=2).map(lambda snapshots: {**snapshots, **tree})
    ),
    "form": st.sampled_from(["consolidated", "sharded"]),
    "saved_on": RANKS,
    "loaded_on": RANKS,
    "extra": JSON,
}


@pytest.mark.parametrize("examples", [12, pytest.param(400, marks=pytest.mark.slow)])
def test_any_checkpoint_is_read_as_it_was_written(examples: int) -> None:
    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(**ROUND_TRIPS)
    def check(tree: Tree, form: str, saved_on: Any, loaded_on: Any, extra: Any) -> None:
        with TemporaryDirectory() as folder:
            check_round_trip(Path(folder), tree, form, saved_on, loaded_on, extra)

    check()
