"""`tastemaker encode`: the tokens of pictures in LlamaGen's layout, so that a generator can train without pictures."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from ..config.check import torchrun_world_size
from ..core import output_paths
from ..core.registry import ConfigError
from ..core.types import Placement
from ..models.nets.vq import VQ
from ..models.vq import build_frozen_tokenizer, read_tokenizer
from .cifar10 import is_cifar10, load_cifar10
from .crops import center_and_flip, center_crop, ten_crop
from .image_io import ImageError
from .labeled_images import LabeledImages, open_class_folder
from .skipped_files import SkippedFiles

ROWS = 64  # squares encoded at a time
NOTE = "codes.json"  # what the codes were made of
Views = Literal["middle", "flip", "ten-crop"]
COUNT: dict[Views, int] = {"middle": 1, "flip": 2, "ten-crop": 10}


@dataclass(frozen=True)
class TokenEncodingOptions:
    """Which pictures to encode, how, and where to write their tokens."""

    pictures: Path
    tokenizer: str
    out: Path
    size: int
    views: Views
    wide: float = 1.1  # of ten crops: the side of the square they are cut from, in their own
    name: str = "imagenet"  # of the data, in the folders' names
    split: str = "train"
    skip: int = 10  # pictures that cannot be read and are left out, on each rank; one more is an error

    @property
    def codes(self) -> Path:
        return self.out / f"{self.name}{self.size}_codes"

    @property
    def labels(self) -> Path:
        return self.out / f"{self.name}{self.size}_labels"

    def cut(self, pixels: Tensor) -> Tensor:
        """The views of a picture: [V, 3, size, size]."""
        if self.views == "ten-crop":
            return ten_crop(pixels, self.size, self.wide)
        return center_and_flip(pixels, self.size) if self.views == "flip" else center_crop(pixels, self.size)[None]


def open_labeled_images(order: TokenEncodingOptions) -> LabeledImages:
    if is_cifar10(order.pictures):
        return load_cifar10(order.pictures, order.split)
    return open_class_folder(order.pictures)


def encode_tokens(order: TokenEncodingOptions, placement: Placement, console: Console) -> Path:
    """Write what is not there yet, each rank its share: `<number>.npy` of codes [1, V, T] and of the label [1]."""
    output_paths.check_output_directory(order.out)
    shape, tensors = read_tokenizer(order.tokenizer)
    if order.size % shape.stride:
        raise ConfigError(f"--size {order.size} is no multiple of {shape.stride}, the pixels of a token; choose one")
    pictures, (rank, world) = open_labeled_images(order), rank_and_world_size()
    check_manifest(order, len(pictures), tensors)
    net = build_frozen_tokenizer(shape, tensors, order.tokenizer, placement)
    own = range(rank, len(pictures), world)
    left = [i for i in own if not is_encoded(order, i)]
    shown, broken = console if rank == 0 else Console(quiet=True), SkippedFiles(order.skip)
    size = max(1, ROWS // COUNT[order.views])
    with Progress(console=shown) as progress:
        task = progress.add_task("encoding", total=len(own), completed=len(own) - len(left))
        for first in range(0, len(left), size):
            numbers = left[first : first + size]
            cut = {i: views for i in numbers if (views := crop_views(order, pictures, i, broken, console)) is not None}
            for number, ids in zip(cut, tokenize_views(net, list(cut.values()), placement), strict=True):
                write_array(order.codes / f"{number}.npy", ids[None])
                write_array(order.labels / f"{number}.npy", np.array([pictures.label(number)]))
            progress.advance(task, len(numbers))
    told = f"{len(pictures)} pictures in {COUNT[order.views]} views, {order.codes} and {order.labels}{broken.counted()}"
    shown.print(told, markup=False, soft_wrap=True)
    return order.codes


def crop_views(
    order: TokenEncodingOptions, pictures: LabeledImages, number: int, broken: SkippedFiles, console: Console
) -> Tensor | None:
    """The views of a picture, if it can be read."""
    try:
        return order.cut(pictures.picture(number))
    except ImageError as error:
        broken.add(str(error), error, console)
        return None


@torch.no_grad()
def tokenize_views(net: VQ, cut: Sequence[Tensor], placement: Placement) -> Iterator[NDArray[np.int64]]:
    """Of each picture [V, T]."""
    if cut:
        views = torch.stack(list(cut))
        ids = net.encode(views.flatten(0, 1).to(placement.device))
        yield from ids.view(*views.shape[:2], -1).cpu().numpy()


def rank_and_world_size() -> tuple[int, int]:
    """Which rank this is, of how many."""
    return int(os.environ.get("RANK", "0")), torchrun_world_size()


def is_encoded(order: TokenEncodingOptions, number: int) -> bool:
    """Labels are written last."""
    return (order.labels / f"{number}.npy").is_file()


def check_manifest(order: TokenEncodingOptions, count: int, tensors: Mapping[str, Tensor]) -> None:
    """Refuse to go on in a folder that was begun with another tokenizer, other pictures or other views."""
    digest = hashlib.sha256()
    for key in sorted(tensors):
        digest.update(key.encode() + tensors[key].contiguous().cpu().numpy().tobytes())
    told: dict[str, Any] = {**asdict(order), "pictures": str(order.pictures.resolve()), "count": count}
    told = {**told, "tokenizer": digest.hexdigest()}
    del told["out"], told["skip"]
    path = order.codes / NOTE
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        other = [key for key in told if found.get(key) != told[key]]
        if other:
            was, now = (str(x.get(other[0]))[:60] for x in (found, told))
            raise ConfigError(
                f"{order.codes} was begun with another '{other[0]}' ({was}, now {now}); name another folder with --out"
            )
    for folder in (order.codes, order.labels):
        folder.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{NOTE}.{uuid4().hex}")  # every rank writes it, and process numbers may be alike
    partial.write_text(json.dumps(told, indent=1), encoding="utf-8")
    os.replace(partial, path)


def write_array(path: Path, values: NDArray[np.int64]) -> None:
    """All of a file or none."""
    partial = path.with_name(f".{path.stem}.{os.getpid()}.npy")
    np.save(partial, values.astype(np.int64))
    os.replace(partial, path)
