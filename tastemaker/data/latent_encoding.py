"""`tastemaker encode --vae`: the latents of pictures in shards, so that a generator can train without pictures."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..core import output_paths
from ..core.autoencoder import ContinuousAutoencoder
from ..core.registry import ConfigError
from ..core.types import Placement
from ..models import autoencoder_fingerprint
from ..models.autoencoder_loading import load_autoencoder
from .class_images import READ_ERRORS
from .image_decoding import decode_square
from .image_io import ImageError
from .images import CroppedImage, Gallery, GalleryCaption, GalleryDataset
from .latents import MANIFEST, LatentFolder, LatentManifest, files_fingerprint, read_manifest, read_shard
from .skipped_files import SkippedFiles
from .token_encoding import rank_and_world_size

BATCH = 64  # squares encoded at a time


@dataclass(frozen=True)
class LatentEncodingOptions:
    """Which pictures to encode, how, and where to write their latents."""

    pictures: Path
    vae: str
    out: Path
    size: int
    mirrored: bool = False
    say: GalleryCaption | None = (
        None  # of a picture: if not given its caption, else the number of its class, else nothing
    )
    rows: int = 1024  # pictures of a shard
    skip: int = 10  # pictures that cannot be used and are left out, on each rank; one more is an error


def encode_latents(order: LatentEncodingOptions, placement: Placement, console: Console) -> Path:
    """Write the shards that are not there yet, each rank its share; what is in one depends on no rank."""
    output_paths.check_output_directory(order.out)
    codec = load_continuous_autoencoder(order.vae, order.size, placement)
    pictures = Gallery(order.pictures, order.size, say=order.say, workers=0).load(0)
    if order.say is None and pictures.say == "nothing" and len(pictures.source.names) > 1:
        pictures = Gallery(order.pictures, order.size, say="number", workers=0).load(0)
    wanted = describe_latents(order, pictures, codec)
    check_latent_manifest(wanted, order.out)
    wanted.write(order.out)
    rank, world = rank_and_world_size()
    shown = console if rank == 0 else Console(quiet=True)
    files = [order.out / wanted.file(i) for i in range(wanted.shards)]
    own = range(rank, wanted.shards, world)
    # Of this rank's own shards alone: others may be writing theirs.
    there = [files[i] for i in own if files[i].is_file()]
    broken = SkippedFiles(order.skip, [said for file in there for said in read_shard(file).skipped])
    work = LatentEncoder(codec, pictures, wanted, placement, broken, console)
    with Progress(console=shown) as progress:
        task = progress.add_task("encoding", total=sum(len(wanted.numbers(i)) for i in own))
        for number in own:
            for count in work.shard(files[number], wanted.numbers(number)):
                progress.advance(task, count)
    if all(file.is_file() for file in files):
        found = LatentFolder(order.out).load(0)
        left_out = SkippedFiles(0, [said for kept in found.shards for said in kept.skipped]).counted()
        told = f"latents of {len(found)} pictures in {order.out}, of deviation {found.deviation:.4g}{left_out}"
        shown.print(told, markup=False, soft_wrap=True)
    return order.out


def load_continuous_autoencoder(name: str, size: int, placement: Placement) -> ContinuousAutoencoder:
    net = load_autoencoder(name, placement)
    if not isinstance(net, ContinuousAutoencoder):
        raise ConfigError(
            f"--vae: '{name:.200}' makes no latents that a generator could learn; name a tokenizer with --tokenizer, "
            "and give a network of your own `channels`, `stride`, `encode` and `decode`"
        )
    if size % net.stride:
        raise ConfigError(f"--size {size} is no multiple of {net.stride}, the pixels of a latent; choose one")
    return net


def describe_latents(
    order: LatentEncodingOptions, pictures: GalleryDataset, codec: ContinuousAutoencoder
) -> LatentManifest:
    side = order.size // codec.stride
    return LatentManifest(
        codec=autoencoder_fingerprint.autoencoder_fingerprint(codec),
        data=files_fingerprint(order.pictures),
        pictures=str(order.pictures.resolve()),
        count=len(pictures),
        size=order.size,
        views=2 if order.mirrored else 1,
        shape=(codec.channels, side, side),
        say=pictures.say,
        names=tuple(pictures.source.names),
        rows=order.rows,
    )


def check_latent_manifest(wanted: LatentManifest, folder: Path) -> None:
    """Refuse to go on in a folder that was begun with another autoencoder, other pictures or another size."""
    if not (folder / MANIFEST).is_file():
        return
    found, now = asdict(read_manifest(folder)), asdict(wanted)
    other = next((key for key in now if found[key] != now[key]), None)
    if other is not None:
        what = {"codec": "autoencoder", "data": "pictures", "count": "pictures"}.get(other, other)
        raise ConfigError(
            f"{folder} was begun with another '{what}' ({found[other]!s:.60}, now {now[other]!s:.60}); "
            "name another folder with --out, or remove this one"
        )


@dataclass(frozen=True)
class LatentChunk:
    """Latents of some pictures in half precision, and what is known of each."""

    x: Tensor  # [N, V, C, h, w]
    prompts: tuple[str, ...]
    labels: tuple[int, ...]
    skipped: tuple[str, ...]  # what is wrong with those that are left out

    def write(self, path: Path) -> None:
        """All of a file or none."""
        wide = self.x.double()
        said = {
            "prompts": self.prompts,
            "labels": self.labels,
            "sums": [float(wide.sum()), float(wide.square().sum())],
            "numbers": self.x.numel(),
            **({"skipped": self.skipped} if self.skipped else {}),
        }
        partial = path.with_name(f".{path.stem}.{os.getpid()}.partial")
        save_file({"latents": self.x.contiguous()}, partial, {"told": json.dumps(said)})
        os.replace(partial, path)


def read_chunk(path: Path) -> LatentChunk:
    found = read_shard(path)
    return LatentChunk(load_file(path)["latents"], found.prompts, found.labels, found.skipped)


def join_chunks(pieces: Sequence[LatentChunk]) -> LatentChunk:
    said = [sum(parts, ()) for parts in zip(*((x.prompts, x.labels, x.skipped) for x in pieces), strict=True)]
    return LatentChunk(torch.cat([piece.x for piece in pieces]), *said)


@dataclass(frozen=True)
class LatentEncoder:
    """What pictures are encoded by and with."""

    codec: ContinuousAutoencoder
    pictures: GalleryDataset
    wanted: LatentManifest
    placement: Placement
    broken: SkippedFiles
    console: Console

    def shard(self, path: Path, numbers: range) -> Iterator[int]:
        """Write a shard that is not there, by pieces, so that an interruption costs no more than one; tells counts."""
        if path.is_file():
            yield len(numbers)
            return
        parts = [numbers[first : first + BATCH] for first in range(0, len(numbers), BATCH)]
        files = [path.with_name(f".{path.stem}-{part.start}-{part.stop}.piece") for part in parts]
        for file, part in zip(files, parts, strict=True):
            if file.is_file():
                self.broken.told.extend(read_shard(file).skipped)
            else:
                self.piece(part).write(file)
            yield len(part)
        join_chunks([read_chunk(file) for file in files]).write(path)
        for file in files:
            file.unlink()

    def piece(self, numbers: range) -> LatentChunk:
        """Of the pictures with these numbers that can be used."""
        before = len(self.broken.told)
        cuts = [cut for number in numbers if (cut := self._cut(number)) is not None]
        labels = tuple(label(self.pictures, cut.number) for cut in cuts)
        prompts, skipped = tuple(cut.prompt for cut in cuts), tuple(self.broken.told[before:])
        return LatentChunk(self._latents([cut.pixels for cut in cuts]), prompts, labels, skipped)

    def _cut(self, number: int) -> CroppedImage | None:
        """The middle square of a picture, if it can be used."""
        source = self.pictures.source
        try:
            pixels = decode_square(source.encoded(number), source.name(number), self.wanted.size)
            return CroppedImage(self.pictures.said(number), pixels.movedim(-1, 0), number)
        except READ_ERRORS as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            other = f"{source.name(number)} cannot be used ({reason:.200}); mend or remove it"
            self.broken.add(str(error) if isinstance(error, ImageError) else other, error, self.console)
            return None

    @torch.no_grad()
    def _latents(self, cuts: Sequence[Tensor]) -> Tensor:
        """Of squares [3, S, S] of bytes: [N, V, C, h, w]."""
        if not cuts:
            return torch.empty(0, self.wanted.views, *self.wanted.shape, dtype=torch.half)
        pixels = torch.stack(list(cuts)) / 255
        views = torch.stack([pixels, pixels.flip(-1)][: self.wanted.views], 1)  # [B, V, 3, S, S]
        found = self.codec.encode(views.flatten(0, 1).to(self.placement.device)).half().cpu()
        return found.view(*views.shape[:2], *self.wanted.shape)


def label(pictures: GalleryDataset, number: int) -> int:
    """The class of a picture; -1 where it has none."""
    try:
        return pictures.source.label(number)
    except READ_ERRORS:
        return -1
