"""Preference pairs: a chosen and a rejected image or video for each prompt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..core.registry import ConfigError
from ..core.types import PreferenceBatch
from .dataset import ShuffledDataset
from .image_io import read_image
from .image_transforms import center_square, check_image_size, stack_images
from .images import FORMATS, CaptionedFolder, read_caption
from .text_files import MixtureRow, read_mixture, require_file


@dataclass(frozen=True)
class PairDataset(ShuffledDataset):
    """Pairs on disk, decoded when they are needed."""

    prompts: tuple[str, ...]
    files: tuple[tuple[Path, Path], ...]  # chosen, rejected
    locations: tuple[str, ...]  # where each pair is written, for messages
    image_size: int | None
    seed: int

    def collate(self, indices: list[int]) -> PreferenceBatch:
        files = [file for i in indices for file in self.files[i]]
        names = [f"{self.locations[i]}: {file.name}" for i in indices for file in self.files[i]]
        pixels = stack_images([center_square(read_image(file), self.image_size) for file in files], names)
        return PreferenceBatch(tuple(self.prompts[i] for i in indices), pixels[0::2], pixels[1::2])


@dataclass(frozen=True)
class PairFile:
    """Rows {prompt, chosen, rejected} of a .jsonl, a .json list, or a .yaml that mixes such files as LLaVA's do."""

    path: Path | None = None  # by default a few small images, each preferred to the next one, to try a recipe
    image_dir: Path | None = None  # the folder of relative image paths; by default that of the file that names them
    image_size: int | None = None  # pixels per side of the center square; by default images stay as they are
    batch_type: ClassVar[type] = PreferenceBatch

    def __post_init__(self) -> None:
        check_image_size(self.image_size)

    def load(self, seed: int) -> PairDataset:
        if self.path is None:
            chosen = CaptionedFolder().load(seed)
            examples = tuple(zip(chosen.files, (*chosen.files[1:], chosen.files[0]), strict=True))
            locations = tuple(str(file.parent) for file in chosen.files)
            return PairDataset(chosen.prompts, examples, locations, self.image_size, seed)
        rows = read_mixture(self.path, seed)
        files = tuple((self._image_file(row, "chosen"), self._image_file(row, "rejected")) for row in rows)
        prompts = tuple(row.get_text("prompt") for row in rows)
        return PairDataset(prompts, files, tuple(row.location for row in rows), self.image_size, seed)

    def _image_file(self, row: MixtureRow, column: str) -> Path:
        return require_file((self.image_dir or row.file.parent) / row.get_text(column), row.location)


@dataclass(frozen=True)
class PairFolder:
    """Images of the same names in the folders `chosen` and `rejected`, and their prompts in NAME.txt above them."""

    path: Path
    image_size: int | None = None  # pixels per side of the center square; by default images stay as they are
    batch_type: ClassVar[type] = PreferenceBatch

    def __post_init__(self) -> None:
        check_image_size(self.image_size)

    def load(self, seed: int) -> PairDataset:
        chosen, rejected = (self._list_images(side) for side in ("chosen", "rejected"))
        unpaired = sorted(chosen.keys() ^ rejected.keys())
        if unpaired:
            side = "rejected" if unpaired[0] in chosen else "chosen"
            raise ConfigError(
                f"{self.path}: '{unpaired[0]}' does not have an image in the folder {side}; add the missing "
                f"image, or remove '{unpaired[0]}' [TM203]"
            )
        prompts = [read_caption(self.path / f"{name}.txt", f"the prompt of {chosen[name]}") for name in chosen]
        files = tuple((chosen[name], rejected[name]) for name in chosen)
        locations = tuple(f"{self.path}, '{name}'" for name in chosen)
        return PairDataset(tuple(prompts), files, locations, self.image_size, seed)

    def _list_images(self, side: str) -> dict[str, Path]:
        folder = self.path / side
        if not folder.is_dir():
            raise ConfigError(
                f"{folder}: no such folder; data.path must contain the folders chosen and rejected [TM204]"
            )
        files = {file.stem: file for file in sorted(folder.iterdir()) if file.suffix.lower() in FORMATS}
        if not files:
            raise ConfigError(
                f"{folder}: the folder does not contain images; add files that end in {', '.join(FORMATS)} [TM205]"
            )
        return files
