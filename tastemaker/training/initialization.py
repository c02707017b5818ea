"""Continue from another trainer's weights, optimizer state and step count."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from . import distributed
from .run import Run
from .safetensors_io import CheckpointError


@torch.no_grad()
def initialize_from_trainer(
    run: Run, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor], step: int, where: str
) -> None:
    """Put tensors in place, each rank its rows of them; what trails the weights begins as they do.

    The reference stays what the run was built with: what the other trainer set out from, if `model.weights` says so.
    """
    _fill(dict(run.policy.weights.trainable()), weights, where)
    _fill(run.engine.optimizer.state(), moments, where)
    for name in {*run.policy.weights.stored()} - {"reference"}:
        run.policy.weights.blend(name)
    run.start = step


def _fill(own: Mapping[str, Tensor], found: Mapping[str, Tensor], where: str) -> None:
    lost = [key for key, x in own.items() if key not in found or found[key].shape != x.shape]
    if lost:
        raise CheckpointError(
            f"{where} does not fit this run: it has no '{lost[0]}' of that shape, nor {len(lost) - 1} more; go on with "
            "full tuning and moments in fp32, or start from its weights alone, as model.weights"
        )
    for key, x in own.items():
        mine, first = distributed.local_shard(x), distributed.shard_offset(x)
        mine.copy_(found[key][first : first + len(mine)] if mine.ndim else found[key])
