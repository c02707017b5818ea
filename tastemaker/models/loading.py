"""Load checkpoints (.pt, .safetensors, FSDP shards, Hugging Face Llama) with keys of our networks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..core.registry import ConfigError
from ..core.types import Placement
from . import weight_files
from .pretrained import WeightsSource, find_weights
from .pretrained import load_state_dict as read_published
from .safe_unpickling import RankShards, load_pickle, merge_rank_shards

N = TypeVar("N", bound=nn.Module)
Tensors = dict[str, Tensor]
STATE_DICT_KEYS = ("model", "module", "state_dict")  # of DDP, DeepSpeed and Lightning, each maybe around another
WRAPPER_PREFIXES = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")  # of DDP, torch.compile and FSDP
CONSOLIDATED_FILE, SHARD_PATTERN, STATE_TYPE_FILE, STEP_FILE = (
    "consolidated.pth",
    "model.shard.*.pth",
    "state_type.txt",
    "resume_step.txt",
)
# What comes along but is computed anew: rotary tables, caches of keys and values, a count of codes in use.
IGNORED_KEYS = re.compile(r"(.*\.)?(freqs_cis|kv_cache\.[kv]_cache|codebook_used|inv_freq|causal_mask)")
RANK_FILE = re.compile(r".+\.(\d+)-of-(\d+)\.pth")
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
)  # names of transformers' Llama


def read_checkpoint(
    name: str, source: WeightsSource | None = None, wrappers: Sequence[str] = STATE_DICT_KEYS
) -> Tensors:
    """The tensors of a file, a folder, a run, a name in the package, or what was fetched of the hub."""
    path = Path(name).expanduser()
    if not path.exists():
        path = (
            find_weights(name, source)
            if source is not None and name == source.hub
            else weight_files.shipped_weights_path(name)
        )
    if path.is_dir() and (path / "checkpoints").is_dir():
        return weight_files.read_weights(path)[0]
    tensors = _folder(path, wrappers) if path.is_dir() else _file(path, wrappers)
    return normalize_keys(tensors)


def _folder(path: Path, wrappers: Sequence[str]) -> Mapping[str, Tensor]:
    """A trainer's own checkpoint, whole or in what each of its ranks held; or a folder of the hub."""
    shards = list_rank_files(path, SHARD_PATTERN)
    if (path / CONSOLIDATED_FILE).is_file():
        return unwrap_state_dict(load_pickle(path / CONSOLIDATED_FILE), path / CONSOLIDATED_FILE, wrappers)
    if shards:
        return merge_rank_shards([unwrap_state_dict(load_pickle(shard), shard, wrappers) for shard in shards])
    return read_published(path)


def list_rank_files(path: Path, pattern: str) -> list[Path]:
    """The files of all ranks in their order; none may be missing."""
    found = sorted(path.glob(pattern))
    world = {int(match[2]) for file in found if (match := RANK_FILE.fullmatch(file.name))}
    if found and world != {len(found)}:
        raise ConfigError(f"{path} holds {len(found)} of {max(world, default=0)} files {pattern}; copy all of them")
    return found


def _file(path: Path, wrappers: Sequence[str]) -> Mapping[str, Tensor]:
    if path.suffix != ".safetensors":
        return unwrap_state_dict(load_pickle(path), path, wrappers)
    return weight_files.read_weights(path)[0] if has_config_metadata(path) else read_published(path)


def has_config_metadata(path: Path) -> bool:
    """Whether a safetensors file says what its tensors belong to, as those written here do."""
    try:
        with safe_open(path, framework="pt") as file:
            return "config" in (file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} is not a readable safetensors file ({error}); fetch it again") from error


def unwrap_state_dict(data: Any, path: Path, wrappers: Sequence[str] = STATE_DICT_KEYS) -> Tensors:
    """The state dict in whatever it is wrapped in."""
    for name in wrappers:
        if isinstance(data, Mapping) and isinstance(data.get(name), Mapping):
            return unwrap_state_dict(data[name], path, wrappers)
    wrong = [key for key, x in data.items() if not isinstance(x, Tensor)] if isinstance(data, Mapping) else []
    if not isinstance(data, Mapping) or wrong or not data:
        found = f"'{wrong[0]!s:.60}' in it is no tensor" if wrong else f"it holds a {type(data).__name__}"
        raise ConfigError(
            f"{path} is no state dict: {found}; expected tensors by name, or one of {', '.join(wrappers)}"
        )
    return dict(data)


def normalize_keys(tensors: Mapping[str, Tensor]) -> Tensors:
    """Under our names, without what is computed anew."""
    plain: Tensors = {}
    for key, x in tensors.items():
        name = key
        while name.startswith(WRAPPER_PREFIXES):
            name = name.split(".", 1)[1]
        if not IGNORED_KEYS.fullmatch(name):
            plain[name.replace("_fsdp_wrapped_module.", "")] = x
    return _from_llama(plain) if "model.embed_tokens.weight" in plain else plain


def _from_llama(tensors: Mapping[str, Tensor]) -> Tensors:
    """Of transformers' Llama, whose queries, keys and values are apart; positions turn pairs of neighbours as here."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, x in tensors.items():
        name = next((new for old, ours in LLAMA_KEY_RULES for new, hit in [re.subn(f"^{old}", ours, key)] if hit), key)
        found.setdefault(name, {})[key] = x
    order = ("q_proj", "k_proj", "v_proj")
    return {
        name: next(iter(parts.values())) if len(parts) == 1 else torch.cat(_ordered(parts, order))
        for name, parts in found.items()
    }


def _ordered(parts: Mapping[str, Tensor], order: Sequence[str]) -> list[Tensor]:
    return [x for part in order for key, x in parts.items() if f".{part}." in key]


def assign_state_dict(net: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype, name: str) -> None:
    """Make a network, which may be without a device, of tensors in that precision; others are refused by name."""
    if any(isinstance(x, RankShards) for x in tensors.values()):
        raise ConfigError(f"'{name:.200}' is what one rank held; name the folder with the files of all ranks")
    own = net.state_dict()
    lost, unknown = [key for key in own if key not in tensors], [key for key in tensors if key not in own]
    if lost or unknown:
        told = ([f"it lacks {abbreviate_keys(lost)}"] if lost else []) + (
            [f"it has {abbreviate_keys(unknown)}, unknown here"] if unknown else []
        )
        raise ConfigError(
            f"the weights '{name:.200}' are of another network: {' and '.join(told)}; name others{_sizes(name)}"
        )
    for key, x in own.items():
        if x.shape != tensors[key].shape:
            shapes = f"'{key}' is {list(tensors[key].shape)}, expected {list(x.shape)}"
            raise ConfigError(
                f"the weights '{name:.200}' are of another network: {shapes}; set the sizes they were trained with"
                f"{_sizes(name)}"
            )
    # Copied, for they may still lie in the file.
    kept = {key: tensors[key].to(dtype if x.is_floating_point() else x.dtype, copy=True) for key, x in own.items()}
    net.load_state_dict(kept, assign=True)


def _sizes(name: str) -> str:
    """How else to have the sizes that weights were trained with, where they are a run's."""
    ran = os.path.isfile(Path(name) / "config.yaml")
    return f", or begin a recipe with `extends: [{name:.200}]`, which brings its sizes" if ran else ""


def trainable_dtype(placement: Placement) -> torch.dtype:
    """Return the dtype of trainable weights: as configured, else bf16 if the run is bf16."""
    return placement.trained or (torch.bfloat16 if placement.dtype == torch.bfloat16 else torch.float32)


def init_random(make: Callable[[], N], seed: int, placement: Placement) -> N:
    """A network with random weights, made where and as it will be, the same every time."""
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
    """The tokens of pictures, if they are as many as a model has."""
    if ids.shape[1:] != shape:
        height, width = pixels.shape[-2:]
        raise ConfigError(
            f"data: pictures of {height}x{width} pixels have {ids.shape[1]} tokens, the model has {shape[0]}; "
            f"set data.size={size}"
        )
    return ids


def abbreviate_keys(keys: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    return f"'{keys[0]}'" + (f" and {len(keys) - 1} more" if len(keys) > 1 else "")
