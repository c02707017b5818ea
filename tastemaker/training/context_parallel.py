"""Context parallelism (Ulysses): ranks share the tokens of the same samples, with the hooks of diffusers.

diffusers splits and gathers the tokens and exchanges them for heads in the attention. Added here are the gradient of
attention over tokens that do not divide evenly, and the networks whose plan in diffusers does not train.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..core.errors import TrainingError
from .distributed import CollectiveComm, DistributedComm

OUTPUT = "proj_out"  # the last layer of every transformer, after which the tokens are gathered
Plan = Mapping[str, Any]  # what diffusers splits and gathers, by the name of the module
# Text stays whole on every rank where image tokens read it by cross-attention, which then needs no communication.
CROSS_ATTENTION = {
    "LTXVideoTransformer3DModel": ("encoder_hidden_states", "encoder_attention_mask"),
    "LTX2VideoTransformer3DModel": ("encoder_hidden_states", "encoder_attention_mask"),
}
# Sound stays whole on every rank. diffusers' plan leaves out that it attends to all tokens of the video.
WITH_SOUND = "LTX2VideoTransformer3DModel"


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
    from diffusers.hooks.context_parallel import apply_context_parallel
    from diffusers.models import attention_dispatch
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig

    count = mesh["ulysses"].size()
    # diffusers' attention over uneven parts has no backward pass.
    vars(attention_dispatch)["TemplatedUlyssesAnythingAttention"] = UnevenAttention
    for transformer, plan in find_plans(net, count):
        # As `enable_parallelism` of diffusers does, which requires an accelerator.
        parallel = ContextParallelConfig(ulysses_degree=count, mesh=mesh)
        config: Any = ParallelConfig(context_parallel_config=parallel)
        config.setup(dist.get_rank(), dist.get_world_size(), torch.device(mesh.device_type), mesh=mesh)
        for name, module in transformer.named_modules():
            processor = getattr(module, "processor", None)
            if processor is not None and shares_tokens(transformer, name):
                processor._parallel_config = config
        transformer.register_forward_pre_hook(partial(_prepare_call, parallel, plan), with_kwargs=True)
        apply_context_parallel(transformer, parallel, {name: each for name, each in plan.items() if name != OUTPUT})
        transformer.get_submodule(OUTPUT).register_forward_hook(partial(_gather_tokens, parallel))
        if type(transformer).__name__ == WITH_SOUND:
            hook_sound(transformer, partial(_own_part, parallel), partial(_gather_all, parallel))


def find_plans(net: nn.Module, count: int) -> list[tuple[nn.Module, Plan]]:
    """The transformers of a network, of which Wan 2.2 has two, and where their tokens are split and gathered."""
    transformers = [module for module in net.modules() if getattr(module, "_cp_plan", None)]
    if not transformers:
        raise TrainingError(
            f"engine.context_parallel: {type(net).__name__} does not support context parallelism, got {count}; "
            "set engine.context_parallel=1 [TM266]"
        )
    return [(transformer, _trainable_plan(transformer)) for transformer in transformers]


def _trainable_plan(transformer: Any) -> Plan:
    """diffusers' plan without the entries that are not split here: text of cross-attention, timesteps of tokens."""
    whole = {*CROSS_ATTENTION.get(type(transformer).__name__, ()), "timestep"}
    plan: dict[str, Any] = {}
    for module, entries in transformer._cp_plan.items():
        if module == "rope" and type(transformer).__name__ == WITH_SOUND:
            continue  # `hook_sound` splits both of its position tables
        kept = {key: entry for key, entry in entries.items() if key not in whole} if isinstance(entries, dict) else None
        if kept or kept is None:
            plan[module] = kept or entries
    return plan


def shares_tokens(transformer: nn.Module, name: str) -> bool:
    """Whether an attention layer is over tokens that are split: where text or sound stays whole, the first alone."""
    return type(transformer).__name__ not in CROSS_ATTENTION or name.rpartition(".")[2] == "attn1"


def hook_sound(
    transformer: Any, split: Callable[[Tensor, int], Tensor], gather: Callable[[Tensor, int], Tensor]
) -> list[Any]:
    """Split the positions of the video, and let the sound attend to all of its tokens; returns the hooks' handles.

    Every rank computes the whole sound. Its gradient comes from the rank's own tokens of the video, because no loss
    reads the sound, so the gradients of the ranks add up here as well.
    """

    def split_positions(_: nn.Module, inputs: Any, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(split(table, table.ndim - 2) for table in tables)

    def gather_keys(_: nn.Module, inputs: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        keys, positions = named["encoder_hidden_states"], named["key_rotary_emb"]
        every = {
            "encoder_hidden_states": gather(keys, 1),
            "key_rotary_emb": tuple(gather(table, table.ndim - 2) for table in positions),
        }
        return inputs, {**named, **every}

    of_video = (transformer.rope, transformer.cross_attn_rope)
    return [each.register_forward_hook(split_positions) for each in of_video] + [
        block.video_to_audio_attn.register_forward_pre_hook(gather_keys, with_kwargs=True)
        for block in transformer.transformer_blocks
    ]


def _own_part(parallel: Any, x: Tensor, dim: int) -> Tensor:
    """This rank's tokens of a tensor that every rank has."""
    group = parallel._ulysses_mesh.get_group()
    return x.tensor_split(parallel.ulysses_degree, dim=dim)[dist.get_rank(group)]


def _gather_all(parallel: Any, x: Tensor, dim: int) -> Tensor:
    """The tokens of all ranks; their gradients are summed over the ranks, which use them for different losses."""
    gather: Callable[..., Tensor] = SummedGather.apply
    return gather(x.transpose(0, dim), parallel.image_counts, parallel._ulysses_mesh.get_group()).transpose(0, dim)


def _prepare_call(
    parallel: Any, plan: Plan, net: Any, inputs: Any, named: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Pad the text if the network takes a mask, and choose how tokens are exchanged; refuse heads that do not divide.

    The number of tokens on each rank is kept in `parallel`, so that no rank has to ask the others.
    """
    count, heads = parallel.ulysses_degree, net.config.get("num_attention_heads", parallel.ulysses_degree)
    if heads % count:
        raise TrainingError(
            f"engine.context_parallel: {count} does not divide the {heads} attention heads of {type(net).__name__}; "
            f"choose a divisor of {heads} [TM267]"
        )
    splits_text = any(isinstance(entries, dict) and "encoder_hidden_states" in entries for entries in plan.values())
    padding = -named["encoder_hidden_states"].shape[1] % count if splits_text else 0
    if padding and "encoder_hidden_states_mask" in named:
        named = _pad_text(named, padding)
    if "timestep" in named and named["timestep"].ndim == 2:  # of every token
        named = {**named, "timestep": _own_part(parallel, named["timestep"], 1)}
    hidden_states = named["hidden_states"] if "hidden_states" in named else inputs[0]
    image_counts = split_evenly(count_tokens(net, hidden_states), count)
    text_counts = split_evenly(named["encoder_hidden_states"].shape[1] if splits_text else 0, count)
    parallel.image_counts = image_counts
    parallel.joint_counts = [image + text for image, text in zip(image_counts, text_counts, strict=True)]
    parallel.ulysses_anything = len({*image_counts}) > 1 or len({*text_counts}) > 1  # diffusers: uneven parts
    return inputs, named


def split_evenly(tokens: int, count: int) -> list[int]:
    """Tokens of each rank, as `torch.tensor_split` divides them: the first ranks may have one more."""
    return [-(-(tokens - rank) // count) for rank in range(count)]


def _gather_tokens(parallel: Any, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """The image tokens of all ranks, from each rank's [B, S_rank, D]; diffusers' own gather needs NCCL if uneven."""
    from diffusers.hooks.context_parallel import AllGatherFunction

    counts = parallel.image_counts
    padded = F.pad(output, (0, 0, 0, max(counts) - output.shape[1])).contiguous()  # gathered parts have equal shapes
    gather: Callable[..., Tensor] = AllGatherFunction.apply
    parts = torch.split(gather(padded, 1, parallel._ulysses_mesh.get_group()), max(counts), dim=1)
    return torch.cat([part[:, :tokens] for part, tokens in zip(parts, counts, strict=True)], dim=1)


def count_tokens(net: Any, hidden_states: Tensor) -> int:
    """Image tokens of a call: rows of [B, S, D], or patches of latents [B, C, F, H, W]."""
    if hidden_states.ndim == 3:
        return hidden_states.shape[1]
    patches: int = math.prod(hidden_states.shape[2:]) // math.prod(net.config.patch_size)
    return patches


def _pad_text(named: dict[str, Any], padding: int) -> dict[str, Any]:
    text, mask = named["encoder_hidden_states"], named["encoder_hidden_states_mask"]
    if mask is None:
        mask = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device)
    padded = {
        "encoder_hidden_states": F.pad(text, (0, 0, 0, padding)),
        "encoder_hidden_states_mask": F.pad(mask, (0, padding)),
    }
    return {**named, **padded}


class UnevenAttention:
    """Attention over tokens of which the ranks have different numbers; in place of diffusers' class of two functions.

    Unlike padding with a mask, it leaves the fast attention kernels in use.
    """

    @staticmethod
    def apply(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
        return_lse: bool,
        forward_op: Any,
        backward_op: Any,
        parallel_config: Any,
    ) -> Tensor:
        """Attend with this rank's tokens [B, S_rank, H, D] to the tokens of all ranks."""
        parallel = parallel_config.context_parallel_config
        group = parallel._ulysses_mesh.get_group()
        joint = query.shape[1] == parallel.joint_counts[dist.get_rank(group)]  # of text and image
        counts = parallel.joint_counts if joint else parallel.image_counts
        if attn_mask is not None and attn_mask.shape[-1] == key.shape[1] < sum(counts):
            attn_mask = _gather_mask(attn_mask, counts, group)
        to_tokens: Callable[..., Tensor] = TokenExchange.apply
        to_heads: Callable[..., Tensor] = HeadExchange.apply
        q, k, v = (to_tokens(x, counts, group).transpose(1, 2) for x in (query, key, value))  # [B, h, S, D]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, scale=scale)
        return to_heads(out.transpose(1, 2), counts, group)


def _gather_mask(mask: Tensor, counts: list[int], group: Any) -> Tensor:
    """The masks of all ranks, side by side; they are padded on the way, because a gather needs equal shapes."""
    padded = F.pad(mask, (0, max(counts) - mask.shape[-1]))
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded.contiguous(), group=group)
    return torch.cat([part[..., :tokens] for part, tokens in zip(parts, counts, strict=True)], dim=-1)


def exchange_tokens(x: Tensor, counts: list[int], group: Any) -> Tensor:
    """All heads of this rank's tokens [B, S_rank, H, D] to all tokens of this rank's heads [B, S, H / ranks, D]."""
    heads = x.view(*x.shape[:2], len(counts), -1, x.shape[3])  # [B, S_rank, ranks, H / ranks, D]
    sent = heads.permute(2, 1, 0, 3, 4).flatten(0, 1).contiguous()
    received = sent.new_empty(sum(counts), *sent.shape[1:])
    dist.all_to_all_single(received, sent, counts, [x.shape[1]] * len(counts), group=group)
    return received.transpose(0, 1)


def exchange_heads(x: Tensor, counts: list[int], group: Any) -> Tensor:
    """The inverse of `exchange_tokens`: [B, S, H / ranks, D] to [B, S_rank, H, D]."""
    ranks, own = len(counts), counts[dist.get_rank(group)]
    sent = x.transpose(0, 1).contiguous()
    received = sent.new_empty(ranks * own, *sent.shape[1:])
    dist.all_to_all_single(received, sent, [own] * ranks, counts, group=group)
    return received.view(ranks, own, *sent.shape[1:]).permute(2, 1, 0, 3, 4).flatten(2, 3)


class TokenExchange(torch.autograd.Function):
    """`exchange_tokens`, whose backward pass is `exchange_heads`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int], group: Any) -> Tensor:
        ctx.counts, ctx.group = counts, group
        return exchange_tokens(x, counts, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return exchange_heads(gradient, ctx.counts, ctx.group), None, None


class HeadExchange(torch.autograd.Function):
    """`exchange_heads`, whose backward pass is `exchange_tokens`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int], group: Any) -> Tensor:
        ctx.counts, ctx.group = counts, group
        return exchange_heads(x, counts, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return exchange_tokens(gradient, ctx.counts, ctx.group), None, None


class SummedGather(torch.autograd.Function):
    """Tokens of all ranks in dimension 0; the backward pass sums the gradients of all ranks and takes the own part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int], group: Any) -> Tensor:
        ctx.counts, ctx.group = counts, group
        padded = torch.cat([x, x.new_zeros(max(counts) - len(x), *x.shape[1:])])  # gathered parts have equal shapes
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded.contiguous(), group=group)
        return torch.cat([part[:tokens] for part, tokens in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        total = gradient.contiguous()
        dist.all_reduce(total, group=ctx.group)
        return torch.split(total, ctx.counts)[dist.get_rank(ctx.group)], None, None


@contextmanager
def emulate_context_parallel(net: nn.Module, count: int) -> Iterator[None]:
    """Compute only the first rank's tokens within the block, without other ranks, for measuring memory.

    Results are wrong but have the right shape: the tokens that are gathered are copies.
    """
    if count == 1:
        yield
        return
    from diffusers.hooks.context_parallel import EquipartitionSharder, apply_context_parallel, remove_context_parallel
    from diffusers.models._modeling_parallel import ContextParallelConfig

    totals: set[int] = set()  # numbers of tokens that were split

    def shard(x: Tensor, dim: int, mesh: object) -> Tensor:
        totals.add(x.shape[dim])
        return x.tensor_split(count, dim=dim)[0]

    def unshard(x: Tensor, dim: int, mesh: object) -> Tensor:
        total = max(tokens for tokens in totals if -(-tokens // count) == x.shape[dim])
        return torch.cat([x] * count, dim=dim).narrow(dim, 0, total)

    plans, parallel, sharder = find_plans(net, count), ContextParallelConfig(ulysses_degree=count), EquipartitionSharder
    originals = {name: vars(sharder)[name] for name in ("shard", "unshard")}

    def split_timesteps(_: nn.Module, inputs: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        timestep = named.get("timestep")
        if timestep is None or timestep.ndim == 1:
            return inputs, named
        return inputs, {**named, "timestep": shard(timestep, 1, None)}

    handles: list[Any] = []
    for transformer, plan in plans:
        apply_context_parallel(transformer, parallel, dict(plan))
        handles.append(transformer.register_forward_pre_hook(split_timesteps, with_kwargs=True))
        if type(transformer).__name__ == WITH_SOUND:
            handles += hook_sound(transformer, lambda x, dim: shard(x, dim, None), lambda x, dim: unshard(x, dim, None))
    try:
        for name, function in (("shard", shard), ("unshard", unshard)):
            setattr(sharder, name, staticmethod(function))
        yield
    finally:
        for name, original in originals.items():
            setattr(sharder, name, original)
        for handle in handles:
            handle.remove()
        for transformer, plan in plans:
            remove_context_parallel(transformer, dict(plan))
