"""`tastemaker pack`, `reference` and `compare`: image sets in ADM's layout, reference statistics and FID."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..console import Table, make_console, track
from ..core import output_paths
from ..core.array_files import read_arrays
from ..core.registry import ConfigError
from ..core.safe_files import parse_json
from ..data.cifar10 import is_cifar10, load_cifar10
from ..data.image_io import IMAGE_FORMATS, read_image, to_uint8
from .feature_extractors import ExtractedFeatures, FeatureExtractor, extract_features
from .metrics import feature_moments, frechet_distance_from_moments, inception_score, kernel_distance, precision_recall

GRID_FILES = {"sheet.png"}  # written by `generate` beside the samples
MEAN_TOLERANCE = 0.05  # of the variance: how far the mean of a subset may be from the mean of the set
MAX_KEPT_FEATURES = 10_000  # features kept one by one, for KID, precision and recall
BATCH_SIZE = 128


# Image sets


def load_image_set(path: Path, split: str = "train") -> Tensor:
    """Load images as bytes [N, H, W, 3] from an `.npz` in ADM's layout, from CIFAR-10 or from a folder."""
    if path.suffix == ".npz":
        return read_npz(path)
    if not path.is_dir():
        raise ConfigError(
            f"the path {path} does not exist; give an .npz file of samples, or a folder of images [TM620]"
        )
    if is_cifar10(path):
        return load_cifar10(path, split).pixels.movedim(1, -1)
    files = sorted(
        file for file in path.rglob("*") if file.suffix.lower() in IMAGE_FORMATS and file.name not in GRID_FILES
    )
    if not files:
        raise ConfigError(
            f"{path}: the folder does not contain images; add files that end in {', '.join(IMAGE_FORMATS)}, or "
            "correct the path [TM621]"
        )
    images = [
        torch.from_numpy(to_uint8(read_image(file))[0])
        for file in track(files, "reading", make_console(stderr=True), "images")
    ]
    for file, image in zip(files, images, strict=True):
        if image.shape != images[0].shape:
            sizes = [f"{x.shape[1]}x{x.shape[0]}" for x in (image, images[0])]
            raise ConfigError(
                f"{file} has {sizes[0]} pixels, but {files[0]} has {sizes[1]}; resize all images to one size [TM622]"
            )
    return torch.stack(images)


def read_npz(path: Path) -> Tensor:
    """Read bytes [N, H, W, 3] from `arr_0` of an `.npz`."""
    try:
        images = read_arrays(path, ["arr_0"])["arr_0"]
    except (ConfigError, KeyError) as error:
        raise ConfigError(
            f"{path} does not contain samples ({error}); give an .npz file with the array `arr_0`, uint8 [N, H, "
            "W, 3] [TM623]"
        ) from error
    if images.ndim != 4 or images.shape[-1] != 3 or images.dtype != np.uint8:
        raise ConfigError(
            f"{path}: arr_0 is {images.dtype} {list(images.shape)}; save it as uint8 [N, H, W, 3] [TM624]"
        )
    return torch.from_numpy(images)


def pack_images(folder: Path, out: Path, console: Console) -> Path:
    """Write all images of a folder, ordered by name, into one `.npz` that ADM's evaluator reads."""
    output_paths.check_output_file(out)
    images = load_image_set(folder).numpy()
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez(out, arr_0=images)
    console.print(f"{len(images)} images of {images.shape[2]}x{images.shape[1]} pixels in {out}")
    return out


def extract_with_progress(images: Tensor, extractor: FeatureExtractor, console: Console) -> ExtractedFeatures:
    """Features of bytes [N, H, W, 3]."""
    batches = track(torch.split(images, BATCH_SIZE), "extracting features", console, "batches")
    return extract_features((batch.movedim(-1, 1).float() / 255 for batch in batches), extractor)


# Reference statistics


@dataclass(frozen=True)
class ReferenceLabel:
    """Identity of reference statistics. Statistics that differ in any field cannot be compared."""

    name: str
    split: str
    count: int
    side: int  # pixels
    network: str
    preprocessing: str

    def __str__(self) -> str:
        return f"{self.name} {self.split}, {self.count} images of {self.side} pixels, by {self.network}"


@dataclass(frozen=True)
class ReferenceStatistics:
    """Feature statistics of real images, with their label."""

    label: ReferenceLabel
    mean: Tensor  # [C]
    covariance: Tensor  # [C, C]
    features: Tensor  # [n, C], of at most MAX_KEPT_FEATURES images

    def save(self, path: Path) -> None:
        tensors = {"mean": self.mean, "covariance": self.covariance, "features": self.features}
        path.parent.mkdir(parents=True, exist_ok=True)
        with output_paths.replace_file(path) as partial:
            save_file(tensors, partial, {"label": json.dumps(asdict(self.label))})


@dataclass(frozen=True)
class ReferenceDescription:
    """What the user says about the images of a reference, or expects of them. Empty fields are not checked."""

    name: str = ""
    split: str = ""
    max_images: int = 0  # random subset of this size; all images if 0
    count: int = 0  # number of images behind the statistics in ADM's file, which does not contain it


def load_reference(path: Path) -> ReferenceStatistics:
    try:
        with safe_open(path, "pt") as file:
            label = ReferenceLabel(**parse_json((file.metadata() or {})["label"], path))
            return ReferenceStatistics(label, *(file.get_tensor(key) for key in ("mean", "covariance", "features")))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is not a reference with a label ({type(error).__name__}); make a reference with `tastemaker "
            "reference` [TM625]"
        ) from error


def make_reference(
    source: Path, description: ReferenceDescription, extractor: FeatureExtractor, out: Path, console: Console
) -> ReferenceStatistics:
    """Compute and save the statistics of real images. Statistics in a file of ADM's layout are kept as they are."""
    output_paths.check_output_file(out)
    adm_statistics = read_adm_statistics(source) if source.suffix == ".npz" else None
    if adm_statistics is not None and not description.count:
        raise ConfigError(
            f"--num-images: {source} has statistics of more images than it contains, but does not say of how "
            "many; give --num-images (1281167 for the train split of ImageNet) [TM626]"
        )
    if adm_statistics is None and description.count:
        raise ConfigError(
            f"--num-images: got {description.count}, but {source} does not have statistics; leave --num-images "
            "out [TM627]"
        )
    images = load_image_set(source, description.split)
    if description.max_images:
        generator = torch.Generator().manual_seed(0)
        images = images[torch.randperm(len(images), generator=generator)[: description.max_images]]
    extracted = extract_with_progress(images, extractor, console)
    count, features = len(extracted.features), extracted.features
    networks = (extractor.network, extractor.preprocessing)
    label = ReferenceLabel(description.name, description.split, count, extracted.side, *networks)
    kept = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:MAX_KEPT_FEATURES]
    reference = ReferenceStatistics(label, *feature_moments(features), features[kept].contiguous())
    if adm_statistics is not None:
        reference = use_adm_statistics(reference, adm_statistics, description.count, source)
    reference.save(out)
    console.print(f"{out}: {reference.label}")
    return reference


def read_adm_statistics(path: Path) -> tuple[Tensor, Tensor] | None:
    """Read mean and covariance of the whole set, which ADM's references store beside some of its images."""
    try:
        arrays = [torch.from_numpy(x).double() for _, x in sorted(read_arrays(path, ("mu", "sigma")).items())]
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); download the file again [TM628]") from error
    return (arrays[0], arrays[1]) if len(arrays) == 2 else None


def use_adm_statistics(
    reference: ReferenceStatistics, statistics: tuple[Tensor, Tensor], count: int, source: Path
) -> ReferenceStatistics:
    """Replace mean and covariance by published ones, after checking that they come from the same network."""
    mean, covariance = statistics
    if (mean.shape, covariance.shape) != (reference.mean.shape, reference.covariance.shape):
        raise ConfigError(
            f"{source} has statistics of {len(mean)} features, but this network has {len(reference.mean)} "
            "features; use the network that the statistics were made with [TM629]"
        )
    distance, variance = float((mean - reference.mean).square().sum()), float(covariance.trace())
    if distance > variance * (MEAN_TOLERANCE + 4 / len(reference.features)):
        raise ConfigError(
            f"{source}: with this network, the mean of the images is {distance:.3g} away from the published mean, "
            f"which is too far for a variance of {variance:.3g}; use the Inception network that the statistics "
            "were made with [TM630]"
        )
    return replace(reference, mean=mean, covariance=covariance, label=replace(reference.label, count=count))


# Comparison of samples with a reference


def compare_to_reference(
    samples: Path,
    path: Path,
    expected: ReferenceDescription,
    extractor: FeatureExtractor,
    console: Console,
    *,
    allow_few: bool = False,
) -> dict[str, Any]:
    """Compute FID, KID, precision, recall and, if the network has classes, the Inception score of samples."""
    reference = load_reference(path)
    label = reference.label
    for key, option in (("name", "--name"), ("split", "--split"), ("count", "--num-images")):
        if getattr(expected, key) not in ("", 0, getattr(label, key)):
            raise ConfigError(
                f"{option}: got {getattr(expected, key)}, but the reference {path} is {label}; give another "
                f"reference, or change {option} [TM631]"
            )
    for key in ("network", "preprocessing"):
        before, now = getattr(label, key), getattr(extractor, key)
        if before != now:
            raise ConfigError(
                f"{path} was made with another {key} ({before}, now {now}); make the reference again with "
                "`tastemaker reference` [TM632]"
            )
    images = load_image_set(samples)
    if images.shape[1] != label.side:
        raise ConfigError(
            f"{samples} is {images.shape[1]} pixels high, but the reference {path} is {label}; compare images of "
            "the same size [TM633]"
        )
    if len(images) <= len(reference.mean) and not allow_few:
        raise ConfigError(
            f"FID: {len(images)} samples for {len(reference.mean)} features are too few to estimate a covariance; "
            "give more samples, or add --allow-few-samples if the numbers need not be comparable with published "
            "ones [TM634]"
        )
    result = {"samples": str(samples), "reference": str(label), "preprocessing": label.preprocessing}
    metrics = compute_metrics(extract_with_progress(images, extractor, console), reference)
    table = Table("metric", "value", title=f"{metrics['count']} samples against {label}")
    for name, value in metrics.items():
        if isinstance(value, float):
            table.add_row(name, f"{value:.4f}")
    console.print(table)
    return {**result, **metrics}


def compute_metrics(extracted: ExtractedFeatures, reference: ReferenceStatistics) -> dict[str, float]:
    kid, kid_deviation = kernel_distance(reference.features, extracted.features)
    precision, recall = precision_recall(reference.features, extracted.features[:MAX_KEPT_FEATURES])
    metrics = {
        "count": len(extracted.features),
        "fid": frechet_distance_from_moments(
            reference.mean, reference.covariance, *feature_moments(extracted.features)
        ),
        "kid": kid,
        "kid deviation": kid_deviation,
        "precision": precision,
        "recall": recall,
    }
    if extracted.probabilities is not None:
        metrics["inception score"], metrics["inception score deviation"] = inception_score(extracted.probabilities)
    return metrics


def write_metrics(result: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        output_paths.check_output_file(out).parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
