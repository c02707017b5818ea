"""Conversion of open_clip checkpoints to transformers' CLIP."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ...core.registry import ConfigError
from ...core.safe_files import read_json

MARKER = "visual.conv1.weight"  # a key that only this layout has
SETTINGS = "open_clip_config.json"  # beside the weights in open_clip's repositories
HEADS = {1280: 16, 1408: 16, 1664: 16}  # of ViT-H, g and bigG by width; other image encoders have 64 channels a head
KEYS = {
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
TRANSPOSED = {"visual.proj": "visual_projection.weight", "text_projection": "text_projection.weight"}
BLOCK = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)\.(weight|bias)")
BLOCK_KEYS = {
    "attn.out_proj": "self_attn.out_proj",
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
FUSED = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.attn\.in_proj_(weight|bias)")


def convert_keys(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The tensors under transformers' keys, with the fused projection of attention split."""
    return {key: x.contiguous() for old, tensor in tensors.items() for key, x in _convert(old, tensor, name)}


def _convert(old: str, tensor: Tensor, name: str) -> Iterator[tuple[str, Tensor]]:
    old = old.removeprefix("module.")
    block, fused = BLOCK.fullmatch(old), FUSED.fullmatch(old)
    if old in KEYS:
        yield KEYS[old], tensor
    elif old in TRANSPOSED:
        yield TRANSPOSED[old], tensor.t()
    elif fused:
        for part, x in zip("qkv", tensor.chunk(3), strict=True):
            yield f"{_encoder(fused[1])}.encoder.layers.{fused[2]}.self_attn.{part}_proj.{fused[3]}", x
    elif block and block[3] in BLOCK_KEYS:
        yield f"{_encoder(block[1])}.encoder.layers.{block[2]}.{BLOCK_KEYS[block[3]]}.{block[4]}", tensor
    else:
        raise ConfigError(
            f"the weights '{name:.200}' contain '{old:.100}', which is not part of a CLIP model of open_clip; use "
            "other weights [TM364]"
        )


def _encoder(visual: str | None) -> str:
    return "vision_model" if visual else "text_model"


def clip_config(
    tensors: Mapping[str, Tensor], name: str, num_heads: tuple[int, int] | None = None, activation: str = "gelu"
) -> Any:
    """The CLIPConfig of converted tensors; numbers of heads (image, text) follow from the widths unless given."""
    from transformers import CLIPConfig

    try:
        patches = tensors["vision_model.embeddings.patch_embedding.weight"]
        positions = tensors["vision_model.embeddings.position_embedding.weight"]
        vocabulary = tensors["text_model.embeddings.token_embedding.weight"]
        length = len(tensors["text_model.embeddings.position_embedding.weight"])
        projection = len(tensors["visual_projection.weight"])
        vision, text = (_encoder_sizes(tensors, name, activation) for name in ("vision_model", "text_model"))
    except (KeyError, IndexError) as error:
        raise ConfigError(
            f"the weights '{name:.200}' do not contain {error}; give a complete CLIP model of open_clip [TM365]"
        ) from error
    vision_heads, text_heads = num_heads or (HEADS.get(len(patches), len(patches) // 64), vocabulary.shape[1] // 64)
    for width, heads in ((len(patches), vision_heads), (vocabulary.shape[1], text_heads)):
        if heads < 1 or width % heads:
            raise ConfigError(
                f"the weights '{name:.200}' have width {width}, which does not determine the number of attention "
                f"heads; put {SETTINGS} from open_clip into the same folder [TM366]"
            )
    side = round((len(positions) - 1) ** 0.5) * patches.shape[-1]
    return CLIPConfig(
        text_config=text
        | {"num_attention_heads": text_heads, "vocab_size": len(vocabulary), "max_position_embeddings": length}
        # With eos_token_id 2 transformers takes the largest id as the end of a text, as open_clip does.
        | {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "projection_dim": projection},
        vision_config=vision
        | {"num_attention_heads": vision_heads, "image_size": side, "patch_size": patches.shape[-1]}
        | {"projection_dim": projection},
        projection_dim=projection,
    )


@dataclass(frozen=True)
class OpenClipSettings:
    """What open_clip's settings say about a network and its tensors do not."""

    num_heads: tuple[int, int]  # of attention, in the image and in the text encoder
    activation: str = "gelu"


def read_settings(folder: Path) -> OpenClipSettings | None:
    """Heads and activation from open_clip's settings, if they are there."""
    path = folder / SETTINGS
    if not path.is_file():
        return None
    try:
        settings = read_json(path)
        model = settings.get("model_cfg", settings)
        vision, text = (model[name] for name in ("vision_cfg", "text_cfg"))
        heads = int(vision["width"]) // int(vision.get("head_width", 64)), int(text["heads"])
        return OpenClipSettings(heads, "quick_gelu" if model.get("quick_gelu") else "gelu")
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ConfigError(
            f"{path} does not contain the number of attention heads of a ViT ({error!r:.100}); download the file "
            "again [TM367]"
        ) from error


def _encoder_sizes(tensors: Mapping[str, Tensor], encoder: str, activation: str) -> dict[str, Any]:
    fc1 = tensors[f"{encoder}.encoder.layers.0.mlp.fc1.weight"]
    layers = 1 + max(int(key.split(".")[3]) for key in tensors if key.startswith(f"{encoder}.encoder.layers."))
    sizes = {"hidden_size": fc1.shape[1], "intermediate_size": len(fc1), "num_hidden_layers": layers}
    return {**sizes, "hidden_act": activation}
