"""Context parallelism (Ulysses): ranks share the tokens of the same samples, with the hooks of diffusers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..core.errors import TrainingError
from .distributed import CollectiveComm, DistributedComm


def split_data_parallel(
    comm: CollectiveComm, size: int, device: torch.device
) -> tuple[CollectiveComm, DeviceMesh | None]:
    """Return the communicator between data-parallel groups, of `size` ranks each, and the mesh of all ranks.

    The ranks of a group compute the same samples and share their tokens.
    """
    if not isinstance(comm, DistributedComm) or size == 1:
        return comm, None
    if comm.world_size % size:
        raise TrainingError(
            f"engine.context_parallel: {size} does not divide the {comm.world_size} ranks of this run; start a "
            f"multiple of {size} ranks, or change engine.context_parallel [TM265]"
        )
    groups = comm.world_size // size
    # diffusers looks for the dimensions "ring" and "ulysses".
    mesh = init_device_mesh(device.type, (groups, 1, size), mesh_dim_names=("data", "ring", "ulysses"))
    return DistributedComm(comm.rank // size, groups, device, mesh["data"].get_group()), mesh


def enable_context_parallel(net: nn.Module, mesh: DeviceMesh) -> None:
    """Let each rank compute a part of the tokens, and attention over all tokens for a part of the heads (Ulysses).

    Where tokens are gathered, each rank receives the gradient of its own tokens: all ranks of a group compute the same
    loss, so their gradients add up to the full one.
    """
    plan, count = getattr(net, "_cp_plan", None), mesh["ulysses"].size()
    if plan is None:
        raise TrainingError(
            f"engine.context_parallel: {type(net).__name__} does not support context parallelism, got {count}; "
            "set engine.context_parallel=1 [TM266]"
        )
    from diffusers.hooks.context_parallel import apply_context_parallel
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig

    # As `enable_parallelism` of diffusers does, which requires an accelerator.
    parallel = ContextParallelConfig(ulysses_degree=count, mesh=mesh)
    config: Any = ParallelConfig(context_parallel_config=parallel)
    config.setup(dist.get_rank(), dist.get_world_size(), torch.device(mesh.device_type), mesh=mesh)
    for processor in (getattr(module, "processor", None) for module in net.modules()):
        if processor is not None:
            processor._parallel_config = config
    net.register_forward_pre_hook(partial(_pad_and_check, count), with_kwargs=True)
    apply_context_parallel(net, parallel, plan)


def _pad_and_check(count: int, net: nn.Module, inputs: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Pad the text tokens to a multiple of `count` if the network takes a mask; refuse sizes that cannot be split."""
    padding = -named["encoder_hidden_states"].shape[1] % count
    if padding and "encoder_hidden_states_mask" in named:
        named = _pad_text(named, padding)
    heads = getattr(net, "config", {}).get("num_attention_heads", count)
    text_tokens, image_tokens = (named[name].shape[1] for name in ("encoder_hidden_states", "hidden_states"))
    if image_tokens % count or text_tokens % count or heads % count:
        raise TrainingError(
            f"engine.context_parallel: {image_tokens} image tokens, {text_tokens} text tokens and {heads} heads "
            f"cannot be split over {count} ranks; change the image size, model.max_text_tokens or "
            "engine.context_parallel [TM267]"
        )
    return inputs, named


def _pad_text(named: dict[str, Any], padding: int) -> dict[str, Any]:
    text, mask = named["encoder_hidden_states"], named["encoder_hidden_states_mask"]
    if mask is None:
        mask = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device)
    padded = {
        "encoder_hidden_states": F.pad(text, (0, 0, 0, padding)),
        "encoder_hidden_states_mask": F.pad(mask, (0, padding)),
    }
    return {**named, **padded}
