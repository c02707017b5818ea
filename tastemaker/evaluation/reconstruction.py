"""`tastemaker reconstruct`: reconstruct images with an autoencoder, side by side with the originals, and score them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from ..autoencoders.lpips import VGG16
from ..console import ProgressBar, Table
from ..core import output_paths
from ..core.autoencoder import as_autoencoder
from ..core.registry import ConfigError
from ..core.safe_files import read_json, read_json_rows
from ..core.types import Placement
from ..data.image_encoding import SkippedFiles, check_same_manifest, load_any_autoencoder
from ..data.image_io import IMAGE_FORMATS, ImageError, read_image, save_image
from ..data.image_sources import CELEBA_HQ_FOLDER
from ..data.image_transforms import center_crop
from .reconstruction_metrics import ReconstructionEvaluator

SCORES, MANIFEST, PAIRS = "scores.jsonl", "reconstruct.json", "images"
METRICS = ("psnr", "ssim", "lpips")
NUM_WORST = 5  # images listed in the summary
Row = dict[str, Any]  # a line of the scores
ImageBatch = list[tuple[Path, Tensor]]  # files and pixels [3, H, W] of one size


@dataclass(frozen=True)
class ReconstructionOptions:
    """Which images to reconstruct with which autoencoder, and where to write."""

    images: Path
    model: str
    out: Path
    size: int = 0  # side of a center crop in pixels; 0 keeps the size
    batch_size: int = 16  # images of one size
    max_unreadable: int = 10  # files that are skipped; one more is an error
    vgg_weights: str = VGG16.hub
    lpips_weights: str = ""


def reconstruct_images(options: ReconstructionOptions, placement: Placement, console: Console) -> list[Row]:
    """Reconstruct the images that have no scores yet, then print means and the worst reconstructions."""
    output_paths.check_output_directory(options.out)
    files, net = (
        find_image_files(options.images, options.out),
        load_any_autoencoder(options.model, "--model", placement, console),
    )
    check_manifest(options, net)
    evaluator = ReconstructionEvaluator.from_weights(options.vgg_weights, options.lpips_weights, None, placement)
    rows = read_scores(options)
    pending = [file for file in files if _name(file, options) not in rows]
    skipped, stride = SkippedFiles(options.max_unreadable), as_autoencoder(net).stride
    with (options.out / SCORES).open("a", encoding="utf-8") as scores, ProgressBar(console) as progress:
        progress.start("reconstructing", len(files), len(files) - len(pending), "images")
        for batch in iterate_same_size_batches(pending, options, stride, skipped, progress.console):
            try:
                for row in reconstruct_batch(net, evaluator, batch, options, placement):
                    scores.write(json.dumps(row) + "\n")
                    rows[row["file"]] = row
            except ConfigError:
                raise
            except ValueError as error:  # the network fails on the size, such as a norm of a single latent
                for file, _ in batch:
                    text = (
                        f"{file} cannot be reconstructed at this size ({error!s:.200}); enlarge the images with --size"
                    )
                    skipped.add(text, error, progress.console)
            scores.flush()
            progress.advance(len(batch))
        progress.update(len(files))
    ordered = [rows[name] for file in files if (name := _name(file, options)) in rows]
    write_scores(options, ordered)
    missing = [sentence for sentence in evaluator.missing if sentence.startswith("LPIPS")]
    print_summary(options, ordered, skipped, missing, console)
    return ordered


def _name(file: Path, options: ReconstructionOptions) -> str:
    return str(file.relative_to(options.images))


def find_image_files(folder: Path, out: Path) -> list[Path]:
    """List all images below a folder except those in `out`. Of CelebA-HQ, only the faces."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; give a folder with images, at any depth [TM641]")
    root = folder / CELEBA_HQ_FOLDER if (folder / CELEBA_HQ_FOLDER).is_dir() else folder
    candidates = [path for path in root.rglob("*") if path.suffix.lower() in IMAGE_FORMATS and path.is_file()]
    files = sorted(file for file in candidates if out not in file.parents and not file.name.startswith("."))
    if not files:
        raise ConfigError(
            f"{folder}: the folder does not contain images; add files that end in {', '.join(IMAGE_FORMATS)}, or "
            "correct the path [TM642]"
        )
    return files


def check_manifest(options: ReconstructionOptions, net: nn.Module) -> None:
    """Refuse an output folder that was started with another autoencoder, other images or another size."""
    digest = hashlib.sha256()
    for key, x in sorted(net.state_dict().items()):
        digest.update(key.encode() + x.detach().float().contiguous().cpu().numpy().tobytes())
    settings = {"images": str(options.images.resolve()), "model": digest.hexdigest(), "size": options.size}
    path = options.out / MANIFEST
    check_same_manifest(settings, read_json(path) if path.is_file() else settings, options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def read_scores(options: ReconstructionOptions) -> dict[str, Row]:
    """Read the rows of finished images by name. Incomplete lines of an interrupted run are dropped."""
    path, rows = options.out / SCORES, {}
    for row in read_json_rows(path):
        if (options.out / PAIRS / f"{row.get('file')}.png").is_file():
            rows[row["file"]] = row
    write_scores(options, [*rows.values()])
    return rows


def write_scores(options: ReconstructionOptions, rows: Sequence[Row]) -> None:
    output_paths.write_text_atomically(options.out / SCORES, "".join(json.dumps(row) + "\n" for row in rows))


def iterate_same_size_batches(
    files: Sequence[Path], options: ReconstructionOptions, stride: int, skipped: SkippedFiles, console: Console
) -> Iterator[ImageBatch]:
    """Yield batches of consecutive images that have the same size."""
    batch: ImageBatch = []
    for file in files:
        try:
            pixels = crop_for_autoencoder(read_image(file)[0], options.size, stride, file)
        except ImageError as error:
            skipped.add(str(error), error, console)
            continue
        if batch and (len(batch) == options.batch_size or batch[0][1].shape != pixels.shape):
            yield batch
            batch = []
        batch.append((file, pixels))
    if batch:
        yield batch


def crop_for_autoencoder(pixels: Tensor, size: int, stride: int, file: Path) -> Tensor:
    """Crop the center of an image [3, H, W]: a square of `size`, or the largest size that the stride divides."""
    if size:
        return center_crop(pixels, size)
    height, width = (side - side % stride for side in pixels.shape[-2:])
    if not height or not width:
        raise ImageError(
            f"{file} is smaller than one latent, which covers {stride}x{stride} pixels; enlarge the images with "
            "--size [TM643]"
        )
    top, left = (pixels.shape[-2] - height) // 2, (pixels.shape[-1] - width) // 2
    return pixels[:, top : top + height, left : left + width]


@torch.no_grad()
def reconstruct_batch(
    net: nn.Module,
    evaluator: ReconstructionEvaluator,
    batch: ImageBatch,
    options: ReconstructionOptions,
    placement: Placement,
) -> Iterator[Row]:
    """Save each image beside its reconstruction, and yield its scores."""
    pixels = torch.stack([x for _, x in batch]).to(placement.device)
    reconstruction = net(pixels)[0].float().clamp(0, 1)
    measured = evaluator.measure(pixels, reconstruction)
    for i, (file, original) in enumerate(batch):
        name = _name(file, options)
        pair = torch.cat([original, reconstruction[i].cpu()], 2)[None]
        save_image(pair, options.out / PAIRS / f"{name}.png")
        height, width = original.shape[-2:]
        scores = {key: float(measured[key][i]) for key in METRICS if key in measured}
        yield {"file": name, "width": width, "height": height, **scores}


def print_summary(
    options: ReconstructionOptions, rows: Sequence[Row], skipped: SkippedFiles, missing: Sequence[str], console: Console
) -> None:
    table = Table("metric", "images", "mean", "min", "max")
    for name in METRICS:
        values = [row[name] for row in rows if name in row]
        if values:
            numbers = (sum(values) / len(values), min(values), max(values))
            table.add_row(name, str(len(values)), *(f"{number:.4g}" for number in numbers))
    console.print(table)
    for row in sorted(rows, key=lambda row: row["psnr"])[:NUM_WORST]:
        console.print(f"{row['psnr']:.2f} dB  {row['file']}", markup=False, highlight=False)
    for sentence in missing:
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    text = f"{len(rows)} images beside their reconstructions in {options.out / PAIRS}, scores in {options.out / SCORES}"
    console.print(f"{text}{skipped.summary()}", markup=False, highlight=False, soft_wrap=True)
