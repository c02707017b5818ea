"""Figures for notebooks and files: captioned grids of samples, and two sets of samples side by side."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ..core.text_layout import truncate_text
from ..data.image_io import encode_png, make_grid, save_image, to_uint8
from .sample_sets import SampleSet, stack_pixels
from .share_image import BAD, GOOD

TITLE_SIZE, TITLE_LINE, MAX_TITLE_WIDTH = 14, 20, 1200  # pixels: of the font, of a line, and of the text
PAIR_SIZE = 320  # pixels of the longer side of a pair of samples
JPEG_QUALITY = 72
MAX_PNG_BYTES = 32_768  # larger still figures are displayed as JPEG, so that notebooks stay small


@dataclass(frozen=True, repr=False)
class Figure:
    """A picture that displays itself in a notebook; `save` writes it to a file."""

    frames: Tensor  # [F, 3, H, W] in [0, 1]; several frames if the samples are videos
    title: str
    samples: tuple[SampleSet, ...]
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # means by set of samples and reward

    @property
    def image(self) -> Image.Image:
        """The first frame as a PIL image."""
        return Image.fromarray(to_uint8(self.frames[0]))

    def save(self, path: str | Path) -> Path:
        """Write the figure in the format of the suffix: .png, .jpg, .webp; for videos also .gif and .mp4."""
        save_image(self.frames, Path(path))
        return Path(path)

    def __repr__(self) -> str:
        width, height = self.image.size
        return f"Figure({self.title!r}, {width}x{height})"

    def _repr_png_(self) -> bytes | None:
        """PNG for a notebook; None for a large still image, which is displayed as JPEG."""
        content = encode_png(self.frames)
        return content if len(self.frames) > 1 or len(content) <= MAX_PNG_BYTES else None

    def _repr_jpeg_(self) -> bytes | None:
        """JPEG for a notebook; None if the figure is displayed as PNG."""
        if self._repr_png_() is not None:
            return None
        file = io.BytesIO()
        self.image.save(file, "JPEG", quality=JPEG_QUALITY, optimize=True)
        return file.getvalue()


def draw_samples(samples: SampleSet, columns: int | None = None, score: str = "", title: str = "") -> Figure:
    """Draw samples as a grid, each above its prompt and its score."""
    bordered = [draw_border(pixels, find_verdict(samples, i)) for i, pixels in enumerate(samples.pixels)]
    notes = [describe_score(samples, i, score) for i in range(len(samples))]
    captions = samples.prompts if any(samples.prompts) else ()
    grid = make_grid(stack_pixels(bordered), columns, captions, notes=notes if any(notes) else ())
    means = samples.mean_scores()
    text = ": ".join(part for part in (title or samples.name, format_means(means)) if part)
    return Figure(draw_title(grid, [text] if text else []), text, (samples,), {samples.name: means})


def draw_pairs(
    a: SampleSet, b: SampleSet, labels: tuple[str, str], columns: int | None = None, score: str = "", title: str = ""
) -> Figure:
    """Draw the samples of two sets side by side, with scores and the difference where both have them."""
    pixels = stack_pixels([*draw_borders(a), *draw_borders(b)])
    gap = max(1, pixels.shape[-1] // 32)
    left, right = F.pad(pixels[: len(a)], (0, gap), value=1.0), F.pad(pixels[len(a) :], (0, 3 * gap), value=1.0)
    notes = [describe_pair(a, b, i, labels, score) for i in range(len(a))]
    captions = a.prompts if any(a.prompts) else b.prompts
    columns = columns or max(1, min(3, math.ceil(math.sqrt(len(a)))))
    grid = make_grid(
        torch.cat([left, right], -1), columns, captions if any(captions) else (), min_size=PAIR_SIZE, notes=notes
    )
    first, second = a.mean_scores(), b.mean_scores()
    difference = {name: second[name] - first[name] for name in first if name in second}
    lines = [
        *([title] if title else []),
        f"left, {labels[0]}: {format_means(first) or 'no scores'}",
        f"right, {labels[1]}: {format_means(second, difference) or 'no scores'}",
    ]
    if a.seed is not None and b.seed is not None and a.seed != b.seed:
        lines.append(f"The seeds differ: {a.seed} and {b.seed}.")
    scores = {labels[0]: first, labels[1]: second, "difference": difference}
    return Figure(draw_title(grid, lines), "; ".join(lines), (a, b), scores)


def find_verdict(samples: SampleSet, index: int) -> bool | None:
    return samples.verdicts[index] if samples.verdicts else None


def draw_borders(samples: SampleSet) -> list[Tensor]:
    """Return the samples, framed in green if they are right and in red if they are wrong."""
    return [draw_border(pixels, find_verdict(samples, i)) for i, pixels in enumerate(samples.pixels)]


def draw_border(pixels: Tensor, verdict: bool | None) -> Tensor:
    """Add a border [F, 3, H, W] in the color of a verdict; without one, return the sample as it is."""
    if verdict is None:
        return pixels
    width = max(1, pixels.shape[-1] // 32)
    color = GOOD if verdict else BAD
    values = torch.tensor([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    framed = values.view(1, 3, 1, 1).expand(len(pixels), 3, pixels.shape[2] + 2 * width, pixels.shape[3] + 2 * width)
    framed = framed.clone()
    framed[:, :, width:-width, width:-width] = pixels
    return framed


def find_score(samples: SampleSet, index: int, name: str) -> tuple[str, float] | None:
    """Return name and value of one score of a sample: the one named, or its first."""
    row = samples.scores[index] if samples.scores else {}
    name = name or next(iter(row), "")
    return (name, row[name]) if name in row else None


def describe_score(samples: SampleSet, index: int, name: str) -> str:
    """Return a line about a sample: its verdict and its score, as far as they are known."""
    verdict, score = find_verdict(samples, index), find_score(samples, index, name)
    words = [] if verdict is None else ["right" if verdict else "wrong"]
    return ", ".join([*words, *([f"{score[0]} {score[1]:.2f}"] if score else [])])


def describe_pair(a: SampleSet, b: SampleSet, index: int, labels: tuple[str, str], name: str) -> str:
    """Return a line about a pair of samples: both scores and their difference, or both verdicts."""
    first, second = (find_score(samples, index, name) for samples in (a, b))
    if first and second:
        return f"{first[0]}: {first[1]:.2f}, {second[1]:.2f} ({second[1] - first[1]:+.2f})"
    verdicts = [find_verdict(samples, index) for samples in (a, b)]
    if None not in verdicts:
        return ", ".join("right" if verdict else "wrong" for verdict in verdicts)
    return f"{labels[0]}, {labels[1]}"


def format_means(means: Mapping[str, float], difference: Mapping[str, float] | None = None) -> str:
    """Return mean scores as text, with differences in parentheses."""
    changes = {name: f" ({value:+.2f})" for name, value in (difference or {}).items()}
    return ", ".join(f"{name} {value:.2f}{changes.get(name, '')}" for name, value in means.items())


def draw_title(frames: Tensor, lines: Sequence[str]) -> Tensor:
    """Add lines of text above frames [F, 3, H, W], which get wider, up to a limit, if the text needs it."""
    if not lines:
        return frames
    font = ImageFont.load_default(TITLE_SIZE)
    lines = [truncate_text(line, max(frames.shape[-1] - 8, MAX_TITLE_WIDTH), font.getlength) for line in lines]
    width = max(frames.shape[-1], *(math.ceil(font.getlength(line)) + 8 for line in lines))
    image = Image.new("RGB", (width, TITLE_LINE * len(lines) + 4), "white")
    for row, line in enumerate(lines):
        ImageDraw.Draw(image).text((4, 2 + row * TITLE_LINE), line, "black", font)
    header = torch.from_numpy(np.array(image)).movedim(-1, 0) / 255
    padded = F.pad(frames, (0, width - frames.shape[-1]), value=1.0)
    return torch.cat([header.expand(len(frames), -1, -1, -1), padded], 2)
