"""Pictures from wherever they lie, cut to squares by threads while the last step is still being computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Protocol

import torch
from pydantic import Field, NonNegativeInt
from torch import Tensor

from ..core.randomness import Randomness
from ..core.registry import ConfigError
from ..core.types import ImageBatch, PromptBatch
from .class_images import READ_ERRORS, Crop, SkippedExamples, class_captions
from .hf_datasets import is_saved, load_images
from .image_decoding import decode_square, to_channels_first
from .image_tree import open_image_tree
from .prefetch import BatchShard, Prefetcher
from .sampler import batch_indices, epoch_permutation
from .webdataset import are_shards, open_tar_shards

GalleryCaption = Literal["caption", "name", "number", "nothing"]
HELD = 4 * 2**30  # bytes of squares from the middle that are kept, so that their pictures are decoded once
CHUNK = 8  # rows that a thread makes at a time


class EncodedImageSource(Protocol):
    """Encoded pictures by number, and what is known of each; what is broken or missing raises."""

    @property
    def names(self) -> Sequence[str]:
        """Of the classes, in order; none if they are numbers alone."""

    @property
    def captioned(self) -> bool:
        """Whether any has a caption."""

    def __len__(self) -> int: ...
    def name(self, number: int) -> str: ...
    def encoded(self, number: int) -> Path | bytes: ...
    def label(self, number: int) -> int: ...
    def caption(self, number: int) -> str: ...


@dataclass(frozen=True)
class CroppedImage:
    """A square of a picture, and which it is."""

    prompt: str
    pixels: Tensor  # [3, S, S] bytes
    number: int


@dataclass(frozen=True)
class GalleryDataset:
    """Some of a source's pictures in an order of the seed's; in the place of one that is broken comes the next."""

    source: EncodedImageSource
    spec: Gallery
    chosen: Tensor  # [N] numbers in the source
    seed: int
    say: GalleryCaption
    prompts: tuple[str, ...]  # by class, if they have names
    skipped: SkippedExamples

    def __len__(self) -> int:
        return len(self.chosen)

    @cached_property
    def ahead(self) -> Prefetcher[list[CroppedImage], ImageBatch]:
        return Prefetcher(self._jobs, self._joined, self.spec.workers)

    @cached_property
    def kept(self) -> dict[int, Tensor]:
        """Squares that come again as they are, by number."""
        return {}

    def batch(self, step: int, size: int, rank: int, world: int) -> ImageBatch:
        return self.ahead.take(BatchShard(step, size, rank, world))

    def _joined(self, chunks: Sequence[Sequence[CroppedImage]]) -> ImageBatch:
        cuts = [cut for chunk in chunks for cut in chunk]
        pixels = torch.empty(len(cuts), 1, 3, self.spec.size, self.spec.size)
        for row, cut in zip(pixels, cuts, strict=True):
            torch.div(cut.pixels, 255, out=row[0])  # a tenth of the time it takes to stack, to convert and to divide
        numbers = torch.tensor([cut.number for cut in cuts]) if self.spec.crop == "middle" else None
        return ImageBatch(tuple(cut.prompt for cut in cuts), pixels, numbers)

    def _jobs(self, share: BatchShard) -> list[Callable[[], list[CroppedImage]]]:
        places = batch_indices(len(self), self.seed, share.step, share.size, share.rank, share.world)
        first = share.rank * share.size // share.world
        chances = Randomness(self.seed, share.step, torch.arange(first, first + len(places))).uniform("crop", 4)
        asked = list(zip(places, chances.tolist(), strict=True))
        return [partial(self._some, asked[i : i + CHUNK]) for i in range(0, len(asked), CHUNK)]

    def _some(self, asked: Sequence[tuple[int, Sequence[float]]]) -> list[CroppedImage]:
        return [self._usable(place, chance) for place, chance in asked]

    def _usable(self, place: int, chance: Sequence[float]) -> CroppedImage:
        for further in range(len(self)):
            number = int(self.chosen[(place + further) % len(self)])
            if number in self.skipped.why:
                continue
            try:
                return self._cut(number, chance)
            except READ_ERRORS as error:
                self.skipped.add(number, self.source.name(number), error)
        raise ConfigError(f"data: none of the {len(self)} pictures can be used; check what they are")

    def _cut(self, number: int, chance: Sequence[float]) -> CroppedImage:
        pixels = self.kept[number] if number in self.kept else self._square(number, chance)
        turned = self.spec.mirror and chance[3] < 0.5
        named = 2 * number + turned if self.spec.mirror else number
        return CroppedImage(self.said(number), pixels.flip(-1) if turned else pixels, named)

    def _square(self, number: int, chance: Sequence[float]) -> Tensor:
        spec, source = self.spec, self.source
        where = chance[:3] if spec.crop == "random" else ()
        pixels = to_channels_first(
            decode_square(source.encoded(number), source.name(number), spec.size, where, grey=spec.grey)
        )
        if spec.crop == "middle" and (len(self.kept) + 1) * pixels.nbytes <= HELD:
            self.kept[number] = pixels
        return pixels

    def said(self, number: int) -> str:
        if self.say == "nothing":
            return ""
        if self.say == "caption":
            return self.source.caption(number)
        label = self.source.label(number)
        if self.prompts and label >= len(self.prompts):
            raise ValueError(f"its class is {label}, and there are {len(self.prompts)}")
        return self.prompts[label] if self.prompts else str(label)

    def first(self, count: int) -> PromptBatch:
        known = list(self.prompts)
        for number in self.chosen.tolist() if not known else ():
            with suppress(*READ_ERRORS):  # which is told of when its turn comes
                known.append(self.said(number))
            if len(known) == count or self.say == "nothing":
                break
        known = known or [""]
        return PromptBatch(tuple(known[i % len(known)] for i in range(count)), ({},) * count)

    def parts(self, held: int, seed: int) -> tuple[GalleryDataset, GalleryDataset]:
        """All but some to learn from, and those, which are held out and cut from the middle."""
        order = self.chosen[epoch_permutation(len(self), self.seed, 0)]
        plain = replace(self.spec, crop="middle", mirror=False)
        return replace(self, chosen=order[held:], seed=seed), replace(self, chosen=order[:held], seed=seed, spec=plain)


@dataclass(frozen=True)
class Gallery:
    """Pictures in folders at any depth, in tar shards, or as `datasets` saved them; a square of each."""

    path: Path  # of CelebAMask-HQ, the faces alone are taken
    size: Annotated[int, Field(ge=1, le=16384)] = 256  # pixels a side
    match: str = "*"  # names of files, or of shards, such as train-*.tar
    split: str = "train"  # of what `datasets` saved
    say: GalleryCaption | None = None  # of a picture; captions where there are any, otherwise nothing
    crop: Crop = "middle"  # random: four fifths of the shorter side or more, anywhere
    mirror: bool = False  # every other picture the other way round, by chance
    grey: bool = False  # pictures of one channel, which all three then are
    skip: NonNegativeInt = 0  # pictures that cannot be used and are passed over, on each rank; one more is an error
    workers: Annotated[int, Field(ge=0, le=256)] = 4  # threads on each rank that read and cut the next steps' pictures
    yields: ClassVar[type] = ImageBatch

    def load(self, seed: int) -> GalleryDataset:
        source = open_images(self.path, self.match, self.split)
        say: GalleryCaption = self.say or ("caption" if source.captioned else "nothing")
        known = class_captions(source.names, say) if say in ("name", "number") else ()
        return GalleryDataset(source, self, torch.arange(len(source)), seed, say, known, SkippedExamples(self.skip))


def open_images(path: Path, match: str, split: str) -> EncodedImageSource:
    """What lies at a path, by how it is laid out."""
    if is_saved(path):
        found: EncodedImageSource = load_images(path, split)
    else:
        found = open_tar_shards(path, match) if are_shards(path) else open_image_tree(path, match)
    if not len(found):
        raise ConfigError(f"data: {path} has no rows; expected at least one picture")
    return found
