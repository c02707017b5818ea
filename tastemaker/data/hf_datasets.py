"""Data sets that `datasets` saved to disk; the only module that imports it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.output_paths import replace_file
from ..core.registry import ConfigError
from .image_sources import LABEL_COLUMNS, PROMPT_COLUMNS, ImageSource

IMAGE_COLUMNS = ("image", "image_path", "file", "filepath")  # the first that exists
ROWS_PER_BATCH = 64  # of Parquet files, whose rows hold images
SAVED_FILES = ("dataset_dict.json", "dataset_info.json", "state.json")  # written by `save_to_disk`


@dataclass(frozen=True)
class HfImageSource(ImageSource):
    """Rows of a saved data set, decoded when they are asked for."""

    table: Any
    folder: Path
    image_column: str
    label_column: str | None
    prompt_column: str | None

    def __len__(self) -> int:
        return len(self.table)

    def name(self, index: int) -> str:
        return f"row {index} of {self.folder}"

    def label(self, index: int) -> int:
        if self.label_column is None:
            raise ValueError(f"the row has no class; add one of the columns {', '.join(LABEL_COLUMNS)} [TM150]")
        value = self.table[index][self.label_column]
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(
                f"{self.label_column} is {value!r:.40}; expected a class id, which is an integer of at least 0 [TM151]"
            )
        return value

    def caption(self, index: int) -> str:
        value = self.table[index][self.prompt_column] if self.prompt_column else None
        if not isinstance(value, str):
            raise ValueError(
                f"the caption is {value!r:.40}; expected text in one of the columns {', '.join(PROMPT_COLUMNS)} [TM152]"
            )
        return value

    def encoded(self, index: int) -> Path | bytes:
        value = self.table[index][self.image_column]
        if isinstance(value, dict):  # the Image feature holds bytes or a path
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes):
            return value
        if not isinstance(value, str):
            raise ValueError(
                f"{self.image_column} is a {type(value).__name__}; expected an image or the path of an image [TM153]"
            )
        return self.folder / value  # an absolute path stays as it is


def is_saved_dataset(folder: Path) -> bool:
    return any((folder / name).is_file() for name in SAVED_FILES)


def load_table(folder: Path, split: str) -> Any:
    """A split of a saved DatasetDict, or a saved Dataset."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{folder} was saved by the package datasets, which is not installed; run `pip install "
            "'tastemaker[datasets]'` [TM154]"
        ) from error
    try:
        table: Any = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, IndexError) as error:  # IndexError if it has no rows
        raise ConfigError(
            f"{folder} cannot be loaded as a data set with rows ({error!s:.200}); save the data set again with "
            "save_to_disk [TM155]"
        ) from error
    if isinstance(table, datasets.DatasetDict):
        if split not in table:
            raise ConfigError(
                f"data.split: {folder} does not have the split '{split:.60}'; set data.split to one of "
                f"{', '.join(table)} [TM156]"
            )
        return table[split]
    if split != "train":
        raise ConfigError(
            f"data.split: {folder} is a data set without splits, but data.split is '{split:.60}'; remove "
            "data.split [TM157]"
        )
    return table


def iterate_rows(path: Path, split: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a folder that `datasets` saved, or of a Parquet file; images are {bytes, path}."""
    if path.suffix == ".parquet":
        parquet = _import_parquet(path)
        for batch in parquet.ParquetFile(path).iter_batches(ROWS_PER_BATCH):
            yield from batch.to_pylist()
        return
    for row in load_encoded_table(path, split):
        yield dict(row)


def load_encoded_table(folder: Path, split: str) -> Any:
    """A split of a saved data set whose images are {bytes, path}, also in lists of images."""
    table = load_table(folder, split)
    import datasets

    for name, feature in table.features.items():
        if isinstance(feature, datasets.Image):
            table = table.cast_column(name, datasets.Image(decode=False))
        elif isinstance(getattr(feature, "feature", None), datasets.Image):  # a list of images
            table = table.cast_column(name, type(feature)(datasets.Image(decode=False)))
    return table


def save_rows(rows: list[dict[str, Any]], path: Path) -> None:
    """Write rows to a Parquet file, or to a folder as `save_to_disk` of `datasets` does."""
    parquet = _import_parquet(path)
    if path.suffix == ".parquet":
        import pyarrow  # type: ignore[import-untyped]

        with replace_file(path) as partial:
            parquet.write_table(pyarrow.Table.from_pylist(rows), partial)
        return
    import datasets

    table = datasets.Dataset.from_list(rows)
    datasets.disable_progress_bars()
    table.save_to_disk(str(path))


def _import_parquet(path: Path) -> Any:
    try:
        import datasets  # noqa: F401  # brings pyarrow
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError(
            f"{path} needs the package datasets, which is not installed; run `pip install 'tastemaker[datasets]'`, or "
            "use a .jsonl file [TM1415]"
        ) from error
    return pyarrow.parquet


def load_prompts(folder: Path, split: str) -> tuple[str, list[dict[str, Any]]]:
    """The name of the prompt column, and the rows without columns such as images."""
    table = load_table(folder, split)
    column = _find_column(table, PROMPT_COLUMNS, folder)
    scalars = [name for name, feature in table.features.items() if type(feature).__name__ in ("Value", "ClassLabel")]
    return column, [dict(row) for row in table.select_columns([column, *(n for n in scalars if n != column)])]


def load_images(folder: Path, split: str, *, labeled: bool = False) -> HfImageSource:
    """The images of a split, with labels and captions if it has them; labels are required if `labeled`."""
    import datasets

    table = load_table(folder, split)
    image_column = _find_column(table, IMAGE_COLUMNS, folder)
    if labeled:
        _find_column(table, LABEL_COLUMNS, folder)
    label_column, prompt_column = (
        next((name for name in names if name in table.column_names), None) for names in (LABEL_COLUMNS, PROMPT_COLUMNS)
    )
    feature = table.features[label_column] if label_column else None
    class_names = tuple(feature.names) if isinstance(feature, datasets.ClassLabel) else ()
    if isinstance(table.features[image_column], datasets.Image):
        # Decoded by ImageSource, whose errors name the row.
        table = table.cast_column(image_column, datasets.Image(decode=False))
    return HfImageSource(
        class_names, prompt_column is not None, table, folder, image_column, label_column, prompt_column
    )


def _find_column(table: Any, names: tuple[str, ...], folder: Path) -> str:
    for name in names:
        if name in table.column_names:
            return name
    raise ConfigError(
        f"{folder} has the columns {', '.join(table.column_names)}; rename a column to one of {', '.join(names)} "
        "[TM158]"
    )
