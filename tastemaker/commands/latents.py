"""`tastemaker encode --vae`: the latents of pictures in shards, so that a generator can train without pictures."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from safetensors.torch import save_file
from torch import Tensor

from ..codec import Continuous
from ..data.class_pictures import BROKEN
from ..data.decoding import square
from ..data.gallery import Gallery, GalleryRows, Say
from ..data.latents import NOTE, LatentFolder, Note, fingerprint, note
from ..models import codecs
from ..models.opening import opened
from ..registry import ConfigError
from ..types import Placement
from .encoding import share

BATCH = 64  # squares encoded at a time


@dataclass(frozen=True)
class Order:
    """Which pictures to encode, how, and where to write their latents."""

    pictures: Path
    vae: str
    out: Path
    size: int
    mirrored: bool = False
    say: Say | None = None  # of a picture: if not given its caption, else the number of its class, else nothing
    rows: int = 1024  # pictures of a shard


def encode(order: Order, placement: Placement, console: Console) -> Path:
    """Write the shards that are not there yet, each rank its share; what is in one depends on no rank."""
    codec = frozen(order.vae, order.size, placement)
    pictures = Gallery(order.pictures, order.size, say=order.say, workers=0).load(0)
    if order.say is None and pictures.say == "nothing" and len(pictures.source.names) > 1:
        pictures = Gallery(order.pictures, order.size, say="number", workers=0).load(0)
    wanted = described(order, pictures, codec)
    agree(wanted, order.out)
    wanted.write(order.out)
    rank, world = share()
    left = [i for i in range(rank, wanted.shards, world) if not (order.out / wanted.file(i)).is_file()]
    shown = console if rank == 0 else Console(quiet=True)
    for number in track(left, "encoding", console=shown):
        numbers = range(number * wanted.rows, min((number + 1) * wanted.rows, wanted.count))
        write(order.out / wanted.file(number), latents(codec, pictures, numbers, wanted, placement), pictures, numbers)
    if all((order.out / wanted.file(i)).is_file() for i in range(wanted.shards)):
        deviation = LatentFolder(order.out).load(0).deviation
        shown.print(f"latents of {wanted.count} pictures in {order.out}, of deviation {deviation:.4g}", soft_wrap=True)
    return order.out


def frozen(name: str, size: int, placement: Placement) -> Continuous:
    net = opened(name, placement)
    if not isinstance(net, Continuous):
        raise ConfigError(f"--vae: '{name:.200}' makes tokens and no latents; name it with --tokenizer instead")
    if size % net.stride:
        raise ConfigError(f"--size {size} is no multiple of {net.stride}, the pixels of a latent; choose one")
    return net


def described(order: Order, pictures: GalleryRows, codec: Continuous) -> Note:
    side = order.size // codec.stride
    return Note(
        codec=codecs.fingerprint(codec),
        data=fingerprint(order.pictures),
        pictures=str(order.pictures.resolve()),
        count=len(pictures),
        size=order.size,
        views=2 if order.mirrored else 1,
        shape=(codec.channels, side, side),
        say=pictures.say,
        names=tuple(pictures.source.names),
        rows=order.rows,
    )


def agree(wanted: Note, folder: Path) -> None:
    """Refuse to go on in a folder that was begun with another autoencoder, other pictures or another size."""
    if not (folder / NOTE).is_file():
        return
    found, now = asdict(note(folder)), asdict(wanted)
    other = next((key for key in now if found[key] != now[key]), None)
    if other is not None:
        what = {"codec": "autoencoder", "data": "pictures", "count": "pictures"}.get(other, other)
        raise ConfigError(
            f"{folder} was begun with another '{what}' ({found[other]!s:.60}, now {now[other]!s:.60}); "
            "name another folder with --out, or remove this one"
        )


@torch.no_grad()
def latents(
    codec: Continuous, pictures: GalleryRows, numbers: Sequence[int], wanted: Note, placement: Placement
) -> Tensor:
    """Of some pictures, in half precision: [N, V, C, h, w]."""
    pieces = []
    for first in range(0, len(numbers), BATCH):
        pixels = torch.stack([cut(pictures, i, wanted.size) for i in numbers[first : first + BATCH]])
        views = torch.stack([pixels, pixels.flip(-1)][: wanted.views], 1)  # [B, V, 3, S, S]
        found = codec.encode(views.flatten(0, 1).to(placement.device)).half().cpu()
        pieces.append(found.view(*views.shape[:2], *wanted.shape))
    return torch.cat(pieces)


def cut(pictures: GalleryRows, number: int, size: int) -> Tensor:
    """The middle square of a picture: [3, size, size] in [0, 1]."""
    source = pictures.source
    try:
        return square(source.encoded(number), source.name(number), size).movedim(-1, 0) / 255
    except BROKEN as error:
        raise ConfigError(
            f"{source.name(number)} cannot be used ({' '.join(str(error).split()):.200}); mend or remove it"
        ) from error


def write(path: Path, x: Tensor, pictures: GalleryRows, numbers: Sequence[int]) -> None:
    """All of a shard or none."""
    wide = x.double()
    said = {
        "prompts": [pictures.said(i) for i in numbers],
        "labels": [label(pictures, i) for i in numbers],
        "sums": [float(wide.sum()), float(wide.square().sum())],
        "numbers": x.numel(),
    }
    partial = path.with_name(f".{path.stem}.{os.getpid()}.partial")
    save_file({"latents": x.contiguous()}, partial, {"told": json.dumps(said)})
    os.replace(partial, path)


def label(pictures: GalleryRows, number: int) -> int:
    """The class of a picture; -1 where it has none."""
    try:
        return pictures.source.label(number)
    except BROKEN:
        return -1
