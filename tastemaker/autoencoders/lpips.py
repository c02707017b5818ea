"""How different two pictures look (LPIPS, Zhang et al. 2018): by VGG16's features, weighted as people judge."""

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

TINY = "tiny"  # weights that are in no file
VGG16 = WeightsSource("timm/vgg16.tv_in1k", "model.safetensors", "0.55 GB", "BSD-3-Clause")
WIDTHS = (64, 128, 256, 512, 512)
DEPTHS = (2, 2, 3, 3, 3)  # convolutions of each block, with a rectifier after each; what comes out is compared
SMALLEST = 16  # pixels a side: it is halved between blocks
# What the heads were trained to see of [-1, 1].
SHIFT = (-0.030, -0.088, -0.188)
SCALE = (0.458, 0.448, 0.450)
TRUNK = re.compile(r"(?:features|net\.slice\d)\.(\d+)\.(weight|bias)")
HEAD = re.compile(r"lin(\d)\.model\.1\.weight")


class LPIPSDistance(nn.Module):
    """The distance of pictures [N, 3, H, W] in [0, 1] to others: [N], nought for the same."""

    shift: Tensor
    scale: Tensor

    def __init__(self, widths: Sequence[int] = WIDTHS) -> None:
        super().__init__()
        self.features, self.ends = _vgg(widths)
        self.heads = nn.ParameterList([torch.full((1, width, 1, 1), 1 / width) for width in widths])
        self.register_buffer("shift", torch.tensor(SHIFT)[:, None, None], persistent=False)
        self.register_buffer("scale", torch.tensor(SCALE)[:, None, None], persistent=False)

    def forward(self, pixels: Tensor, others: Tensor) -> Tensor:
        if min(pixels.shape[-2:]) < SMALLEST:
            height, width = pixels.shape[-2:]
            raise ValueError(f"LPIPS was given pictures of {height}x{width} pixels; expected {SMALLEST} a side or more")
        rows = len(pixels)
        seen = self.look(torch.cat([pixels, others]))
        gaps = [(one[:rows] - one[rows:]).square() for one in seen]
        each = [(gap * head).sum(1).mean((1, 2)) for gap, head in zip(gaps, self.heads, strict=True)]
        return torch.stack(each).sum(0)

    def look(self, pixels: Tensor) -> list[Tensor]:
        """What each block sees, of length one at every place: [N, C, H', W'] each."""
        x, seen = ((pixels * 2 - 1) - self.shift) / self.scale, []
        for place, layer in enumerate(self.features):
            x = layer(x)
            if place in self.ends:
                # A norm of all zeros has the gradient nought here; a root's would be infinite.
                seen.append(x / (torch.linalg.vector_norm(x, dim=1, keepdim=True) + 1e-10))
        return seen


def _vgg(widths: Sequence[int]) -> tuple[nn.Sequential, tuple[int, ...]]:
    """The convolutions of VGG16 as they are numbered everywhere, and where its blocks end."""
    layers: list[nn.Module] = []
    ends: list[int] = []
    before = 3
    for width, depth in zip(widths, DEPTHS, strict=True):
        if layers:
            layers.append(nn.MaxPool2d(2))
        for _ in range(depth):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
            before = width
        ends.append(len(layers) - 1)
    return nn.Sequential(*layers), tuple(ends)


def load_lpips(weights: str, heads: str, placement: Placement) -> LPIPSDistance:
    """A frozen distance: VGG16 as torchvision or timm publish it, or an LPIPS whole; its heads, if not within, from
    a file of their own or from the package lpips, where that is installed."""
    if weights == TINY:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return _frozen(LPIPSDistance((4, 4, 8, 8, 8)), placement)
    path = find_weights(weights, VGG16)
    tensors = _renamed(load_state_dict(path))
    if not any(key.startswith("heads.") for key in tensors):
        tensors |= _renamed(load_state_dict(_heads(heads)))
    widths = [len(tensors[f"heads.{k}"][0]) for k in range(len(WIDTHS)) if f"heads.{k}" in tensors]
    net = LPIPSDistance(widths if len(widths) == len(WIDTHS) else WIDTHS)
    load_weights_into(net, tensors, path)
    return _frozen(net, placement)


def _frozen(net: LPIPSDistance, placement: Placement) -> LPIPSDistance:
    return net.to(placement.device, placement.dtype).eval().requires_grad_(False)


def _renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Ours of the published names; a classifier's are left out."""
    found = {}
    for key, x in tensors.items():
        if trunk := TRUNK.fullmatch(key):
            found[f"features.{trunk[1]}.{trunk[2]}"] = x
        elif head := HEAD.fullmatch(key):
            found[f"heads.{head[1]}"] = x
    return found


def _heads(name: str) -> Path:
    if name:
        path = Path(name).expanduser()
        if not path.is_file():
            raise ConfigError(f"there are no heads of LPIPS at '{name:.200}'; expected `vgg.pth` of the package lpips")
        return path
    found = importlib.util.find_spec("lpips")  # which is not imported, for that would need torchvision
    for folder in (found.submodule_search_locations or ()) if found else ():
        path = Path(folder) / "weights" / "v0.1" / "vgg.pth"
        if path.is_file():
            return path
    raise ConfigError(
        "LPIPS needs its heads beside VGG16, and they are not here; run `pip install --no-deps lpips==0.1.4`, "
        "or give the path of its weights/v0.1/vgg.pth as `heads`"
    )
