"""PatchGAN discriminator (pix2pix), in the layout of LlamaGen's checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from ..core.registry import ConfigError
from ..models.pretrained import load_state_dict, load_weights_into
from ..models.restricted_unpickler import load_pickle

MAX_MULTIPLIER = 8  # of the first width
LAYER = re.compile(r"layers\.(\d+)\.([01])\.(\w+)")
CHECKPOINT_KEY = "discriminator"  # of LlamaGen's checkpoints, beside the tokenizer


class PatchGANDiscriminator(nn.Module):
    """Pixels [N, 3, H, W] in [0, 1] to logits [N, 1, h, w], one per patch, high if it looks real.

    With `extra_layer`, one more of stride 1, it is LlamaGen's; without, it is that of explainingai's VAE.
    """

    def __init__(self, width: int = 64, num_layers: int = 3, *, extra_layer: bool = True) -> None:
        super().__init__()
        strides = [2] * num_layers + [1] * extra_layer
        widths = [width * min(2**i, MAX_MULTIPLIER) for i in range(len(strides))]
        layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2)]
        for i in range(1, len(strides)):
            layers += [nn.Conv2d(widths[i - 1], widths[i], 4, strides[i], 1, bias=False)]
            layers += [nn.BatchNorm2d(widths[i]), nn.LeakyReLU(0.2)]
        self.main = nn.Sequential(*layers, nn.Conv2d(widths[-1], 1, 4, 1, 1, bias=extra_layer))
        self.min_size = min_image_size(strides)
        self.apply(_initialize)

    def forward(self, pixels: Tensor) -> Tensor:
        if min(pixels.shape[-2:]) < self.min_size:
            height, width = pixels.shape[-2:]
            raise ConfigError(
                "discriminator.num_layers: the discriminator needs images of at least "
                f"{self.min_size}x{self.min_size} pixels, got {height}x{width}; lower discriminator.num_layers, "
                "or use larger images [TM554]"
            )
        out: Tensor = self.main(2 * pixels - 1)
        return out.float()


def min_image_size(strides: list[int]) -> int:
    """Pixels per side of the smallest image that has one logit."""
    side = 1
    for stride in [1, *reversed(strides)]:
        side = (side - 1) * stride + 2  # kernel 4, padding 1
    return side


def _initialize(module: nn.Module) -> None:
    """The initialization of the published code (pix2pix)."""
    if isinstance(module, nn.Conv2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def load_discriminator(net: PatchGANDiscriminator, path: Path) -> None:
    """Load weights from a checkpoint of LlamaGen, which holds the tokenizer too, of explainingai, or of our own."""
    if not path.is_file():
        raise ConfigError(
            f"discriminator.weights: the file '{path!s:.200}' does not exist; set discriminator.weights to a file "
            "with discriminator weights [TM555]"
        )
    checkpoint = None if path.suffix == ".safetensors" else load_pickle(path)
    nested = checkpoint.get(CHECKPOINT_KEY) if isinstance(checkpoint, Mapping) else None
    if isinstance(nested, Mapping):
        tensors = {key: x for key, x in nested.items() if isinstance(x, Tensor)}
    else:
        tensors = load_state_dict(path)
    load_weights_into(net, gray_to_rgb_weights(convert_explainingai_keys(tensors)), path)


def gray_to_rgb_weights(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights for gray images as weights for three equal channels, each with a third of the weight."""
    first = tensors.get("main.0.weight")
    if first is None or first.shape[1:2] != (1,):
        return tensors
    return {**tensors, "main.0.weight": first.repeat(1, 3, 1, 1) / 3}


def convert_explainingai_keys(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of explainingai under our names: `layers.2.1.weight` is the norm of the third layer."""
    converted = {}
    for key, x in tensors.items():
        name = key.removeprefix(f"{CHECKPOINT_KEY}.")
        if layer := LAYER.fullmatch(name):
            number = int(layer[1])
            name = f"main.{max(0, 3 * number - 1) + int(layer[2])}.{layer[3]}"
        converted[name] = x
    return converted
