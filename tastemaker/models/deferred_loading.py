"""Build networks of diffusers without their weights, which every rank reads in part once the network is sharded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..core.safe_files import read_json
from .pretrained import detect_weight_format

WEIGHTS_FILE = "diffusion_pytorch_model.safetensors"
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
MODEL_FILE = "model.safetensors"  # of transformers


class DeferredSafetensors:
    """Tensors of a diffusers folder, one or several safetensors files, that are read by rows.

    Floats are read as `dtype`; those of modules in `fp32_modules` as float32, as diffusers loads them.
    """

    def __init__(self, paths: Mapping[str, Path], dtype: torch.dtype, fp32_modules: tuple[str, ...] = ()) -> None:
        self.dtype, self.fp32_modules = dtype, fp32_modules
        files: dict[Path, Any] = {path: safe_open(path, framework="pt") for path in sorted({*paths.values()})}
        self.files = {name: files[path] for name, path in paths.items()}
        self.shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in self.files.items()}
        stored = [(name, self.shapes[name], file.get_slice(name).get_dtype()) for name, file in self.files.items()]
        sizes = [(path.name, path.stat().st_size) for path in files]
        self.fingerprint = hashlib.sha256(json.dumps([stored, sizes]).encode()).hexdigest()

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # a copy of the network reads the same files

    def loaded_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a float tensor."""
        return torch.float32 if {*self.fp32_modules} & {*name.split(".")} else self.dtype

    def read(self, name: str, start: int, count: int) -> Tensor:
        rows: Tensor = self.files[name].get_slice(name)[start : start + count]
        return self._cast(name, rows)

    def read_whole(self, name: str) -> Tensor:
        return self._cast(name, self.files[name].get_tensor(name)).clone()  # a tensor of its own, not the mapped file

    def _cast(self, name: str, x: Tensor) -> Tensor:
        return x.to(self.loaded_dtype(name)) if x.is_floating_point() else x


def open_folder(path: Path, dtype: torch.dtype, fp32_modules: tuple[str, ...]) -> DeferredSafetensors | None:
    """Return the tensors of a folder in diffusers' layout; None if it has other files, such as pickles or variants.

    None also if a file is damaged, which diffusers reports.
    """
    if detect_weight_format(path) != (True, None):
        return None
    try:
        if (path / INDEX_FILE).is_file():
            index = read_json(path / INDEX_FILE)["weight_map"]
            if any(Path(file).name != file for file in index.values()):  # outside the folder, which diffusers refuses
                return None
            return DeferredSafetensors({name: path / file for name, file in index.items()}, dtype, fp32_modules)
        if not (path / WEIGHTS_FILE).is_file():
            return None
        with safe_open(path / WEIGHTS_FILE, framework="pt") as file:
            names = list(file.keys())
        return DeferredSafetensors(dict.fromkeys(names, path / WEIGHTS_FILE), dtype, fp32_modules)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
        return None


def open_model(path: Path, dtype: torch.dtype, prefixes: tuple[str, ...]) -> DeferredSafetensors | None:
    """Return the tensors of a folder in transformers' layout whose names begin so; None if it has other files."""
    index, single = path / f"{MODEL_FILE}.index.json", path / MODEL_FILE
    try:
        if index.is_file():
            files = {str(name): str(file) for name, file in read_json(index)["weight_map"].items()}
        elif single.is_file():
            with safe_open(single, framework="pt") as opened:
                files = dict.fromkeys(opened.keys(), MODEL_FILE)
        else:
            return None
        if any(Path(file).name != file for file in files.values()):  # outside the folder
            return None
        chosen = {name: path / file for name, file in files.items() if name.startswith(prefixes)}
        return DeferredSafetensors(chosen, dtype)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
        return None


@torch.no_grad()
def defer_weights(net: nn.Module, tensors: DeferredSafetensors) -> bool:
    """Give a network on the meta device the tensors that it is loaded from; False if they are not of its names.

    Its buffers are read now.
    """
    state = net.state_dict()
    if any(tensors.shapes.get(key) != tuple(x.shape) for key, x in state.items()):
        return False
    parameters = dict(net.named_parameters())
    if any(not p.is_floating_point() for p in parameters.values()):
        return False
    for key, p in parameters.items():
        p.data = p.data.to(tensors.loaded_dtype(key))
    for key in state.keys() - parameters.keys():
        module, _, name = key.rpartition(".")
        net.get_submodule(module)._buffers[name] = tensors.read_whole(key)
    net.deferred_tensors = tensors  # type: ignore[assignment]  # no module or tensor
    return True
