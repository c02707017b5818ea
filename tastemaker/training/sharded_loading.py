"""Read weights that were left in their files: each rank reads its rows once the network is sharded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..core.errors import TrainingError
from ..core.weights import DeferredTensors
from . import distributed

# By module and name of the parameter in it: FSDP replaces parameters, but not modules.
DeferredParameters = dict[tuple[nn.Module, str], tuple[DeferredTensors, str]]


def find_deferred_parameters(nets: Sequence[nn.Module], comm: distributed.CollectiveComm) -> DeferredParameters:
    """Return the parameters that are still in their files. Every rank must call this; all must have the same files."""
    deferred: DeferredParameters = {}
    fingerprints: list[str] = []
    for owner in [module for net in nets for module in net.modules()]:
        tensors: DeferredTensors | None = owner.__dict__.pop("deferred_tensors", None)
        if tensors is None:
            continue
        fingerprints.append(tensors.fingerprint)
        for prefix, module in owner.named_modules():
            for name, _ in module.named_parameters(recurse=False):
                deferred[module, name] = tensors, f"{prefix}.{name}" if prefix else name
    if len(set(comm.gather_objects([tuple(fingerprints)]))) > 1:
        raise TrainingError(
            "model.weights: the ranks found different files, of which each would read a part; copy the same folder to "
            "all machines, or name one on a disk that they share"
            " [TM933]"
        )
    return deferred


@torch.no_grad()
def read_shards(unit: nn.Module, deferred: DeferredParameters, device: torch.device) -> None:
    """Allocate the shards of a unit that FSDP has sharded on the meta device, and read this rank's rows from files."""
    names = [(module, name) for module in unit.modules() for name, _ in module.named_parameters(recurse=False)]
    waiting = [key for key in names if key in deferred]
    if not waiting:
        return
    # Through `_apply`, after which FSDP takes over the new shards.
    unit._apply(lambda x: torch.empty_like(x, device=device) if x.is_meta else x)  # type: ignore[no-untyped-call]
    for module, name in waiting:
        tensors, key = deferred.pop((module, name))
        parameter = module.get_parameter(name)
        shard = distributed.local_shard(parameter)
        if shard.numel():
            shard.copy_(tensors.read(key, distributed.shard_offset(parameter), len(shard)))
