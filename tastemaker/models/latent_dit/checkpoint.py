"""DiT checkpoints: read those of facebook, diffusers and explainingai with our keys, and convert ours to diffusers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.model_spec import Tensors
from ...core.registry import ConfigError
from .. import loading, weight_files
from ..checkpoint_keys import KeyRules, invert_key_rules, rename_and_concat
from ..nets.latent_dit import EMBEDDING_CONVENTIONS, LatentDiTConfig
from ..pretrained import HUB_ID, WeightsSource, find_weights

WEIGHT_FILES = tuple(  # of a diffusers folder, highest precision first
    f"diffusion_pytorch_model{end}" for end in (".safetensors", ".bin", ".fp16.safetensors", ".fp16.bin")
)
EMA_FIRST_KEYS = ("ema", *loading.STATE_DICT_KEYS)
LAYER = r"(\d+)\."
DIFFUSERS_KEY_RULES: KeyRules = (
    (r"pos_embed\.proj\.", "enter."),
    (r"embedder\.timestep_embedder\.linear_1\.", "time_in."),
    (r"embedder\.timestep_embedder\.linear_2\.", "time_out."),
    (r"embedder\.class_embedder\.embedding_table\.", "kind."),
    (rf"transformer_blocks\.{LAYER}norm1\.linear\.", r"blocks.\1.modulation."),
    *((rf"transformer_blocks\.{LAYER}attn1\.to_{x}\.", r"blocks.\1.attention.qkv.") for x in "qkv"),
    (rf"transformer_blocks\.{LAYER}attn1\.to_out\.0\.", r"blocks.\1.attention.out."),
    (rf"transformer_blocks\.{LAYER}ff\.net\.0\.proj\.", r"blocks.\1.up."),
    (rf"transformer_blocks\.{LAYER}ff\.net\.2\.", r"blocks.\1.down."),
    (r"proj_out_1\.", "last."),
    (r"proj_out_2\.", "leave."),
)
FACEBOOK_KEY_RULES: KeyRules = (
    (r"x_embedder\.proj\.", "enter."),
    (r"t_embedder\.mlp\.0\.", "time_in."),
    (r"t_embedder\.mlp\.2\.", "time_out."),
    (r"y_embedder\.embedding_table\.", "kind."),
    (rf"blocks\.{LAYER}adaLN_modulation\.1\.", r"blocks.\1.modulation."),
    (rf"blocks\.{LAYER}attn\.qkv\.", r"blocks.\1.attention.qkv."),
    (rf"blocks\.{LAYER}attn\.proj\.", r"blocks.\1.attention.out."),
    (rf"blocks\.{LAYER}mlp\.fc1\.", r"blocks.\1.up."),
    (rf"blocks\.{LAYER}mlp\.fc2\.", r"blocks.\1.down."),
    (r"final_layer\.adaLN_modulation\.1\.", "last."),
    (r"final_layer\.linear\.", "leave."),
)
EXPLAININGAI_KEY_RULES: KeyRules = (
    (r"patch_embed_layer\.patch_embed\.0\.", "enter."),
    (r"t_proj\.0\.", "time_in."),
    (r"t_proj\.2\.", "time_out."),
    (rf"layers\.{LAYER}adaptive_norm_layer\.1\.", r"blocks.\1.modulation."),
    (rf"layers\.{LAYER}attn_block\.qkv_proj\.", r"blocks.\1.attention.qkv."),
    (rf"layers\.{LAYER}attn_block\.output_proj\.0\.", r"blocks.\1.attention.out."),
    (rf"layers\.{LAYER}mlp_block\.0\.", r"blocks.\1.up."),
    (rf"layers\.{LAYER}mlp_block\.2\.", r"blocks.\1.down."),
    (r"adaptive_norm_layer\.1\.", "last."),
    (r"proj_out\.", "leave."),
)
LAYOUT_BY_KEY = {  # a key that only this layout has
    "pos_embed.proj.weight": "diffusers",
    "x_embedder.proj.weight": "facebook",
    "patch_embed_layer.patch_embed.0.weight": "explainingai",
}
COMPATIBLE_CONVENTIONS = {
    "diffusers": ("diffusers", "facebook"),
    "facebook": ("facebook", "diffusers"),
    "explainingai": ("explainingai",),
}
BLOCK_EMBEDDER = re.compile(r"transformer_blocks\.(\d+)\.norm1\.emb\.")

DIFFUSERS_EMBEDDING_SIZE = 256  # of the sinusoidal timestep embedding in diffusers' DiT, whatever the network's size
NETWORK_KEYS = (("enter.", "pos_embed.proj."), ("last.", "proj_out_1."), ("leave.", "proj_out_2."))
BLOCK_KEYS = (
    ("modulation.", "norm1.linear."),
    ("attention.out.", "attn1.to_out.0."),
    ("up.", "ff.net.0.proj."),
    ("down.", "ff.net.2."),
)
EMBEDDER_KEYS = (("time_in.", "timestep_embedder.linear_1."), ("time_out.", "timestep_embedder.linear_2."))
CLASS_TABLE_KEY = "class_embedder.embedding_table.weight"


def read_dit_checkpoint(name: str, convention: str, patch_size: int) -> Tensors:
    """Read the tensors of a run, a file, a folder or a hub id, with our keys."""
    tensors = _read_tensors(name)
    layout = next((layout for key, layout in LAYOUT_BY_KEY.items() if key in tensors), None)
    if layout is None:
        return tensors
    if convention not in COMPATIBLE_CONVENTIONS[layout]:
        raise ConfigError(
            f"model.convention: '{name:.200}' is in {layout}'s layout, which needs model.convention={layout}, got "
            f"{convention}; set model.convention={layout} [TM438]"
        )
    return to_native_keys(tensors, layout, patch_size, name)


def _read_tensors(name: str) -> Tensors:
    path = Path(name).expanduser()
    if not path.exists() and HUB_ID.fullmatch(name) and not weight_files.is_shipped(name):
        path = find_weights(name, WeightsSource(name))
    for folder in (path, path / "transformer"):
        for file in WEIGHT_FILES:
            if (folder / file).is_file():
                return loading.read_checkpoint(str(folder / file), None, EMA_FIRST_KEYS)
    return loading.read_checkpoint(str(path) if path.exists() else name, None, EMA_FIRST_KEYS)


def to_native_keys(tensors: Mapping[str, Tensor], layout: str, patch_size: int, name: str) -> Tensors:
    """Rename the tensors of a layout to our keys; `name` is for error messages."""
    weights = {key: x for key, x in tensors.items() if key not in ("pos_embed", "pos_embed.pos_embed")}
    if layout == "diffusers":
        weights = merge_block_embedders(weights, name)
    try:
        if layout == "diffusers":
            return rename_and_concat(weights, DIFFUSERS_KEY_RULES)
        if layout == "facebook":
            return rename_and_concat(weights, FACEBOOK_KEY_RULES)
        renamed = rename_and_concat(weights, EXPLAININGAI_KEY_RULES)
    except ValueError as error:
        raise ConfigError(
            f"model.weights: '{name:.200}' belongs to another network: {error}; use other weights [TM439]"
        ) from error
    # Patches are flattened as rows, columns, channels there; our convolution has channels first.
    flat = renamed["enter.weight"]
    patches = flat.view(len(flat), patch_size, patch_size, -1)
    return {**renamed, "enter.weight": patches.permute(0, 3, 1, 2).contiguous()}


def to_explainingai_keys(tensors: Mapping[str, Tensor], config: LatentDiTConfig) -> Tensors:
    """Rename our tensors to the keys of explainingai's and nanoVLA-RL's trainers; refuse networks that they lack."""
    if config.convention != EMBEDDING_CONVENTIONS["explainingai"]:
        raise ConfigError(
            "--layout: authors is the layout of nanoVLA-RL, whose network embeds time and position by "
            "model.convention=explainingai; give diffusers, or leave --layout out"
            " [TM850]"
        )
    if config.num_classes or config.max_text_tokens or config.out_channels != config.channels:
        raise ConfigError(
            "--layout: nanoVLA-RL's DiT has neither a condition nor a learned variance, which this network has; leave "
            "--layout out"
            " [TM851]"
        )
    renamed = {invert_key_rules(key, EXPLAININGAI_KEY_RULES): x for key, x in tensors.items()}
    patches = tensors["enter.weight"].permute(0, 2, 3, 1).flatten(1)  # rows, columns, channels
    return {**renamed, "patch_embed_layer.patch_embed.0.weight": patches.contiguous()}


def merge_block_embedders(tensors: Mapping[str, Tensor], name: str) -> Tensors:
    """Merge diffusers' copies of the time and class embedders, one per block; copies that differ are an error."""
    merged: Tensors = {}
    for key, x in tensors.items():
        if BLOCK_EMBEDDER.match(key) is None:
            merged[key] = x
            continue
        first = tensors[BLOCK_EMBEDDER.sub("transformer_blocks.0.norm1.emb.", key)]
        if x.device.type != "meta" and not torch.equal(x, first):
            raise ConfigError(
                f"model.weights: '{name:.200}' was trained in diffusers with separate time and class embeddings "
                f"per block ('{key}' differs from the first block); this network shares one embedding for all "
                "blocks, so use other weights [TM440]"
            )
        merged[BLOCK_EMBEDDER.sub("embedder.", key)] = first
    return merged


def check_convertible(config: LatentDiTConfig) -> None:
    """Refuse a network that diffusers' DiT would compute differently."""
    reason = None
    if config.max_text_tokens:
        reason = "is conditioned on words, but diffusers' DiT on classes only"
    elif config.convention.rows_first or config.convention.sine_first:
        reason = "embeds time and position as explainingai's trainer does, but diffusers' DiT does it differently"
    elif config.timestep_embed_dim != DIFFUSERS_EMBEDDING_SIZE:
        reason = f"embeds time by {config.timestep_embed_dim} numbers, but diffusers' DiT by {DIFFUSERS_EMBEDDING_SIZE}"
    elif config.intermediate_size != 4 * config.width:
        reason = f"has an MLP width of {config.intermediate_size}, but diffusers' DiT has {4 * config.width}"
    elif config.attention_width != config.width:
        reason = f"has attention of width {config.attention_width}, but diffusers' DiT has {config.width}"
    if reason is not None:
        raise ConfigError(
            f"--layout: the network {reason}, so it cannot be saved as a diffusers folder; remove --layout to "
            "write a file that `model.weights` can load [TM441]"
        )


def describe_differences(config: LatentDiTConfig) -> str:
    """Return a sentence about what diffusers computes differently nevertheless; '' if nothing."""
    if config.convention.downscale_freq_shift == EMBEDDING_CONVENTIONS["diffusers"].downscale_freq_shift:
        return ""
    return (
        "diffusers embeds time with frequencies that are up to 7 % lower than those this network was trained with, as "
        "it does for facebook's own weights: images are similar, not the same; they are the same for a run with "
        "model.convention=diffusers, and here"
    )


def diffusers_config(config: LatentDiTConfig) -> dict[str, Any]:
    """Return the settings of diffusers' DiTTransformer2DModel."""
    return {
        "num_attention_heads": config.heads,
        "attention_head_dim": config.width // config.heads,
        "in_channels": config.channels,
        "out_channels": config.out_channels,
        "num_layers": config.depth,
        "sample_size": config.side,
        "patch_size": config.patch_size,
        "num_embeds_ada_norm": config.num_classes or 1,
        "norm_eps": config.convention.eps,
    }


def to_diffusers_keys(tensors: Mapping[str, Tensor], config: LatentDiTConfig) -> Tensors:
    """Rename our tensors to diffusers' keys: each block gets a copy of the time and class embedders.

    An unconditional network gets a class table of zeros.
    """
    ends = ("weight", "bias")
    renamed = {theirs + end: tensors[ours + end] for ours, theirs in NETWORK_KEYS for end in ends}
    if config.num_classes:
        class_table = tensors["kind.weight"]
    else:
        class_table = tensors["time_out.weight"].new_zeros(2, config.width)
    for i in range(config.depth):
        ours, theirs = f"blocks.{i}.", f"transformer_blocks.{i}."
        renamed |= {theirs + b + end: tensors[ours + a + end] for a, b in BLOCK_KEYS for end in ends}
        embedder = f"{theirs}norm1.emb."
        renamed |= {embedder + b + end: tensors[a + end].clone() for a, b in EMBEDDER_KEYS for end in ends}
        renamed[embedder + CLASS_TABLE_KEY] = class_table.clone()
        for end in ends:
            qkv = tensors[f"{ours}attention.qkv.{end}"].chunk(3)
            renamed |= {f"{theirs}attn1.to_{x}.{end}": part.clone() for x, part in zip("qkv", qkv, strict=True)}
    return renamed
