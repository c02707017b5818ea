"""Pictures with the number of their class, each to be had by its own number."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from ..core.registry import ConfigError
from .image_io import IMAGE_FORMATS, read_image


class LabeledImages(Protocol):
    def __len__(self) -> int: ...
    def picture(self, number: int) -> Tensor:
        """[3, H, W] in [0, 1]."""

    def label(self, number: int) -> int: ...


@dataclass(frozen=True)
class ClassFolder:
    """A folder for each class, which are numbered by their names in order; without any, all is of class 0."""

    files: tuple[Path, ...]
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.files)

    def picture(self, number: int) -> Tensor:
        return read_image(self.files[number])[0]

    def label(self, number: int) -> int:
        return self.labels[number]


def open_class_folder(path: Path) -> ClassFolder:
    if not path.is_dir():
        raise ConfigError(f"{path}: there is no such folder; check the path")
    classes = list_class_folders(path)
    found = [
        (file, label)
        for label, folder in enumerate(classes or [path])
        for file in sorted(folder.rglob("*") if classes else folder.iterdir())
        if file.suffix.lower() in IMAGE_FORMATS
    ]
    if not found:
        raise ConfigError(f"{path}: there are no pictures; expected files that end in {', '.join(IMAGE_FORMATS)}")
    return ClassFolder(tuple(file for file, _ in found), tuple(label for _, label in found))


def list_class_folders(path: Path) -> list[Path]:
    """In order; what notebooks and the like hide among them is no class, or others would be numbered wrongly."""
    return sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))
