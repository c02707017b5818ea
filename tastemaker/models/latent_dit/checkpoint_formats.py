"""Weights of DiT in the layouts they come in, under the names of ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...core.registry import ConfigError
from .. import autoencoder_fingerprint, loading
from ..pipeline_layout import KeyRules, rename_and_concat
from ..pretrained import HUB, WeightsSource, find_weights

Tensors = dict[str, Tensor]
WEIGHT_FILES = tuple(
    f"diffusion_pytorch_model{end}" for end in (".safetensors", ".bin", ".fp16.safetensors", ".fp16.bin")
)  # of diffusers' folders, the fullest first
EMA_FIRST_KEYS = ("ema", *loading.STATE_DICT_KEYS)
LAYER = r"(\d+)\."
DIFFUSERS: KeyRules = (
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
FACEBOOK: KeyRules = (
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
EXPLAININGAI: KeyRules = (
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
FORMAT_BY_KEY = {
    "pos_embed.proj.weight": "diffusers",
    "x_embedder.proj.weight": "facebook",
    "patch_embed_layer.patch_embed.0.weight": "explainingai",
}  # what only one of them has
COMPATIBLE_CONVENTIONS = {
    "diffusers": ("diffusers", "facebook"),
    "facebook": ("facebook", "diffusers"),
    "explainingai": ("explainingai",),
}
EMBEDDER = re.compile(r"transformer_blocks\.(\d+)\.norm1\.emb\.")


def read_dit_checkpoint(name: str, habit: str, patch: int) -> Tensors:
    """The tensors of a run, a file or a folder, under our names."""
    tensors = read_raw_checkpoint(name)
    layout = next((layout for key, layout in FORMAT_BY_KEY.items() if key in tensors), None)
    if layout is None:
        return tensors
    if habit not in COMPATIBLE_CONVENTIONS[layout]:
        raise ConfigError(
            f"model.weights: '{name:.200}' are in {layout}'s layout, whose network counts time and places as "
            f"model.habit={layout} does, found {habit}; set model.habit={layout}"
        )
    return to_native_keys(tensors, layout, patch, name)


def read_raw_checkpoint(name: str) -> Tensors:
    path = Path(name).expanduser()
    if not path.exists() and HUB.fullmatch(name) and not autoencoder_fingerprint.is_shipped(name):
        path = find_weights(name, WeightsSource(name))
    for folder in (path, path / "transformer"):
        for file in WEIGHT_FILES:
            if (folder / file).is_file():
                return loading.read_checkpoint(str(folder / file), None, EMA_FIRST_KEYS)
    return loading.read_checkpoint(str(path) if path.exists() else name, None, EMA_FIRST_KEYS)


def to_native_keys(tensors: Mapping[str, Tensor], layout: str, patch: int, name: str) -> Tensors:
    kept = {key: x for key, x in tensors.items() if key not in ("pos_embed", "pos_embed.pos_embed")}
    try:
        if layout == "diffusers":
            return rename_and_concat(merge_block_embedders(kept, name), DIFFUSERS)
        if layout == "facebook":
            return rename_and_concat(kept, FACEBOOK)
        ours = rename_and_concat(kept, EXPLAININGAI)
    except ValueError as error:
        raise ConfigError(f"model.weights: '{name:.200}' are of another network: {error}") from error
    # A patch lies there as rows, columns, channels; a convolution wants channels first.
    flat = ours["enter.weight"]
    return {**ours, "enter.weight": flat.view(len(flat), patch, patch, -1).permute(0, 3, 1, 2).contiguous()}


def merge_block_embedders(tensors: Mapping[str, Tensor], name: str) -> Tensors:
    """Diffusers keeps what embeds time and class in each block: all the same, where they were not trained there."""
    kept: Tensors = {}
    for key, x in tensors.items():
        match = EMBEDDER.match(key)
        if match is None:
            kept[key] = x
            continue
        first = tensors[EMBEDDER.sub("transformer_blocks.0.norm1.emb.", key)]
        if x.device.type != "meta" and not torch.equal(x, first):
            raise ConfigError(
                f"model.weights: '{name:.200}' were trained in diffusers, where every block has come to read time and "
                f"class in its own way ('{key}' differs from the first); this network reads them once, so name others"
            )
        kept[EMBEDDER.sub("embedder.", key)] = first
    return kept
