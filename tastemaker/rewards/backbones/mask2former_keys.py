"""Conversion of mmdet's Mask2Former checkpoints (mmdet 2 and 3) to transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.registry import ConfigError

MARKER = "panoptic_head.cls_embed.weight"  # a key that only mmdet's files have
SWIN = r"model.pixel_level_module.encoder.swin."
PIXELS = r"model.pixel_level_module.decoder."
QUERIES = r"model.transformer_module."
PIXEL_LAYER = r"panoptic_head\.pixel_decoder\.encoder\.layers\.(\d+)\."
QUERY_LAYER = r"panoptic_head\.transformer_decoder\.layers\.(\d+)\."
BLOCK = r"backbone\.stages\.(\d+)\.blocks\.(\d+)\."
STAGE = r"backbone\.stages\.(\d+)\."
SWIN_BLOCK = rf"{SWIN}encoder.layers.\1.blocks.\2"
PIXELS_LAYER, QUERIES_LAYER = rf"{PIXELS}encoder.layers.\1", rf"{QUERIES}decoder.layers.\1"
PIXEL_ATTENTION = r"(?:attentions\.0|self_attn)"
MLP = r"(?:ffns\.0|ffn)\.layers"  # mmdet 2, mmdet 3
END = r"(weight|bias)"

# A target with {} splits a fused tensor into those of queries, keys and values.
RULES: tuple[tuple[str, str], ...] = (
    (rf"backbone\.patch_embed\.projection\.{END}", rf"{SWIN}embeddings.patch_embeddings.projection.\1"),
    (rf"backbone\.patch_embed\.norm\.{END}", rf"{SWIN}embeddings.norm.\1"),
    (rf"{BLOCK}norm1\.{END}", rf"{SWIN_BLOCK}.layernorm_before.\3"),
    (rf"{BLOCK}norm2\.{END}", rf"{SWIN_BLOCK}.layernorm_after.\3"),
    (rf"{BLOCK}attn\.w_msa\.(relative_position_bias_table)", rf"{SWIN_BLOCK}.attention.relative_position_bias.\3"),
    (rf"{BLOCK}attn\.w_msa\.qkv\.{END}", rf"{SWIN_BLOCK}.attention.{{}}_proj.\3"),
    (rf"{BLOCK}attn\.w_msa\.proj\.{END}", rf"{SWIN_BLOCK}.attention.o_proj.\3"),
    (rf"{BLOCK}ffn\.layers\.0\.0\.{END}", rf"{SWIN_BLOCK}.mlp.fc1.\3"),
    (rf"{BLOCK}ffn\.layers\.1\.{END}", rf"{SWIN_BLOCK}.mlp.fc2.\3"),
    (rf"{STAGE}downsample\.reduction\.{END}", rf"{SWIN}encoder.layers.\1.downsample.reduction.\2"),
    (rf"{STAGE}downsample\.norm\.{END}", rf"{SWIN}encoder.layers.\1.downsample.norm.\2"),
    *(
        (rf"backbone\.norm{k}\.{END}", rf"model.pixel_level_module.encoder.hidden_states_norms.stage{k + 1}.\1")
        for k in range(4)
    ),
    (rf"panoptic_head\.pixel_decoder\.input_convs\.(\d+)\.conv\.{END}", rf"{PIXELS}input_projections.\1.0.\2"),
    (rf"panoptic_head\.pixel_decoder\.input_convs\.(\d+)\.gn\.{END}", rf"{PIXELS}input_projections.\1.1.\2"),
    (
        rf"{PIXEL_LAYER}{PIXEL_ATTENTION}\.(sampling_offsets|attention_weights|value_proj|output_proj)\.{END}",
        rf"{PIXELS_LAYER}.self_attn.\2.\3",
    ),
    (rf"{PIXEL_LAYER}{MLP}\.0\.0\.{END}", rf"{PIXELS_LAYER}.fc1.\2"),
    (rf"{PIXEL_LAYER}{MLP}\.1\.{END}", rf"{PIXELS_LAYER}.fc2.\2"),
    (rf"{PIXEL_LAYER}norms\.0\.{END}", rf"{PIXELS_LAYER}.self_attn_layer_norm.\2"),
    (rf"{PIXEL_LAYER}norms\.1\.{END}", rf"{PIXELS_LAYER}.final_layer_norm.\2"),
    (r"panoptic_head\.pixel_decoder\.level_encoding\.weight", rf"{PIXELS}level_embed"),
    (rf"panoptic_head\.pixel_decoder\.lateral_convs\.0\.conv\.{END}", rf"{PIXELS}adapter_1.0.\1"),
    (rf"panoptic_head\.pixel_decoder\.lateral_convs\.0\.gn\.{END}", rf"{PIXELS}adapter_1.1.\1"),
    (rf"panoptic_head\.pixel_decoder\.output_convs\.0\.conv\.{END}", rf"{PIXELS}layer_1.0.\1"),
    (rf"panoptic_head\.pixel_decoder\.output_convs\.0\.gn\.{END}", rf"{PIXELS}layer_1.1.\1"),
    (rf"panoptic_head\.pixel_decoder\.mask_feature\.{END}", rf"{PIXELS}mask_projection.\1"),
    (
        rf"{QUERY_LAYER}(?:attentions\.0|cross_attn)\.attn\.(in_proj_\w+|out_proj\.\w+)",
        rf"{QUERIES_LAYER}.cross_attn.\2",
    ),
    (rf"{QUERY_LAYER}(?:attentions\.1|self_attn)\.attn\.in_proj_{END}", rf"{QUERIES_LAYER}.self_attn.{{}}_proj.\2"),
    (rf"{QUERY_LAYER}(?:attentions\.1|self_attn)\.attn\.out_proj\.{END}", rf"{QUERIES_LAYER}.self_attn.out_proj.\2"),
    (rf"{QUERY_LAYER}{MLP}\.0\.0\.{END}", rf"{QUERIES_LAYER}.fc1.\2"),
    (rf"{QUERY_LAYER}{MLP}\.1\.{END}", rf"{QUERIES_LAYER}.fc2.\2"),
    (rf"{QUERY_LAYER}norms\.0\.{END}", rf"{QUERIES_LAYER}.cross_attn_layer_norm.\2"),
    (rf"{QUERY_LAYER}norms\.1\.{END}", rf"{QUERIES_LAYER}.self_attn_layer_norm.\2"),
    (rf"{QUERY_LAYER}norms\.2\.{END}", rf"{QUERIES_LAYER}.final_layer_norm.\2"),
    (rf"panoptic_head\.transformer_decoder\.post_norm\.{END}", rf"{QUERIES}decoder.layernorm.\1"),
    (r"panoptic_head\.query_embed\.weight", rf"{QUERIES}queries_embedder.weight"),
    (r"panoptic_head\.query_feat\.weight", rf"{QUERIES}queries_features.weight"),
    (r"panoptic_head\.level_embed\.weight", rf"{QUERIES}level_embed.weight"),
    (rf"panoptic_head\.cls_embed\.{END}", r"class_predictor.\1"),
    *(
        (rf"panoptic_head\.mask_embed\.{2 * k}\.{END}", rf"{QUERIES}decoder.mask_predictor.mask_embedder.{k}.0.\1")
        for k in range(3)
    ),
)


def convert_keys(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """mmdet's tensors under transformers' keys."""
    converted: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if key.endswith("relative_position_index") or key.startswith("data_preprocessor."):
            continue  # transformers computes them
        target = next((match.expand(to) for match, to in _matches(key)), None)
        if target is None:
            raise ConfigError(
                f"{name} contains '{key:.100}', which is not part of mmdet's Mask2Former; give another file [TM363]"
            )
        if "{}" in target:
            converted |= {target.format(part): x for part, x in zip("qkv", tensor.chunk(3), strict=True)}
        else:
            converted[target] = reorder_patch_merging(tensor) if ".downsample." in key else tensor
    return converted


def _matches(key: str) -> list[tuple[re.Match[str], str]]:
    return [(match, to) for pattern, to in RULES if (match := re.fullmatch(pattern, key))]


def reorder_patch_merging(tensor: Tensor) -> Tensor:
    """Reorder the inputs of patch merging [..., 4 C] from mmdet's channel-major order to Swin's corner-major one."""
    corners = tensor.view(*tensor.shape[:-1], -1, 4)[..., [0, 2, 1, 3]]  # Swin takes the lower left corner second
    return corners.transpose(-1, -2).flatten(-2)


def mask2former_config(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The settings of transformers' Mask2FormerConfig, derived from mmdet's tensors."""
    table = tensors["backbone.stages.0.blocks.0.attn.w_msa.relative_position_bias_table"]
    stages = _count(tensors, r"backbone\.stages\.(\d+)\.")
    depths = [_count(tensors, rf"backbone\.stages\.{k}\.blocks\.(\d+)\.") for k in range(stages)]
    tables = [f"backbone.stages.{k}.blocks.0.attn.w_msa.relative_position_bias_table" for k in range(stages)]
    patches, queries = tensors["backbone.patch_embed.projection.weight"], tensors["panoptic_head.query_feat.weight"]
    sizes = {_target(key): x.shape for key, x in tensors.items() if not key.endswith("relative_position_index")}
    swin = {
        "model_type": "swin",
        "embed_dim": patches.shape[0],
        "patch_size": patches.shape[-1],
        "depths": depths,
        "num_heads": [tensors[name].shape[1] for name in tables],
        "window_size": (round(table.shape[0] ** 0.5) + 1) // 2,
        "out_features": [f"stage{k + 1}" for k in range(stages)],
    }
    return {
        "backbone_config": swin,
        "num_labels": tensors[MARKER].shape[0] - 1,
        "num_queries": queries.shape[0],
        "hidden_dim": queries.shape[1],
        "feature_size": queries.shape[1],
        "mask_feature_size": sizes[f"{PIXELS}mask_projection.weight"][0],
        "encoder_feedforward_dim": sizes[f"{PIXELS}encoder.layers.0.fc1.weight"][0],
        "encoder_layers": _count(tensors, PIXEL_LAYER),
        "decoder_layers": _count(tensors, QUERY_LAYER) + 1,  # transformers counts the prediction before the first layer
        "num_attention_heads": sizes[f"{PIXELS}encoder.layers.0.self_attn.attention_weights.weight"][0] // 12,
        "dim_feedforward": sizes[f"{QUERIES}decoder.layers.0.fc1.weight"][0],
    }


def _target(key: str) -> str:
    return next((match.expand(to) for match, to in _matches(key)), key)


def _count(tensors: Mapping[str, Tensor], pattern: str) -> int:
    return len({match[1] for key in tensors if (match := re.match(pattern, key))})


def unused_norm(width: int) -> dict[str, Tensor]:
    """A norm that transformers builds but never uses, and that some files lack."""
    key = f"{SWIN}layernorm."
    return {f"{key}weight": torch.ones(width), f"{key}bias": torch.zeros(width)}
