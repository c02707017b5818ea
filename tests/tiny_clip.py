"""Tiny CLIP models in the published checkpoint layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel

from tastemaker.rewards.backbones.frozen_models import silence_transformers
from tastemaker.rewards.backbones.tokenizers import tiny_clip_tokenizer

TOWER = {"intermediate_size": 96, "num_hidden_layers": 2, "hidden_act": "gelu"}
SPECIAL_TOKENS = {"vocab_size": 514, "bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513}
LAYER_NAMES = {
    "self_attn.out_proj": "attn.out_proj",
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}
NAMES = {
    "logit_scale": "logit_scale",
    "vision_model.embeddings.class_embedding": "visual.class_embedding",
    "vision_model.embeddings.patch_embedding.weight": "visual.conv1.weight",
    "vision_model.embeddings.position_embedding.weight": "visual.positional_embedding",
    "vision_model.pre_layrnorm.": "visual.ln_pre.",
    "vision_model.post_layernorm.": "visual.ln_post.",
    "text_model.embeddings.token_embedding.weight": "token_embedding.weight",
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "text_model.final_layer_norm.": "ln_final.",
}


def build_clip(**settings: Any) -> Any:
    """Build a CLIP with a head dimension of 64, like all published sizes but the largest."""
    config = CLIPConfig(
        text_config={"hidden_size": 64, "num_attention_heads": 1, **TOWER, **SPECIAL_TOKENS},
        vision_config={"hidden_size": 128, "num_attention_heads": 2, "image_size": 28, "patch_size": 14, **TOWER},
        projection_dim=32,
        **settings,
    )
    return random_clip(CLIPModel, config)


@torch.no_grad()
def random_clip(model_class: Any, config: Any) -> Any:
    """Build a network with noise added to its weights, so that embeddings differ between texts and between images."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = model_class(config).eval()
        for name, weights in net.named_parameters():
            if not name.startswith("logit_"):
                weights.add_(0.15 * torch.randn_like(weights))
    return net


def open_clip_state(net: Any) -> dict[str, Tensor]:
    """The state dict of a CLIP under open_clip's names, the inverse of the conversion of published files."""
    state, renamed = net.state_dict(), {}
    for key, x in state.items():
        for ours, theirs in NAMES.items():
            if key.startswith(ours):
                renamed[key.replace(ours, theirs)] = x
    renamed["visual.proj"] = state["visual_projection.weight"].t().contiguous()
    renamed["text_projection"] = state["text_projection.weight"].t().contiguous()
    for tower, prefix in (("vision_model", "visual.transformer"), ("text_model", "transformer")):
        for layer in range(2):
            ours, theirs = f"{tower}.encoder.layers.{layer}", f"{prefix}.resblocks.{layer}"
            for suffix in ("weight", "bias"):
                renamed |= {
                    f"{theirs}.{new}.{suffix}": state[f"{ours}.{old}.{suffix}"] for old, new in LAYER_NAMES.items()
                }
                parts = [state[f"{ours}.self_attn.{part}_proj.{suffix}"] for part in "qkv"]
                renamed[f"{theirs}.attn.in_proj_{suffix}"] = torch.cat(parts)
    return renamed


def save_checkpoint(net: Any, folder: Path, processor: Any = None) -> str:
    """Save weights, tokenizer and processor in the hub's layout."""
    with silence_transformers():
        net.save_pretrained(folder)
        tiny_clip_tokenizer().save_pretrained(folder)
        (processor or CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=28)).save_pretrained(folder)
    return str(folder)


def save_original_checkpoints(net: Any, folder: Path) -> tuple[str, str]:
    """Save a checkpoint in HPS's layout and one with equal tensors in safetensors, both without a tokenizer."""
    folder.mkdir()
    state = open_clip_state(net)
    torch.save({"epoch": 3, "state_dict": state}, folder / "HPS_v2.1_compressed.pt")
    save_file({key: x.clone() for key, x in state.items()}, folder / "hps.safetensors")
    return str(folder / "HPS_v2.1_compressed.pt"), str(folder / "hps.safetensors")
