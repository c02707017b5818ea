"""Reference statistics for FID and related metrics, labelled with dataset, network and preprocessing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..core.registry import ConfigError
from ..core.types import Placement
from ..rewards.backbones.cifar10_classifier import Cifar10Classifier, load_cifar10_classifier
from .inception import Inception, load_inception
from .metrics import feature_moments

MAX_KEPT_FEATURES = 10_000  # features that are kept one by one, for what moments do not tell
ExtractorName = Literal["inception", "classifier"]


@dataclass(frozen=True)
class ReferenceLabel:
    """What a set of pictures is; two that differ in any of it are not the same set."""

    name: str
    split: str
    count: int
    side: int  # pixels
    network: str
    preprocessing: str

    def __str__(self) -> str:
        return f"{self.name} {self.split}, {self.count} pictures of {self.side} pixels, by {self.network}"


class FeatureExtractor(Protocol):
    """A network that sees pictures."""

    @property
    def network(self) -> str:
        """Its name and a part of its weights' digest."""

    @property
    def preprocessing(self) -> str: ...
    def look(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Features [N, C], and probabilities of classes if it knows any."""


@dataclass(frozen=True)
class InceptionExtractor:
    net: Inception
    network: str
    device: torch.device
    preprocessing: str = "TensorFlow 1's bilinear resize to 299, (x - 128) / 128"

    @torch.no_grad()
    def look(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        features = self.net(pixels.to(self.device))
        return features.cpu(), None if self.net.fc is None else self.net.fc(features).softmax(1).cpu()


@dataclass(frozen=True)
class ClassifierExtractor:
    net: Cifar10Classifier
    network: str
    device: torch.device
    preprocessing: str = "32 pixels a side, from 0 to 255"

    @torch.no_grad()
    def look(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        here = pixels.to(self.device)
        return self.net.features(here).cpu(), self.net(here).softmax(1).cpu()


def load_feature_extractor(which: ExtractorName, weights: str, placement: Placement) -> FeatureExtractor:
    if which == "classifier":
        photos = load_cifar10_classifier(weights, placement)
        return ClassifierExtractor(photos, f"classifier-{weights_digest(photos)}", placement.device)
    net = load_inception(Path(weights).expanduser()).to(placement.device)
    return InceptionExtractor(net, f"inception-{weights_digest(net)}", placement.device)


def weights_digest(net: torch.nn.Module) -> str:
    """Of the weights that features are made of; classes beside them make no other network."""
    found = hashlib.sha256()
    for name, p in net.named_parameters():
        found.update(p.detach().cpu().contiguous().numpy().tobytes() if not name.startswith("fc.") else b"")
    return found.hexdigest()[:12]


@dataclass(frozen=True)
class ExtractedFeatures:
    """What a network saw of many pictures."""

    features: Tensor  # [N, C]
    probabilities: Tensor | None  # [N, classes]
    side: int


def extract_features(pieces: Iterable[Tensor], by: FeatureExtractor) -> ExtractedFeatures:
    """Of pictures [n, 3, H, W] in [0, 1], piece by piece."""
    features, chances, side = [], [], 0
    for pixels in pieces:
        if side not in (0, pixels.shape[-1]):
            raise ConfigError(f"there are pictures of {side} and of {pixels.shape[-1]} pixels a side; make them alike")
        side = pixels.shape[-1]
        seen, chance = by.look(pixels)
        features.append(seen.float())
        chances += [chance] if chance is not None else []
    if not features:
        raise ConfigError("there are no pictures to look at; check the path")
    return ExtractedFeatures(torch.cat(features), torch.cat(chances) if chances else None, side)


@dataclass(frozen=True)
class ReferenceStatistics:
    """Statistics of real pictures, with their label."""

    label: ReferenceLabel
    mean: Tensor
    covariance: Tensor
    features: Tensor  # of some of them

    def save(self, path: Path) -> None:
        tensors = {"mean": self.mean, "covariance": self.covariance, "features": self.features}
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, {"label": json.dumps(asdict(self.label))})


def compute_reference(name: str, split: str, seen: ExtractedFeatures, by: FeatureExtractor) -> ReferenceStatistics:
    count = len(seen.features)
    label = ReferenceLabel(name, split, count, seen.side, by.network, by.preprocessing)
    chosen = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:MAX_KEPT_FEATURES]
    return ReferenceStatistics(label, *feature_moments(seen.features), seen.features[chosen].contiguous())


def load_reference(path: Path) -> ReferenceStatistics:
    try:
        with safe_open(path, "pt") as file:
            label = ReferenceLabel(**json.loads((file.metadata() or {})["label"]))
            return ReferenceStatistics(label, *(file.get_tensor(key) for key in ("mean", "covariance", "features")))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is no reference that names itself ({type(error).__name__}); make one with `tastemaker reference`"
        ) from error


def iterate_batches(pixels: Tensor, rows: int = 128) -> Iterator[Tensor]:
    """Bytes [N, H, W, 3], as `.npz` files of samples hold them, in [0, 1]."""
    for piece in torch.split(pixels, rows):
        yield piece.movedim(-1, 1).float() / 255
