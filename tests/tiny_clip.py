"""Tiny CLIPs in the layouts that CLIPs are published in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel

from tastemaker.rewards.backbones.frozen_models import silence_transformers
from tastemaker.rewards.backbones.tokenizers import tiny_clip_tokenizer

HALF = {"intermediate_size": 96, "num_hidden_layers": 2, "hidden_act": "gelu"}
ENDS = {"vocab_size": 514, "bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513}
INNER = {
    "self_attn.out_proj": "attn.out_proj",
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}
OUTER = {
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


def clip(**settings: Any) -> Any:
    """A CLIP with heads of 64 numbers, as all have but the largest."""
    config = CLIPConfig(
        text_config={"hidden_size": 64, "num_attention_heads": 1, **HALF, **ENDS},
        vision_config={"hidden_size": 128, "num_attention_heads": 2, "image_size": 28, "patch_size": 14, **HALF},
        projection_dim=32,
        **settings,
    )
    return random_clip(CLIPModel, config)


@torch.no_grad()
def random_clip(kind: Any, config: Any) -> Any:
    """As made, texts and pictures are all alike to a network; to this one, always the same, they differ."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = kind(config).eval()
        for name, weights in net.named_parameters():
            if not name.startswith("logit_"):
                weights.add_(0.15 * torch.randn_like(weights))
    return net


def open_clip_state(net: Any) -> dict[str, Tensor]:
    """The tensors of a CLIP as open_clip names them: the map of the published files, the other way round."""
    state, made = net.state_dict(), {}
    for key, x in state.items():
        for ours, theirs in OUTER.items():
            if key.startswith(ours):
                made[key.replace(ours, theirs)] = x
    made["visual.proj"] = state["visual_projection.weight"].t().contiguous()
    made["text_projection"] = state["text_projection.weight"].t().contiguous()
    for half, prefix in (("vision_model", "visual.transformer"), ("text_model", "transformer")):
        for layer in range(2):
            ours, theirs = f"{half}.encoder.layers.{layer}", f"{prefix}.resblocks.{layer}"
            for end in ("weight", "bias"):
                made |= {f"{theirs}.{new}.{end}": state[f"{ours}.{old}.{end}"] for old, new in INNER.items()}
                parts = [state[f"{ours}.self_attn.{part}_proj.{end}"] for part in "qkv"]
                made[f"{theirs}.attn.in_proj_{end}"] = torch.cat(parts)
    return made


def save_folder(net: Any, folder: Path, processor: Any = None) -> str:
    """Weights, tokenizer and processor, as on the hub."""
    with silence_transformers():
        net.save_pretrained(folder)
        tiny_clip_tokenizer().save_pretrained(folder)
        (processor or CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=28)).save_pretrained(folder)
    return str(folder)


def save_published(net: Any, folder: Path) -> tuple[str, str]:
    """A checkpoint as HPS comes, and one of the same tensors in safetensors; without a tokenizer beside them."""
    folder.mkdir()
    state = open_clip_state(net)
    torch.save({"epoch": 3, "state_dict": state}, folder / "HPS_v2.1_compressed.pt")
    save_file({key: x.clone() for key, x in state.items()}, folder / "hps.safetensors")
    return str(folder / "HPS_v2.1_compressed.pt"), str(folder / "hps.safetensors")
