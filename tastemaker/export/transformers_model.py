"""Folders that transformers and peft load: a trained model with the other parts of its base, or LoRA adapters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.lora import LoraWeights
from ..core.registry import ConfigError
from ..models.pretrained import WEIGHT_SUFFIXES, load_state_dict
from .lora import ADAPTER_FILE, LORA_A, LORA_B, PEFT_PREFIX
from .model_card import public_name
from .modelspec import save_safetensors, save_shards

ADAPTER_CONFIG_FILE = "adapter_config.json"  # of peft
WEIGHTS_PATTERN = "model{suffix}.safetensors"
INDEX_SUFFIX = ".index.json"
NOT_COPIED = ("README.md", ".gitattributes")


def write_peft_adapters(
    weights: LoraWeights, out: Path, dtype: torch.dtype, base_model: str, metadata: Mapping[str, str]
) -> None:
    """Write adapters under peft's names, and the settings that `PeftModel.from_pretrained` reads.

    The scale is multiplied into B, because not every reader looks at the settings.
    """
    rank, scale = weights.config.r, weights.config.lora_alpha / weights.config.r
    tensors = {
        PEFT_PREFIX + key: (x.detach().float() * (scale if key.endswith(LORA_B) else 1)).to(dtype)
        for key, x in weights.trainable().items()
    }
    save_safetensors(tensors, out / ADAPTER_FILE, metadata)
    targets = sorted(key.removesuffix(LORA_A) for key in weights.trainable() if key.endswith(LORA_A))
    config: dict[str, Any] = {
        "base_model_name_or_path": public_name(base_model),
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": targets,
        "task_type": None,
    }
    (out / ADAPTER_CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_model(
    tensors: Mapping[str, Tensor], base: Path | None, out: Path, max_shard_size: str, metadata: Mapping[str, str]
) -> None:
    """Write trained tensors with the other tensors and files of the base model; without a base only what trained."""
    if base is not None:
        others = load_state_dict(base)
        missing = [key for key in tensors if key not in others]
        if missing:
            raise ConfigError(
                f"{base} is not in transformers' layout (it has no '{missing[0]}'); add --network-only to export the "
                "trained tensors alone, or train on a folder of deepseek-community [TM2571]"
            )
        tensors = {key: tensors.get(key, x) for key, x in others.items()}
        for path in base.iterdir():
            is_weights = path.suffix in WEIGHT_SUFFIXES or path.name.endswith(INDEX_SUFFIX)
            if path.is_file() and not is_weights and path.name not in NOT_COPIED:
                shutil.copyfile(path, out / path.name)  # resolves the links of the hub's cache
    save_shards(tensors, out, WEIGHTS_PATTERN, max_shard_size, metadata)
