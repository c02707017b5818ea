"""Pictures and their classes in what `datasets` saved to disk; the one file that imports it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..pictures import from_bytes, read_picture
from ..registry import ConfigError

PICTURES = ("image", "image_path", "file", "filepath")  # columns, the first that is there
PROMPTS = ("prompt", "caption", "text")
LABELS = ("label", "labels")
MARKS = ("dataset_dict.json", "dataset_info.json", "state.json")  # of a folder that `save_to_disk` wrote
LIMIT = 3 * 20_000**2  # numbers of a picture


@dataclass(frozen=True)
class Saved:
    """Rows of a saved data set, decoded when their turn comes."""

    table: Any
    folder: Path
    picture_column: str
    label_column: str
    names: tuple[str, ...]  # of the classes, if they are told

    def __len__(self) -> int:
        return len(self.table)

    def name(self, number: int) -> str:
        return f"row {number} of {self.folder}"

    def label(self, number: int) -> int:
        value = self.table[number][self.label_column]
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"its {self.label_column} is {value!r:.40}, expected a class's number")
        return value

    def picture(self, number: int) -> Tensor:
        value = self.table[number][self.picture_column]
        if isinstance(value, dict):  # of an Image: bytes, or where the file is
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes):
            return from_bytes(value, self.name(number), LIMIT)[0]
        if not isinstance(value, str):
            raise ValueError(f"its {self.picture_column} is a {type(value).__name__}, expected a picture or its path")
        return read_picture(self.folder / value)[0]  # an absolute path stays as it is


def is_saved(folder: Path) -> bool:
    return any((folder / mark).is_file() for mark in MARKS)


def table(folder: Path, split: str) -> Any:
    """A split of what `save_to_disk` wrote; of a single data set, all of it."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{folder} was saved by datasets, which is not installed; run pip install 'tastemaker[datasets]'"
        ) from error
    try:
        found: Any = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder} is no readable data set ({error!s:.200}); save it to disk again") from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise ConfigError(f"data.split: {folder} has no '{split:.60}'; there are {', '.join(found)}")
        found = found[split]
    return found


def texts(folder: Path, split: str) -> tuple[str, list[dict[str, Any]]]:
    """Its rows, of which pictures are left out, and the column their prompts are in."""
    found = table(folder, split)
    column = _column(found, PROMPTS, folder)
    plain = [name for name, kind in found.features.items() if type(kind).__name__ in ("Value", "ClassLabel")]
    return column, [dict(row) for row in found.select_columns([column, *(n for n in plain if n != column)])]


def saved(folder: Path, split: str) -> Saved:
    """Pictures and classes of a split."""
    import datasets

    found = table(folder, split)
    pictures, labels = (_column(found, names, folder) for names in (PICTURES, LABELS))
    kind = found.features[labels]
    told = tuple(kind.names) if isinstance(kind, datasets.ClassLabel) else ()
    if isinstance(found.features[pictures], datasets.Image):
        found = found.cast_column(pictures, datasets.Image(decode=False))  # decoded here, where mistakes get names
    return Saved(found, folder, pictures, labels, told)


def _column(table: Any, names: tuple[str, ...], folder: Path) -> str:
    for name in names:
        if name in table.column_names:
            return name
    raise ConfigError(f"{folder} has the columns {', '.join(table.column_names)}; expected one of {', '.join(names)}")
