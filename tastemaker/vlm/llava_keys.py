"""LLaVA-OneVision as LLaVA-NeXT writes it, for transformers: the layout of the published ORM and PARM judges."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..core.registry import ConfigError

RULES = (
    (r"model\.vision_tower\.vision_tower\.vision_model\.(.+)", r"model.vision_tower.\1"),
    (r"model\.mm_projector\.0\.(weight|bias)", r"model.multi_modal_projector.linear_1.\1"),
    (r"model\.mm_projector\.2\.(weight|bias)", r"model.multi_modal_projector.linear_2.\1"),
    (r"model\.(embed_tokens|layers|norm)\.(.+)", r"model.language_model.\1.\2"),
    (r"(model\.image_newline|lm_head\.weight)", r"\1"),
)
TOWER = "model.vision_tower."
HEAD = 72  # width of an attention head of SigLIP so400m, which no tensor tells
LAYERS = 26  # of SigLIP's 27; LLaVA reads the last but one
PICTURE, MOVIE = 151646, 151647  # spare rows of Qwen2's vocabulary
TEXT = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
)  # what its config.json says of the language model, flat


def is_llava_next(told: Mapping[str, Any]) -> bool:
    """Whether a config.json is of this layout."""
    return "mm_vision_tower" in told


def convert_keys(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The tensors by the names transformers gives them, without those it has no use for."""
    found = {_renamed(key, path): x for key, x in tensors.items()}
    found.pop("", None)
    tied = found.get("model.language_model.embed_tokens.weight")
    if tied is not None:
        found.setdefault("lm_head.weight", tied.clone())
    return found


def _renamed(key: str, path: Path) -> str:
    last = rf"vision_model\.(head\.|encoder\.layers\.{LAYERS}\.)"
    if re.search(rf"rotary_emb\.inv_freq$|position_ids$|{last}", key):
        return ""
    for old, new in RULES:
        if re.fullmatch(old, key):
            return re.sub(old, new, key)
    raise ConfigError(f"{path} holds '{key:.120}', which no LLaVA-OneVision has; expected one in LLaVA-NeXT's layout")


def llava_config(told: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> Any:
    """The settings transformers wants, of the language model as told, of the eyes as the converted tensors show."""
    from transformers import LlavaOnevisionConfig

    lost = [name for name in TEXT if name not in told]
    if lost:
        raise ConfigError(f"{path}/config.json says no '{lost[0]}'; expected that of a LLaVA-OneVision with Qwen2")
    text = {name: told[name] for name in TEXT} | {"model_type": "qwen2", "tie_word_embeddings": False}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": float(told.get("rope_theta", 1e6))}
    picture = PICTURE if text["vocab_size"] > MOVIE else text["vocab_size"] - 2
    return LlavaOnevisionConfig(
        text_config=text,
        vision_config=_eyes(str(told["mm_vision_tower"]), tensors, path),
        image_token_index=picture,
        video_token_index=picture + 1,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )


def _eyes(name: str, tensors: Mapping[str, Tensor], path: Path) -> dict[str, Any]:
    try:
        patches = tensors[f"{TOWER}embeddings.patch_embedding.weight"]
        places = tensors[f"{TOWER}embeddings.position_embedding.weight"]
        inner = tensors[f"{TOWER}encoder.layers.0.mlp.fc1.weight"]
    except KeyError as error:
        raise ConfigError(f"{path} lacks {error}; expected a whole LLaVA-OneVision, its vision tower too") from error
    layers = {key.split(".")[4] for key in tensors if key.startswith(f"{TOWER}encoder.layers.")}
    width, patch, along = patches.shape[0], patches.shape[-1], math.isqrt(places.shape[0])
    named = re.search(r"(\d+)$", name)  # siglip-so400m-patch14-384: a little more than the patches cover
    side = int(named[1]) if named and int(named[1]) // patch == along else patch * along
    return {
        "model_type": "siglip_vision_model",
        "hidden_size": width,
        "intermediate_size": inner.shape[0],
        "num_hidden_layers": len(layers),
        "num_attention_heads": max(1, width // HEAD),
        "patch_size": patch,
        "image_size": side,
        "vision_use_head": False,
    }
