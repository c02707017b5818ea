"""Pictures and their classes in what `datasets` saved to disk; the one file that imports it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..core.registry import ConfigError
from .image_io import decode_image, read_image

PICTURES = ("image", "image_path", "file", "filepath")  # columns, the first that is there
PROMPTS = ("prompt", "caption", "text")
LABELS = ("label", "labels")
MARKS = ("dataset_dict.json", "dataset_info.json", "state.json")  # of a folder that `save_to_disk` wrote
LIMIT = 3 * 20_000**2  # numbers of a picture


@dataclass(frozen=True)
class HfImageTable:
    """Rows of a saved data set, decoded when their turn comes."""

    table: Any
    folder: Path
    picture_column: str
    label_column: str | None  # likewise below: none where there is none
    names: tuple[str, ...]  # of the classes, if they are told
    prompt_column: str | None = None

    def __len__(self) -> int:
        return len(self.table)

    def name(self, number: int) -> str:
        return f"row {number} of {self.folder}"

    @property
    def captioned(self) -> bool:
        return self.prompt_column is not None

    def label(self, number: int) -> int:
        if self.label_column is None:
            raise ValueError(f"it has no class, expected one of the columns {', '.join(LABELS)}")
        value = self.table[number][self.label_column]
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"its {self.label_column} is {value!r:.40}, expected a class's number")
        return value

    def caption(self, number: int) -> str:
        value = self.table[number][self.prompt_column] if self.prompt_column else None
        if not isinstance(value, str):
            raise ValueError(f"its caption is {value!r:.40}, expected text in one of the columns {', '.join(PROMPTS)}")
        return value

    def encoded(self, number: int) -> Path | bytes:
        value = self.table[number][self.picture_column]
        if isinstance(value, dict):  # of an Image: bytes, or where the file is
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes):
            return value
        if not isinstance(value, str):
            raise ValueError(f"its {self.picture_column} is a {type(value).__name__}, expected a picture or its path")
        return self.folder / value  # an absolute path stays as it is

    def picture(self, number: int) -> Tensor:
        found = self.encoded(number)
        return (decode_image(found, self.name(number), LIMIT) if isinstance(found, bytes) else read_image(found))[0]


def is_saved(folder: Path) -> bool:
    return any((folder / mark).is_file() for mark in MARKS)


def load_table(folder: Path, split: str) -> Any:
    """A split of what `save_to_disk` wrote; of a single data set, all of it."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{folder} was saved by datasets, which is not installed; run pip install 'tastemaker[datasets]'"
        ) from error
    try:
        found: Any = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, IndexError) as error:  # the last of one without rows
        raise ConfigError(
            f"{folder} is no readable data set ({error!s:.200}), or has no rows; save it to disk again"
        ) from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise ConfigError(f"data.split: {folder} has no '{split:.60}'; there are {', '.join(found)}")
        return found[split]
    if split != "train":
        raise ConfigError(f"data.split: {folder} is one data set without splits, found '{split:.60}'; leave it out")
    return found


def load_texts(folder: Path, split: str) -> tuple[str, list[dict[str, Any]]]:
    """Its rows, of which pictures are left out, and the column their prompts are in."""
    found = load_table(folder, split)
    column = _column(found, PROMPTS, folder)
    plain = [name for name, kind in found.features.items() if type(kind).__name__ in ("Value", "ClassLabel")]
    return column, [dict(row) for row in found.select_columns([column, *(n for n in plain if n != column)])]


def load_images(folder: Path, split: str) -> HfImageTable:
    """Pictures of a split, with their classes and captions if it has them."""
    import datasets

    found = load_table(folder, split)
    pictures = _column(found, PICTURES, folder)
    labels, prompts = (next((n for n in names if n in found.column_names), None) for names in (LABELS, PROMPTS))
    kind = found.features[labels] if labels else None
    told = tuple(kind.names) if isinstance(kind, datasets.ClassLabel) else ()
    if isinstance(found.features[pictures], datasets.Image):
        found = found.cast_column(pictures, datasets.Image(decode=False))  # decoded here, where mistakes get names
    return HfImageTable(found, folder, pictures, labels, told, prompts)


def load_labeled_images(folder: Path, split: str) -> HfImageTable:
    """Load the images of a split with their class labels."""
    found = load_images(folder, split)
    _column(found.table, LABELS, folder)
    return found


def _column(table: Any, names: tuple[str, ...], folder: Path) -> str:
    for name in names:
        if name in table.column_names:
            return name
    raise ConfigError(f"{folder} has the columns {', '.join(table.column_names)}; expected one of {', '.join(names)}")
