"""`tastemaker reconstruct`: pictures beside their copies by an autoencoder, and how good each copy is."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

from ..autoencoders.lpips import VGG16
from ..config.load import load_any_config
from ..config.schema import AutoencoderRunConfig
from ..core import output_paths
from ..core.autoencoder import HasStride
from ..core.registry import ConfigError
from ..core.types import Placement
from ..data.crops import center_crop
from ..data.image_io import IMAGE_FORMATS, ImageError, read_image, save_image
from ..data.image_tree import FACES
from ..data.skipped_files import SkippedFiles
from ..models.autoencoder_loading import load_autoencoder
from .reconstruction_metrics import ReconstructionEvaluator

SCORES, NOTE, BOTH = "scores.jsonl", "reconstruct.json", "pictures"
MEASURES = ("psnr", "ssim", "lpips")
WORST = 5  # pictures that are named in the end
Row = dict[str, Any]  # a line of the scores


@dataclass(frozen=True)
class ReconstructionOptions:
    """Which pictures to copy by what, and where to write."""

    pictures: Path
    model: str
    out: Path
    size: int = 0  # pixels a side of a square cut from the middle; as they are if 0
    rows: int = 16  # pictures of one size at a time
    skip: int = 10  # that cannot be read and are passed over; one more is an error
    vgg: str = VGG16.hub
    heads: str = ""


def reconstruct_images(order: ReconstructionOptions, placement: Placement, console: Console) -> list[Row]:
    """Write what is not there yet, a line a picture; then the means, and the pictures that are copied worst."""
    output_paths.check_output_directory(order.out)
    files, net = find_image_files(order.pictures, order.out), load_any_autoencoder(order.model, placement)
    check_reconstruction_manifest(order, net)
    measure, rows = ReconstructionEvaluator.by(order.vgg, order.heads, None, placement), read_scores(order)
    left = [file for file in files if str(file.relative_to(order.pictures)) not in rows]
    broken, stride = SkippedFiles(order.skip), net.stride if isinstance(net, HasStride) else 1
    with (order.out / SCORES).open("a", encoding="utf-8") as record, Progress(console=console) as progress:
        task = progress.add_task("reconstructing", total=len(files), completed=len(files) - len(left))
        for batch in batches(left, order, stride, broken, progress.console):
            for row in check_batch(
                reconstruct_batch(net, measure, batch, order, placement), batch, broken, progress.console
            ):
                record.write(json.dumps(row) + "\n")
                rows[row["file"]] = row
            record.flush()
            progress.advance(task, len(batch))
        progress.update(task, completed=len(files))
    kept = [rows[name] for file in files if (name := str(file.relative_to(order.pictures))) in rows]
    write_scores(order, kept)
    print_summary(order, kept, broken, [said for said in measure.missing if said.startswith("LPIPS")], console)
    return kept


def load_any_autoencoder(name: str, placement: Placement) -> nn.Module:
    """Of a run, a file or a folder; or of a configuration that says which weights."""
    if not name.endswith((".yaml", ".yml")):
        return load_autoencoder(name, placement)
    config = load_any_config(name)
    if not isinstance(config, AutoencoderRunConfig):
        raise ConfigError(f"--model: {name:.200} trains no autoencoder; name one with an `autoencoder:`")
    return config.autoencoder.load(placement).requires_grad_(False).eval()


def find_image_files(folder: Path, out: Path) -> list[Path]:
    """Every picture below a folder, but those that were written before; of CelebA-HQ's, the faces alone."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; expected one with pictures in it, at any depth")
    root = folder / FACES if (folder / FACES).is_dir() else folder
    hidden = [place for place in root.rglob("*") if place.suffix.lower() in IMAGE_FORMATS and place.is_file()]
    files = sorted(file for file in hidden if out not in file.parents and not file.name.startswith("."))
    if not files:
        raise ConfigError(f"{folder}: there are no pictures; expected files that end in {', '.join(IMAGE_FORMATS)}")
    return files


def check_reconstruction_manifest(order: ReconstructionOptions, net: nn.Module) -> None:
    """Refuse to go on in a folder that was begun with another autoencoder, other pictures or another size."""
    digest = hashlib.sha256()
    for key, x in sorted(net.state_dict().items()):
        digest.update(key.encode() + x.detach().float().contiguous().cpu().numpy().tobytes())
    told = {"pictures": str(order.pictures.resolve()), "model": digest.hexdigest(), "size": order.size}
    note = order.out / NOTE
    before = json.loads(note.read_text(encoding="utf-8")) if note.is_file() else told
    other = [key for key in told if before.get(key) != told[key]]
    if other:
        was, now = (str(x.get(other[0]))[:60] for x in (before, told))
        raise ConfigError(
            f"{order.out} was begun with other {other[0]} ({was}, now {now}); name another folder with --out"
        )
    order.out.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def read_scores(order: ReconstructionOptions) -> dict[str, Row]:
    """Lines of pictures that were written whole, by name; a line that was cut off by a kill is not one."""
    path, rows = order.out / SCORES, {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if (order.out / BOTH / f"{row['file']}.png").is_file():
            rows[row["file"]] = row
    write_scores(order, [*rows.values()])
    return rows


def write_scores(order: ReconstructionOptions, rows: Sequence[Row]) -> None:
    """All lines anew, in order, in a file that is whole or not there."""
    partial = order.out / f".{SCORES}.partial"
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(partial, order.out / SCORES)


def batches(
    files: Sequence[Path], order: ReconstructionOptions, stride: int, broken: SkippedFiles, console: Console
) -> Iterator[list[tuple[Path, Tensor]]]:
    """Pictures of one size together, as they come."""
    waiting: list[tuple[Path, Tensor]] = []
    for file in files:
        try:
            pixels = crop_for_autoencoder(read_image(file)[0], order.size, stride, file)
        except ImageError as error:
            broken.add(str(error), error, console)
            continue
        if waiting and (len(waiting) == order.rows or waiting[0][1].shape != pixels.shape):
            yield waiting
            waiting = []
        waiting.append((file, pixels))
    if waiting:
        yield waiting


def crop_for_autoencoder(pixels: Tensor, size: int, stride: int, file: Path) -> Tensor:
    """The middle of a picture: a square at that size, or as much of it as an autoencoder can take."""
    if size:
        return center_crop(pixels, size)
    height, width = (side - side % stride for side in pixels.shape[-2:])
    if not height or not width:
        raise ImageError(f"{file} is smaller than the {stride} pixels of one latent; enlarge it with --size")
    top, left = (pixels.shape[-2] - height) // 2, (pixels.shape[-1] - width) // 2
    return pixels[:, top : top + height, left : left + width]


def check_batch(
    rows: Iterator[Row], batch: Sequence[tuple[Path, Tensor]], broken: SkippedFiles, console: Console
) -> Iterator[Row]:
    """All rows, or none if the pictures are too small: the norm of a single latent, for one, cannot be taken."""
    try:
        yield from rows
    except ConfigError:
        raise
    except ValueError as error:
        for file, _ in batch:
            said = f"{file} cannot be copied at this size ({error!s:.200}); enlarge it with --size"
            broken.add(said, error, console)


@torch.no_grad()
def reconstruct_batch(
    net: nn.Module,
    measure: ReconstructionEvaluator,
    batch: Sequence[tuple[Path, Tensor]],
    order: ReconstructionOptions,
    placement: Placement,
) -> Iterator[Row]:
    """Each picture beside its copy, both as 8 bits hold them, and its line."""
    pixels = torch.stack([x for _, x in batch]).to(placement.device)
    made = net(pixels)[0].float().clamp(0, 1)
    seen = measure.look(pixels, made)
    for place, (file, original) in enumerate(batch):
        name = str(file.relative_to(order.pictures))
        both = torch.cat([original, made[place].cpu()], 2)[None]
        save_image(both, order.out / BOTH / f"{name}.png")
        height, width = original.shape[-2:]
        scores = {key: float(seen[key][place]) for key in MEASURES if key in seen}
        yield {"file": name, "width": width, "height": height, **scores}


def print_summary(
    order: ReconstructionOptions, rows: Sequence[Row], broken: SkippedFiles, missing: Sequence[str], console: Console
) -> None:
    table = Table("measure", "pictures", "mean", "least", "most")
    for name in MEASURES:
        values = [row[name] for row in rows if name in row]
        if values:
            numbers = (sum(values) / len(values), min(values), max(values))
            table.add_row(name, str(len(values)), *(f"{number:.4g}" for number in numbers))
    console.print(table)
    for row in sorted(rows, key=lambda row: row["psnr"])[:WORST]:
        console.print(f"{row['psnr']:.2f} dB  {row['file']}", markup=False, highlight=False)
    for said in missing:
        console.print(said, markup=False, highlight=False, soft_wrap=True)
    ending = f"{len(rows)} pictures beside their copies in {order.out / BOTH}, line by line in {order.out / SCORES}"
    console.print(f"{ending}{broken.counted()}", markup=False, highlight=False, soft_wrap=True)
