"""CLIP as open_clip's files hold it, brought under transformers' names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ...core.registry import ConfigError

MARK = "visual.conv1.weight"  # a name that only this layout has
SETTINGS = "open_clip_config.json"  # beside the weights, where their own folder was copied whole
HEADS = {1280: 16, 1408: 16, 1664: 16}  # of the picture half by width: ViT-H, g and bigG; others have 64 numbers a head
NAMES = {
    "logit_scale": "logit_scale",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
}
TURNED = {"visual.proj": "visual_projection.weight", "text_projection": "text_projection.weight"}  # from x W to W x
BLOCK = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)\.(weight|bias)")
INNER = {
    "attn.out_proj": "self_attn.out_proj",
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
FUSED = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.attn\.in_proj_(weight|bias)")


def convert_keys(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The same tensors under transformers' names; attention's fused projection comes apart."""
    return {key: x.contiguous() for old, tensor in tensors.items() for key, x in _renamed(old, tensor, name)}


def _renamed(old: str, tensor: Tensor, name: str) -> Iterator[tuple[str, Tensor]]:
    old = old.removeprefix("module.")
    block, fused = BLOCK.fullmatch(old), FUSED.fullmatch(old)
    if old in NAMES:
        yield NAMES[old], tensor
    elif old in TURNED:
        yield TURNED[old], tensor.t()
    elif fused:
        for part, x in zip("qkv", tensor.chunk(3), strict=True):
            yield f"{_half(fused[1])}.encoder.layers.{fused[2]}.self_attn.{part}_proj.{fused[3]}", x
    elif block and block[3] in INNER:
        yield f"{_half(block[1])}.encoder.layers.{block[2]}.{INNER[block[3]]}.{block[4]}", tensor
    else:
        raise ConfigError(f"the weights '{name:.200}' hold '{old:.100}', which no CLIP of open_clip has")


def _half(visual: str | None) -> str:
    return "vision_model" if visual else "text_model"


def clip_config(tensors: Mapping[str, Tensor], name: str, heads: tuple[int, int] | None = None) -> Any:
    """The sizes that converted tensors have; heads of pictures and texts follow from the widths unless given."""
    from transformers import CLIPConfig

    try:
        patches = tensors["vision_model.embeddings.patch_embedding.weight"]
        places = tensors["vision_model.embeddings.position_embedding.weight"]
        words = tensors["text_model.embeddings.token_embedding.weight"]
        length = len(tensors["text_model.embeddings.position_embedding.weight"])
        joint = len(tensors["visual_projection.weight"])
        seen, read = _half_sizes(tensors, "vision_model"), _half_sizes(tensors, "text_model")
    except (KeyError, IndexError) as error:
        raise ConfigError(f"the weights '{name:.200}' have no {error}; expected a whole CLIP of open_clip") from error
    looking, reading = heads or (HEADS.get(len(patches), len(patches) // 64), words.shape[1] // 64)
    _divided(((len(patches), looking), (words.shape[1], reading)), name)
    side = round((len(places) - 1) ** 0.5) * patches.shape[-1]
    return CLIPConfig(
        text_config=read
        | {"num_attention_heads": reading, "vocab_size": len(words), "max_position_embeddings": length}
        # The end of a text is its largest id, wherever its padding is: the rule that transformers keeps for id 2.
        | {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "projection_dim": joint},
        vision_config=seen
        | {"num_attention_heads": looking, "image_size": side, "patch_size": patches.shape[-1]}
        | {"projection_dim": joint},
        projection_dim=joint,
    )


def _divided(halves: tuple[tuple[int, int], ...], name: str) -> None:
    for width, heads in halves:
        if heads < 1 or width % heads:
            found = f"the weights '{name:.200}' are {width} numbers wide, which does not tell how many heads they have"
            raise ConfigError(f"{found}; put {SETTINGS} beside them, as open_clip writes it")


def read_head_counts(folder: Path) -> tuple[int, int] | None:
    """Attention heads of pictures and of texts, if open_clip's settings are there."""
    path = folder / SETTINGS
    if not path.is_file():
        return None
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        seen, read = (told.get("model_cfg", told)[half] for half in ("vision_cfg", "text_cfg"))
        return int(seen["width"]) // int(seen.get("head_width", 64)), int(read["heads"])
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ConfigError(f"{path} does not tell the heads of a ViT ({error!r:.100}); fetch it again") from error


def _half_sizes(tensors: Mapping[str, Tensor], half: str) -> dict[str, Any]:
    wide = tensors[f"{half}.encoder.layers.0.mlp.fc1.weight"]
    layers = 1 + max(int(key.split(".")[3]) for key in tensors if key.startswith(f"{half}.encoder.layers."))
    sizes = {"hidden_size": wide.shape[1], "intermediate_size": len(wide), "num_hidden_layers": layers}
    return {**sizes, "hidden_act": "gelu"}
