"""Fingerprints that identify which autoencoder made stored latents."""

from __future__ import annotations

import hashlib

from torch import nn

from ..core.autoencoder import ContinuousAutoencoder
from . import weight_files


def autoencoder_fingerprint(net: ContinuousAutoencoder) -> str:
    """Of all of an autoencoder's numbers; latents of another mean something else."""
    told = hashlib.sha256(f"{type(net).__name__} {net.channels} {net.stride}".encode())
    for key, x in sorted(net.state_dict().items()) if isinstance(net, nn.Module) else ():
        told.update(key.encode() + x.detach().cpu().contiguous().numpy().tobytes())
    return told.hexdigest()[:16]


def is_shipped(name: str) -> bool:
    """Whether a name is of a file in the package."""
    home, _, short = name.rpartition("/")
    return bool(home) and (weight_files.PACKAGE_ROOT / home / "weights" / f"{short}.safetensors").is_file()
