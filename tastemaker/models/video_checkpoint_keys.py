"""Names of video transformers in their authors' checkpoints, which ComfyUI loads: Wan, LTX, HunyuanVideo and Mochi."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..core.model_spec import Tensors
from .checkpoint_keys import KeyRules, rename_and_concat, swap_scale_shift

WAN_RULES: KeyRules = (
    (r"patch_embedding\.", "patch_embedding."),
    (r"condition_embedder\.time_embedder\.linear_1\.", "time_embedding.0."),
    (r"condition_embedder\.time_embedder\.linear_2\.", "time_embedding.2."),
    (r"condition_embedder\.text_embedder\.linear_1\.", "text_embedding.0."),
    (r"condition_embedder\.text_embedder\.linear_2\.", "text_embedding.2."),
    (r"condition_embedder\.time_proj\.", "time_projection.1."),
    (r"condition_embedder\.image_embedder\.norm1\.", "img_emb.proj.0."),
    (r"condition_embedder\.image_embedder\.ff\.net\.0\.proj\.", "img_emb.proj.1."),
    (r"condition_embedder\.image_embedder\.ff\.net\.2\.", "img_emb.proj.3."),
    (r"condition_embedder\.image_embedder\.norm2\.", "img_emb.proj.4."),
    (r"blocks\.(\d+)\.attn2\.add_([kv])_proj\.", r"blocks.\1.cross_attn.\2_img."),
    (r"blocks\.(\d+)\.attn2\.norm_added_k\.", r"blocks.\1.cross_attn.norm_k_img."),
    *(
        rule
        for ours, theirs in (("attn1", "self_attn"), ("attn2", "cross_attn"))
        for rule in (
            (rf"blocks\.(\d+)\.{ours}\.to_([qkv])\.", rf"blocks.\1.{theirs}.\2."),
            (rf"blocks\.(\d+)\.{ours}\.to_out\.0\.", rf"blocks.\1.{theirs}.o."),
            (rf"blocks\.(\d+)\.{ours}\.norm_([qk])\.", rf"blocks.\1.{theirs}.norm_\2."),
        )
    ),
    (r"blocks\.(\d+)\.norm2\.", r"blocks.\1.norm3."),
    (r"blocks\.(\d+)\.ffn\.net\.0\.proj\.", r"blocks.\1.ffn.0."),
    (r"blocks\.(\d+)\.ffn\.net\.2\.", r"blocks.\1.ffn.2."),
    (r"blocks\.(\d+)\.scale_shift_table", r"blocks.\1.modulation"),
    (r"scale_shift_table", "head.modulation"),
    (r"proj_out\.", "head.head."),
)
LTX_RULES: KeyRules = (
    (r"proj_in\.", "patchify_proj."),
    (r"time_embed\.", "adaln_single."),
    (r"transformer_blocks\.(\d+)\.(attn[12])\.norm_([qk])\.", r"transformer_blocks.\1.\2.\3_norm."),
    (r"(transformer_blocks\.|caption_projection\.|proj_out\.|scale_shift_table)", r"\1"),
)
LTX2_RULES: KeyRules = (
    (r"proj_in\.", "patchify_proj."),
    (r"audio_proj_in\.", "audio_patchify_proj."),
    (r"(audio_|)time_embed\.", r"\1adaln_single."),
    (r"av_cross_attn_(video|audio)_scale_shift\.", r"av_ca_\1_scale_shift_adaln_single."),
    (r"av_cross_attn_(?:video|audio)_(a2v|v2a)_gate\.", r"av_ca_\1_gate_adaln_single."),
    (
        r"transformer_blocks\.(\d+)\.(video|audio)_a2v_cross_attn_scale_shift_table",
        r"transformer_blocks.\1.scale_shift_table_a2v_ca_\2",
    ),
    (r"transformer_blocks\.(\d+)\.(\w+)\.norm_([qk])\.", r"transformer_blocks.\1.\2.\3_norm."),
    (r"(transformer_blocks\.|(?:audio_|)(?:caption_projection\.|proj_out\.|scale_shift_table))", r"\1"),
)
REFINER = r"context_embedder\.token_refiner\.refiner_blocks\.(\d+)\."
REFINED = r"txt_in.individual_token_refiner.blocks.\1."
DOUBLE, SINGLE = r"transformer_blocks\.(\d+)\.", r"single_transformer_blocks\.(\d+)\."
HUNYUANVIDEO_RULES: KeyRules = (
    (r"x_embedder\.", "img_in."),
    (r"context_embedder\.time_text_embed\.timestep_embedder\.linear_1\.", "txt_in.t_embedder.mlp.0."),
    (r"context_embedder\.time_text_embed\.timestep_embedder\.linear_2\.", "txt_in.t_embedder.mlp.2."),
    (r"context_embedder\.time_text_embed\.text_embedder\.", "txt_in.c_embedder."),
    (r"context_embedder\.proj_in\.", "txt_in.input_embedder."),
    *((rf"{REFINER}attn\.to_{part}\.", f"{REFINED}self_attn_qkv.") for part in "qkv"),
    (rf"{REFINER}attn\.to_out\.0\.", f"{REFINED}self_attn_proj."),
    (rf"{REFINER}ff\.net\.0\.proj\.", f"{REFINED}mlp.fc1."),
    (rf"{REFINER}ff\.net\.2\.", f"{REFINED}mlp.fc2."),
    (rf"{REFINER}norm_out\.linear\.", f"{REFINED}adaLN_modulation.1."),
    (rf"{REFINER}norm([12])\.", rf"{REFINED}norm\2."),
    (r"time_text_embed\.timestep_embedder\.linear_1\.", "time_in.mlp.0."),
    (r"time_text_embed\.timestep_embedder\.linear_2\.", "time_in.mlp.2."),
    (r"time_text_embed\.guidance_embedder\.linear_1\.", "guidance_in.mlp.0."),
    (r"time_text_embed\.guidance_embedder\.linear_2\.", "guidance_in.mlp.2."),
    (r"time_text_embed\.text_embedder\.linear_1\.", "vector_in.in_layer."),
    (r"time_text_embed\.text_embedder\.linear_2\.", "vector_in.out_layer."),
    *((rf"{DOUBLE}attn\.to_{part}\.", r"double_blocks.\1.img_attn_qkv.") for part in "qkv"),
    *((rf"{DOUBLE}attn\.add_{part}_proj\.", r"double_blocks.\1.txt_attn_qkv.") for part in "qkv"),
    (rf"{DOUBLE}attn\.norm_([qk])\.", r"double_blocks.\1.img_attn_\2_norm."),
    (rf"{DOUBLE}attn\.norm_added_([qk])\.", r"double_blocks.\1.txt_attn_\2_norm."),
    (rf"{DOUBLE}attn\.to_out\.0\.", r"double_blocks.\1.img_attn_proj."),
    (rf"{DOUBLE}attn\.to_add_out\.", r"double_blocks.\1.txt_attn_proj."),
    (rf"{DOUBLE}norm1\.linear\.", r"double_blocks.\1.img_mod.linear."),
    (rf"{DOUBLE}norm1_context\.linear\.", r"double_blocks.\1.txt_mod.linear."),
    (rf"{DOUBLE}ff\.net\.0\.proj\.", r"double_blocks.\1.img_mlp.fc1."),
    (rf"{DOUBLE}ff\.net\.2\.", r"double_blocks.\1.img_mlp.fc2."),
    (rf"{DOUBLE}ff_context\.net\.0\.proj\.", r"double_blocks.\1.txt_mlp.fc1."),
    (rf"{DOUBLE}ff_context\.net\.2\.", r"double_blocks.\1.txt_mlp.fc2."),
    *((rf"{SINGLE}attn\.to_{part}\.", r"single_blocks.\1.linear1.") for part in "qkv"),
    (rf"{SINGLE}proj_mlp\.", r"single_blocks.\1.linear1."),
    (rf"{SINGLE}proj_out\.", r"single_blocks.\1.linear2."),
    (rf"{SINGLE}norm\.linear\.", r"single_blocks.\1.modulation.linear."),
    (rf"{SINGLE}attn\.norm_([qk])\.", r"single_blocks.\1.\2_norm."),
    (r"norm_out\.linear\.", "final_layer.adaLN_modulation.1."),
    (r"proj_out\.", "final_layer.linear."),
)
HUNYUANVIDEO15_RULES: KeyRules = (
    (r"time_embed\.timestep_embedder\.linear_1\.", "time_in.mlp.0."),
    (r"time_embed\.timestep_embedder\.linear_2\.", "time_in.mlp.2."),
    (r"time_embed\.timestep_embedder_r\.linear_1\.", "time_r_in.mlp.0."),
    (r"time_embed\.timestep_embedder_r\.linear_2\.", "time_r_in.mlp.2."),
    (r"context_embedder_2\.norm\.", "byt5_in.layernorm."),
    (r"context_embedder_2\.linear_([123])\.", r"byt5_in.fc\1."),
    (r"image_embedder\.norm_in\.", "vision_in.proj.0."),
    (r"image_embedder\.linear_1\.", "vision_in.proj.1."),
    (r"image_embedder\.linear_2\.", "vision_in.proj.3."),
    (r"image_embedder\.norm_out\.", "vision_in.proj.4."),
    (r"cond_type_embed\.", "cond_type_embedding."),
    *HUNYUANVIDEO_RULES,
)
MOCHI_RULES: KeyRules = (
    (r"patch_embed\.", "x_embedder."),
    (r"time_embed\.timestep_embedder\.linear_1\.", "t_embedder.mlp.0."),
    (r"time_embed\.timestep_embedder\.linear_2\.", "t_embedder.mlp.2."),
    (r"time_embed\.pooler\.", "t5_y_embedder."),
    (r"time_embed\.caption_proj\.", "t5_yproj."),
    (rf"{DOUBLE}norm1\.linear\.", r"blocks.\1.mod_x."),
    (rf"{DOUBLE}norm1_context\.linear(_1)?\.", r"blocks.\1.mod_y."),  # linear_1 in the last block
    *((rf"{DOUBLE}attn1\.to_{part}\.", r"blocks.\1.attn.qkv_x.") for part in "qkv"),
    *((rf"{DOUBLE}attn1\.add_{part}_proj\.", r"blocks.\1.attn.qkv_y.") for part in "qkv"),
    (rf"{DOUBLE}attn1\.norm_([qk])\.", r"blocks.\1.attn.\2_norm_x."),
    (rf"{DOUBLE}attn1\.norm_added_([qk])\.", r"blocks.\1.attn.\2_norm_y."),
    (rf"{DOUBLE}attn1\.to_out\.0\.", r"blocks.\1.attn.proj_x."),
    (rf"{DOUBLE}attn1\.to_add_out\.", r"blocks.\1.attn.proj_y."),
    (rf"{DOUBLE}ff\.net\.0\.proj\.", r"blocks.\1.mlp_x.w1."),
    (rf"{DOUBLE}ff\.net\.2\.", r"blocks.\1.mlp_x.w2."),
    (rf"{DOUBLE}ff_context\.net\.0\.proj\.", r"blocks.\1.mlp_y.w1."),
    (rf"{DOUBLE}ff_context\.net\.2\.", r"blocks.\1.mlp_y.w2."),
    (r"norm_out\.linear\.", "final_layer.mod."),
    (r"proj_out\.", "final_layer.linear."),
    (r"pos_frequencies", "pos_frequencies"),
)
HUNYUANVIDEO_COMFYUI_NAMES = (  # of layers: regular expressions of Tencent's names, and their replacements
    (r"txt_in\.t_embedder\.mlp\.0\.", "txt_in.t_embedder.in_layer."),
    (r"txt_in\.t_embedder\.mlp\.2\.", "txt_in.t_embedder.out_layer."),
    (r"txt_in\.c_embedder\.linear_1\.", "txt_in.c_embedder.in_layer."),
    (r"txt_in\.c_embedder\.linear_2\.", "txt_in.c_embedder.out_layer."),
    (r"_(attn)_(qkv|proj)\.", r"_\1.\2."),
    (r"mlp\.fc1\.", "mlp.0."),
    (r"mlp\.fc2\.", "mlp.2."),
    (r"(_mod|\.modulation)\.linear\.", r"\1.lin."),
    (r"_in\.mlp\.0\.", "_in.in_layer."),
    (r"_in\.mlp\.2\.", "_in.out_layer."),
)


def wan_to_original(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Rename a transformer's tensors as Wan's authors do."""
    return rename_and_concat(tensors, WAN_RULES)


def ltx_to_original(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Rename a transformer's tensors as Lightricks do."""
    return rename_and_concat(tensors, LTX_RULES)


def ltx2_to_original(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Rename a transformer's tensors as Lightricks do for LTX-2."""
    return rename_and_concat(tensors, LTX2_RULES)


def hunyuanvideo_to_original(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Rename a transformer's tensors as Tencent does, whose last modulation has shift before scale."""
    swapped = {key: swap_scale_shift(x) for key, x in tensors.items() if key.startswith("norm_out.linear.")}
    return rename_and_concat({**tensors, **swapped}, HUNYUANVIDEO_RULES)


def hunyuanvideo15_to_comfyui(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Rename a transformer's tensors as Tencent does, but with queries, keys and values fused, as ComfyUI has them.

    ComfyUI's network of HunyuanVideo 1.5 is that of HunyuanVideo; Tencent's has three layers in place of the fused one.
    """
    swapped = {key: swap_scale_shift(x) for key, x in tensors.items() if key.startswith("norm_out.linear.")}
    return rename_and_concat({**tensors, **swapped}, HUNYUANVIDEO15_RULES)


def mochi_to_original(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Rename a transformer's tensors as Genmo does: halves of modulation and of gated layers in the other order."""
    halves = ("norm_out.linear.", ".ff.net.0.proj.", ".ff_context.net.0.proj.")
    swapped = {key: swap_scale_shift(x) for key, x in tensors.items() if any(part in key for part in halves)}
    return rename_and_concat({**tensors, **swapped}, MOCHI_RULES)


def hunyuanvideo_comfyui_layer(layer: str) -> str:
    """ComfyUI's name of a layer of Tencent's network, without the tensor's name."""
    name = f"{layer}."
    for pattern, replacement in HUNYUANVIDEO_COMFYUI_NAMES:
        name = re.sub(pattern, replacement, name)
    return name.removesuffix(".")
