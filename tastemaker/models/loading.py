"""Load checkpoints (.pt, .safetensors, FSDP shards, Hugging Face Llama) into our networks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..core.registry import ConfigError
from ..core.types import Placement
from . import weight_files
from .pretrained import WeightsSource, find_weights, load_state_dict, unwrap_state_dict
from .restricted_unpickler import RankShards, load_trainer_pickle, merge_rank_shards

N = TypeVar("N", bound=nn.Module)
Tensors = dict[str, Tensor]
STATE_DICT_KEYS = ("model", "module", "state_dict")  # of DDP, DeepSpeed and Lightning, possibly nested
WRAPPER_PREFIXES = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")  # of DDP, torch.compile and FSDP
CONSOLIDATED_FILE, SHARD_PATTERN, STATE_TYPE_FILE, STEP_FILE = (
    "consolidated.pth",
    "model.shard.*.pth",
    "state_type.txt",
    "resume_step.txt",
)
# Buffers of checkpoints that are not loaded: rotary tables, KV caches, usage counts of a codebook.
IGNORED_KEYS = re.compile(r"(.*\.)?(freqs_cis|kv_cache\.[kv]_cache|codebook_used|inv_freq|causal_mask)")
RANK_FILE = re.compile(r".+\.(\d+)-of-(\d+)\.pth")
# Keys of transformers' Llama.
LLAMA_KEY_RULES = (
    (r"model\.embed_tokens\.", "tok_embeddings."),
    (r"model\.cls_embedding\.", "cls_embedding."),
    (r"model\.norm\.", "norm."),
    (r"lm_head\.", "output."),
    *(
        (rf"model\.layers\.(\d+)\.{theirs}\.", rf"layers.\1.{ours}.")
        for theirs, ours in (
            (r"self_attn\.[qkv]_proj", "attention.wqkv"),
            (r"self_attn\.o_proj", "attention.wo"),
            (r"mlp\.gate_proj", "feed_forward.w1"),
            (r"mlp\.up_proj", "feed_forward.w3"),
            (r"mlp\.down_proj", "feed_forward.w2"),
            ("input_layernorm", "attention_norm"),
            ("post_attention_layernorm", "ffn_norm"),
        )
    ),
)


def read_checkpoint(
    name: str, source: WeightsSource | None = None, wrappers: Sequence[str] = STATE_DICT_KEYS
) -> Tensors:
    """The tensors of a file, a folder, a run, a name in the package, or a downloaded hub repository."""
    path = Path(name).expanduser()
    if not path.exists():
        on_hub = source is not None and name == source.hub
        path = find_weights(name, source) if source and on_hub else weight_files.shipped_weights_path(name)
    if path.is_dir() and (path / "checkpoints").is_dir():
        return weight_files.read_weights(path)[0]
    tensors = _read_folder(path, wrappers) if path.is_dir() else _read_file(path, wrappers)
    return normalize_keys(tensors)


def _read_folder(path: Path, wrappers: Sequence[str]) -> Mapping[str, Tensor]:
    """Tensors of a trainer's checkpoint, consolidated or in shards per rank, or of a folder from the hub."""
    shards = list_rank_files(path, SHARD_PATTERN)
    if (path / CONSOLIDATED_FILE).is_file():
        return unwrap_state_dict(load_trainer_pickle(path / CONSOLIDATED_FILE), path / CONSOLIDATED_FILE, wrappers)
    if shards:
        return merge_rank_shards([unwrap_state_dict(load_trainer_pickle(shard), shard, wrappers) for shard in shards])
    return load_state_dict(path)


def list_rank_files(path: Path, pattern: str) -> list[Path]:
    """The files of all ranks in order; refuse a folder where some are missing."""
    files = sorted(path.glob(pattern))
    world_sizes = {int(match[2]) for file in files if (match := RANK_FILE.fullmatch(file.name))}
    if files and world_sizes != {len(files)}:
        expected = max(world_sizes, default=0)
        raise ConfigError(
            f"{path} contains {len(files)} of {expected} files {pattern}; copy all of them into this folder [TM459]"
        )
    return files


def _read_file(path: Path, wrappers: Sequence[str]) -> Mapping[str, Tensor]:
    if path.suffix != ".safetensors":
        return unwrap_state_dict(load_trainer_pickle(path), path, wrappers)
    return weight_files.read_weights(path)[0] if has_config_metadata(path) else load_state_dict(path)


def has_config_metadata(path: Path) -> bool:
    """Whether a safetensors file has a configuration in its metadata, as those of `weight_files` do."""
    try:
        with safe_open(path, framework="pt") as file:
            return "config" in (file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{path} is not a readable safetensors file ({error}); download the file again [TM460]"
        ) from error


def normalize_keys(tensors: Mapping[str, Tensor]) -> Tensors:
    """The tensors under the names of our networks, without wrapper prefixes and buffers that are not loaded."""
    normalized: Tensors = {}
    for key, x in tensors.items():
        name = key
        while name.startswith(WRAPPER_PREFIXES):
            name = name.split(".", 1)[1]
        if not IGNORED_KEYS.fullmatch(name):
            normalized[name.replace("_fsdp_wrapped_module.", "")] = x
    return _from_llama(normalized) if "model.embed_tokens.weight" in normalized else normalized


def _from_llama(tensors: Mapping[str, Tensor]) -> Tensors:
    """Convert from transformers' Llama: join queries, keys and values; rotary pairs are neighbors in both."""
    parts: dict[str, dict[str, Tensor]] = {}
    for key, x in tensors.items():
        name = next((new for old, ours in LLAMA_KEY_RULES for new, hit in [re.subn(f"^{old}", ours, key)] if hit), key)
        parts.setdefault(name, {})[key] = x
    order = (".q_proj.", ".k_proj.", ".v_proj.")
    return {
        name: next(iter(group.values()))
        if len(group) == 1
        else torch.cat([x for projection in order for key, x in group.items() if projection in key])
        for name, group in parts.items()
    }


def assign_state_dict(net: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype, name: str) -> None:
    """Assign tensors as `dtype` to a network, which may be on the meta device; refuse those of another network."""
    if any(isinstance(x, RankShards) for x in tensors.values()):
        raise ConfigError(
            f"'{name:.200}' contains the shards of one rank; give the folder with the files of all ranks [TM461]"
        )
    own = net.state_dict()
    missing, unknown = [key for key in own if key not in tensors], [key for key in tensors if key not in own]
    if missing or unknown:
        reasons = [f"missing {abbreviate_keys(missing)}"] if missing else []
        reasons += [f"unexpected {abbreviate_keys(unknown)}"] if unknown else []
        raise ConfigError(
            f"the weights '{name:.200}' belong to another network: {', '.join(reasons)}; use other "
            f"weights{_run_advice(name)} [TM462]"
        )
    for key, x in own.items():
        if x.shape != tensors[key].shape:
            shapes = f"'{key}' is {list(tensors[key].shape)}, expected {list(x.shape)}"
            raise ConfigError(
                f"the weights '{name:.200}' belong to another network: {shapes}; set the model sizes to those of "
                f"the weights{_run_advice(name)} [TM463]"
            )
    # Copied, because they may be memory-mapped from the file.
    converted = {key: tensors[key].to(dtype if x.is_floating_point() else x.dtype, copy=True) for key, x in own.items()}
    net.load_state_dict(converted, assign=True)


def _run_advice(name: str) -> str:
    """For the weights of a run: how to take over its sizes."""
    is_run = os.path.isfile(Path(name) / "config.yaml")
    return f", or start a recipe with `extends: [{name:.200}]`, which uses the sizes of this run" if is_run else ""


def trainable_dtype(placement: Placement) -> torch.dtype:
    """The dtype of trainable weights: as configured, else bf16 if the run is in bf16."""
    return placement.trainable_dtype or (torch.bfloat16 if placement.dtype == torch.bfloat16 else torch.float32)


def init_random(make: Callable[[], N], seed: int, placement: Placement) -> N:
    """A network with random weights of a seed, built on its device and in its dtype."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[placement.device] if placement.device.type == "cuda" else []):
        torch.manual_seed(seed)
        try:
            torch.set_default_dtype(trainable_dtype(placement))
            with torch.device(placement.device):
                return make()
        finally:
            torch.set_default_dtype(before)


def check_token_count(ids: Tensor, pixels: Tensor, shape: tuple[int, ...], size: int) -> Tensor:
    """The tokens themselves; refuse images of a size at which there are more or fewer than the model's."""
    if ids.shape[1:] != shape:
        height, width = pixels.shape[-2:]
        raise ConfigError(
            f"images of {height}x{width} pixels have {ids.shape[1]} tokens, but the model has {shape[0]}; set "
            f"data.image_size={size} [TM464]"
        )
    return ids


def abbreviate_keys(keys: Sequence[str]) -> str:
    """The first key, and how many more there are."""
    return f"'{keys[0]}'" + (f" and {len(keys) - 1} more" if len(keys) > 1 else "")
