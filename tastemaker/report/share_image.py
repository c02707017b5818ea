"""The share image of a report: 1200x630 pixels with the headline and samples before and after training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from ..core.output_paths import replace_file
from ..core.text_layout import truncate_text
from .samples import Sample, SamplePair

WIDTH, HEIGHT = 1200, 630
MARGIN, GAP, LABELS = 56, 18, 110  # pixels; LABELS is the width of the column with "before" and "after"
TOP = 216  # of the samples
MAX_COLUMNS = 6
PAPER, INK, QUIET, GOOD, BAD, ACCENT = "#faf9f7", "#1d1c1a", "#66625c", "#1f7a3f", "#b3261e", "#a8481c"


def share_image_path(report: Path) -> Path:
    """Return the path of the share image beside a report: report.html has report-share.png."""
    return report.with_name(f"{report.stem}-share.png")


def write_share_image(path: Path, headline: str, subtitle: str, pairs: Sequence[SamplePair]) -> None:
    """Write the image atomically."""
    with replace_file(path) as partial:
        draw_share_image(headline, subtitle, pairs).save(partial, "PNG", optimize=True)


def draw_share_image(headline: str, subtitle: str, pairs: Sequence[SamplePair]) -> Image.Image:
    """Draw the headline, a line below it, and rows of sources (of edits), of samples before and after training."""
    image = Image.new("RGB", (WIDTH, HEIGHT), PAPER)
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, WIDTH, 10), ACCENT)
    top = 40 if pairs else 230
    draw.text((MARGIN, top), *_fit(headline, 68, WIDTH - 2 * MARGIN, INK))
    draw.text((MARGIN, top + 92), *_fit(subtitle, 32, WIDTH - 2 * MARGIN, QUIET))
    if pairs:
        _draw_pairs(image, draw, pairs)
    return image


def _draw_pairs(image: Image.Image, draw: ImageDraw.ImageDraw, pairs: Sequence[SamplePair]) -> None:
    rows = ("source", "before", "after") if all(pair.source for pair in pairs) else ("before", "after")
    row_height = (HEIGHT - TOP - 34 - GAP * (len(rows) - 1)) // len(rows)
    ratio = max(_frame(pair.after).width / _frame(pair.after).height for pair in pairs)
    available = WIDTH - 2 * MARGIN - LABELS
    columns = max(1, min(len(pairs), MAX_COLUMNS, int((available + GAP) // (row_height * min(ratio, 2.0) + GAP))))
    cell = min(int(row_height * ratio), (available - GAP * (columns - 1)) // columns), row_height
    for row, when in enumerate(rows):
        y = TOP + row * (row_height + GAP)
        font = ImageFont.load_default(28)
        draw.text((MARGIN, y + row_height // 2), when, INK if when == "after" else QUIET, font, anchor="lm")
        for column, pair in enumerate(pairs[:columns]):
            sample = {"source": pair.source or pair.before, "before": pair.before, "after": pair.after}[when]
            picture = _resize(_frame(sample), cell)
            x = MARGIN + LABELS + column * (cell[0] + GAP)
            image.paste(picture, (x, y))
            if sample.is_right is not None:
                _draw_verdict(draw, sample.is_right, x + picture.width, y + picture.height, picture.size)


def _draw_verdict(draw: ImageDraw.ImageDraw, is_right: bool, right: int, bottom: int, size: tuple[int, int]) -> None:
    """Draw a frame around a sample, and a check mark or a cross in its lower right corner."""
    color, x, y = GOOD if is_right else BAD, right - 22, bottom - 22
    draw.rectangle((right - size[0], bottom - size[1], right - 1, bottom - 1), outline=color, width=4)
    draw.ellipse((x - 17, y - 17, x + 17, y + 17), color)
    if is_right:
        draw.line([(x - 8, y), (x - 2, y + 7), (x + 9, y - 7)], "white", 4, joint="curve")
    else:
        draw.line([(x - 7, y - 7), (x + 7, y + 7)], "white", 4)
        draw.line([(x - 7, y + 7), (x + 7, y - 7)], "white", 4)


def _frame(sample: Sample) -> Image.Image:
    """Return the sample itself, or the first frame of a strip."""
    if sample.num_frames == 1:
        return sample.image
    return sample.image.crop((0, 0, sample.image.width // sample.num_frames, sample.image.height))


def _resize(image: Image.Image, cell: tuple[int, int]) -> Image.Image:
    """Resize into a cell. Small images are enlarged without smoothing, so that their pixels stay visible."""
    scale = min(cell[0] / image.width, cell[1] / image.height)
    resampling = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    return image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))), resampling)


def _fit(text: str, size: int, width: int, color: str) -> tuple[str, str, Any]:
    """Return the text, its color and a font in which it fits the width; very long texts are cut."""
    text = truncate_text(text, width)  # a character is wider than a pixel, so no more than that can fit
    for smaller in range(size, size // 2, -2):
        font = ImageFont.load_default(smaller)
        if font.getlength(text) <= width:
            return text, color, font
    return truncate_text(text, width, font.getlength), color, font
