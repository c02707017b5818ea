"""Draw source, before and after of an editor's run into one image: tools/edit_sheet.py RUN OUT [COUNT].

The run needs two evaluations, of which one is called `before`. The prompts are the first ones of the benchmark.
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from tastemaker.core.text_layout import wrap_text
from tastemaker.report.run_record import read_run
from tastemaker.report.samples import Sample, read_before_and_after

CELL, TEXT, GAP, COLUMNS = 112, 34, 6, 8  # pixels, pixels, pixels, pictures in a row
GOOD, BAD = "#1e7f43", "#b3261e"


def draw_sheet(run: Path, out: Path, count: int = 16) -> None:
    samples = read_before_and_after(read_run(run), count)
    if samples is None:
        raise SystemExit(f"{run} has no samples before and after; evaluate it first")
    rows, font = -(-len(samples.pairs) // COLUMNS), ImageFont.load_default(11)
    sheet = Image.new("RGB", (COLUMNS * (CELL + GAP), rows * (3 * (CELL + 2) + TEXT + GAP)), "white")
    draw = ImageDraw.Draw(sheet)
    for number, pair in enumerate(samples.pairs):
        x, y = number % COLUMNS * (CELL + GAP), number // COLUMNS * (3 * (CELL + 2) + TEXT + GAP)
        text = "\n".join(wrap_text(pair.prompt, CELL, 2, font.getlength))
        draw.multiline_text((x, y), text, "black", font, spacing=2)
        for row, sample in enumerate((pair.source, pair.before, pair.after)):
            if sample is not None:
                draw_sample(sheet, sample, x, y + TEXT + row * (CELL + 2))
    sheet.save(out, optimize=True)


def draw_sample(sheet: Image.Image, sample: Sample, x: int, y: int) -> None:
    """Paste a sample, with a frame in the color of its verdict."""
    sheet.paste(sample.image.resize((CELL, CELL), Image.Resampling.NEAREST), (x, y))
    if sample.is_right is not None:
        box = (x, y, x + CELL - 1, y + CELL - 1)
        ImageDraw.Draw(sheet).rectangle(box, outline=GOOD if sample.is_right else BAD, width=3)


if __name__ == "__main__":
    draw_sheet(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:4]))
