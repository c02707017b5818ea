"""Samples to display: from tensors, images, files, the directory of a run, a run in memory or a policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ..core.errors import ConfigError
from ..core.policy import Policy
from ..core.randomness import Randomness
from ..core.reward import Rubric
from ..core.safe_files import read_json_rows
from ..core.types import Metadata, PromptBatch
from ..data.image_io import FRAMES_SUFFIX, IMAGE_FORMATS, VIDEO_SUFFIXES, pil_to_pixels, read_image, resize_lanczos
from ..training.run import SAMPLE_STEP, Run
from ..training.samples import sample_pixels
from .headline import find_evaluation_pair
from .run_record import VERDICTS, SampleGrid, read_evaluated_samples, read_run

METRICS_FILE, METADATA_FILE, SCORES_FILE = "metrics.jsonl", "metadata.jsonl", "scores.jsonl"
CONTACT_SHEET = "sheet.png"  # of generated samples, which is no sample itself


@dataclass(frozen=True)
class SampleSet:
    """Samples with their prompts, and their scores and verdicts where these are known."""

    name: str
    pixels: tuple[Tensor, ...]  # [F, 3, H, W] each, in [0, 1]
    prompts: tuple[str, ...]  # empty strings if they are unknown
    metadata: tuple[Metadata, ...] = ()
    scores: tuple[Mapping[str, float], ...] = ()  # of each sample, by reward; empty if they are unknown
    verdicts: tuple[bool | None, ...] = ()  # whether each sample is right; empty if they are unknown
    seed: int | None = None  # of the noise, if known
    means: Mapping[str, float] = field(default_factory=dict)  # of scores that are known as means only

    def __len__(self) -> int:
        return len(self.pixels)

    def mean_scores(self) -> dict[str, float]:
        """Return the mean of each score, and the share of right samples if there are verdicts."""
        names = dict.fromkeys(name for row in self.scores for name in row)
        columns = {name: [row[name] for row in self.scores if name in row] for name in names}
        means = {**self.means, **{name: sum(column) / len(column) for name, column in columns.items()}}
        known = [verdict for verdict in self.verdicts if verdict is not None]
        return {**({"right": sum(known) / len(known)} if known else {}), **means}

    def take(self, count: int) -> SampleSet:
        """Return the first `count` samples."""
        rows = {name: getattr(self, name)[:count] for name in ("pixels", "prompts", "metadata", "scores", "verdicts")}
        return replace(self, **rows) if len(self) > count else self


def collect_samples(
    source: Any, *, count: int, prompts: Sequence[str] = (), seed: int | None = None, step: int | None = None
) -> SampleSet:
    """Return at most `count` samples of a source; see `tastemaker.show` for the sources.

    `prompts` are what runs and policies generate, and the captions of samples whose prompts are unknown. `step` is
    the step of the samples in the directory of a run, by default the last.
    """
    if isinstance(source, Run | Policy):
        batch = choose_prompts(source, prompts, count)
        return generate_samples(source, batch, seed)
    if isinstance(source, str | Path):
        samples = read_directory(Path(source), step) if Path(source).is_dir() else read_files([Path(source)])
    elif isinstance(source, Tensor):
        samples = SampleSet("", split_tensor(source), ())
    elif isinstance(source, Image.Image):
        samples = SampleSet("", (pil_to_pixels(source),), ())
    elif isinstance(source, Sequence) and source:
        samples = collect_list(source)
    else:
        kind = "an empty list" if isinstance(source, Sequence) else f"a {type(source).__name__}"
        raise ConfigError(
            f"cannot show {kind}; expected "
            "files from generate(), images, a tensor, the directory of a run, a run or a policy [TM834]"
        )
    if not any(samples.prompts):
        samples = replace(samples, prompts=(*prompts, *[""] * len(samples))[: len(samples)])
    return samples.take(count)


def collect_list(items: Sequence[Any]) -> SampleSet:
    """Return the samples of a list of files, of PIL images or of tensors."""
    if all(isinstance(item, str | Path) for item in items):
        return read_files([Path(item) for item in items])
    pixels: list[Tensor] = []
    for item in items:
        if isinstance(item, Image.Image):
            pixels.append(pil_to_pixels(item))
        elif isinstance(item, Tensor):
            pixels += split_tensor(item)
        else:
            raise ConfigError(
                f"cannot show a list with a {type(item).__name__}; expected files, images or tensors [TM835]"
            )
    return SampleSet("", tuple(pixels), ())


def split_tensor(pixels: Tensor) -> tuple[Tensor, ...]:
    """Split pixels [3, H, W], [B, 3, H, W] or [B, F, 3, H, W] in [0, 1] into samples [F, 3, H, W]."""
    images = pixels.detach().float().cpu()
    images = images[None] if images.ndim == 3 else images
    images = images[:, None] if images.ndim == 4 else images
    if images.ndim != 5 or images.shape[2] not in (1, 3):
        raise ConfigError(
            f"cannot show a tensor of shape {list(pixels.shape)}; expected [B, 3, H, W] or [B, F, 3, H, W] [TM836]"
        )
    low, high = float(images.min()), float(images.max())
    if low < -0.01 or high > 1.01:
        raise ConfigError(
            f"the pixels are between {low:.3g} and {high:.3g}; expected 0 to 1 (from -1 to 1: x / 2 + 0.5) [TM837]"
        )
    return tuple(images.expand(-1, -1, 3, -1, -1))


# Files


def read_files(paths: Sequence[Path]) -> SampleSet:
    """Read images and videos, with prompts, scores and verdicts from the metadata beside them."""
    rows = {folder: read_metadata(folder) for folder in {path.parent for path in paths}}
    metadata = [rows[path.parent].get(path.name, {}) for path in paths]
    seeds = {row.get("seed") for row in metadata}
    verdicts = [next((bool(row[name]) for name in VERDICTS if row.get(name) in (0, 1)), None) for row in metadata]
    scores = [{name: float(row[name]) for name in ("score", *VERDICTS) if is_finite(row.get(name))} for row in metadata]
    folders = {path.parent.name for path in paths}
    return SampleSet(
        name=folders.pop() if len(folders) == 1 else "",
        pixels=tuple(read_image(path) for path in paths),
        prompts=tuple(str(row.get("prompt", "")) for row in metadata),
        scores=tuple(scores) if any(scores) else (),
        verdicts=tuple(verdicts) if any(verdict is not None for verdict in verdicts) else (),
        seed=seed if len(seeds) == 1 and isinstance(seed := seeds.pop(), int) else None,
    )


def read_metadata(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Return what metadata.jsonl or scores.jsonl of a folder says about each file; empty if there is neither."""
    rows: dict[str, Mapping[str, Any]] = {}
    for path in (folder / METADATA_FILE, folder / SCORES_FILE):
        for row in read_json_rows(path):
            try:
                rows[Path(row["file"]).name] = row
            except (KeyError, TypeError):
                continue
    return rows


def read_directory(folder: Path, step: int | None) -> SampleSet:
    """Read the samples of a run, of an evaluation or of `generate`, or all images of another folder."""
    if (folder / METRICS_FILE).is_file():
        grids = read_run(folder).sample_grids
        chosen = [grid for grid in grids if step is None or grid.step == step]
        if not chosen:
            steps = ", ".join(str(grid.step) for grid in grids) or "none"
            wanted = "" if step is None else f" of step {step}"
            raise ConfigError(
                f"{folder} has no samples{wanted} (steps with samples: {steps}); set sample.every [TM838]"
            )
        return read_sample_grid(chosen[-1], folder.resolve().name)
    rows = read_metadata(folder)
    names = list(rows) or sorted(path.name for path in folder.iterdir() if is_sample(path))
    paths = [folder / name for name in names if (folder / name).exists()]
    if not paths:
        raise ConfigError(f"{folder} holds no run and no images; pass the directory of a run or image files [TM839]")
    return read_files(paths)


def is_sample(path: Path) -> bool:
    suffixes = {*IMAGE_FORMATS, ".gif", *VIDEO_SUFFIXES, FRAMES_SUFFIX}
    return path.suffix.lower() in suffixes and path.name != CONTACT_SHEET and not path.name.startswith(".")


def read_sample_grid(grid: SampleGrid, name: str) -> SampleSet:
    """Cut the samples out of a grid that training wrote. Their scores are known as means only."""
    frames = read_image(grid.path)
    samples = []
    for left, top, right, bottom in grid.boxes:
        scale = max(1, (right - left) // grid.sample_size[0])
        samples.append(frames[:, :, top:bottom:scale, left:right:scale])
    return SampleSet(f"{name}, step {grid.step}", tuple(samples), grid.prompts, means=grid.scores)


def read_common_evaluation(folders: Sequence[Path], count: int) -> list[SampleSet]:
    """Return the samples of the latest evaluations of runs that have the same prompts and seeds; empty if none do."""
    records = [read_run(folder) for folder in folders]
    pairs = [find_evaluation_pair(record) for record in records]
    samples = [
        read_evaluated_samples(record, pair.after) if pair else {} for record, pair in zip(records, pairs, strict=True)
    ]
    keys = [key for key in samples[0] if all(key in other for other in samples[1:])]
    keys = [key for key in keys if len({each[key].prompt for each in samples}) == 1][:count]
    return [
        SampleSet(
            record.name,
            tuple(read_image(each[key].path) for key in keys),
            tuple(each[key].prompt for key in keys),
            verdicts=tuple(each[key].is_right for key in keys),
        )
        for record, each in zip(records, samples, strict=True)
        if keys
    ]


# Runs and policies in memory


def choose_prompts(source: Run | Policy[Any], prompts: Sequence[str], count: int) -> PromptBatch:
    """Return the prompts to generate: those given, or the run's fixed prompts with their metadata."""
    if prompts:
        return PromptBatch(tuple(prompts[:count]), tuple({} for _ in prompts[:count]))
    if isinstance(source, Run):
        return source.fixed_prompts(count)
    raise ConfigError("a policy has no prompts of its own; pass prompts=['a red cube', ...] [TM840]")


@torch.no_grad()
def generate_samples(source: Run | Policy[Any], batch: PromptBatch, seed: int | None) -> SampleSet:
    """Generate one sample per prompt; a run scores them with its rewards."""
    if isinstance(source, Run):
        seed = source.seed if seed is None else seed
        pixels = sample_pixels(source, batch.prompts, batch.metadata, seed).float().clamp(0, 1)
        samples = SampleSet(source.directory.name, tuple(pixels.cpu()), batch.prompts, batch.metadata, seed=seed)
        return score_samples(samples, source.rubric)
    seed = 0 if seed is None else seed
    device = next(iter(source.weights.trainable().values())).device
    rows = torch.arange(len(batch), device=device)
    cond = source.embed(batch.prompts, batch.metadata)
    pixels = source.decode(source.sample(cond, Randomness(seed, SAMPLE_STEP, rows)).final)
    return SampleSet("", tuple(pixels.float().clamp(0, 1).cpu()), batch.prompts, batch.metadata, seed=seed)


@torch.no_grad()
def score_samples(samples: SampleSet, rubric: Rubric) -> SampleSet:
    """Add the scores of all rewards of a rubric to samples."""
    rubric = rubric.pointwise()
    if not rubric.rewards:
        return samples
    rewards = rubric.score(stack_pixels(samples.pixels), samples.prompts, samples.metadata).rewards
    columns = {name: reward.tolist() for name, reward in rewards.items()}
    rows = [{name: column[i] for name, column in columns.items()} for i in range(len(samples))]
    known: Sequence[Mapping[str, float]] = samples.scores or [{}] * len(samples)
    return replace(samples, scores=tuple({**new, **old} for old, new in zip(known, rows, strict=True)))


def stack_pixels(samples: Iterable[Tensor]) -> Tensor:
    """Stack samples as [B, F, 3, H, W], resized to the largest; shorter videos repeat their last frame."""
    rows = list(samples)
    frames, height, width = (max(row.shape[axis] for row in rows) for axis in (0, 2, 3))
    resized = [resize_lanczos(row, height, width) for row in rows]
    return torch.stack([row[torch.arange(frames).clamp(max=len(row) - 1)] for row in resized])


def is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
