"""LLaVA-OneVision checkpoints in LLaVA-NeXT's layout (the published ORM and PARM judges), converted to transformers."""

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
HEAD_WIDTH = 72  # of SigLIP so400m's attention, which no tensor shape shows
NUM_LAYERS = 26  # of SigLIP's 27; LLaVA uses the last but one
IMAGE_TOKEN, VIDEO_TOKEN = 151646, 151647  # unused rows of Qwen2's vocabulary
TEXT_SETTINGS = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
)  # settings of the language model in config.json, which is flat


def convert_keys(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The tensors under transformers' keys, without those that it does not use."""
    converted = {_convert_key(key, path): x for key, x in tensors.items()}
    converted.pop("", None)
    embeddings = converted.get("model.language_model.embed_tokens.weight")
    if embeddings is not None:
        converted.setdefault("lm_head.weight", embeddings.clone())
    return converted


def _convert_key(key: str, path: Path) -> str:
    unused = rf"vision_model\.(head\.|encoder\.layers\.{NUM_LAYERS}\.)"
    if re.search(rf"rotary_emb\.inv_freq$|position_ids$|{unused}", key):
        return ""
    for old, new in RULES:
        if re.fullmatch(old, key):
            return re.sub(old, new, key)
    raise ConfigError(
        f"{path} contains '{key:.120}', which LLaVA-OneVision does not have; give a model in LLaVA-NeXT's layout "
        "[TM716]"
    )


def llava_config(settings: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> Any:
    """transformers' config: the language model from config.json, the vision tower from the converted tensors."""
    from transformers import LlavaOnevisionConfig

    missing = [name for name in TEXT_SETTINGS if name not in settings]
    if missing:
        raise ConfigError(
            f"{path}/config.json does not contain '{missing[0]}'; give a LLaVA-OneVision model with Qwen2 [TM717]"
        )
    text = {name: settings[name] for name in TEXT_SETTINGS} | {"model_type": "qwen2", "tie_word_embeddings": False}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": float(settings.get("rope_theta", 1e6))}
    image_token = IMAGE_TOKEN if text["vocab_size"] > VIDEO_TOKEN else text["vocab_size"] - 2
    return LlavaOnevisionConfig(
        text_config=text,
        vision_config=_vision_config(str(settings["mm_vision_tower"]), tensors, path),
        image_token_index=image_token,
        video_token_index=image_token + 1,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )


def _vision_config(name: str, tensors: Mapping[str, Tensor], path: Path) -> dict[str, Any]:
    try:
        patches = tensors[f"{TOWER}embeddings.patch_embedding.weight"]
        positions = tensors[f"{TOWER}embeddings.position_embedding.weight"]
        fc1 = tensors[f"{TOWER}encoder.layers.0.mlp.fc1.weight"]
    except KeyError as error:
        raise ConfigError(
            f"{path} lacks {error}; give a complete LLaVA-OneVision model with its vision tower [TM718]"
        ) from error
    layers = {key.split(".")[4] for key in tensors if key.startswith(f"{TOWER}encoder.layers.")}
    width, patch, grid = patches.shape[0], patches.shape[-1], math.isqrt(positions.shape[0])
    suffix = re.search(r"(\d+)$", name)  # siglip-so400m-patch14-384: slightly more than the patches cover
    image_size = int(suffix[1]) if suffix and int(suffix[1]) // patch == grid else patch * grid
    return {
        "model_type": "siglip_vision_model",
        "hidden_size": width,
        "intermediate_size": fc1.shape[0],
        "num_hidden_layers": len(layers),
        "num_attention_heads": max(1, width // HEAD_WIDTH),
        "patch_size": patch,
        "image_size": image_size,
        "vision_use_head": False,
    }
