"""Shapes of the conditioning tensors of published generators, without the batch dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..models.cogvideox import CogVideoX
from ..models.hunyuanvideo import HunyuanVideo
from ..models.ltx import Ltx
from ..models.mochi import Mochi
from ..models.svd import Svd
from ..models.video_component_configs import ComponentConfigs
from ..models.wan import Wan

CLIP_TEXT_TOKENS = 77
TEXT_MASK = "seen"  # which words are no filling
ConditioningShapes = dict[str, tuple[int, ...]]


def conditioning_shapes(spec: Any, sizes: ComponentConfigs) -> ConditioningShapes:
    """By what its encoders say, and by where its latents are seen."""
    found = VIDEO_MODELS.get(type(spec))
    return (
        image_model_shapes(spec, sizes)
        if found is None
        else found(spec, sizes.get("transformer", sizes.get("unet", {})))
    )


def masked_text_shapes(spec: Any, width: int) -> ConditioningShapes:
    return {"words": (spec.words, width), TEXT_MASK: (spec.words,)}


VIDEO_MODELS: dict[type, Callable[[Any, dict[str, Any]], ConditioningShapes]] = {
    Wan: lambda spec, net: {"words": (spec.words, net["text_dim"])},
    CogVideoX: lambda spec, net: {"words": (spec.words, net["text_embed_dim"])},
    Ltx: lambda spec, net: masked_text_shapes(spec, net["caption_channels"]),
    Mochi: lambda spec, net: masked_text_shapes(spec, net["text_embed_dim"]),
    HunyuanVideo: lambda spec, net: {
        **masked_text_shapes(spec, net["text_embed_dim"]),
        "pooled": (net["pooled_projection_dim"],),
    },
    Svd: lambda spec, net: {"look": (1, net["cross_attention_dim"]), "reference": spec.shape[1:]},
}


def image_model_shapes(spec: Any, sizes: ComponentConfigs) -> ConditioningShapes:
    """Of generators of pictures, and of clips on UNets of theirs."""
    if "unet" in sizes:
        words: ConditioningShapes = {"words": (CLIP_TEXT_TOKENS, int(sizes["unet"]["cross_attention_dim"]))}
        words |= {"fps": ()} if sizes["unet"].get("fps_cond") else {}
        return words | ({"summary": (1280,)} if "addition_embed_type" in sizes["unet"] else {})
    net = sizes["transformer"]
    if "pooled_projection_dim" not in net:  # Qwen-Image, whose language model says nothing of a prompt as a whole
        return {"words": (spec.words, int(net["joint_attention_dim"]))}
    before = CLIP_TEXT_TOKENS if "text_encoder_3" in sizes else 0
    return {
        "words": (before + spec.words, int(net["joint_attention_dim"])),
        "pooled": (int(net["pooled_projection_dim"]),),
    }
