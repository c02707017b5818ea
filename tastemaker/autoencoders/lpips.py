"""LPIPS (Zhang et al. 2018): perceptual distance by VGG16 features, weighted to match human judgments."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ..core.registry import ConfigError
from ..core.types import Placement
from ..models.pretrained import WeightsSource, find_weights, load_state_dict, load_weights_into

TINY = "tiny"  # random weights, for tests
VGG16 = WeightsSource("timm/vgg16.tv_in1k", "model.safetensors", "0.55 GB", "BSD-3-Clause")
WIDTHS = (64, 128, 256, 512, 512)
DEPTHS = (2, 2, 3, 3, 3)  # convolutions per block, each with a ReLU; the output of each block is compared
MIN_SIZE = 16  # pixels per side, which are halved between blocks
# Normalization of pixels in [-1, 1] that the published weights were trained with.
SHIFT = (-0.030, -0.088, -0.188)
SCALE = (0.458, 0.448, 0.450)
TRUNK = re.compile(r"(?:features|net\.slice\d)\.(\d+)\.(weight|bias)")
HEAD = re.compile(r"lin(\d)\.model\.1\.weight")


class LPIPSDistance(nn.Module):
    """Perceptual distance [N] between images [N, 3, H, W] in [0, 1]; zero for equal images."""

    shift: Tensor
    scale: Tensor

    def __init__(self, widths: Sequence[int] = WIDTHS) -> None:
        super().__init__()
        self.features, self.block_ends = _build_vgg(widths)
        self.heads = nn.ParameterList([torch.full((1, width, 1, 1), 1 / width) for width in widths])
        self.register_buffer("shift", torch.tensor(SHIFT)[:, None, None], persistent=False)
        self.register_buffer("scale", torch.tensor(SCALE)[:, None, None], persistent=False)

    def forward(self, pixels: Tensor, others: Tensor) -> Tensor:
        if min(pixels.shape[-2:]) < MIN_SIZE:
            height, width = pixels.shape[-2:]
            raise ValueError(
                f"LPIPS: expected images of at least {MIN_SIZE}x{MIN_SIZE} pixels, got {height}x{width}; use "
                "larger images [TM551]"
            )
        count = len(pixels)
        features = self.block_features(torch.cat([pixels, others]))
        differences = [(x[:count] - x[count:]).square() for x in features]
        distances = [(x * head).sum(1).mean((1, 2)) for x, head in zip(differences, self.heads, strict=True)]
        return torch.stack(distances).sum(0)

    def block_features(self, pixels: Tensor) -> list[Tensor]:
        """Output of each block, normalized to unit length at every position: [N, C, H', W'] each."""
        x, features = ((pixels * 2 - 1) - self.shift) / self.scale, []
        for i, layer in enumerate(self.features):
            x = layer(x)
            if i in self.block_ends:
                # vector_norm has gradient zero at zero, where that of a square root is infinite.
                features.append(x / (torch.linalg.vector_norm(x, dim=1, keepdim=True) + 1e-10))
        return features


def _build_vgg(widths: Sequence[int]) -> tuple[nn.Sequential, tuple[int, ...]]:
    """The convolutions of VGG16 with their usual numbering, and the index of the last layer of each block."""
    layers: list[nn.Module] = []
    ends: list[int] = []
    in_channels = 3
    for width, depth in zip(widths, DEPTHS, strict=True):
        if layers:
            layers.append(nn.MaxPool2d(2))
        for _ in range(depth):
            layers += [nn.Conv2d(in_channels, width, 3, padding=1), nn.ReLU()]
            in_channels = width
        ends.append(len(layers) - 1)
    return nn.Sequential(*layers), tuple(ends)


def load_lpips(weights: str, heads: str, placement: Placement) -> LPIPSDistance:
    """A frozen LPIPS distance from VGG16 weights of torchvision or timm, or from full LPIPS weights.

    Without LPIPS weights in the file, the heads come from their own file or from the installed package lpips.
    """
    if weights == TINY:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return _freeze(LPIPSDistance((4, 4, 8, 8, 8)), placement)
    path = find_weights(weights, VGG16)
    tensors = _convert_keys(load_state_dict(path))
    if not any(key.startswith("heads.") for key in tensors):
        tensors |= _convert_keys(load_state_dict(_find_heads(heads)))
    widths = [len(tensors[f"heads.{k}"][0]) for k in range(len(WIDTHS)) if f"heads.{k}" in tensors]
    net = LPIPSDistance(widths if len(widths) == len(WIDTHS) else WIDTHS)
    load_weights_into(net, tensors, path)
    return _freeze(net, placement)


def _freeze(net: LPIPSDistance, placement: Placement) -> LPIPSDistance:
    return net.to(placement.device, placement.dtype).eval().requires_grad_(False)


def _convert_keys(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Published tensors under our names; those of the classifier are dropped."""
    converted = {}
    for key, x in tensors.items():
        if trunk := TRUNK.fullmatch(key):
            converted[f"features.{trunk[1]}.{trunk[2]}"] = x
        elif head := HEAD.fullmatch(key):
            converted[f"heads.{head[1]}"] = x
    return converted


def _find_heads(name: str) -> Path:
    if name:
        path = Path(name).expanduser()
        if not path.is_file():
            raise ConfigError(
                f"LPIPS: the file '{name:.200}' does not exist; give the path of `weights/v0.1/vgg.pth` from the "
                "package lpips [TM552]"
            )
        return path
    package = importlib.util.find_spec("lpips")  # not imported, because that needs torchvision
    for folder in (package.submodule_search_locations or ()) if package else ():
        path = Path(folder) / "weights" / "v0.1" / "vgg.pth"
        if path.is_file():
            return path
    raise ConfigError(
        "LPIPS: the weights of its linear layers were not found; run `pip install --no-deps lpips==0.1.4`, or "
        "set `heads` to the path of that package's weights/v0.1/vgg.pth [TM553]"
    )
