"""`tastemaker caption`: what a chat model says of every picture in a folder, where training looks for captions."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from ..core.registry import ConfigError
from ..data.image_io import KNOWN, ImageError
from ..data.text_files import read_json_rows
from ..rewards.scoring import ImageRecord, find_images_and_videos
from .annotations import print_line
from .answer_generation import GenerationSettings
from .question_answering import AnsweringModel, AskOptions, answer_folder

RECORD = "captions.jsonl"  # every answer, to go on from
LIST = "metadata.jsonl"  # what training reads in place of the texts beside the pictures
CaptionLayout = Literal["txt", "jsonl", "both"]


@dataclass(frozen=True)
class CaptionOptions:
    """How a folder is to be captioned."""

    folder: Path
    model: str
    prompt: str | None = None  # what the model is asked; its own usual words if not given
    manner: GenerationSettings = GenerationSettings(tokens=64)
    batch: int = 8
    form: CaptionLayout = "txt"
    again: bool = False  # captions that are there are written anew
    out: Path | None = None  # the record, captions.jsonl in the folder if not given

    @property
    def texts(self) -> bool:
        return self.form != "jsonl"

    @property
    def listed(self) -> bool:
        return self.form != "txt"

    @property
    def record(self) -> Path:
        return self.out or self.folder / RECORD


def find_images(wish: CaptionOptions) -> list[Path]:
    """The pictures of the folder; refused before a large model is loaded."""
    if not wish.folder.is_dir():
        raise ConfigError(f"{wish.folder} is no folder; expected one with pictures (`tastemaker ask` takes one alone)")
    files = find_images_and_videos(wish.folder, folders=False)
    if not files:
        raise ConfigError(f"{wish.folder}: no pictures found; expected files that end in {KNOWN}")
    if not wish.listed and (wish.folder / LIST).is_file():
        raise ConfigError(
            f"{wish.folder / LIST} is there, and training reads it in place of .txt files; add to it with "
            "--form jsonl or both, or move it away"
        )
    return files


def caption_folder(model: AnsweringModel, wish: CaptionOptions, files: Sequence[Path], console: Console) -> int:
    """Ask for a caption of each picture that has none, and write it where training looks. How many are new."""
    rows = read_caption_list(wish.folder / LIST)
    kept = {} if wish.again else {file: text for file in files if (text := existing_caption(wish, file, rows))}
    if kept:
        print_line(console, f"{len(kept)} of {len(files)} pictures have captions, which stay")
    left = [file for file in files if file not in kept]
    order = AskOptions((wish.prompt or model.caption,), wish.model, wish.manner, wish.batch)
    complaint: BaseException | None = None
    shown = [ImageRecord(file, file.stem.replace("_", " ").replace("-", " ")) for file in left]
    try:
        told = answer_folder(model, order, wish.folder, wish.record, console, shown) if left else []
    except (ImageError, KeyboardInterrupt) as error:  # the others have their captions all the same
        complaint, told = error, order.answers(wish.record, shown)
    said = {row["file"]: " ".join(str(row["answer"]).split()) for row in told}
    new = {file: said[str(file)] for file in left if said.get(str(file))}
    write_captions(wish, {**kept, **new}, rows)
    if empty := sum(not text for text in said.values()):
        print_line(console, f"{empty} captions came out empty and are left out; ask otherwise with --prompt")
    print_line(console, f"{len(new)} captions written, as {names(wish)}; data='{{type: gallery, path: {wish.folder}}}'")
    if complaint is not None:
        raise complaint
    return len(new)


def names(wish: CaptionOptions) -> str:
    return " and ".join([*([".txt beside the pictures"] if wish.texts else []), *([LIST] if wish.listed else [])])


def existing_caption(wish: CaptionOptions, file: Path, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The caption a picture has, in the list or beside it; nothing if it has none."""
    text = file.with_suffix(".txt")
    listed = rows.get(name_of(wish.folder, file), {}).get("prompt")
    beside = text.read_text(encoding="utf-8") if text.is_file() else ""
    return " ".join(str(listed or beside).split())


def name_of(folder: Path, file: Path) -> str:
    return file.relative_to(folder).as_posix()


def read_caption_list(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of a list that is there, by the names of their pictures."""
    if not path.is_file() or not path.read_text(encoding="utf-8").strip():
        return {}
    named = [(number, row, row.get("file_name", row.get("file"))) for number, row in read_json_rows(path)]
    for number, _, name in named:
        if not isinstance(name, str):
            raise ConfigError(f"{path}, line {number}: it names no 'file_name'; mend the line or move the file away")
    return {str(name): dict(row) for _, row, name in named}


def write_captions(wish: CaptionOptions, captions: Mapping[Path, str], rows: dict[str, dict[str, Any]]) -> None:
    """Each file whole or not at all; what else a list knows of a picture stays in it."""
    for file, text in captions.items():
        name = name_of(wish.folder, file)
        rows[name] = {**rows.get(name, {}), "file_name": name, "file": name, "prompt": text}
    try:
        for file, text in captions.items() if wish.texts else ():
            if wish.again or not file.with_suffix(".txt").is_file():
                replace_file(file.with_suffix(".txt"), text + "\n")
        if wish.listed:
            lines = [json.dumps(rows[key], ensure_ascii=False) + "\n" for key in sorted(rows)]
            replace_file(wish.folder / LIST, "".join(lines))
    except OSError as error:
        raise ConfigError(f"captions cannot be written in {wish.folder} ({error}); check its permissions") from error


def replace_file(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
