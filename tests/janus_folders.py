"""A tiny random Janus-Pro of transformers, its tokenizer, and both as published folders."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tastemaker.models.janus.prompt_tokenizer import BOS, IMAGE_START, PAD

SPECIAL_TOKENS = [BOS, PAD, IMAGE_START, "<end_of_image>", "<image_placeholder>", "<|User|>", "<|Assistant|>"]
VOCAB_SIZE = 272


def byte_tokenizer() -> Any:
    """A tokenizer whose vocabulary is single bytes and Janus-Pro's special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def tiny_janus(seed: int = 0) -> Any:
    """JanusForConditionalGeneration with 16 image tokens of 64 codes, 16x16 pixels, and perturbed weights."""
    from transformers import JanusConfig, JanusForConditionalGeneration

    ids = {token: byte_tokenizer().token_to_id(token) for token in SPECIAL_TOKENS}
    config: Any = JanusConfig(
        text_config={
            "model_type": "llama",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
        },
        vision_config={
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
            "num_image_tokens": 16,
            "projection_dim": 32,
        },
        vq_config={
            "base_channels": 32,
            "channel_multiplier": [1, 1, 2],
            "num_res_blocks": 1,
            "latent_channels": 32,
            "num_embeddings": 64,
            "projection_dim": 32,
            "image_token_embed_dim": 32,
        },
        image_token_id=ids["<image_placeholder>"],
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model: Any = JanusForConditionalGeneration(config).eval()
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p) / max(p.shape[-1], 1) ** 0.5)
    generation = model.generation_config
    generation.bos_token_id, generation.pad_token_id, generation.guidance_scale = ids[BOS], ids[PAD], 5
    generation.generation_kwargs = {"boi_token_id": ids[IMAGE_START]}
    return model


def save_folder(model: Any, folder: Path) -> Path:
    """Save in transformers' layout."""
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "pad_token": PAD}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


# The names of the authors' layout by those of transformers'.
AUTHORS_NAMES = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^model\.generation_embeddings\.", "gen_embed."),
    (r"^model\.generation_aligner\.fc1\.", "gen_aligner.layers.0."),
    (r"^model\.generation_aligner\.hidden_layers\.0\.", "gen_aligner.layers.2."),
    (r"^model\.generation_head\.proj_out\.", "gen_head.output_mlp_projector."),
    (r"^model\.generation_head\.vision_head\.", "gen_head.vision_head."),
    (r"^model\.vqmodel\.(encoder\.)down\.", r"gen_vision_model.\1conv_blocks."),
    (r"^model\.vqmodel\.(decoder\.)up\.", r"gen_vision_model.\1conv_blocks."),
    (r"^model\.vqmodel\.", "gen_vision_model."),
    (r"(gen_vision_model.*conv_blocks\.\d+)\.block\.", r"\1.res."),
    (r"(gen_vision_model.*\.mid)\.block_1\.", r"\1.0."),
    (r"(gen_vision_model.*\.mid)\.attn_1\.", r"\1.1."),
    (r"(gen_vision_model.*\.mid)\.block_2\.", r"\1.2."),
)


def save_authors_folder(model: Any, folder: Path) -> Path:
    """Save network and image tokenizer in the layout of deepseek-ai, with the tokenizer's buffer of used codes."""
    folder.mkdir(parents=True)
    tensors = {}
    for name, x in model.state_dict().items():
        for pattern, replacement in AUTHORS_NAMES:
            name = re.sub(pattern, replacement, name)
        tensors[name] = x.clone()
    tensors["gen_vision_model.quantize.codebook_used"] = torch.zeros(65536)
    save_file(tensors, folder / "model.safetensors")
    text, vq = model.config.text_config, model.config.vq_config
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = {
        "model_type": "multi_modality",
        "language_config": {"vocab_size": VOCAB_SIZE, **{key: getattr(text, key) for key in keys}},
        "gen_vision_config": {"params": {"image_token_size": vq.num_embeddings, "n_embed": vq.embed_dim}},
        "gen_aligner_config": {"params": {"depth": vq.num_hidden_layers, "n_embed": vq.projection_dim}},
        "gen_head_config": {"params": {"image_token_embed": text.hidden_size, "n_embed": vq.projection_dim}},
        "vision_config": {"params": {"image_size": 384}},
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_tokenizer(folder)
    return folder
