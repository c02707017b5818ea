"""Pictures in folders at any depth, with captions beside them and the folders they lie in for classes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from ..core.registry import ConfigError
from .hf_datasets import PROMPTS
from .image_io import IMAGE_FORMATS
from .prompts import check_exists
from .text_files import read_json_rows, read_text, text_field

FACES = "CelebA-HQ-img"  # of CelebAMask-HQ, whose other folders hold masks
LISTED = "metadata.jsonl"


@dataclass(frozen=True)
class ImageTree:
    """Files in an order of their names; of class k is what lies in the k-th folder below the root."""

    root: Path
    files: tuple[Path, ...]
    names: tuple[str, ...]  # of the folders below the root that hold pictures
    captions: Mapping[Path, Path | str]  # a file of words, or the words

    @property
    def captioned(self) -> bool:
        return bool(self.captions)

    def __len__(self) -> int:
        return len(self.files)

    def name(self, number: int) -> str:
        return str(self.files[number])

    def encoded(self, number: int) -> Path:
        return self.files[number]

    def label(self, number: int) -> int:
        folder, *below = self.files[number].relative_to(self.root).parts
        if not below:
            raise ValueError(f"it lies in {self.root} itself, expected it in a folder of its class")
        return self.names.index(folder)

    def caption(self, number: int) -> str:
        found = self.captions.get(self.files[number])
        if found is None:
            raise ValueError(f"it has no caption, expected {self.files[number].with_suffix('.txt').name} beside it")
        return found if isinstance(found, str) else " ".join(read_text(found).split())


def open_image_tree(path: Path, match: str = "*") -> ImageTree:
    """The pictures below a folder whose names match; of CelebA-HQ's, the faces alone."""
    if path.is_file():
        raise ConfigError(f"{path}: this is a file; expected the folder that pictures lie in")
    if not path.is_dir():
        raise ConfigError(f"{path}: there is no such folder; check the path")
    root = path / FACES if (path / FACES).is_dir() else path
    every = walk_files(root)
    files = tuple(file for file in every if file.suffix.lower() in IMAGE_FORMATS and fnmatch(file.name, match))
    if not files:
        that = "" if match == "*" else f" that match {match}"
        raise ConfigError(f"{root}: there are no pictures{that}; expected files that end in {', '.join(IMAGE_FORMATS)}")
    inside = sorted({file.relative_to(root).parts[0] for file in files if file.parent != root})
    return ImageTree(root, files, tuple(inside), read_captions(root, files, every))


def read_captions(root: Path, files: Sequence[Path], every: Sequence[Path]) -> dict[Path, Path | str]:
    """Captions: all in one file of rows, or each in a .txt beside its picture."""
    if (listed := root / LISTED).is_file():
        return dict(_listed(listed))
    texts = {file for file in every if file.suffix == ".txt"}
    return {file: file.with_suffix(".txt") for file in files if file.with_suffix(".txt") in texts}


def _listed(path: Path) -> Iterator[tuple[Path, str]]:
    for number, row in read_json_rows(path):
        column = next((name for name in PROMPTS if name in row), PROMPTS[0])
        file = path.parent / text_field(path, number, row, "file_name")
        yield check_exists(file, f"{path}, line {number}"), text_field(path, number, row, column)


def walk_files(root: Path) -> list[Path]:
    """All files below a folder that are not hidden, links followed, each folder once."""
    found, seen = [], set()
    for folder, inside, names in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        inside[:] = [] if real in seen else sorted(name for name in inside if not name.startswith("."))
        if real not in seen:
            seen.add(real)
            found += [Path(folder, name) for name in sorted(names) if not name.startswith(".")]
    return found
