"""How the latents of one autoencoder are told from another's."""

from __future__ import annotations

import hashlib

from torch import nn

from ..codec import Continuous
from . import files


def fingerprint(net: Continuous) -> str:
    """Of all of an autoencoder's numbers; latents of another mean something else."""
    told = hashlib.sha256(f"{type(net).__name__} {net.channels} {net.stride}".encode())
    for key, x in sorted(net.state_dict().items()) if isinstance(net, nn.Module) else ():
        told.update(key.encode() + x.detach().cpu().contiguous().numpy().tobytes())
    return told.hexdigest()[:16]


def shipped(name: str) -> bool:
    """Whether a name is of a file in the package."""
    home, _, short = name.rpartition("/")
    return bool(home) and (files.PACKAGE / home / "weights" / f"{short}.safetensors").is_file()
