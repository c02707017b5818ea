"""`modelspec.*` metadata of exported safetensors files (Stability AI's Model Metadata Standard, version 1.0.1).

Interfaces such as ComfyUI's model managers show it, and read from it what a file is for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from ..config.dump import dataclass_to_dict, registered_name
from ..config.schema import RunConfig
from ..models.pretrained import HUB_ID
from ..processes.gaussian import GaussianProcess
from ..processes.paths import VariancePreserving

VERSION = "1.0.1"
PREFIX = "modelspec."
# Ids that the specification and kohya's trainer use; others are made of the base model's name on the hub.
ARCHITECTURES = {"sd15": "stable-diffusion-v1", "sdxl": "stable-diffusion-xl-v1-base"}
# Whose names the tensors have, by layout.
IMPLEMENTATIONS = {
    "diffusers": "diffusers",
    "transformers": "transformers",
    "comfyui": "https://github.com/comfyanonymous/ComfyUI",
    "authors": "original",
    "tastemaker": "tastemaker",
}
PREDICTION_TYPES = {"epsilon": "epsilon", "v_prediction": "v", "sample": "sample"}
HASH_KEY = f"{PREFIX}hash_sha256"
HASH_PLACEHOLDER = "0x" + 64 * "0"  # replaced once the tensors are written
HASH_CHUNK = 2**20


def make_metadata(
    config: RunConfig, layout: str, *, is_lora: bool, size: tuple[int, int] | None = None
) -> dict[str, str]:
    """The metadata of a run's weights in a layout; `size` is the height and width of samples.

    Keys that are not known are left out.
    """
    objective, model = registered_name(type(config.objective)), registered_name(type(config.model))
    rewards = [name for name, reward in config.rewards.items() if reward.weight != 0]
    trained_by = f", with the rewards {', '.join(rewards)}" if rewards else ""
    base = base_name(config)
    known = {
        "sai_model_spec": VERSION,
        "architecture": architecture(config) + ("/lora" if is_lora else ""),
        "implementation": IMPLEMENTATIONS[layout],
        "title": config.name,
        "description": f"{base or model} after post-training by {objective}{trained_by}.",
        "date": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "hash_sha256": HASH_PLACEHOLDER,
        "license": config.model.sources[0].license if config.model.sources else "",
        "usage_hint": usage_hint(config),
        "resolution": resolution(config, size),
        "prediction_type": prediction_type(config),
        "tags": ", ".join(["tastemaker", objective, *(["lora"] if is_lora else [])]),
    }
    return {PREFIX + key: value for key, value in known.items() if value}


def base_name(config: RunConfig) -> str:
    """The base model's name on the hub; empty for local folders, whose paths are nobody's business."""
    weights = config.model.weights or ""
    return weights if HUB_ID.fullmatch(weights) else ""


def architecture(config: RunConfig) -> str:
    """The id of the architecture: what inference code has to know to load the weights."""
    model = registered_name(type(config.model))
    name = base_name(config).rpartition("/")[2].lower().removesuffix("-diffusers").replace("flux.", "flux-")
    return ARCHITECTURES.get(model) or name or model.replace("_", "-")


def usage_hint(config: RunConfig) -> str:
    """Steps and guidance that samples look best with, as the recipe has them."""
    sample, process = config.sample, config.process
    steps = sample.num_steps or (process.num_steps if isinstance(process, GaussianProcess) else None)
    distilled = dataclass_to_dict(config.model).get("guidance_scale")  # of models that take it as an input
    scale = sample.guidance_scale or distilled or (config.guidance.scale if config.guidance else None)
    ends = scale if isinstance(scale, list | tuple) else [scale]  # of the first and the last frame, or of all
    guidance = [f"guidance {' to '.join(f'{end:g}' for end in ends)}"] if scale and list(ends) != [1] else []
    return ", ".join([*([f"{steps} steps"] if steps else []), *guidance])


def resolution(config: RunConfig, size: tuple[int, int] | None) -> str:
    """Width and height of a sample in pixels, those of `sample` first; empty if they are not known."""
    height, width = size or (None, None)
    height, width = config.sample.height or height, config.sample.width or width
    return f"{width}x{height}" if width and height else ""


def prediction_type(config: RunConfig) -> str:
    """What the network predicts: epsilon, v, or the velocity of a flow; empty for token models."""
    if not isinstance(config.process, GaussianProcess):
        return ""
    path = config.process.path
    return PREDICTION_TYPES.get(path.prediction_type, "") if isinstance(path, VariancePreserving) else "flow"


def save_safetensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write tensors with metadata, whose hash is that of the tensors."""
    save_file({key: x.contiguous() for key, x in tensors.items()}, path, {"format": "pt", **metadata})
    seal_hash(path)


def save_shards(
    tensors: Mapping[str, Tensor], folder: Path, pattern: str, max_shard_size: str, metadata: Mapping[str, str]
) -> None:
    """Save tensors in one safetensors file, or in shards with an index."""
    from huggingface_hub import save_torch_state_dict

    options = {"filename_pattern": pattern, "max_shard_size": max_shard_size}
    save_torch_state_dict(dict(tensors), folder, **options, metadata=dict(metadata))  # type: ignore[arg-type]
    for path in folder.glob("*.safetensors"):
        seal_hash(path)


def seal_hash(path: Path) -> None:
    """Replace the placeholder in the header of a file by the hash of its tensors, in place."""
    placeholder = json.dumps(HASH_PLACEHOLDER).encode()
    with path.open("r+b") as file:
        header_size = int.from_bytes(file.read(8), "little")
        position = file.read(header_size).find(json.dumps(HASH_KEY).encode() + b":" + placeholder)
        if position < 0:
            return
        digest = hashlib.sha256()
        while chunk := file.read(HASH_CHUNK):
            digest.update(chunk)
        file.seek(8 + position + len(json.dumps(HASH_KEY)) + 1)
        file.write(json.dumps(f"0x{digest.hexdigest()}").encode())
