"""`tastemaker pack`, `reference` and `compare`: sets of pictures as ADM exchanges them, and how far apart two are."""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from ..core import output_paths
from ..core.registry import ConfigError
from ..data.cifar10 import is_cifar10, load_cifar10
from ..data.image_io import IMAGE_FORMATS, read_image, to_uint8
from . import reference_statistics as references
from .metrics import feature_moments, frechet_distance_from_moments, inception_score, kernel_distance, precision_recall
from .reference_statistics import (
    ExtractedFeatures,
    FeatureExtractor,
    ReferenceStatistics,
    extract_features,
    iterate_batches,
)

SHEETS = {"sheet.png"}  # what `generate` puts beside the pictures
STRAY = 0.05  # of the variance, that the mean of some pictures may be from that of all


def load_image_set(path: Path, split: str = "train") -> Tensor:
    """Bytes [N, H, W, 3]: of an `.npz` in ADM's layout, of CIFAR-10, or of the pictures in a folder."""
    if path.suffix == ".npz":
        return read_npz(path)
    if not path.is_dir():
        raise ConfigError(f"there is nothing at {path}; expected an .npz of samples, or a folder of pictures")
    if is_cifar10(path):
        return load_cifar10(path, split).pixels.movedim(1, -1)
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMAGE_FORMATS and file.name not in SHEETS)
    if not files:
        raise ConfigError(f"{path}: there are no pictures; expected files that end in {', '.join(IMAGE_FORMATS)}")
    found = [torch.from_numpy(to_uint8(read_image(file))[0]) for file in track(files, "reading", transient=True)]
    for file, pixels in zip(files, found, strict=True):
        if pixels.shape != found[0].shape:
            shapes = [f"{x.shape[1]}x{x.shape[0]}" for x in (pixels, found[0])]
            raise ConfigError(f"{file} has {shapes[0]} pixels, {files[0]} has {shapes[1]}; make them alike")
    return torch.stack(found)


def read_npz(path: Path) -> Tensor:
    try:
        with np.load(path, allow_pickle=False) as file:
            found = file["arr_0"]
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path} holds no samples ({error}); expected `arr_0` of bytes [N, H, W, 3]") from error
    if found.ndim != 4 or found.shape[-1] != 3 or found.dtype != np.uint8:
        raise ConfigError(f"{path}: arr_0 is {found.dtype} {list(found.shape)}; expected uint8 [N, H, W, 3]")
    return torch.from_numpy(found)


def pack_images(folder: Path, out: Path, console: Console) -> Path:
    """One file of all pictures, in the order of their names, as ADM's evaluator reads it."""
    output_paths.check_output_file(out)
    found = load_image_set(folder).numpy()
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez(out, arr_0=found)
    console.print(f"{len(found)} pictures of {found.shape[2]}x{found.shape[1]} pixels in {out}")
    return out


def extract_with_progress(pixels: Tensor, by: FeatureExtractor, console: Console) -> ExtractedFeatures:
    count = -(-len(pixels) // 128)
    return extract_features(track(iterate_batches(pixels), "looking", total=count, console=console), by)


@dataclass(frozen=True)
class ReferenceDescription:
    """What a reference is said to be."""

    name: str
    split: str
    limit: int = 0  # only so many, at random; all if 0
    count: int = 0  # that statistics in the file are of, which it does not tell


def make_reference(
    source: Path, named: ReferenceDescription, by: FeatureExtractor, out: Path, console: Console
) -> ReferenceStatistics:
    """Statistics of real pictures, for samples to be compared with; those of a file in ADM's layout stay its own."""
    output_paths.check_output_file(out)
    known = statistics(source) if source.suffix == ".npz" else None
    if known is not None and not named.count:
        raise ConfigError(
            f"{source} holds statistics of more pictures than are in it, and not of how many; tell it by --count, "
            "which is 1281167 for the train split of ImageNet"
        )
    if known is None and named.count:
        raise ConfigError(f"--count is {named.count}, but {source} holds no statistics; pictures are counted here")
    pixels = load_image_set(source, named.split)
    if named.limit:
        chance = torch.Generator().manual_seed(0)
        pixels = pixels[torch.randperm(len(pixels), generator=chance)[: named.limit]]
    found = references.compute_reference(named.name, named.split, extract_with_progress(pixels, by, console), by)
    found = found if known is None else reference_from_statistics(found, known, named.count, source)
    found.save(out)
    console.print(f"{out}: {found.label}")
    return found


def statistics(path: Path) -> tuple[Tensor, Tensor] | None:
    """Mean and covariance of a whole set, which ADM's references have beside some of its pictures."""
    try:
        with np.load(path, allow_pickle=False) as file:
            found = [torch.from_numpy(file[key]).double() for key in ("mu", "sigma") if key in file]
    except (OSError, ValueError, TypeError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path} cannot be read ({error}); fetch it again") from error
    return (found[0], found[1]) if len(found) == 2 else None


def reference_from_statistics(
    seen: ReferenceStatistics, known: tuple[Tensor, Tensor], count: int, source: Path
) -> ReferenceStatistics:
    """A reference by statistics that were known, if what is seen here of some of its pictures agrees with them."""
    mean, covariance = known
    if (mean.shape, covariance.shape) != (seen.mean.shape, seen.covariance.shape):
        raise ConfigError(
            f"{source} has statistics of {len(mean)} features, this network {len(seen.mean)}; give another"
        )
    apart, spread = float((mean - seen.mean).square().sum()), float(covariance.trace())
    if apart > spread * (STRAY + 4 / len(seen.features)):
        raise ConfigError(
            f"{source}: by this network its pictures are {apart:.3g} from its own mean, which others that vary by "
            f"{spread:.3g} cannot be; give the Inception that it was made by"
        )
    return replace(seen, mean=mean, covariance=covariance, label=replace(seen.label, count=count))


@dataclass(frozen=True)
class ExpectedReference:
    """What the user takes a reference for; empty where nothing is said."""

    name: str = ""
    split: str = ""
    count: int = 0

    def check(self, found: ReferenceStatistics, where: Path) -> None:
        for what in ("name", "split", "count"):
            said, is_ = getattr(self, what), getattr(found.label, what)
            if said and said != is_:
                raise ConfigError(f"--{what} says {said}, but {where} is {found.label}; give another reference")


def check_same_network(real: ReferenceStatistics, by: FeatureExtractor, where: Path) -> None:
    """Refuse to compare what was seen by different eyes, before anything is looked at."""
    label = real.label
    for what, was, now in (
        ("network", label.network, by.network),
        ("preprocessing", label.preprocessing, by.preprocessing),
    ):
        if was != now:
            raise ConfigError(f"{where} was seen by another {what} ({was}, here {now}); make it anew with this one")


def compare_to_reference(
    samples: Path, where: Path, claim: ExpectedReference, by: FeatureExtractor, console: Console, *, few: bool = False
) -> dict[str, Any]:
    """FID, KID, precision and recall against a reference, and the Inception score if the network knows classes."""
    real = references.load_reference(where)
    claim.check(real, where)
    check_same_network(real, by, where)
    pixels = load_image_set(samples)
    if pixels.shape[1] != real.label.side:
        raise ConfigError(
            f"{samples} is {pixels.shape[1]} pixels high, but {where} is {real.label}; compare alike sizes"
        )
    if len(pixels) <= len(real.mean) and not few:
        raise ConfigError(
            f"there are {len(pixels)} samples for {len(real.mean)} features, which no covariance can be measured by; "
            "give more of them, or --few for numbers that cannot be compared with others'"
        )
    label = {"samples": str(samples), "reference": str(real.label), "preprocessing": real.label.preprocessing}
    told: dict[str, Any] = {**label, **compute_metrics(extract_with_progress(pixels, by, console), real)}
    console.print(table(told))
    return told


def compute_metrics(seen: ExtractedFeatures, real: ReferenceStatistics) -> dict[str, float]:
    distance, spread = kernel_distance(real.features, seen.features)
    precision, recall = precision_recall(real.features, seen.features[: references.MAX_KEPT_FEATURES])
    found = {
        "count": len(seen.features),
        "fid": frechet_distance_from_moments(real.mean, real.covariance, *feature_moments(seen.features)),
        "kid": distance,
        "kid deviation": spread,
        "precision": precision,
        "recall": recall,
    }
    if seen.probabilities is not None:
        found["inception score"], found["inception score deviation"] = inception_score(seen.probabilities)
    return found


def table(told: dict[str, Any]) -> Table:
    found = Table("measure", "value", title=f"{told['count']} samples against {told['reference']}")
    for name, value in told.items():
        if isinstance(value, float):
            found.add_row(name, f"{value:.4f}")
    return found


def write_metrics(told: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        output_paths.check_output_file(out).parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
