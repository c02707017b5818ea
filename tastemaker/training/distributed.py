"""Process groups, collectives and sharded tensors (only the engine uses torch.distributed too)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ..core.errors import TrainingError
from ..core.objective import Comm, SingleProcess

BUCKET_ELEMENTS = 1 << 25  # gradient elements in one all-reduce
COLLECTIVE_VARIABLE = "TASTEMAKER_COLLECTIVE_SECONDS"
COLLECTIVE_SECONDS = 1800.0  # a rank that waits longer for another one gives up
RENDEZVOUS_VARIABLE = "TASTEMAKER_RENDEZVOUS_SECONDS"
RENDEZVOUS_SECONDS = 600.0  # all ranks have to join within this time
REQUESTS, POLL_SECONDS = "tastemaker/requests", 0.05  # of ranks that ask rank 0 for the name of the attempt


class CollectiveComm(Comm, Protocol):
    """The collectives that the engine and the loop need beyond those of `Comm`."""

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over ranks."""


@dataclass(frozen=True)
class DistributedComm:
    """The ranks that torchrun started, or a subgroup of them."""

    rank: int
    world_size: int
    device: torch.device  # that the backend communicates on
    group: dist.ProcessGroup | None = None  # None: all ranks

    def gather(self, x: Tensor) -> Tensor:
        local = x.detach().to(self.device).contiguous()
        counts = self._all_gather(torch.tensor([len(local)], device=self.device))
        longest = max(int(count) for count in counts)
        padded = local.new_zeros((longest, *local.shape[1:]))
        padded[: len(local)] = local
        gathered = self._all_gather(padded)
        return torch.cat([part[: int(n)] for part, n in zip(gathered, counts, strict=True)]).to(x.device)

    def _all_gather(self, x: Tensor) -> list[Tensor]:
        # Booleans are sent as bytes, which every backend supports.
        sent = x.byte() if x.dtype == torch.bool else x
        received = [torch.empty_like(sent) for _ in range(self.world_size)]
        dist.all_gather(received, sent, group=self.group)
        return [part.to(x.dtype) for part in received]

    def gather_objects(self, items: Sequence[Any]) -> list[Any]:
        lists: list[Any] = [None] * self.world_size
        dist.all_gather_object(lists, list(items), group=self.group)
        return [item for part in lists for item in part]

    def mean(self, x: Tensor) -> Tensor:
        return self.sum(x) / self.world_size

    def barrier(self) -> None:
        self.sum(torch.zeros(1))

    def any(self, flag: bool) -> bool:
        return bool(self.sum(torch.tensor(float(flag))) > 0)

    def sum(self, x: Tensor) -> Tensor:
        total = x.detach().to(self.device, copy=True)
        dist.all_reduce(total, group=self.group)
        return total.to(x.device)


def get_rank() -> int:
    """Return the rank that torchrun gave this process, or 0; works without a process group."""
    return int(os.environ.get("RANK", "0"))


def get_local_rank() -> int:
    """Return the rank of this process on its machine, or 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def is_launched() -> bool:
    """Return whether torchrun started this process or a process group exists already."""
    return dist.is_initialized() or {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def init_process_group(device: torch.device, *, always: bool = False) -> tuple[CollectiveComm, bool]:
    """Return the communicator of this process, and whether this call created the process group.

    A process without torchrun has none, or with `always` a group of its own. Raises TrainingError if not all ranks join
    within TASTEMAKER_RENDEZVOUS_SECONDS, 10 minutes by default.
    """
    if not is_launched() and not always:
        return SingleProcess(), False
    started = not dist.is_initialized()
    if started:
        backend = "nccl" if device.type == "cuda" else "gloo"
        device_id = device if device.type == "cuda" else None
        one_rank: dict[str, Any] = {}
        if not is_launched():
            one_rank = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
        # A short timeout until all ranks have joined: without torchrun, nobody else notices that one of them died.
        seconds = float(os.environ.get(RENDEZVOUS_VARIABLE, RENDEZVOUS_SECONDS))
        timeout = timedelta(seconds=seconds)
        try:
            with _store_of_this_attempt(timeout) as store:
                dist.init_process_group(backend, timeout=timeout, device_id=device_id, **{**one_rank, **store})
            patience = float(os.environ.get(COLLECTIVE_VARIABLE, COLLECTIVE_SECONDS))
            dist.group.WORLD.set_timeout(timedelta(seconds=patience))  # type: ignore[union-attr]
        except (dist.DistError, RuntimeError) as error:
            raise TrainingError(
                f"rank {get_rank()} of {os.environ.get('WORLD_SIZE', '1')} could not join the other ranks: "
                f"{str(error).splitlines()[0]}; look for the error of the rank that is missing, or, if the ranks start "
                f"more than {seconds:.0f} s apart, set {RENDEZVOUS_VARIABLE} to a longer time [TM1640]"
            ) from error
    return DistributedComm(dist.get_rank(), dist.get_world_size(), device), started


@contextmanager
def _store_of_this_attempt(timeout: timedelta) -> Iterator[dict[str, Any]]:
    """Yield arguments of `init_process_group`: a store that holds nothing of ranks before torchrun restarted them.

    torchrun's agent keeps one store for all attempts, where new ranks would read the addresses of old ones (PyTorch
    issue 135712), and the number of an attempt differs between machines. So rank 0 invents a name for the
    attempt, under which its ranks store their keys, and answers every rank that asks for it, until all have joined.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        yield {}
        return
    rank, world_size = get_rank(), int(os.environ["WORLD_SIZE"])
    store, joined = _connect_to_agent(timeout), threading.Event()
    if rank == 0:
        name = uuid4().hex
        threading.Thread(target=_answer_requests, args=(_connect_to_agent(timeout), name, joined), daemon=True).start()
    else:
        request = uuid4().hex
        store.set(f"{REQUESTS}/{store.add(REQUESTS, 1)}", request)
        name = store.get(f"{REQUESTS}/answer/{request}").decode()
    try:
        yield {"store": dist.PrefixStore(name, store), "rank": rank, "world_size": world_size}  # type: ignore[attr-defined]
    finally:
        joined.set()


def _connect_to_agent(timeout: timedelta) -> Any:
    """Connect to the store of torchrun's agent."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]


def _answer_requests(store: Any, name: str, joined: threading.Event) -> None:
    """Answer all requests with the name of the attempt until `joined`; nobody reads the answers to old ones."""
    answered: set[int] = set()
    with suppress(dist.DistError, RuntimeError):  # the agent has ended, which the main thread notices too
        while not joined.wait(POLL_SECONDS):
            for number in set(range(1, store.add(REQUESTS, 0) + 1)) - answered:
                key = f"{REQUESTS}/{number}"
                if store.check([key]):  # the rank may have been killed before it wrote its request
                    store.set(f"{REQUESTS}/answer/{store.get(key).decode()}", name)
                    answered.add(number)


def separate_comm(comm: CollectiveComm) -> Comm:
    """Return a communicator of the same ranks for another thread, on the CPU. Every rank must call this."""
    if not isinstance(comm, DistributedComm):
        return comm
    group = dist.new_group(backend="gloo")
    return DistributedComm(comm.rank, comm.world_size, torch.device("cpu"), group)


def destroy_process_group() -> None:
    """Destroy the process group, and wait for the threads of its backend to finish."""
    if dist.is_initialized():
        dist.destroy_process_group()
        # gloo's threads free the tensors of their last call under the GIL. A process that exits at once would be
        # aborted while they wait for it.
        time.sleep(0.2)


def mesh_shape(strategy: str, replicas: int, world_size: int) -> tuple[int, ...]:
    """Return the shape of the device mesh: (shards,), or (replicas, shards) with HSDP."""
    if strategy != "hsdp":
        return (world_size,)
    if world_size % replicas:
        raise TrainingError(
            f"engine.hsdp_replicas: {replicas} does not divide the {world_size} ranks of this run; start a "
            f"multiple of {replicas} ranks, or change engine.hsdp_replicas [TM269]"
        )
    return (replicas, world_size // replicas)


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor]) -> None:
    """Copy the values of rank 0 to all ranks."""
    for tensor in tensors:
        values = tensor.detach().contiguous()
        # Gloo has no float8, whose bytes are as good.
        dist.broadcast(values.view(torch.uint8) if values.itemsize == 1 else values, 0)
        tensor.copy_(values)


@torch.no_grad()
def all_reduce_gradients(parameters: Sequence[nn.Parameter], dtype: torch.dtype, comm: CollectiveComm) -> None:
    """Replace the gradients of every rank by their sum, computed in `dtype` in buckets."""
    ranks_with_grad = comm.sum(torch.tensor([float(p.grad is not None) for p in parameters])).tolist()
    # A parameter that only some ranks used has a zero gradient on the others; one that no rank used keeps none.
    used = [p for p, count in zip(parameters, ranks_with_grad, strict=True) if count]
    for p in used:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    for bucket in _buckets([p.grad for p in used if p.grad is not None]):
        flat = torch.cat([grad.flatten().to(dtype) for grad in bucket])
        dist.all_reduce(flat)
        for grad, reduced in zip(bucket, torch.split(flat, [grad.numel() for grad in bucket]), strict=True):
            grad.copy_(reduced.view_as(grad))


def _buckets(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        bucket.append(tensor)
        if sum(x.numel() for x in bucket) >= BUCKET_ELEMENTS:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


@torch.no_grad()
def local_shard(x: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, which shares its memory."""
    return x.to_local() if isinstance(x, DTensor) else x


@torch.no_grad()
def full_tensor(x: Tensor) -> Tensor:
    """Gather a sharded tensor. Every rank must call this."""
    if not isinstance(x, DTensor):
        return x
    # Ranks on GPUs exchange tensors on GPUs only, also if the shards are in host memory.
    device = x.device_mesh.device_type
    sharded: Any = x if x.device.type == device else x.to(device)
    gathered: Tensor = sharded.full_tensor()
    return gathered


def zeros_like_rows(x: Tensor, width: int) -> Tensor:
    """Return fp32 zeros [len(x), width], sharded like x."""
    if not isinstance(x, DTensor):
        return torch.zeros(x.shape[0], width, device=x.device)
    shard = x.to_local()
    rows = torch.zeros(shard.shape[0], width, device=shard.device)
    meta = TensorMeta(torch.Size((x.shape[0], width)), (width, 1), rows.dtype)
    # Not `DTensor.from_local`, which would move shards of offloaded weights from the host to the device of the mesh.
    wrap: Any = DTensor
    sharded: Tensor = wrap(rows, DTensorSpec(x.device_mesh, x.placements, tensor_meta=meta), requires_grad=False)
    return sharded


def is_sharded(x: Tensor) -> bool:
    return isinstance(x, DTensor)


def shard_offset(x: Tensor) -> int:
    """Return the first row of this rank's shard: dimension 0 is split into equal parts, the last ones shorter."""
    if not isinstance(x, DTensor):
        return 0
    dimension = next(i for i, placement in enumerate(x.placements) if placement.is_shard(0))
    rows = -(-x.shape[0] // x.device_mesh.size(dimension))
    return min(x.device_mesh.get_local_rank(dimension) * rows, x.shape[0])
