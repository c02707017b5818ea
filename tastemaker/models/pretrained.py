"""Published weights: where they are on the hub and on disk, and how to load their state dicts without running code."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..core.cards import PUBLISHED_JUDGES, parse_hub_id
from ..core.cards import WeightsSource as WeightsSource
from ..core.registry import ConfigError
from ..core.safe_files import read_json_object
from .restricted_unpickler import load_pickle

N = TypeVar("N", bound=nn.Module)
STATE_DICT_WRAPPERS = ("state_dict", "model", "module")  # keys that hold the state dict, possibly nested
# Names of unsharded weights in a folder.
SINGLE_FILE_NAMES = (
    "model.safetensors",
    "pytorch_model.safetensors",
    "pytorch_model.bin",
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.safetensors",
    "open_clip_pytorch_model.bin",
)
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")  # owner/name
# The same weights for other frameworks, and documentation.
IGNORED_SUFFIXES = {".h5", ".msgpack", ".onnx", ".onnx_data", ".ot", ".tflite", ".gguf", ".mlmodel", ".xml"}
IGNORED_SUFFIXES |= {".md", ".png", ".jpg", ".jpeg", ".webp", ".gif", ".mp4"}
PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt"}
WEIGHT_SUFFIXES = (".safetensors", ".bin")  # of diffusers and transformers, the preferred one first
VARIANT = re.compile(r"\.(fp16|bf16|fp32|fp8|non_ema|ema)([-.])")  # the same weights in another precision or average
PIPELINE_INDEX = "model_index.json"  # of a diffusers pipeline
COMPONENT_FOLDER = re.compile(
    r"(transformer|unet|vae|text_encoder|tokenizer|scheduler|feature_extractor|processor)(_\d+)?"
)
NETWORK_PREFIX = "model.diffusion_model."  # of the network in a single file that holds other components too


def find_weights(name: str, source: WeightsSource) -> Path:
    """The local file or folder of a path or of a hub name; nothing is downloaded."""
    path = Path(name).expanduser()
    if path.exists():
        # A source made of the name alone says nothing about what is published.
        if HUB_ID.fullmatch(name) and name == source.hub and source != WeightsSource(name):
            warnings.warn(
                f"'{name}' is a folder here, which is used instead of the published weights of that name; write "
                f"'./{name}' if you mean the folder, or rename it [TM1190]",
                stacklevel=2,
            )
        return path
    source = PUBLISHED_JUDGES.get(name, source)
    cached = _find_in_cache(source.hub if name in PUBLISHED_JUDGES else name, source)
    if cached is None:
        download = _recommended_download(name, source)
        gated = ", gated: request access on its page" if source.gated else ""
        raise ConfigError(
            f"the weights '{name:.200}' were not found; give a local path, or download {source} ({source.size}, "
            f"{source.license}{gated}) with `tastemaker download {download}` [TM505]"
        )
    return cached


def _recommended_download(name: str, source: WeightsSource) -> WeightsSource | str:
    """What `tastemaker download` should be given if the weights `name` are missing.

    A name such as ckpts/parm looks like a hub id; it means the published weights of that name.
    """
    last = Path(name).name
    if last in PUBLISHED_JUDGES:
        return last
    is_local = Path(name).parent != Path() and Path(name).parent.is_dir()
    return name if HUB_ID.fullmatch(name) and name != source.hub and not is_local else source


def find_published_file(name: str, source: WeightsSource, key: str, aliases: Sequence[str] = ()) -> Path:
    """The file of a path or hub name; of a folder the published file itself, or one of its aliases, never another."""
    path = find_weights(name, source)
    if not path.is_dir():
        return path
    for file in (source.file, *aliases):
        if (path / file).is_file():
            return path / file
    found = sorted(file.name for file in path.iterdir() if file.suffix in {".safetensors", *PICKLE_SUFFIXES})
    has = f"it has {', '.join(found[:4])}" if found else "it has no weights"
    raise ConfigError(
        f"{key} is the folder '{name:.200}', which has no {' or '.join((source.file, *aliases))} ({has}); download it "
        f"with `tastemaker download {source}`, or name the file itself"
        " [TM880]"
    )


def find_cached(source: WeightsSource) -> Path | None:
    """The file or folder of published weights in the hub cache, if they were downloaded."""
    return _find_in_cache(source.hub, source)


def _find_in_cache(name: str, source: WeightsSource) -> Path | None:
    from huggingface_hub import snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        if name == source.hub and source.file:
            path = try_to_load_from_cache(name, source.file)
            return Path(path) if isinstance(path, str) else None
        if name == source.hub and source.folder:
            return _find_cached_folder(source)
        if name.count("/") > 1 and (inside := parse_hub_id(name)).folder:
            return _find_cached_folder(inside)
        return Path(snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def _find_cached_folder(source: WeightsSource) -> Path | None:
    """The downloaded folder of a repository; its config.json is downloaded last."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(source.hub, f"{source.folder}/config.json")
    return Path(config).parent if isinstance(config, str) else None


def select_needed_files(names: Sequence[str]) -> list[str]:
    """The files of a repository to download: weights in one format, and the components of a pipeline that we load."""
    paths = [PurePosixPath(name) for name in names]
    if PIPELINE_INDEX in names:
        top = [path for path in paths if not path.parts[1:] and path.name.startswith((PIPELINE_INDEX, "LICENSE"))]
        components = [str(path) for path in paths if path.parts[1:] and COMPONENT_FOLDER.fullmatch(path.parts[0])]
        return [*map(str, top), *select_needed_files(components)]
    safetensors = [path for path in paths if path.suffix == ".safetensors"]
    with_plain = {path.parent for path in safetensors if not VARIANT.search(path.name)}
    with_safetensors = {path.parent for path in safetensors}
    return [
        str(path)
        for path in paths
        if path.suffix not in IGNORED_SUFFIXES
        and path.name != ".gitattributes"
        and not (path.suffix in PICKLE_SUFFIXES and path.parent in with_safetensors)
        and not (VARIANT.search(path.name) and path.parent in with_plain)
    ]


def detect_weight_format(folder: Path) -> tuple[bool, str | None]:
    """Whether to load safetensors, and the variant if the folder has variants only (highest precision first)."""
    names = sorted(file.name for file in folder.glob("*") if file.suffix in WEIGHT_SUFFIXES)
    plain = [name for name in names if not VARIANT.search(name)]
    preferred = sorted(plain or names, key=lambda name: WEIGHT_SUFFIXES.index(Path(name).suffix))
    if not preferred:
        return True, None  # diffusers and transformers report the missing file themselves
    variant = VARIANT.search(preferred[0])
    return preferred[0].endswith(WEIGHT_SUFFIXES[0]), variant[1] if variant else None


def load_state_dict(path: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint: a file, or a folder with one file or with shards and their index."""
    if path.is_dir():
        return _load_folder(path)
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return dict(load_file(path))
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{path} is not a readable safetensors file ({error}); download the file again [TM506]"
            ) from error
    return unwrap_state_dict(load_pickle(path), path)


def _load_folder(path: Path) -> dict[str, Tensor]:
    for index in sorted(path.glob("*.index.json"), reverse=True):  # safetensors before pickles
        files = read_json_object(index).get("weight_map")
        names = sorted(map(str, files.values())) if isinstance(files, dict) else []
        if not names or any(Path(name).name != name or not os.path.isfile(path / name) for name in names):
            raise ConfigError(
                f"{index} does not list files of its own folder under weight_map; download the folder again [TM1161]"
            )
        shards = sorted(set(names))
        return {key: x for shard in shards for key, x in load_state_dict(path / shard).items()}
    for name in SINGLE_FILE_NAMES:
        if (path / name).is_file():
            return load_state_dict(path / name)
    expected = ", ".join(SINGLE_FILE_NAMES)
    raise ConfigError(
        f"{path} holds no weights; expected one of {expected}, or shards with their index, so check the path [TM507]"
    )


def unwrap_state_dict(data: Any, path: Path, wrappers: Sequence[str] = STATE_DICT_WRAPPERS) -> dict[str, Tensor]:
    """The state dict of a loaded checkpoint, which may be the value of one of the keys in `wrappers`."""
    for name in wrappers:
        if isinstance(data, Mapping) and isinstance(data.get(name), Mapping):
            return unwrap_state_dict(data[name], path, wrappers)
    wrong = [key for key, x in data.items() if not isinstance(x, Tensor)] if isinstance(data, Mapping) else []
    if not isinstance(data, Mapping) or wrong or not data:
        reason = f"'{wrong[0]!s:.60}' is not a tensor" if wrong else f"the file contains a {type(data).__name__}"
        raise ConfigError(
            f"{path} is not a state dict: {reason}; save tensors by name, or in one of {', '.join(wrappers)} [TM508]"
        )
    return dict(data)


def read_single_file(name: str, source: WeightsSource) -> dict[str, Tensor]:
    """The network's tensors of a single-file checkpoint (ComfyUI, original releases), without their prefix."""
    tensors = load_state_dict(find_weights(name, source))
    network = {key.removeprefix(NETWORK_PREFIX): x for key, x in tensors.items() if key.startswith(NETWORK_PREFIX)}
    if network:  # the file may hold an autoencoder and text encoders too
        return network
    for prefix in ("transformer.", "unet."):
        if all(key.startswith(prefix) for key in tensors):
            return {key.removeprefix(prefix): x for key, x in tensors.items()}
    return tensors


def load_weights_into(
    net: nn.Module, tensors: Mapping[str, Tensor], name: str | Path, optional: Sequence[str] = ()
) -> None:
    """Copy tensors into a network of the same names and shapes; `optional` ones may be missing."""
    own = net.state_dict()
    wrong = [key for key in own if key in tensors and own[key].shape != tensors[key].shape]
    wrong += [key for key in own if key not in tensors and key not in optional]
    wrong += [key for key in tensors if key not in own]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise ConfigError(
            f"the weights '{name!s:.200}' are of another network ('{wrong[0]}'{more} differ); set the model sizes "
            "to those of the weights, or use other weights [TM509]"
        )
    net.load_state_dict(dict(tensors), strict=False)


def with_fast_convolutions(net: N) -> N:
    """The frozen network itself, on a CPU in channels-last format, which makes convolutions 12 to 18 % faster."""
    on_cpu = all(p.device.type == "cpu" for p in net.parameters())
    return net.to(memory_format=torch.channels_last) if on_cpu else net  # type: ignore[call-overload]


@contextmanager
def silence_libraries() -> Iterator[None]:
    """Hide progress bars and log messages of diffusers and transformers within the block."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    libraries: list[Any] = [diffusers_logging, transformers_logging]
    before = [(library, library.get_verbosity(), library.is_progress_bar_enabled()) for library in libraries]
    for library in libraries:
        library.set_verbosity_error()
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library, verbosity, progress_bar in before:
            library.set_verbosity(verbosity)
            if progress_bar:
                library.enable_progress_bar()
