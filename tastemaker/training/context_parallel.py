"""Context parallel: ranks that share the tokens of the same rows, by the pieces diffusers has for it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .distributed import CollectiveComm, DistributedComm
from .errors import TrainingError


def split_data_parallel(
    team: CollectiveComm, context: int, device: torch.device
) -> tuple[CollectiveComm, DeviceMesh | None]:
    """Split ranks into data-parallel groups of `context` ranks each, which share the tokens of the same samples."""
    if not isinstance(team, DistributedComm) or context == 1:
        return team, None
    if team.world % context:
        raise TrainingError(
            f"engine.context is {context}, which does not divide the {team.world} ranks of this run; "
            f"start a multiple of {context} ranks or change engine.context"
        )
    # The names of the last two are those that diffusers looks for.
    mesh = init_device_mesh(
        device.type, (team.world // context, 1, context), mesh_dim_names=("rows", "ring", "ulysses")
    )
    return DistributedComm(team.rank // context, team.world // context, device, mesh["rows"].get_group()), mesh


def enable_context_parallel(net: nn.Module, mesh: DeviceMesh) -> None:
    """Let each rank compute a part of the tokens, and all of the attention for a part of its heads (Ulysses).

    Where tokens are put together again, the gradient of a rank's own goes back to it: as all ranks of a row have the
    same loss, their gradients add up to the whole one.
    """
    plan, count = getattr(net, "_cp_plan", None), mesh["ulysses"].size()
    if plan is None:
        raise TrainingError(
            f"engine.context is {count}, but {type(net).__name__} cannot be cut by its tokens; set engine.context to 1"
        )
    from diffusers.hooks.context_parallel import apply_context_parallel
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig

    # What the network's own `enable_parallelism` does, but that it takes an accelerator for granted.
    cut = ContextParallelConfig(ulysses_degree=count, mesh=mesh)
    config: Any = ParallelConfig(context_parallel_config=cut)
    config.setup(dist.get_rank(), dist.get_world_size(), torch.device(mesh.device_type), mesh=mesh)
    for processor in (getattr(module, "processor", None) for module in net.modules()):
        if processor is not None:
            processor._parallel_config = config
    net.register_forward_pre_hook(partial(_pad_and_check, count), with_kwargs=True)
    apply_context_parallel(net, cut, plan)


def _pad_and_check(count: int, net: nn.Module, inputs: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What can be cut into so many parts: texts are filled up where the network can be told of it."""
    lacking = -named["encoder_hidden_states"].shape[1] % count
    if lacking and "encoder_hidden_states_mask" in named:
        named = _pad_text(named, lacking)
    heads = getattr(net, "config", {}).get("num_attention_heads", count)
    words, tokens = (named[name].shape[1] for name in ("encoder_hidden_states", "hidden_states"))
    if tokens % count or words % count or heads % count:
        raise TrainingError(
            f"{tokens} tokens of pictures, {words} of texts and {heads} heads cannot be shared by {count} ranks; "
            "change the size of pictures, model.words or engine.context"
        )
    return inputs, named


def _pad_text(named: dict[str, Any], lacking: int) -> dict[str, Any]:
    words, mask = named["encoder_hidden_states"], named["encoder_hidden_states_mask"]
    seen = torch.ones(words.shape[:2], dtype=torch.bool, device=words.device) if mask is None else mask
    longer = {"encoder_hidden_states": F.pad(words, (0, 0, 0, lacking))}
    return {**named, **longer, "encoder_hidden_states_mask": F.pad(seen, (0, lacking))}
