"""Networks that come in one file, alone or beside an autoencoder and text encoders."""

from __future__ import annotations

from torch import Tensor

from ..pretrained import Source, locate, read

MARK = "model.diffusion_model."  # before the names of a network that is not alone in its file


def single(name: str, source: Source) -> dict[str, Tensor]:
    """The network's tensors of one file, without the prefixes that ComfyUI and others write."""
    tensors = read(locate(name, source))
    inner = {key.removeprefix(MARK): x for key, x in tensors.items() if key.startswith(MARK)}
    if inner:  # beside them there may be an autoencoder and text encoders
        return inner
    for prefix in ("transformer.", "unet."):
        if all(key.startswith(prefix) for key in tensors):
            return {key.removeprefix(prefix): x for key, x in tensors.items()}
    return tensors
