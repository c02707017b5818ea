"""What published generators are told of a prompt, at full size: tensors by name, without the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..models.clip_sizes import Sizes
from ..models.cogvideox import CogVideoX
from ..models.hunyuanvideo import HunyuanVideo
from ..models.ltx import Ltx
from ..models.mochi import Mochi
from ..models.svd import Svd
from ..models.wan import Wan

CLIP_WORDS = 77
SEEN = "seen"  # which words are no filling
Shapes = dict[str, tuple[int, ...]]


def told(spec: Any, sizes: Sizes) -> Shapes:
    """By what its encoders say, and by where its latents are seen."""
    found = CLIPS.get(type(spec))
    return pictured(spec, sizes) if found is None else found(spec, sizes.get("transformer", sizes.get("unet", {})))


def masked(spec: Any, width: int) -> Shapes:
    return {"words": (spec.words, width), SEEN: (spec.words,)}


CLIPS: dict[type, Callable[[Any, dict[str, Any]], Shapes]] = {
    Wan: lambda spec, net: {"words": (spec.words, net["text_dim"])},
    CogVideoX: lambda spec, net: {"words": (spec.words, net["text_embed_dim"])},
    Ltx: lambda spec, net: masked(spec, net["caption_channels"]),
    Mochi: lambda spec, net: masked(spec, net["text_embed_dim"]),
    HunyuanVideo: lambda spec, net: {
        **masked(spec, net["text_embed_dim"]),
        "pooled": (net["pooled_projection_dim"],),
    },
    Svd: lambda spec, net: {"look": (1, net["cross_attention_dim"]), "reference": spec.shape[1:]},
}


def pictured(spec: Any, sizes: Sizes) -> Shapes:
    """Of generators of pictures, and of clips on UNets of theirs."""
    if "unet" in sizes:
        words: Shapes = {"words": (CLIP_WORDS, int(sizes["unet"]["cross_attention_dim"]))}
        words |= {"fps": ()} if sizes["unet"].get("fps_cond") else {}
        return words | ({"summary": (1280,)} if "addition_embed_type" in sizes["unet"] else {})
    net = sizes["transformer"]
    if "pooled_projection_dim" not in net:  # Qwen-Image, whose language model says nothing of a prompt as a whole
        return {"words": (spec.words, int(net["joint_attention_dim"]))}
    before = CLIP_WORDS if "text_encoder_3" in sizes else 0
    return {
        "words": (before + spec.words, int(net["joint_attention_dim"])),
        "pooled": (int(net["pooled_projection_dim"]),),
    }
