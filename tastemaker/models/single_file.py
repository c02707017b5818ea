"""Read a network from a single-file checkpoint (ComfyUI, original releases)."""

from __future__ import annotations

from torch import Tensor

from .pretrained import WeightsSource, find_weights, load_state_dict

NETWORK_PREFIX = "model.diffusion_model."  # before the names of a network that is not alone in its file


def read_single_file(name: str, source: WeightsSource) -> dict[str, Tensor]:
    """The network's tensors of one file, without the prefixes that ComfyUI and others write."""
    tensors = load_state_dict(find_weights(name, source))
    inner = {key.removeprefix(NETWORK_PREFIX): x for key, x in tensors.items() if key.startswith(NETWORK_PREFIX)}
    if inner:  # beside them there may be an autoencoder and text encoders
        return inner
    for prefix in ("transformer.", "unet."):
        if all(key.startswith(prefix) for key in tensors):
            return {key.removeprefix(prefix): x for key, x in tensors.items()}
    return tensors
