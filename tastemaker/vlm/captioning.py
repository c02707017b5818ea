"""`tastemaker caption`: captions of every image in a folder by a vision-language model, where training reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from ..core.output_paths import write_text_atomically
from ..core.registry import ConfigError
from ..core.safe_files import MAX_ROWS_BYTES, read_text
from ..data.image_io import READABLE_SUFFIXES, ImageError
from ..data.text_files import read_json_rows
from ..rewards.folder_scorer import ImageRecord, find_images_and_videos
from .annotations import print_line
from .generation import GenerationSettings
from .question_answering import AnsweringModel, AskOptions, answer_folder

RECORD = "captions.jsonl"  # all answers, for resuming
METADATA = "metadata.jsonl"  # training reads it instead of the .txt files beside the images
CaptionLayout = Literal["txt", "jsonl", "both"]


@dataclass(frozen=True)
class CaptionOptions:
    folder: Path
    model: str
    prompt: str | None = None  # the question; the model's default if not given
    generation: GenerationSettings = GenerationSettings(max_new_tokens=64)
    batch_size: int = 8
    layout: CaptionLayout = "txt"
    overwrite: bool = False  # existing captions are replaced
    out: Path | None = None  # of all answers; captions.jsonl in the folder if not given

    @property
    def record_path(self) -> Path:
        return self.out or self.folder / RECORD


def find_images(options: CaptionOptions) -> list[Path]:
    """The images of the folder; refuses a wrong folder before a large model is loaded."""
    if not options.folder.is_dir():
        raise ConfigError(
            f"{options.folder} is not a folder; give a folder with images (for a single image use `tastemaker "
            "ask`) [TM702]"
        )
    files = find_images_and_videos(options.folder, frame_folders=False)
    if not files:
        raise ConfigError(
            f"{options.folder}: no images found; add files that end in {READABLE_SUFFIXES}, or correct the path [TM703]"
        )
    if options.layout == "txt" and (options.folder / METADATA).is_file():
        raise ConfigError(
            f"--format: {options.folder / METADATA} exists, and training reads it instead of .txt files; use "
            "--format jsonl or --format both, or move this file away [TM704]"
        )
    return files


def caption_folder(model: AnsweringModel, options: CaptionOptions, files: Sequence[Path], console: Console) -> int:
    """Caption every image without a caption, and write the captions where training reads them; returns their number."""
    rows = read_caption_list(options.folder / METADATA)
    kept: dict[Path, str] = {}
    if not options.overwrite:
        kept = {file: text for file in files if (text := existing_caption(options, file, rows))}
    if kept:
        print_line(console, f"{len(kept)} of {len(files)} images have captions, which are kept")
    pending = [file for file in files if file not in kept]
    prompt = options.prompt or model.caption_prompt
    ask = AskOptions((prompt,), options.model, options.generation, options.batch_size)
    images = [ImageRecord(file, file.stem.replace("_", " ").replace("-", " ")) for file in pending]
    failure: BaseException | None = None
    try:
        answers = answer_folder(model, ask, options.folder, options.record_path, console, images) if pending else []
    except (ImageError, KeyboardInterrupt) as error:  # the captions so far are written all the same
        failure, answers = error, ask.read_answers(options.record_path, images)
    captions = {row["file"]: " ".join(str(row["answer"]).split()) for row in answers}
    new = {file: captions[str(file)] for file in pending if captions.get(str(file))}
    write_captions(options, {**kept, **new}, rows)
    if empty := sum(not text for text in captions.values()):
        print_line(console, f"{empty} captions are empty and left out; ask another question with --prompt")
    advice = f"data='{{type: image_collection, path: {options.folder}}}'"
    written = {"txt": ".txt beside the images", "jsonl": METADATA, "both": f".txt beside the images and {METADATA}"}
    print_line(console, f"{len(new)} captions written, as {written[options.layout]}; train with {advice}")
    if failure is not None:
        raise failure
    return len(new)


def existing_caption(options: CaptionOptions, file: Path, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The caption of an image in metadata.jsonl or in the .txt beside it; empty if it has none."""
    text_file = file.with_suffix(".txt")
    listed = rows.get(relative_name(options.folder, file), {}).get("prompt")
    beside = read_text(text_file) if text_file.is_file() else ""
    return " ".join(str(listed or beside).split())


def relative_name(folder: Path, file: Path) -> str:
    return file.relative_to(folder).as_posix()


def read_caption_list(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of an existing metadata.jsonl by file name."""
    if not path.is_file() or not read_text(path, MAX_ROWS_BYTES).strip():
        return {}
    rows = [(number, row, row.get("file_name", row.get("file"))) for number, row in read_json_rows(path)]
    for number, _, name in rows:
        if not isinstance(name, str):
            raise ConfigError(
                f"{path}, line {number}: 'file_name' is missing; correct this line, or move the file away [TM705]"
            )
    return {str(name): dict(row) for _, row, name in rows}


def write_captions(options: CaptionOptions, captions: Mapping[Path, str], rows: dict[str, dict[str, Any]]) -> None:
    """Write .txt files and metadata.jsonl, each file atomically; other fields of existing rows are kept."""
    for file, text in captions.items():
        name = relative_name(options.folder, file)
        rows[name] = {**rows.get(name, {}), "file_name": name, "file": name, "prompt": text}
    try:
        for file, text in captions.items() if options.layout != "jsonl" else ():
            if options.overwrite or not file.with_suffix(".txt").is_file():
                write_text_atomically(file.with_suffix(".txt"), text + "\n")
        if options.layout != "txt":
            lines = [json.dumps(rows[key], ensure_ascii=False) + "\n" for key in sorted(rows)]
            write_text_atomically(options.folder / METADATA, "".join(lines))
    except OSError as error:
        raise ConfigError(
            f"captions cannot be written in {options.folder} ({error}); check the permissions of the folder [TM706]"
        ) from error
