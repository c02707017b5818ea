"""What the UNets of Stable Diffusion have in common: how levels are told to them, and the files they come in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..core.registry import ConfigError
from .pipeline_components import silence_libraries
from .pretrained import WeightsSource, find_weights, load_state_dict

NUM_TRAIN_TIMESTEPS = 1000  # that all of them were trained on
FACTOR = 8  # pixels a side that one latent stands for
CHANNELS = 4
ORIGINAL_PREFIX = "model.diffusion_model."  # before the network's names in the authors' files


def unet_timestep(t: Tensor) -> Tensor:
    """The level as the network counts it: t = (k + 1)/1000 is k, and what lies between two of them stays there."""
    place = (t.float() * NUM_TRAIN_TIMESTEPS - 1).clamp(min=0)
    nearest = place.round()
    return torch.where((place - nearest).abs() < 1e-3, nearest, place)


def cast_to_network_dtype(net: nn.Module, *given: Tensor) -> tuple[Tensor, ...]:
    """What a network is given, in the precision of its weights; autocast, if it is on, goes on from there."""
    dtype = next(net.parameters()).dtype
    return tuple(x.to(dtype) for x in given)


def check_image_size(height: int, width: int) -> None:
    """Refuse a size no such network can paint."""
    for name, side in (("height", height), ("width", width)):
        if side % FACTOR or not FACTOR <= side <= 8192:
            raise ValueError(f"'{name}' is {side}; expected a multiple of {FACTOR} from {FACTOR} to 8192")


def check_image_shape(pixels: Tensor, made: tuple[int, ...]) -> None:
    """Refuse pictures that are not as large as those the model makes."""
    if pixels.shape[1:] != made:
        (high, wide), (height, width) = pixels.shape[-2:], made[-2:]
        raise ConfigError(
            f"the pictures are {wide}x{high} and the model makes {width}x{height}; "
            "set data.size, or model.height and model.width"
        )


def check_unet_config(config: Mapping[str, Any], name: str, wanted: str | None, other: str) -> None:
    """Refuse the network of another model; `wanted` is how it is told more than words and level."""
    found = config.get("addition_embed_type")
    if found != wanted:
        kind = "two text encoders" if found == "text_time" else "one text encoder" if found is None else found
        raise ConfigError(f"model.weights: '{name:.200}' holds a network for {kind}; set model.type to {other}")
    if config.get("in_channels", CHANNELS) != CHANNELS:
        raise ConfigError(
            f"model.weights: the network of '{name:.200}' reads {config['in_channels']} channels, as those for "
            f"inpainting do; expected {CHANNELS}, so name the base model"
        )


def read_unet_checkpoint(
    name: str | None, source: WeightsSource, config: Mapping[str, Any]
) -> dict[str, Tensor] | None:
    """The network in one file, of diffusers' names or the authors', whatever else is in the file; none without one."""
    if name is None:
        return None
    found = load_state_dict(find_weights(name, source))
    if any(key.startswith("input_blocks.") for key in found):
        found = {ORIGINAL_PREFIX + key: x for key, x in found.items()}
    if not any(key.startswith(ORIGINAL_PREFIX) for key in found):
        return {key.removeprefix("unet."): x for key, x in found.items()}
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    try:
        with silence_libraries():
            return dict(convert_ldm_unet_checkpoint(found, dict(config)))  # type: ignore[no-untyped-call]
    except KeyError as error:
        raise ConfigError(f"'{name:.200}' lacks {error} of this network; name a file of the same model") from error
