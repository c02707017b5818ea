"""Collections of encoded images by index: folders, folders by class, and WebDataset's tar shards.

An index that is broken or lacks what is asked for raises one of READ_ERRORS, which data sets count and skip.
"""

from __future__ import annotations

import os
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from torch import Tensor

from ..core.registry import ConfigError
from ..core.safe_files import check_text, parse_json
from .image_io import IMAGE_FORMATS, decode_image, read_image
from .text_files import get_text, read_json_rows, read_text, require_file

READ_ERRORS = (OSError, ValueError, KeyError, TypeError, IndexError, EOFError)
PROMPT_COLUMNS = ("prompt", "caption", "text")  # the first that exists
LABEL_COLUMNS = ("label", "labels")
MAX_DECODED_VALUES = 3 * 20_000**2  # of an image in memory
CELEBA_HQ_FOLDER = "CelebA-HQ-img"  # the images of CelebAMask-HQ, whose other folders hold masks
METADATA_FILE = "metadata.jsonl"
TAR_LABEL_KEYS = ("cls", *LABEL_COLUMNS)  # of a WebDataset sample: as a file's suffix or in its JSON
TAR_CAPTION_SUFFIXES = ("txt", "caption")
COMPRESSED_TAR = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
PROBED_SAMPLES = 64  # to learn whether shards have captions
FORMATS = ", ".join(IMAGE_FORMATS)


@dataclass(frozen=True)
class ImageSource(ABC):
    """Encoded images by index, with a class and a caption each where they exist."""

    class_names: tuple[str, ...]  # by class id; empty if classes are numbers only
    captioned: bool  # whether any image has a caption

    @abstractmethod
    def __len__(self) -> int: ...
    @abstractmethod
    def name(self, index: int) -> str:
        """How messages call an image."""

    @abstractmethod
    def encoded(self, index: int) -> Path | bytes:
        """The file of an image, or its bytes."""

    @abstractmethod
    def label(self, index: int) -> int:
        """The class id."""

    def caption(self, index: int) -> str:
        raise ValueError("the sample has no caption [TM174]")

    def image(self, index: int) -> Tensor:
        """Decode an image at full size: [3, H, W] in [0, 1]."""
        encoded = self.encoded(index)
        if isinstance(encoded, bytes):
            return decode_image(encoded, self.name(index), MAX_DECODED_VALUES)[0]
        return read_image(encoded)[0]


@dataclass(frozen=True)
class FileImageSource(ImageSource):
    """Image files."""

    files: tuple[Path, ...]

    def __len__(self) -> int:
        return len(self.files)

    def name(self, index: int) -> str:
        return str(self.files[index])

    def encoded(self, index: int) -> Path:
        return self.files[index]


@dataclass(frozen=True)
class FolderImageSource(FileImageSource):
    """Image files at any depth below a folder, ordered by name; the class is the folder just below the root."""

    root: Path
    captions: Mapping[Path, Path | str]  # the text, or the .txt file that holds it

    def label(self, index: int) -> int:
        folder, *below = self.files[index].relative_to(self.root).parts
        if not below:
            raise ValueError(
                f"the image is in {self.root} itself; move it into a subfolder named after its class [TM175]"
            )
        return self.class_names.index(folder)

    def caption(self, index: int) -> str:
        caption = self.captions.get(self.files[index])
        if caption is None:
            raise ValueError(
                f"the caption file {self.files[index].with_suffix('.txt').name} is missing beside the image [TM176]"
            )
        return caption if isinstance(caption, str) else " ".join(read_text(caption).split())


def open_image_folder(path: Path, pattern: str = "*") -> FolderImageSource:
    """The images below a folder whose file names match; of CelebAMask-HQ, without the masks."""
    if path.is_file():
        raise ConfigError(f"{path}: expected a folder of images, got a file; give the path of a folder [TM177]")
    require_directory(path)
    root = path / CELEBA_HQ_FOLDER if (path / CELEBA_HQ_FOLDER).is_dir() else path
    all_files = walk_files(root)
    files = tuple(file for file in all_files if file.suffix.lower() in IMAGE_FORMATS and fnmatch(file.name, pattern))
    if not files:
        matching = "" if pattern == "*" else f" that match {pattern}"
        raise ConfigError(
            f"{root}: the folder does not contain images{matching}; add files that end in {FORMATS}, or correct the "
            "path [TM178]"
        )
    classes = sorted({file.relative_to(root).parts[0] for file in files if file.parent != root})
    captions = find_captions(root, files, all_files)
    return FolderImageSource(tuple(classes), bool(captions), files, root, captions)


def require_directory(path: Path) -> None:
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder; correct the path [TM179]")


def find_captions(root: Path, files: Sequence[Path], all_files: Sequence[Path]) -> dict[Path, Path | str]:
    """Captions by image file: of metadata.jsonl, or the .txt files beside the images."""
    if (metadata := root / METADATA_FILE).is_file():
        return dict(read_metadata_captions(metadata, PROMPT_COLUMNS))
    texts = {file for file in all_files if file.suffix == ".txt"}
    return {file: file.with_suffix(".txt") for file in files if file.with_suffix(".txt") in texts}


def read_metadata_captions(path: Path, columns: Sequence[str]) -> dict[Path, str]:
    """Captions by image file of a metadata.jsonl, from the first of the columns that a row has."""
    captions = {}
    for number, row in read_json_rows(path):
        column = next((name for name in columns if name in row), columns[0])
        file = require_file(path.parent / get_text(path, number, row, "file_name"), f"{path}, line {number}")
        captions[file] = get_text(path, number, row, column)
    return captions


def walk_files(root: Path) -> list[Path]:
    """All files below a folder that are not hidden; symbolic links are followed, each folder is visited once."""
    files, visited = [], set()
    for folder, subfolders, names in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        subfolders[:] = [] if real in visited else sorted(name for name in subfolders if not name.startswith("."))
        if real not in visited:
            visited.add(real)
            files += [Path(folder, name) for name in sorted(names) if not name.startswith(".")]
    return files


@dataclass(frozen=True)
class ClassFolderSource(FileImageSource):
    """A folder per class; class ids follow the order of the folders' names."""

    labels: tuple[int, ...]

    def label(self, index: int) -> int:
        return self.labels[index]


def open_class_folder(path: Path) -> ClassFolderSource:
    """The images of a folder per class; without class folders, the images of the folder itself as class 0."""
    require_directory(path)
    # Hidden folders, such as those of notebooks, are no classes: they would shift the class ids.
    classes = sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    labeled = [
        (file, label)
        for label, folder in enumerate(classes or [path])
        for file in sorted(folder.rglob("*") if classes else folder.iterdir())
        if file.suffix.lower() in IMAGE_FORMATS
    ]
    if not labeled:
        raise ConfigError(
            f"{path}: the folder does not contain images; add files that end in {FORMATS}, or correct the path [TM180]"
        )
    names = tuple(folder.name for folder in classes) or ("0",)
    return ClassFolderSource(names, False, tuple(file for file, _ in labeled), tuple(label for _, label in labeled))


@dataclass(frozen=True, slots=True)  # there may be millions of them
class TarSample:
    """Byte ranges of a WebDataset sample's files in its shard, by the suffix after the first dot of their names."""

    shard: Path
    key: str
    parts: dict[str, tuple[int, int]]  # start and length

    def read(self, part: str) -> bytes:
        start, length = self.parts[part]
        with self.shard.open("rb") as file:
            file.seek(start)
            data = file.read(length)
        if len(data) < length:
            raise ValueError(f"{self.shard} ends within this sample; expected {length} bytes [TM181]")
        return data

    def metadata(self) -> dict[str, Any]:
        """The content of its .json, if it has one."""
        metadata = parse_json(self.read("json").decode(), self.key) if "json" in self.parts else {}
        if not isinstance(metadata, dict):
            raise ValueError(f"the JSON of the sample is a {type(metadata).__name__}; expected an object [TM182]")
        return metadata

    @property
    def image_key(self) -> str | None:
        """The suffix of its image."""
        return next((part for part in self.parts if f".{part.lower()}" in IMAGE_FORMATS), None)


@dataclass(frozen=True)
class TarImageSource(ImageSource):
    """WebDataset samples that have an image, in the order of their shards; classes have no names."""

    samples: tuple[TarSample, ...]

    def __len__(self) -> int:
        return len(self.samples)

    def name(self, index: int) -> str:
        sample = self.samples[index]
        return f"{sample.key} in {sample.shard}"

    def encoded(self, index: int) -> bytes:
        sample = self.samples[index]
        return sample.read(sample.image_key or "")

    def label(self, index: int) -> int:
        value = self._read_field(index, TAR_LABEL_KEYS, TAR_LABEL_KEYS)
        if isinstance(value, bool) or not str(value).strip().isdecimal():
            raise ValueError(
                f"its class is {value!r:.40}, expected a number in .cls or under `cls` or `label` in .json [TM183]"
            )
        return int(str(value))

    def caption(self, index: int) -> str:
        value = self._read_field(index, TAR_CAPTION_SUFFIXES, PROMPT_COLUMNS)
        if not isinstance(value, str):
            raise ValueError(
                f"the caption is {value!r:.40}; expected text in .txt, or in {', '.join(PROMPT_COLUMNS)} of .json "
                "[TM184]"
            )
        is_file = any(part in self.samples[index].parts for part in TAR_CAPTION_SUFFIXES)
        return " ".join(value.split()) if is_file else value

    def _read_field(self, index: int, suffixes: Sequence[str], keys: Sequence[str]) -> Any:
        """The text of the first file with one of the suffixes, or the first of the keys in the JSON, or None."""
        sample = self.samples[index]
        part = next((suffix for suffix in suffixes if suffix in sample.parts), None)
        if part:
            return sample.read(part).decode()
        metadata = sample.metadata()
        return next((metadata[key] for key in keys if key in metadata), None)


def is_tar_path(path: Path) -> bool:
    """Whether a path is a tar file or a folder that holds some."""
    return path.name.endswith((".tar", *COMPRESSED_TAR)) or (path.is_dir() and any(path.glob("*.tar")))


def open_tar_shards(path: Path, pattern: str = "*") -> TarImageSource:
    """The samples of a shard, or of the shards in a folder whose names match; reads their headers once."""
    if path.name.endswith(COMPRESSED_TAR):
        raise ConfigError(
            f"{path} is compressed, and compressed archives do not allow random access; decompress it to a .tar file "
            "[TM185]"
        )
    files = sorted(path.glob("*.tar")) if path.is_dir() else [path]
    matching = [file for file in files if fnmatch(file.name, pattern)]
    if not matching:
        raise ConfigError(
            f"data.file_pattern: '{pattern:.60}' does not match any of the {len(files)} shards in {path}; correct "
            "data.file_pattern [TM186]"
        )
    samples = tuple(sample for file in matching for sample in index_shard(file) if sample.image_key)
    if not samples:
        raise ConfigError(
            f"{path}: the shards do not contain images; expected files that end in {FORMATS} in the .tar files [TM187]"
        )
    return TarImageSource((), any(_has_caption(sample) for sample in samples[:PROBED_SAMPLES]), samples)


def _has_caption(sample: TarSample) -> bool:
    try:
        return any(part in sample.parts for part in TAR_CAPTION_SUFFIXES) or any(
            key in sample.metadata() for key in PROMPT_COLUMNS
        )
    except ValueError:
        return False  # reported when the sample is loaded


def _check_member(file: Path, member: tarfile.TarInfo) -> None:
    """Refuse what no archive of images needs, and one made to do harm has: paths that leave it, links, devices."""
    leaves = member.name.startswith("/") or ".." in member.name.split("/")
    if leaves or not (member.isreg() or member.isdir()) or member.issparse():
        kind = "a path outside the archive" if leaves else "a link, a device or a sparse file"
        raise ConfigError(
            f"{file} holds {check_text(member.name, str(file))!r:.100}, {kind}; expected files and folders only, so "
            "write the archive again, without it [TM1167]"
        )


def index_shard(file: Path) -> Iterator[TarSample]:
    """The samples of a shard, in order, without reading their content."""
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    try:
        length, position = file.stat().st_size, -1
        with tarfile.open(file, "r:") as tar:
            for member in tar:
                _check_member(file, member)
                if member.offset <= position or not 0 <= member.size <= length - member.offset_data:
                    raise tarfile.ReadError(f"'{member.name:.60}' is not within the file")
                position = member.offset
                folder, _, name = member.name.rpartition("/")
                stem, dot, suffix = name.partition(".")
                if member.isfile() and dot and stem:
                    parts = samples.setdefault(f"{folder}/{stem}" if folder else stem, {})
                    parts[suffix.lower()] = (member.offset_data, member.size)
    except ConfigError:
        raise
    except (tarfile.TarError, OSError, EOFError, ValueError, ArithmeticError, IndexError, MemoryError) as error:
        raise ConfigError(
            f"{file} cannot be read as a .tar file ({error!s:.200}); download the file again, or remove it [TM188]"
        ) from error
    for key, parts in samples.items():
        yield TarSample(file, key, parts)
