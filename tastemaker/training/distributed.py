"""Process groups, collectives and sharded tensors."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, zeros

from ..core.objective import Comm, SingleProcess
from .errors import TrainingError

BUCKET_ELEMENTS = 1 << 25  # elements reduced in one call


class CollectiveComm(Comm, Protocol):
    """The collectives that the engine and the loop need beyond those of `Comm`."""

    def barrier(self) -> None: ...
    def total(self, x: Tensor) -> Tensor:
        """The sum over ranks."""


@dataclass(frozen=True)
class DistributedComm:
    """The processes that torchrun started, or some of them."""

    rank: int
    world: int
    device: torch.device  # where the backend wants its tensors
    members: dist.ProcessGroup | None = None  # all if not given

    def gather(self, x: Tensor) -> Tensor:
        mine = x.detach().to(self.device).contiguous()
        counts = self._all(torch.tensor([len(mine)], device=self.device))
        longest = max(int(count) for count in counts)
        padded = mine.new_zeros((longest, *mine.shape[1:]))
        padded[: len(mine)] = mine
        pieces = self._all(padded)
        return torch.cat([p[: int(n)] for p, n in zip(pieces, counts, strict=True)]).to(x.device)

    def _all(self, x: Tensor) -> list[Tensor]:
        # Booleans travel as bytes: not every backend knows them.
        sent = x.byte() if x.dtype == torch.bool else x
        pieces = [torch.empty_like(sent) for _ in range(self.world)]
        dist.all_gather(pieces, sent, group=self.members)
        return [piece.to(x.dtype) for piece in pieces]

    def gather_objects(self, items: Sequence[Any]) -> list[Any]:
        lists: list[Any] = [None] * self.world
        dist.all_gather_object(lists, list(items), group=self.members)
        return [item for each in lists for item in each]

    def mean(self, x: Tensor) -> Tensor:
        return self.total(x) / self.world

    def barrier(self) -> None:
        self.total(torch.zeros(1))

    def any(self, flag: bool) -> bool:
        return bool(self.total(torch.tensor(float(flag))) > 0)

    def total(self, x: Tensor) -> Tensor:
        moved = x.detach().to(self.device, copy=True)
        dist.all_reduce(moved, group=self.members)
        return moved.to(x.device)


def get_rank() -> int:
    """Of this process, as its launcher says, whether a group is joined or was left."""
    return int(os.environ.get("RANK", "0"))


def get_local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def is_launched() -> bool:
    """Whether this process is one of several that a launcher or the caller started."""
    return dist.is_initialized() or {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def init_process_group(device: torch.device) -> tuple[CollectiveComm, bool]:
    """The team this process belongs to, and whether its process group was started here."""
    if not is_launched():
        return SingleProcess(), False
    started = not dist.is_initialized()
    if started:
        backend = "nccl" if device.type == "cuda" else "gloo"
        where = device if device.type == "cuda" else None
        dist.init_process_group(backend, timeout=timedelta(minutes=30), device_id=where)
    return DistributedComm(dist.get_rank(), dist.get_world_size(), device), started


def destroy_process_group() -> None:
    """Leave the process group, without anything left to do for the threads that served it."""
    if dist.is_initialized():
        dist.destroy_process_group()
        # gloo's threads drop the tensors of their last call under the interpreter's lock. A process that ends at once
        # takes the lock away for good while they wait for it, and is aborted after all its work is done.
        time.sleep(0.2)


def mesh_shape(strategy: str, replicas: int, world: int) -> tuple[int, ...]:
    """The mesh of ranks: (shards,) or (replicas, shards)."""
    if strategy != "hsdp":
        return (world,)
    if world % replicas:
        raise TrainingError(
            f"engine.replicas is {replicas}, which does not divide the {world} ranks of this run; "
            f"start a multiple of {replicas} ranks or change engine.replicas"
        )
    return (replicas, world // replicas)


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor]) -> None:
    """Give every rank the values of the first."""
    for tensor in tensors:
        values = tensor.detach().contiguous()
        dist.broadcast(values, 0)
        tensor.copy_(values)


@torch.no_grad()
def all_reduce_gradients(parameters: Sequence[nn.Parameter], dtype: torch.dtype, team: CollectiveComm) -> None:
    """Replace the gradients of every rank by their sum, in buckets of the given dtype."""
    seen = team.total(torch.tensor([float(p.grad is not None) for p in parameters])).tolist()
    # A parameter one rank used and another did not counts as zero there; one that nobody used stays without gradient.
    used = [p for p, count in zip(parameters, seen, strict=True) if count]
    for p in used:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    for bucket in _buckets([p.grad for p in used if p.grad is not None]):
        flat = torch.cat([grad.flatten().to(dtype) for grad in bucket])
        dist.all_reduce(flat)
        for grad, piece in zip(bucket, torch.split(flat, [grad.numel() for grad in bucket]), strict=True):
            grad.copy_(piece.view_as(grad))


def _buckets(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        bucket.append(tensor)
        if sum(each.numel() for each in bucket) >= BUCKET_ELEMENTS:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


@torch.no_grad()
def local_shard(x: Tensor) -> Tensor:
    """This rank's piece of a tensor, sharing its memory."""
    return x.to_local() if isinstance(x, DTensor) else x


@torch.no_grad()
def full_tensor(x: Tensor) -> Tensor:
    """The whole of a tensor; every rank must ask at once."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def zeros_like_rows(x: Tensor, width: int) -> Tensor:
    """Zeros in fp32, so many for each row of a tensor, cut into pieces as it is."""
    if not isinstance(x, DTensor):
        return torch.zeros(x.shape[0], width, device=x.device)
    return zeros(x.shape[0], width, device_mesh=x.device_mesh, placements=x.placements)


def is_sharded(x: Tensor) -> bool:
    return isinstance(x, DTensor)


def shard_offset(x: Tensor) -> int:
    """Where this rank's piece starts: pieces are cut along dimension 0 in equal parts, the last ones shorter."""
    if not isinstance(x, DTensor):
        return 0
    dimension = next(i for i, placement in enumerate(x.placements) if placement.is_shard(0))
    part = -(-x.shape[0] // x.device_mesh.size(dimension))
    return min(x.device_mesh.get_local_rank(dimension) * part, x.shape[0])
