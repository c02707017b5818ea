"""PatchGAN: tells pictures from reconstructions patch by patch, in LlamaGen's layout (pix2pix's discriminator)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from ..core.registry import ConfigError
from ..models.pretrained import load_pickle_safely, load_state_dict, load_weights_into

WIDEST = 8  # times the first width
LAYER = re.compile(r"layers\.(\d+)\.([01])\.(\w+)")
BESIDE = "discriminator"  # what LlamaGen's checkpoints call it, beside the tokenizer


class PatchGANDiscriminator(nn.Module):
    """Pixels [N, 3, H, W] in [0, 1] to logits [N, 1, h, w], each of one patch, high for what it takes for real.

    With a `tail`, another layer that does not halve, it is LlamaGen's; without, it is that of explainingai's VAE.
    """

    def __init__(self, width: int = 64, layers: int = 3, *, tail: bool = True) -> None:
        super().__init__()
        strides = [2] * layers + [1] * tail
        widths = [width * min(2**i, WIDEST) for i in range(len(strides))]
        found: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2)]
        for i in range(1, len(strides)):
            found += [nn.Conv2d(widths[i - 1], widths[i], 4, strides[i], 1, bias=False)]
            found += [nn.BatchNorm2d(widths[i]), nn.LeakyReLU(0.2)]
        self.main = nn.Sequential(*found, nn.Conv2d(widths[-1], 1, 4, 1, 1, bias=tail))
        self.smallest = min_image_size(strides)
        self.apply(_begin)

    def forward(self, pixels: Tensor) -> Tensor:
        if min(pixels.shape[-2:]) < self.smallest:
            height, width = pixels.shape[-2:]
            raise ConfigError(
                f"the critic was given pictures of {height}x{width} pixels and needs {self.smallest} a side; "
                "lower critic.layers"
            )
        out: Tensor = self.main(2 * pixels - 1)
        return out.float()


def min_image_size(strides: list[int]) -> int:
    """Pixels a side of the smallest picture that has a patch."""
    side = 1
    for stride in [1, *reversed(strides)]:
        side = (side - 1) * stride + 2  # of a kernel of four and a border of one each way
    return side


def _begin(module: nn.Module) -> None:
    """As it is published: narrow, and norms about one."""
    if isinstance(module, nn.Conv2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def load_discriminator(net: PatchGANDiscriminator, path: Path) -> None:
    """Fill it from a checkpoint of LlamaGen, where it lies beside the tokenizer, from explainingai's, or its own."""
    if not path.is_file():
        raise ConfigError(f"critic.weights: there is nothing at '{path!s:.200}'; expected a file of a discriminator")
    whole = None if path.suffix == ".safetensors" else load_pickle_safely(path)
    within = whole.get(BESIDE) if isinstance(whole, Mapping) else None
    tensors = {key: x for key, x in within.items() if isinstance(x, Tensor)} if isinstance(within, Mapping) else None
    load_weights_into(
        net, gray_to_rgb_weights(convert_explainingai_keys(load_state_dict(path) if tensors is None else tensors)), path
    )


def gray_to_rgb_weights(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """One of grey pictures for their three channels, which are alike: each then counts a third."""
    first = tensors.get("main.0.weight")
    if first is None or first.shape[1:2] != (1,):
        return tensors
    return {**tensors, "main.0.weight": first.repeat(1, 3, 1, 1) / 3}


def convert_explainingai_keys(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Ours of explainingai's names: `layers.2.1.weight` is the norm of the third layer."""
    found = {}
    for key, x in tensors.items():
        name = key.removeprefix(f"{BESIDE}.")
        if layer := LAYER.fullmatch(name):
            number = int(layer[1])
            name = f"main.{max(0, 3 * number - 1) + int(layer[2])}.{layer[3]}"
        found[name] = x
    return found
