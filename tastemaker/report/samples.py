"""Samples in the report: cut out of their grids, embedded as data URIs, shown before, during and after training."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import torch
from PIL import Image

from ..data.image_io import ImageError, read_image, to_uint8
from .run_record import RunRecord, SampleGrid

NUM_PAIRS = 16  # prompts shown before and after training
FILMSTRIP_PROMPTS, FILMSTRIP_STEPS = 6, 10
THUMBNAIL = 160  # pixels
MAX_SIDE = 512  # pixels of the longer side of an embedded image
MAX_PNG_SIDE = 128  # images up to this height are embedded as PNG, without loss
FRAMES_PER_STRIP = 4  # frames of a video that are shown side by side
MAX_VIDEO_BYTES = 3 * 2**20  # larger videos are shown as frames only
MIME_TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".mp4": "video/mp4", ".gif": "image/gif"}


@dataclass(frozen=True)
class EmbeddedImage:
    """An image as a data URI. A video is a strip of some of its frames."""

    source: str  # data URI
    width: int
    height: int

    @property
    def is_small(self) -> bool:
        return self.height <= MAX_PNG_SIDE


def embed_samples(grid: SampleGrid, count: int, max_side: int = MAX_SIDE) -> list[EmbeddedImage]:
    """Embed the first `count` samples of a grid. Returns an empty list if the file cannot be read."""
    try:
        frames = read_image(grid.path)  # [F, 3, H, W]
    except ImageError:
        return []
    picks = torch.linspace(0, len(frames) - 1, min(FRAMES_PER_STRIP, len(frames))).round().long()
    images: list[EmbeddedImage] = []
    for left, top, right, bottom in grid.boxes[:count]:
        cells = [Image.fromarray(frame) for frame in to_uint8(frames[picks, :, top:bottom, left:right])]
        # Image grids are enlarged by whole factors, so nearest restores the samples exactly. Videos are compressed.
        resampling = Image.Resampling.NEAREST if len(cells) == 1 else Image.Resampling.BOX
        strip = concatenate_frames([cell.resize(grid.sample_size, resampling) for cell in cells])
        images.append(encode_image(strip, max_side * len(cells)))
    return images


def concatenate_frames(cells: list[Image.Image]) -> Image.Image:
    """Place frames side by side with a gray gap between them."""
    if len(cells) == 1:
        return cells[0]
    width, height = cells[0].size
    gap = max(1, width // 24)
    strip = Image.new("RGB", (len(cells) * (width + gap) - gap, height), "grey")
    for i, cell in enumerate(cells):
        strip.paste(cell, (i * (width + gap), 0))
    return strip


def encode_image(image: Image.Image, max_side: int) -> EmbeddedImage:
    """Encode as PNG if the image is small, otherwise as JPEG of at most `max_side` pixels a side."""
    small = image.height <= MAX_PNG_SIDE
    if max(image.size) > max_side:
        image.thumbnail((max_side, max_side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    settings: dict[str, Any] = {"optimize": True} if small else {"quality": 88}
    image.save(buffer, "PNG" if small else "JPEG", **settings)
    return EmbeddedImage(data_uri(buffer.getvalue(), ".png" if small else ".jpg"), *image.size)


def embed_video(grid: SampleGrid) -> str | None:
    """Return the data URI of a grid of videos, or None for images and for files that are too large to embed."""
    if grid.frames == 1 or grid.path.suffix not in MIME_TYPES or grid.path.stat().st_size > MAX_VIDEO_BYTES:
        return None
    return data_uri(grid.path.read_bytes(), grid.path.suffix)


def data_uri(content: bytes, suffix: str) -> str:
    return f"data:{MIME_TYPES[suffix]};base64,{base64.b64encode(content).decode('ascii')}"


def render_before_and_after(record: RunRecord) -> str:
    """Render a card for each prompt with its first and its last sample."""
    if len(record.sample_grids) < 2:
        return '<p class="quiet">Samples of only one step were kept, so there is nothing to compare.</p>'
    first, last = record.sample_grids[0], record.sample_grids[-1]
    video_class = " clips" if first.frames > 1 else ""
    cards = []
    pairs = zip(last.prompts, embed_samples(first, NUM_PAIRS), embed_samples(last, NUM_PAIRS), strict=False)
    for prompt, before, after in pairs:
        figures = _figure(before, "before", first, prompt) + _figure(after, "after", last, prompt)
        label = _prompt_label(prompt)
        cards.append(f'<div class="card pair"><p>{label}</p><div class="two{video_class}">{figures}</div></div>')
    if not cards:
        return '<p class="quiet">The sample files cannot be read.</p>'
    html = f'<div class="cards pairs">{"".join(cards)}</div>'
    return f'<p class="quiet">{_mean_scores(first, last)}</p>{html}{_embedded_videos(first, last)}'


def render_filmstrip(record: RunRecord) -> str:
    """Render a table of samples during training: a row for each prompt, a column for each of some steps."""
    grids = _evenly_spaced(record.sample_grids)
    if len(grids) < 3:
        return ""
    columns = [embed_samples(grid, FILMSTRIP_PROMPTS, THUMBNAIL) for grid in grids]
    readable = [(grid, column) for grid, column in zip(grids, columns, strict=True) if column]
    head = "".join(f'<th scope="col">step {grid.step}</th>' for grid, _ in readable)
    rows = []
    for i, prompt in enumerate(record.sample_grids[-1].prompts[:FILMSTRIP_PROMPTS]):
        cells = "".join(
            f"<td>{_image(column[i], f'{prompt}, step {grid.step}') if i < len(column) else ''}</td>"
            for grid, column in readable
        )
        rows.append(f'<tr><th scope="row">{_prompt_label(prompt)}</th>{cells}</tr>')
    video_class = " clips" if record.sample_grids[0].frames > 1 else ""
    label = escape(f"Samples of {record.name} during training", quote=True)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table class="film{video_class}">'
        f'<thead><tr><th scope="col">prompt</th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _evenly_spaced(grids: Sequence[SampleGrid]) -> list[SampleGrid]:
    count = min(FILMSTRIP_STEPS, len(grids))
    indices = {round(i * (len(grids) - 1) / max(1, count - 1)) for i in range(count)}
    return [grids[i] for i in sorted(indices)]


def _figure(image: EmbeddedImage, when: str, grid: SampleGrid, prompt: str) -> str:
    alt = f"{when} training, step {grid.step}: {prompt or 'the empty prompt'}"
    return f"<figure>{_image(image, alt, when)}<figcaption>{when}, step {grid.step}</figcaption></figure>"


def _image(image: EmbeddedImage, alt: str, css_class: str = "") -> str:
    classes = " ".join(name for name in (css_class, "pixels" if image.is_small else "") if name)
    size = f'width="{image.width}" height="{image.height}"'
    return f'<img class="{classes}" src="{image.source}" alt="{escape(alt, quote=True)}" {size} loading="lazy">'


def _prompt_label(prompt: str) -> str:
    if not prompt:
        return "<i>the empty prompt</i>"
    return f'<span class="prompt" title="{escape(prompt, quote=True)}">{escape(prompt)}</span>'


def _mean_scores(first: SampleGrid, last: SampleGrid) -> str:
    changes = [
        f"{escape(name)} {first.scores[name]:.3g} &rarr; {score:.3g}"
        for name, score in last.scores.items()
        if name in first.scores
    ]
    text = "Both columns use the same prompts and the same noise."
    return f"{text} Mean scores: {', '.join(changes)}." if changes else text


def _embedded_videos(first: SampleGrid, last: SampleGrid) -> str:
    figures = []
    for when, grid in (("before", first), ("after", last)):
        source = embed_video(grid)
        if source:
            label = escape(f"All samples {when} training, as video", quote=True)
            player = f'<video src="{source}" controls loop muted autoplay playsinline aria-label="{label}"></video>'
            content = player if grid.path.suffix == ".mp4" else f'<img src="{source}" alt="{label}">'
            figures.append(
                f'<figure class="card">{content}<figcaption><p>{when}, step {grid.step}</p></figcaption></figure>'
            )
    return f'<div class="cards">{"".join(figures)}</div>' if figures else ""
