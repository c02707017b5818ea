"""`tastemaker score`: scores of rewards for a folder of images and videos."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from ..config.build import build_rubric
from ..config.schema import RewardConfig
from ..config.validate import build_component
from ..console import ProgressBar, Table
from ..core.errors import pluralize
from ..core.output_paths import write_text_atomically
from ..core.registry import ConfigError
from ..core.reward import RewardError, RewardSpec, Rubric
from ..core.safe_files import parse_yaml
from ..core.types import Metadata, Placement
from ..data.edits import resolve_sources
from ..data.image_io import FRAMES_SUFFIX, IMAGE_FORMATS, VIDEO_SUFFIXES, ImageError, read_image
from ..data.text_files import get_text, read_csv_rows, read_json_rows

SUFFIXES = {*IMAGE_FORMATS, ".gif", *VIDEO_SUFFIXES}
FILE_COLUMNS, PROMPT_COLUMNS = ("file", "file_name", "image"), ("prompt", "caption", "text")
MAX_WAITING = 4  # batches of images in memory that wait for others of their size
MAX_WAITING_PIXELS = 40_000_000  # of all of them, which is 32 images of 1024x1024 and 480 MB
ScoreRow = dict[str, Any]  # a line of JSON


@dataclass(frozen=True)
class ImageRecord:
    """An image or video of a folder."""

    file: Path
    prompt: str
    metadata: Metadata = field(default_factory=dict)
    pixels: Tensor | None = None  # [F, 3, H, W] once it is read


@dataclass(frozen=True)
class FolderScorer:
    """Rewards on a device."""

    rubric: Rubric
    device: torch.device

    @torch.no_grad()
    def score_images(self, batch: Sequence[ImageRecord], rubric: Rubric | None = None) -> list[dict[str, float]]:
        """Scores by reward name of each of the images, which have one size."""
        single = [image.pixels[None] for image in batch if image.pixels is not None]
        pixels = (torch.cat(single) if len(single) > 1 else single[0]).to(self.device)  # one image is not copied
        prompts, metadata = [image.prompt for image in batch], [image.metadata for image in batch]
        scores = (rubric or self.rubric).score(pixels, prompts, metadata).rewards
        return [{name: values[i].item() for name, values in scores.items()} for i in range(len(batch))]

    def score_batch(self, batch: Sequence[ImageRecord]) -> list[ScoreRow]:
        """A row for each image; rows of images that cannot be scored have an `error`."""
        try:
            scores = self.score_images(batch)
        except (RewardError, torch.OutOfMemoryError):
            if len(batch) > 1:  # halves isolate the image that fails, or fit into memory
                half = len(batch) // 2
                return [*self.score_batch(batch[:half]), *self.score_batch(batch[half:])]
            return [self._score_one_by_one(batch[0])]
        return [score_row(image) | values for image, values in zip(batch, scores, strict=True)]

    def _score_one_by_one(self, image: ImageRecord) -> ScoreRow:
        """The scores of the rewards that succeed, each evaluated by itself, and the errors of the others."""
        row, errors = score_row(image), []
        for name, reward in self.rubric.rewards.items():
            try:
                row |= self.score_images([image], Rubric({name: reward}))[0]
            except RewardError as error:
                errors.append(str(error))
        return row | {"error": "; ".join(dict.fromkeys(errors))}


def score_row(image: ImageRecord) -> ScoreRow:
    return {"file": str(image.file), "prompt": image.prompt}


def parse_reward(text: str, option: str) -> tuple[str, RewardSpec]:
    """A reward by its name, or as a YAML mapping: jpeg, or {type: jpeg, quality: 80}."""
    try:
        data = parse_yaml(text, option)
    except ConfigError as error:
        raise ConfigError(
            f"{option}: expected a name or a mapping, got {text!r:.80}; give for example jpeg or '{{type: jpeg}}' "
            "[TM387]"
        ) from error
    data = {"type": data} if isinstance(data, str) else data
    spec: RewardSpec = build_component(RewardSpec, data, option)
    return str(data["type"]), spec


def parse_pointwise_reward(text: str, option: str) -> tuple[str, RewardSpec]:
    """A reward as `parse_reward` returns it, if it scores single samples."""
    name, spec = parse_reward(text, option)
    if spec.needs_group or spec.compares_pairs:
        raise ConfigError(
            f"{option}: '{name}' compares the samples of a prompt with each other, and has no score of one sample; use "
            "a reward of single samples, such as the one that it compares, and train with groups for this one [TM1589]"
        )
    return name, spec


def parse_rewards(texts: Sequence[str]) -> dict[str, RewardConfig]:
    """Several rewards of single samples under distinct names."""
    rewards: dict[str, RewardConfig] = {}
    for text in texts:
        name, spec = parse_pointwise_reward(text, "--reward")
        rewards[name if name not in rewards else f"{name}-{len(rewards)}"] = RewardConfig(spec)
    return rewards


def load_folder_scorer(texts: Sequence[str], placement: Placement) -> FolderScorer:
    return FolderScorer(build_rubric(parse_rewards(texts), placement), placement.device)


def find_images_with_prompts(path: Path, prompts: Path | None, *, frame_folders: bool = False) -> list[ImageRecord]:
    """Files with their prompts, from the file `prompts`, else from metadata.jsonl in the folder, else from their names.

    A folder that ends in .frames is a video, and with `frame_folders` every folder below `path` that holds only images.
    """
    folder = image_root(path)
    single, metadata = folder != path, folder / "metadata.jsonl"
    files = [path] if single else find_images_and_videos(path, frame_folders=frame_folders)
    if not files:
        raise ConfigError(f"{path}: no images found; give a file or folder with {', '.join(sorted(SUFFIXES))} [TM388]")
    if prompts:
        records = read_metadata(prompts, folder)
    else:  # files may have been removed since they were listed
        listed = read_metadata(metadata, folder) if metadata.is_file() else []
        records = [record for record in listed if record.file.exists()]
    if single:
        records = [record for record in records if record.file == path]
    if prompts and not records:
        raise ConfigError(f"{prompts}: no row matches {path}; add a row whose 'file' is the name of the image [TM389]")
    return records or [ImageRecord(file, file.stem.replace("_", " ").replace("-", " ")) for file in files]


def image_root(path: Path) -> Path:
    """The folder of the images: `path` itself unless that is an image or video."""
    return path.parent if path.is_file() or path.suffix == FRAMES_SUFFIX else path


def find_images_and_videos(path: Path, *, frame_folders: bool) -> list[Path]:
    """Images, videos and folders of frames below a folder."""
    below = [entry for entry in path.rglob("*") if not entry.name.startswith(".")]
    folders = [entry for entry in below if entry.is_dir()]
    videos = {x for x in folders if x.suffix == FRAMES_SUFFIX or (frame_folders and is_frame_folder(x))}
    files = [file for file in below if file.suffix.lower() in SUFFIXES and not videos & {*file.parents}]
    return sorted([*videos, *files])


def is_frame_folder(folder: Path) -> bool:
    files = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    return bool(files) and all(file.suffix.lower() in IMAGE_FORMATS for file in files)


def read_metadata(path: Path, folder: Path) -> list[ImageRecord]:
    """The rows of a JSONL or CSV file; their other columns become metadata."""
    if path.suffix not in (".jsonl", ".csv"):
        raise ConfigError(
            f"--prompts: expected a .jsonl or .csv file with the columns 'file' and 'prompt', got '{path}'; give "
            "another file [TM390]"
        )
    rows = read_json_rows(path) if path.suffix == ".jsonl" else read_csv_rows(path)

    def column(number: int, row: Metadata, names: Sequence[str]) -> str:
        return get_text(path, number, row, next((name for name in names if name in row), names[0]))

    return [
        ImageRecord(
            folder / column(number, row, FILE_COLUMNS),
            column(number, row, PROMPT_COLUMNS),
            resolve_sources(row, path.parent) if any(name in row for name in FILE_COLUMNS[:2]) else row,
        )
        for number, row in rows
    ]


def batch_by_size(images: Sequence[ImageRecord], batch_size: int) -> Iterator[list[ImageRecord] | ScoreRow]:
    """Batches of images of one size, with few images in memory; a row with an `error` for each unreadable one."""
    waiting: dict[torch.Size, list[ImageRecord]] = {}
    for image in images:
        try:
            record = replace(image, pixels=read_image(image.file))
        except ImageError as error:
            yield score_row(image) | {"error": str(error)}
            continue
        assert record.pixels is not None
        shape = record.pixels.shape
        waiting.setdefault(shape, []).append(record)
        del record  # the caller alone holds what it is given
        if len(waiting[shape]) == batch_size:
            yield waiting.pop(shape)
        while sum(map(len, waiting.values())) > MAX_WAITING * batch_size or count_pixels(waiting) > MAX_WAITING_PIXELS:
            yield waiting.pop(max(waiting, key=lambda shape: (count_pixels({shape: waiting[shape]}), shape)))
    while waiting:
        yield waiting.popitem()[1]


def count_pixels(waiting: Mapping[torch.Size, Sequence[ImageRecord]]) -> int:
    """Return the pixels of images by their shapes [F, 3, H, W]."""
    return sum(len(records) * shape.numel() // 3 for shape, records in waiting.items())


def score_images(
    scorer: FolderScorer, images: Sequence[ImageRecord], target: Path, batch_size: int, console: Console
) -> None:
    """Write a row per image as soon as it is scored, print a table of means, and fail if an image was not scored."""
    rows: list[ScoreRow] = []
    nouns: set[str] = set()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("w", encoding="utf-8") as file, ProgressBar(console) as progress:
            progress.start("scoring", len(images), unit="images")
            for batch in batch_by_size(images, batch_size):
                new = scorer.score_batch(batch) if isinstance(batch, list) else [batch]
                if isinstance(batch, list):
                    nouns |= {"video" if x.pixels is not None and len(x.pixels) > 1 else "image" for x in batch}
                for row in new:
                    file.write(json.dumps(row) + "\n")
                    if "error" in row and len(images) > 1:
                        progress.console.print(
                            f"skipped: {row['error']}", markup=False, highlight=False, soft_wrap=True
                        )
                file.flush()
                rows += new
                progress.advance(len(new))
                del batch  # else its pixels stay in memory while the next ones are read
    except OSError as error:
        raise ConfigError(
            f"--out: {target} cannot be written ({error}); give another file with --out [TM391]"
        ) from error
    # In the order of the images; they were scored grouped by size.
    order = {(str(image.file), image.prompt): i for i, image in enumerate(images)}
    rows.sort(key=lambda row: order[row["file"], row["prompt"]])
    write_text_atomically(target, "".join(json.dumps(row) + "\n" for row in rows))
    errors = [row["error"] for row in rows if "error" in row]
    noun = nouns.pop() if len(nouns) == 1 else "image"
    if errors and len(rows) == 1:
        raise RewardError(errors[0])
    console.print(score_table(rows, list(scorer.rubric.rewards), noun))
    scored = pluralize(len(rows) - len(errors), noun)
    console.print(f"{scored} scored, see {target}", markup=False, soft_wrap=True)
    if errors:
        raise RewardError(
            f"{len(errors)} of {pluralize(len(rows), noun)} could not be scored; see 'error' in {target} [TM392]"
        )


def score_table(rows: Sequence[ScoreRow], names: Sequence[str], noun: str = "image") -> Table:
    """Count, mean, minimum and maximum of each reward."""
    table = Table("reward", f"{noun}s", "mean", "min", "max")
    for name in names:
        values = [row[name] for row in rows if name in row]
        numbers = [sum(values) / len(values), min(values), max(values)] if values else []
        table.add_row(name, str(len(values)), *[f"{number:.4g}" for number in numbers])
    return table
