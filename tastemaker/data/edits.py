"""Edits and image-to-video: prompts with source images, and optionally the wanted result and a mask.

They come from a .jsonl or .csv, from a folder, or from a data set saved by `datasets`, and become the metadata `image`,
`target` and `mask` of a prompt. Several sources of a prompt are a list.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from ..core.registry import ConfigError
from ..core.types import ImageBatch, Metadata, PromptBatch
from .dataset import ShuffledDataset
from .hf_datasets import is_saved_dataset, load_encoded_table
from .image_io import IMAGE_FORMATS, VIDEO_SUFFIXES, decode_image, read_image, resize_and_center_crop
from .image_sources import MAX_DECODED_VALUES, require_directory
from .image_transforms import stack_images
from .text_files import Row, read_csv_rows, read_json_rows, read_text, require_file, row_metadata

Role = Literal["prompt", "image", "target", "mask"]
EncodedImage = str | bytes  # the path of an image, or its bytes

EDIT_EXAMPLES = Path(__file__).parent.parent / "recipes" / "base" / "data" / "edits" / "edits.jsonl"
# Names of columns that are looked for if no setting names one; those of InstructPix2Pix, MagicBrush and OmniEdit too.
COLUMNS: dict[Role, tuple[str, ...]] = {
    "prompt": ("prompt", "instruction", "edit_prompt", "caption", "text"),
    "image": ("image", "images", "source", "source_image", "source_img", "src_img", "original_image", "input_image"),
    "target": ("target", "target_image", "target_img", "edited_image", "edited_img", "output_image"),
    "mask": ("mask", "mask_image", "mask_img"),
}
MAX_SOURCES = 16
TABLES = (".jsonl", ".csv")
PROMPT_FILE = "prompt.txt"
SUFFIXES = (*IMAGE_FORMATS, ".gif", *VIDEO_SUFFIXES)
# source, source_2, target or mask in the folder of an edit; 0001_source, ... if all edits are in one folder
NAMED_FILE = re.compile(r"(?:(?P<name>.+)_)?(?P<role>source|target|mask)(?:_(?P<number>[1-9]\d?))?")


@dataclass(frozen=True)
class Edit:
    """A prompt with its source images, and what is known of the result."""

    prompt: str
    sources: tuple[EncodedImage, ...]
    target: EncodedImage | None
    mask: EncodedImage | None
    location: str  # for messages
    columns: Metadata = field(default_factory=dict)  # that have no meaning here

    def metadata(self) -> Metadata:
        """`image`, `target` and `mask` as paths or pixels, and the other columns; one source stands alone."""
        sources = [decode(source, self.location) for source in self.sources]
        parts = {"image": sources[0] if len(sources) == 1 else sources}
        parts |= {
            name: decode(value, self.location)
            for name, value in (("target", self.target), ("mask", self.mask))
            if value is not None
        }
        return {**self.columns, **parts}

    def read_target(self) -> Tensor:
        """The pixels of the wanted result: [F, 3, H, W]."""
        if self.target is None:
            raise ConfigError(
                f"{self.location}: there is no target to train on; add a target to each edit, or set "
                "data.supervised=false [TM2353]"
            )
        target = decode(self.target, self.location)
        return target if isinstance(target, Tensor) else read_image(Path(target))


def decode(image: EncodedImage, location: str) -> str | Tensor:
    """A path as it is, and bytes as pixels [F, 3, H, W] in [0, 1]."""
    return image if isinstance(image, str) else decode_image(image, location, MAX_DECODED_VALUES)


class EditSource(ABC):
    """Edits by index."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def edit(self, index: int) -> Edit: ...


@dataclass(frozen=True)
class EditDataset(ShuffledDataset):
    """Edits in a new order every epoch; images are read when they are needed."""

    spec: EditFile
    source: EditSource
    seed: int

    def __len__(self) -> int:
        return len(self.source)

    def collate(self, indices: list[int]) -> PromptBatch | ImageBatch:
        edits = [self.source.edit(index) for index in indices]
        prompts, metadata = tuple(edit.prompt for edit in edits), tuple(edit.metadata() for edit in edits)
        if not self.spec.supervised:
            return PromptBatch(prompts, metadata)
        targets = [self.spec.resize(edit.read_target()) for edit in edits]
        return ImageBatch(prompts, stack_images(targets, [edit.location for edit in edits]), None, metadata)

    def first_prompts(self, count: int) -> PromptBatch:
        edits = [self.source.edit(index % len(self)) for index in range(count)]
        return PromptBatch(tuple(edit.prompt for edit in edits), tuple(edit.metadata() for edit in edits))


@dataclass(frozen=True)
class EditFile:
    """Prompts with one or several source images, and optionally the wanted result and a mask of what may change.

    `path` is a .jsonl or .csv, a folder of edits, or a folder saved by `datasets`. For image-to-video, the source is
    the first frame; without one, it is the first frame of the target.
    """

    path: Path | None = None  # by default a few small images, to try a recipe
    split: str = "train"  # of a data set saved by `datasets`
    prompt_column: str = ""  # by default the first of prompt, instruction, edit_prompt, caption and text
    image_columns: tuple[str, ...] = ()  # by default image, source, source_img and the like, then image_2, image_3 ...
    target_column: str = ""  # by default target, target_img, edited_image and the like
    mask_column: str = ""  # by default mask or mask_img
    supervised: bool = False  # yields the targets to train on, for the objective `likelihood`
    height: int | None = None  # pixels of targets to train on, cropped at the center; by default as they are
    width: int | None = None

    def __post_init__(self) -> None:
        if self.path is not None and self.path.suffix not in (*TABLES, "") and not self.path.is_dir():
            raise ValueError(
                f"'path': expected a folder or a file name that ends in .jsonl or .csv, got {str(self.path)!r:.60}; "
                "correct the path, or convert the file [TM222]"
            )
        if (self.height is None) != (self.width is None):
            raise ValueError(
                f"'height' is {self.height} and 'width' is {self.width}; set both, or neither to keep the size of the "
                "targets [TM2354]"
            )

    @property
    def batch_type(self) -> type:
        return ImageBatch if self.supervised else PromptBatch

    def load(self, seed: int) -> EditDataset:
        return EditDataset(self, open_edits(self), seed)

    def resize(self, target: Tensor) -> Tensor:
        """A target [F, 3, H, W] at the size to train on."""
        if self.height is None or self.width is None:
            return target
        return resize_and_center_crop(target, self.height, self.width)


def resolve_sources(row: Row, folder: Path) -> Metadata:
    """A row whose `image`, `target` and `mask`, as far as they name files, have paths that do not need the folder."""
    resolved = dict(row)
    for name in ("image", "target", "mask"):
        value = row.get(name)
        if isinstance(value, str) and value:
            resolved[name] = str(folder / value)
        elif isinstance(value, list):
            resolved[name] = [str(folder / each) if isinstance(each, str) else each for each in value]
    return resolved


def digest_sources(prompts: PromptBatch) -> str:
    """A hash of the source images of all prompts, files by their content; empty if no prompt has any."""
    digest, found = sha256(), False
    for number, entry in enumerate(prompts.metadata):
        image = entry.get("image")
        for each in image if isinstance(image, (list, tuple)) else [image]:
            if each is not None:
                content = each.cpu().numpy().tobytes() if isinstance(each, Tensor) else Path(each).read_bytes()
                digest.update(f"{number} {len(content)} ".encode() + content)
                found = True
    return digest.hexdigest() if found else ""


def has_sources(path: Path) -> bool:
    """Whether a file of prompts names source images, or a folder holds edits; then it is read as an EditFile."""
    if path.is_dir():
        return not is_saved_dataset(path) or any(
            name in COLUMNS["image"] for name in load_encoded_table(path, "train").column_names
        )
    if path.suffix not in TABLES:
        return False
    _, first = (read_json_rows(path) if path.suffix == ".jsonl" else read_csv_rows(path))[0]
    return any(name in first for name in COLUMNS["image"])


def open_edits(spec: EditFile) -> EditSource:
    """The edits of a file, a folder or a saved data set."""
    path = spec.path or EDIT_EXAMPLES
    if path.suffix in TABLES and not path.is_dir():
        rows = read_json_rows(path) if path.suffix == ".jsonl" else read_csv_rows(path)
        columns = EditColumns.find(spec, {name: None for _, row in rows for name in row}, str(path))
        return EditList(tuple(columns.read(row, f"{path}, line {number}", path.parent) for number, row in rows))
    if is_saved_dataset(path):
        table = load_encoded_table(path, spec.split)
        return EditTable(table, EditColumns.find(spec, table.column_names, str(path)), path)
    return EditList(tuple(read_folder(path)))


@dataclass(frozen=True)
class EditList(EditSource):
    edits: tuple[Edit, ...]

    def __len__(self) -> int:
        return len(self.edits)

    def edit(self, index: int) -> Edit:
        return self.edits[index]


@dataclass(frozen=True)
class EditTable(EditSource):
    """Rows of a data set saved by `datasets`, read when they are asked for."""

    table: Any
    columns: EditColumns
    folder: Path

    def __len__(self) -> int:
        return len(self.table)

    def edit(self, index: int) -> Edit:
        return self.columns.read(self.table[index], f"row {index} of {self.folder}", self.folder)


@dataclass(frozen=True)
class EditColumns:
    """The columns of a table that hold the parts of an edit."""

    prompt: str
    images: tuple[str, ...]
    target: str
    mask: str

    @classmethod
    def find(cls, spec: EditFile, names: Iterable[str], location: str) -> EditColumns:
        """The columns that settings name, or the first known names that a table has."""
        known = list(names)

        def choose(role: Role, setting: str) -> str:
            return setting or next((name for name in COLUMNS[role] if name in known), COLUMNS[role][0])

        first = choose("image", "")
        numbered = (f"{first}_{number}" for number in range(2, MAX_SOURCES + 1))
        columns = cls(
            choose("prompt", spec.prompt_column),
            spec.image_columns or (first, *(name for name in numbered if name in known)),
            choose("target", spec.target_column),
            choose("mask", spec.mask_column),
        )
        named = (spec.prompt_column, *spec.image_columns, spec.target_column, spec.mask_column)
        missing = [name for name in (columns.prompt, *named) if name and name not in known]
        if missing:
            raise ConfigError(
                f"{location} has the columns {', '.join(known) or 'nothing'}, but not '{missing[0]:.60}'; correct "
                "data.prompt_column, data.image_columns, data.target_column or data.mask_column [TM2355]"
            )
        return columns

    def read(self, row: Row, location: str, folder: Path) -> Edit:
        """The edit of a row; paths in it are relative to the folder."""
        prompt = row.get(self.prompt)
        if not isinstance(prompt, str):
            raise ConfigError(
                f"{location}: '{self.prompt}' is {prompt!r:.40}; expected the text of the prompt [TM2356]"
            )
        sources = [image for name in self.images for image in self._images(row, name, location, folder)]
        target, mask = (self._image(row, name, location, folder) for name in (self.target, self.mask))
        used = {self.prompt, *self.images, self.target, self.mask}
        others = {name: value for name, value in row_metadata(row, self.prompt).items() if name not in used}
        edit = Edit(prompt, tuple(sources), target, mask, location, others)
        return with_first_frame(edit, f"add the path of the source, or a list of paths, as '{self.images[0]}'")

    def _images(self, row: Row, name: str, location: str, folder: Path) -> list[EncodedImage]:
        value = row.get(name)
        values = value if isinstance(value, (list, tuple)) else [value]
        return [read_cell(each, name, location, folder) for each in values if each not in (None, "")]

    def _image(self, row: Row, name: str, location: str, folder: Path) -> EncodedImage | None:
        images = self._images(row, name, location, folder)
        if len(images) > 1:
            raise ConfigError(f"{location}: '{name}' has {len(images)} images; expected one [TM2357]")
        return images[0] if images else None


def read_cell(value: Any, name: str, location: str, folder: Path) -> EncodedImage:
    """The image of a cell: a path relative to the folder, or bytes, as the feature Image of `datasets` holds them."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise ConfigError(
            f"{location}: '{name}' is {value!r:.40}; expected the path of an image, an image, or a list of them "
            "[TM2358]"
        )
    return str(require_file(folder / value, location))


def with_first_frame(edit: Edit, advice: str) -> Edit:
    """The edit; without a source, that is the target if it is a video, of which models take the first frame."""
    if edit.sources:
        return edit
    if isinstance(edit.target, str) and Path(edit.target).suffix.lower() in (".gif", *VIDEO_SUFFIXES):
        return replace(edit, sources=(edit.target,))
    raise ConfigError(f"{edit.location}: the source image is missing; {advice} [TM223]")


# Folders


def read_folder(folder: Path) -> list[Edit]:
    """The edits of a folder, in the order of their names: a folder each, or files with the same beginning."""
    require_directory(folder)
    folders = sorted(path for path in folder.iterdir() if (path / PROMPT_FILE).is_file())
    groups = [(path / PROMPT_FILE, sorted(path.iterdir()), "") for path in folders] or group_files(folder)
    if not groups:
        raise ConfigError(
            f"{folder}: the folder does not contain edits; expected 0001/{PROMPT_FILE} beside 0001/source.png, or "
            "0001.txt beside 0001.png or 0001_source.png [TM2359]"
        )
    return [read_files(prompt, files, name) for prompt, files, name in groups]


def group_files(folder: Path) -> list[tuple[Path, list[Path], str]]:
    """The prompt, the files and the name of each edit in a flat folder."""
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    by_name: dict[str, list[Path]] = {}
    for path in files:
        match = NAMED_FILE.fullmatch(path.stem)
        by_name.setdefault(match["name"] if match and match["name"] else path.stem, []).append(path)
    prompts = sorted(folder.glob("*.txt"))
    return [(prompt, by_name.get(prompt.stem, []), prompt.stem) for prompt in prompts]


def read_files(prompt: Path, files: Sequence[Path], name: str) -> Edit:
    """An edit of its prompt and its files; a file that is called like the prompt is the source."""
    sources: dict[int, str] = {}
    others: dict[str, str] = {}
    for path in files:
        match = NAMED_FILE.fullmatch(path.stem)
        if path.suffix.lower() not in SUFFIXES or not (match or (name and path.stem == name)):
            continue
        if match is None or match["role"] == "source":
            sources[int(match["number"] or 1) if match else 1] = str(path)
        else:
            others[match["role"]] = str(path)
    text = " ".join(read_text(prompt).split())
    ordered = tuple(sources[number] for number in sorted(sources))
    beside = f"{name}_source.png" if name else "source.png"
    edit = Edit(text, ordered, others.get("target"), others.get("mask"), str(prompt))
    return with_first_frame(edit, f"add {beside} beside {prompt.name}")
