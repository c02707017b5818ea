"""A DiT made here as diffusers knows it: DiTTransformer2DModel's settings and names, and what it cannot hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...core.registry import ConfigError
from ..nets.latent_dit import EMBEDDING_CONVENTIONS, LatentDiTConfig

FREQUENCY_EMBEDDING_SIZE = 256  # that tell the time there, whatever the size
NETWORK_KEYS = (("enter.", "pos_embed.proj."), ("last.", "proj_out_1."), ("leave.", "proj_out_2."))
BLOCK_KEYS = (
    ("modulation.", "norm1.linear."),
    ("attention.out.", "attn1.to_out.0."),
    ("up.", "ff.net.0.proj."),
    ("down.", "ff.net.2."),
)
EMBEDDER_KEYS = (("time_in.", "timestep_embedder.linear_1."), ("time_out.", "timestep_embedder.linear_2."))
CLASS_TABLE_KEY = "class_embedder.embedding_table.weight"


def check_convertible(shape: LatentDiTConfig) -> None:
    """Refuse a network that diffusers' would compute otherwise."""
    found = None
    if shape.words:
        found = "is told words, where diffusers' DiT is told classes alone"
    elif shape.habit.rows_first or shape.habit.sine_first:
        found = "counts time and places as explainingai's trainer does, and diffusers' otherwise"
    elif shape.waves != FREQUENCY_EMBEDDING_SIZE:
        found = f"tells time by {shape.waves} waves, diffusers' by {FREQUENCY_EMBEDDING_SIZE}"
    elif shape.inner != 4 * shape.width:
        found = f"has perceptrons of {shape.inner}, diffusers' four times the width, {4 * shape.width}"
    elif shape.mixed != shape.width:
        found = f"has heads that are {shape.mixed} wide together, diffusers' as wide as the network, {shape.width}"
    if found is not None:
        raise ConfigError(
            f"--layout: the network {found}, so that no folder of diffusers' can hold it; leave --layout out for a "
            "file that `weights:` loads here"
        )


def describe_differences(shape: LatentDiTConfig) -> str:
    """What diffusers computes otherwise all the same, a sentence; nothing if all is alike."""
    if shape.habit.gap == EMBEDDING_CONVENTIONS["diffusers"].gap:
        return ""
    return (
        "diffusers tells time by waves that are up to 7 % slower than those this network learned by, as it does for "
        "facebook's own weights: pictures there are alike, not the same; they are the same for a run with "
        "model.habit=diffusers, and here"
    )


def diffusers_config(shape: LatentDiTConfig) -> dict[str, Any]:
    """What DiTTransformer2DModel is made with."""
    return {
        "num_attention_heads": shape.heads,
        "attention_head_dim": shape.width // shape.heads,
        "in_channels": shape.channels,
        "out_channels": shape.leaving,
        "num_layers": shape.depth,
        "sample_size": shape.side,
        "patch_size": shape.patch,
        "num_embeds_ada_norm": shape.classes or 1,
        "norm_eps": shape.habit.eps,
    }


def to_diffusers_keys(tensors: Mapping[str, Tensor], shape: LatentDiTConfig) -> dict[str, Tensor]:
    """Under diffusers' names, where every block has what embeds time and class; told nothing, a class of noughts."""
    ends = ("weight", "bias")
    found = {theirs + end: tensors[ours + end] for ours, theirs in NETWORK_KEYS for end in ends}
    kind = tensors["kind.weight"] if shape.classes else tensors["time_out.weight"].new_zeros(2, shape.width)
    for i in range(shape.depth):
        ours, theirs = f"blocks.{i}.", f"transformer_blocks.{i}."
        found |= {theirs + b + end: tensors[ours + a + end] for a, b in BLOCK_KEYS for end in ends}
        embedder = f"{theirs}norm1.emb."
        found |= {embedder + b + end: tensors[a + end].clone() for a, b in EMBEDDER_KEYS for end in ends}
        found[embedder + CLASS_TABLE_KEY] = kind.clone()
        for end in ends:
            parts = tensors[f"{ours}attention.qkv.{end}"].chunk(3)
            found |= {f"{theirs}attn1.to_{x}.{end}": part.clone() for x, part in zip("qkv", parts, strict=True)}
    return found
