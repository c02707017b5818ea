"""`tastemaker score`: any rewards over a folder of pictures and clips."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from ..config.build import build_rubric
from ..config.schema import RewardConfig
from ..config.validate import build_component as validated
from ..core.plural import pluralize
from ..core.registry import ConfigError
from ..core.reward import RewardError, RewardSpec, Rubric
from ..core.types import Metadata, Placement
from ..data.image_io import FOLDER, IMAGE_FORMATS, VIDEO_SUFFIXES, ImageError, read_image
from ..data.text_files import read_csv_rows, read_json_rows
from ..data.text_files import text_field as column

SUFFIXES = {*IMAGE_FORMATS, ".gif", *VIDEO_SUFFIXES}
FILES, PROMPTS = ("file", "file_name", "image"), ("prompt", "caption", "text")  # columns, as others name them too
WAITING = 4  # batches of pictures read while each waits for others of its size
Row = dict[str, Any]  # a line of the scores


@dataclass(frozen=True)
class ImageRecord:
    file: Path
    prompt: str
    facts: Metadata = field(default_factory=dict)
    pixels: Tensor | None = None  # [F, 3, H, W] once it is read


@dataclass(frozen=True)
class FolderScorer:
    """Rewards, and where they run."""

    rubric: Rubric
    device: torch.device

    @torch.no_grad()
    def scores(self, batch: Sequence[ImageRecord], rubric: Rubric | None = None) -> list[dict[str, float]]:
        """Of pictures of one size."""
        pixels = torch.stack([picture.pixels for picture in batch if picture.pixels is not None]).to(self.device)
        prompts, facts = [picture.prompt for picture in batch], [picture.facts for picture in batch]
        parts = (rubric or self.rubric).score(pixels, prompts, facts).parts
        return [{name: part[i].item() for name, part in parts.items()} for i in range(len(batch))]

    def judged(self, batch: Sequence[ImageRecord]) -> list[Row]:
        """A line for each picture; of those that cannot be scored, one that says why."""
        try:
            found = self.scores(batch)
        except (RewardError, torch.OutOfMemoryError):
            if len(batch) > 1:  # halves find the one that fails, or fit
                half = len(batch) // 2
                return [*self.judged(batch[:half]), *self.judged(batch[half:])]
            return [self._in_part(batch[0])]
        return [score_row(picture) | scores for picture, scores in zip(batch, found, strict=True)]

    def _in_part(self, picture: ImageRecord) -> Row:
        """What those rewards say that can, each asked alone."""
        row, errors = score_row(picture), []
        for name, graded in self.rubric.rewards.items():
            try:
                row |= self.scores([picture], Rubric({name: graded}))[0]
            except RewardError as error:
                errors.append(str(error))
        return row | {"error": "; ".join(dict.fromkeys(errors))}


def score_row(picture: ImageRecord) -> Row:
    return {"file": str(picture.file), "prompt": picture.prompt}


def parse_reward(text: str, option: str) -> tuple[str, RewardSpec]:
    """A reward by name, or as a mapping in YAML: jpeg, or {type: jpeg, quality: 80}."""
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        told = f"{option} {text!r:.80} is not a name or a mapping; expected jpeg or '{{type: jpeg}}'"
        raise ConfigError(told) from error
    data = {"type": data} if isinstance(data, str) else data
    spec: RewardSpec = validated(RewardSpec, data, option)
    return str(data["type"]), spec


def parse_rewards(texts: Sequence[str]) -> dict[str, RewardConfig]:
    """Several of them, each under a name of its own."""
    rewards: dict[str, RewardConfig] = {}
    for text in texts:
        name, spec = parse_reward(text, "--reward")
        rewards[name if name not in rewards else f"{name}-{len(rewards)}"] = RewardConfig(spec)
    return rewards


def load_folder_scorer(texts: Sequence[str], placement: Placement) -> FolderScorer:
    return FolderScorer(build_rubric(parse_rewards(texts), placement), placement.device)


def find_images_with_prompts(path: Path, prompts: Path | None, *, folders: bool = False) -> list[ImageRecord]:
    """Files with their prompts: of a file that says so, of metadata.jsonl beside them, or of their names.

    A folder that ends in .frames is a clip, and with `folders` every one below `path` that holds stills alone.
    """
    folder = image_root(path)
    one, beside = folder != path, folder / "metadata.jsonl"
    files = [path] if one else find_images_and_videos(path, folders=folders)
    if not files:
        raise ConfigError(f"{path}: no pictures found; expected a file or folder with {', '.join(sorted(SUFFIXES))}")
    said = read_metadata(prompts, folder) if prompts else read_metadata(beside, folder) if beside.is_file() else []
    if prompts is None:  # files may have been removed since they were written down
        said = [picture for picture in said if picture.file.exists()]
    if one:
        said = [picture for picture in said if picture.file == path]
    if prompts and not said:
        raise ConfigError(f"{prompts}: it has no row for {path}; expected one whose 'file' is its name")
    return said or [ImageRecord(file, file.stem.replace("_", " ").replace("-", " ")) for file in files]


def image_root(path: Path) -> Path:
    """The folder that pictures are in: `path` itself unless that is one of them."""
    return path.parent if path.is_file() or path.suffix == FOLDER else path


def find_images_and_videos(path: Path, *, folders: bool) -> list[Path]:
    """Pictures, clips and folders of frames below a folder."""
    below = [place for place in path.rglob("*") if not place.name.startswith(".")]
    clips = {
        place for place in below if place.is_dir() and (place.suffix == FOLDER or (folders and is_frame_folder(place)))
    }
    return sorted([*clips, *(file for file in below if prompt_from_name(file) and not clips & {*file.parents})])


def is_frame_folder(folder: Path) -> bool:
    files = [place for place in folder.iterdir() if not place.name.startswith(".")]
    return bool(files) and all(file.suffix.lower() in IMAGE_FORMATS for file in files)


def prompt_from_name(file: Path) -> bool:
    return file.suffix.lower() in SUFFIXES and not file.name.startswith(".")


def read_metadata(record: Path, folder: Path) -> list[ImageRecord]:
    """The rows of a JSONL or CSV; what they know beside the prompt are facts."""
    if record.suffix not in (".jsonl", ".csv"):
        raise ConfigError(f"--prompts: found '{record}'; expected a .jsonl or .csv with columns 'file' and 'prompt'")
    rows = read_json_rows(record) if record.suffix == ".jsonl" else read_csv_rows(record)

    def text(number: int, row: Metadata, names: Sequence[str]) -> str:
        return column(record, number, row, next((name for name in names if name in row), names[0]))

    return [ImageRecord(folder / text(number, row, FILES), text(number, row, PROMPTS), row) for number, row in rows]


def batch_by_size(pictures: Sequence[ImageRecord], size: int) -> Iterator[list[ImageRecord] | Row]:
    """Batches of pictures of one size, few of them in memory at a time; a line for each that cannot be read."""
    waiting: dict[torch.Size, list[ImageRecord]] = {}
    for picture in pictures:
        try:
            pixels = read_image(picture.file)
        except ImageError as error:
            yield score_row(picture) | {"error": str(error)}
            continue
        alike = waiting.setdefault(pixels.shape, [])
        alike.append(ImageRecord(picture.file, picture.prompt, picture.facts, pixels))
        if len(alike) == size or sum(map(len, waiting.values())) > WAITING * size:
            yield waiting.pop(max(waiting, key=lambda shape: len(waiting[shape])))
    yield from waiting.values()


def score_images(
    jury: FolderScorer, pictures: Sequence[ImageRecord], target: Path, size: int, console: Console
) -> None:
    """Write a line a picture as soon as it is known, show the means, and complain of what could not be scored."""
    rows: list[Row] = []
    words: set[str] = set()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("w", encoding="utf-8") as record, Progress(console=console) as progress:
            task = progress.add_task("scoring", total=len(pictures))
            for batch in batch_by_size(pictures, size):
                new = jury.judged(batch) if isinstance(batch, list) else [batch]
                words |= {image_or_video(picture) for picture in batch} if isinstance(batch, list) else set()
                for row in new:
                    record.write(json.dumps(row) + "\n")
                    if "error" in row and len(pictures) > 1:
                        progress.console.print(
                            f"skipped: {row['error']}", markup=False, highlight=False, soft_wrap=True
                        )
                record.flush()
                rows += new
                progress.advance(task, len(new))
    except OSError as error:
        raise ConfigError(f"{target} cannot be written ({error}); name another file with --out") from error
    sort_scores(rows, pictures, target)
    broken, word = [row["error"] for row in rows if "error" in row], words.pop() if len(words) == 1 else "picture"
    if broken and len(rows) == 1:
        raise RewardError(broken[0])
    console.print(table(rows, list(jury.rubric.rewards), word))
    scored = pluralize(len(rows) - len(broken), word)
    console.print(f"{scored} scored, line by line in {target}", markup=False, soft_wrap=True)
    if broken:
        told = f"{len(broken)} of {pluralize(len(rows), word)} could not be scored"
        raise RewardError(f"{told}; {target} says why, line by line")


def image_or_video(picture: ImageRecord) -> str:
    """What a picture that was read is: a picture, or a clip."""
    return "clip" if picture.pixels is not None and len(picture.pixels) > 1 else "picture"


def sort_scores(rows: list[Row], pictures: Sequence[ImageRecord], target: Path) -> None:
    """Rewrite the scores in the order of the images; they were scored grouped by size."""
    places = {(str(picture.file), picture.prompt): place for place, picture in enumerate(pictures)}
    rows.sort(key=lambda row: places[row["file"], row["prompt"]])
    partial = target.with_name(f".{target.name}.partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(partial, target)


def table(rows: Sequence[Row], names: Sequence[str], word: str = "picture") -> Table:
    shown = Table("reward", f"{word}s", "mean", "least", "most")
    for name in names:
        values = [row[name] for row in rows if name in row]
        numbers = [sum(values) / len(values), min(values), max(values)] if values else []
        shown.add_row(name, str(len(values)), *[f"{number:.4g}" for number in numbers])
    return shown
