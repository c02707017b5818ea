"""Samples in the report: embedded as data URIs, shown before, during and after training.

Pictures before and after training come from the held-out evaluations where a run has them, because these have
verdicts. Otherwise they are cut out of the grids of samples that were written during training.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ..core.text_layout import truncate_text
from ..data.image_io import ImageError, read_image, to_uint8
from .headline import find_evaluation_pair
from .metric_names import name_benchmark
from .run_record import Box, EvaluatedSample, RunRecord, SampleGrid, read_evaluated_samples

NUM_PAIRS = 12  # prompts shown before and after training
MAX_LABEL_CHARACTERS, MAX_ALTERNATIVE_CHARACTERS = 2000, 200  # of a prompt on the page, and beside each image
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


@dataclass(frozen=True)
class Sample:
    """A sample of one prompt, as a strip of frames if it is a video."""

    image: Image.Image
    num_frames: int  # in the strip
    is_right: bool | None = None  # None without a verdict
    reasons: str = ""  # why it is wrong


@dataclass(frozen=True)
class SamplePair:
    """Samples of the same prompt from the same noise, before and after training."""

    prompt: str
    before: Sample
    after: Sample
    source: Sample | None = None  # what the prompt is about; several images are a strip


@dataclass(frozen=True)
class BeforeAndAfter:
    """Pairs of samples with the steps that they are from, and where they come from."""

    pairs: tuple[SamplePair, ...]
    first_step: int
    last_step: int
    source: str  # sentences


def read_grid(grid: SampleGrid, count: int) -> list[Sample]:
    """Cut the first `count` samples out of a grid. Returns an empty list if the file cannot be read."""
    try:
        frames = read_image(grid.path)  # [F, 3, H, W]
    except ImageError:
        return []
    return [
        make_sample(frames[:, :, top:bottom, left:right], grid.sample_size)
        for left, top, right, bottom in grid.boxes[:count]
    ]


def read_grid_sources(grid: SampleGrid, count: int) -> list[Sample | None]:
    """Cut the sources of the first `count` samples out of a grid; None for each if there are none or on errors."""
    none: list[Sample | None] = [None] * min(count, len(grid.boxes))
    if not grid.source_boxes:
        return none
    try:
        frame = read_image(grid.path)[:1]
    except ImageError:
        return none
    return [_read_source(frame, boxes, grid.sample_size) for boxes in grid.source_boxes[:count]]


def _read_source(frame: Tensor, boxes: Sequence[Box], size: tuple[int, int]) -> Sample | None:
    """A strip of the images in some boxes that are not blank, which is how fewer sources than boxes are drawn."""
    cells = [frame[:, :, top:bottom, left:right] for left, top, right, bottom in boxes]
    shown = [cell for i, cell in enumerate(cells) if i == 0 or cell.amin() < 1]
    return make_sample(torch.cat(shown), size) if shown else None


def make_sample(frames: Tensor, size: tuple[int, int] | None = None, verdict: EvaluatedSample | None = None) -> Sample:
    """Make a strip of some frames [F, 3, H, W], reduced to `size` if it is given."""
    picks = torch.linspace(0, len(frames) - 1, min(FRAMES_PER_STRIP, len(frames))).round().long()
    cells = [Image.fromarray(frame) for frame in to_uint8(frames[picks])]
    if size is not None:
        # Image grids are enlarged by whole factors, so nearest restores the samples exactly. Videos are compressed.
        resampling = Image.Resampling.NEAREST if len(cells) == 1 else Image.Resampling.BOX
        cells = [cell.resize(size, resampling) for cell in cells]
    strip = concatenate_frames(cells)
    return Sample(strip, len(cells), verdict.is_right, verdict.reasons) if verdict else Sample(strip, len(cells))


def embed_samples(grid: SampleGrid, count: int, max_side: int = MAX_SIDE) -> list[EmbeddedImage]:
    """Embed the first `count` samples of a grid. Returns an empty list if the file cannot be read."""
    return [encode_image(sample.image, max_side * sample.num_frames) for sample in read_grid(grid, count)]


def read_before_and_after(record: RunRecord, count: int = NUM_PAIRS) -> BeforeAndAfter | None:
    """Return pairs of samples, with verdicts if the run was evaluated before and after; None if there is no pair."""
    samples = _pairs_of_evaluations(record, count) or _pairs_of_grids(record, count)
    return samples if samples and samples.pairs else None


def _pairs_of_evaluations(record: RunRecord, count: int) -> BeforeAndAfter | None:
    names = find_evaluation_pair(record)
    if names is None or names.before is None:
        return None
    before, after = (read_evaluated_samples(record, name) for name in (names.before, names.after))
    pairs: dict[int, SamplePair] = {}
    for index, seed in before:  # the first readable sample of each of the first prompts
        if index in pairs or len(pairs) == count or (index, seed) not in after:
            continue
        try:
            first, last = (
                make_sample(read_image(row.path), verdict=row) for row in (before[index, seed], after[index, seed])
            )
            path = after[index, seed].source
            shown = make_sample(read_image(path)) if path else None
        except ImageError:
            continue
        pairs[index] = SamplePair(before[index, seed].prompt, first, last, shown)
    if not pairs:
        return None
    benchmark = name_benchmark(str(record.evaluations[names.after].get("benchmark", "the evaluation")))
    source = f"The first {len(pairs)} prompts of {benchmark}, from the same noise before and after."
    return BeforeAndAfter(tuple(pairs.values()), 0, names.step, source)


def _pairs_of_grids(record: RunRecord, count: int) -> BeforeAndAfter | None:
    if len(record.sample_grids) < 2:
        return None
    first, last = record.sample_grids[0], record.sample_grids[-1]
    columns = read_grid(first, count), read_grid(last, count), read_grid_sources(last, count)
    rows = zip(last.prompts, *columns, strict=False)
    return BeforeAndAfter(
        tuple(SamplePair(*row) for row in rows), first.step, last.step,
        "Samples of the same prompts from the same noise, at the first and the last step.",
    )  # fmt: skip


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


def render_before_and_after(record: RunRecord, count: int = NUM_PAIRS) -> str:
    """Render a card for each prompt with its first and its last sample, right or wrong where there is a verdict."""
    samples = read_before_and_after(record, count)
    if samples is None:
        reason = (
            "Samples of only one step were kept, so there is nothing to compare."
            if len(record.sample_grids) < 2
            else "The sample files cannot be read."
        )
        return f'<p class="quiet">{reason}</p>'
    cards = "".join(_pair_card(pair, samples) for pair in samples.pairs)
    text = escape(f"{samples.source}{_count_verdicts(samples.pairs)}")
    clips = _embedded_videos(record.sample_grids[0], record.sample_grids[-1]) if len(record.sample_grids) > 1 else ""
    return f'<p class="quiet">{text}</p><div class="cards pairs">{cards}</div>{clips}'


def _pair_card(pair: SamplePair, samples: BeforeAndAfter) -> str:
    figures = _source_figure(pair.source, pair.prompt) if pair.source is not None else ""
    figures += _figure(pair.before, "before", samples.first_step, pair.prompt)
    figures += _figure(pair.after, "after", samples.last_step, pair.prompt)
    kind = "clips" if pair.after.num_frames > 1 else "compare" if pair.source is None else "edits"
    return f'<div class="card pair"><p>{render_prompt(pair.prompt)}</p><div class="two {kind}">{figures}</div></div>'


def _count_verdicts(pairs: Sequence[SamplePair]) -> str:
    judged = [pair for pair in pairs if pair.before.is_right is not None and pair.after.is_right is not None]
    if not judged:
        return ""
    before, after = (
        sum(pair.before.is_right is True for pair in judged),
        sum(pair.after.is_right is True for pair in judged),
    )
    return f" Right: {before} of {len(judged)} before and {after} of {len(judged)} after training."


def render_filmstrip(record: RunRecord) -> str:
    """Render a table of samples during training: a row for each prompt, a column for each of some steps."""
    grids = _evenly_spaced(record.sample_grids)
    if len(grids) < 3:
        return ""
    columns = [embed_samples(grid, FILMSTRIP_PROMPTS, THUMBNAIL) for grid in grids]
    readable = [(grid, column) for grid, column in zip(grids, columns, strict=True) if column]
    head = "".join(f'<th scope="col">step {grid.step}</th>' for grid, _ in readable)
    sources = read_grid_sources(record.sample_grids[-1], FILMSTRIP_PROMPTS)
    head = ('<th scope="col">source</th>' if any(sources) else "") + head
    rows = []
    for i, prompt in enumerate(record.sample_grids[-1].prompts[:FILMSTRIP_PROMPTS]):
        alt = alternative_text(prompt)
        cells = "".join(
            f"<td>{render_image(column[i], f'{alt}, step {grid.step}') if i < len(column) else ''}</td>"
            for grid, column in readable
        )
        source = sources[i] if i < len(sources) else None
        if source is not None:
            shown = encode_image(source.image, THUMBNAIL * source.num_frames)
            cells = f"<td>{render_image(shown, f'{alt}, source')}</td>{cells}"
        rows.append(f'<tr><th scope="row">{render_prompt(prompt)}</th>{cells}</tr>')
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


def _figure(sample: Sample, when: str, step: int, prompt: str) -> str:
    mark = "" if sample.is_right is None else "right" if sample.is_right else "wrong"
    reasons = f" ({sample.reasons})" if sample.reasons and mark == "wrong" else ""
    alt = f"{when} training, step {step}: {alternative_text(prompt) or 'the empty prompt'}"
    image = render_image(
        encode_image(sample.image, MAX_SIDE * sample.num_frames), f"{alt}; {mark}{reasons}" if mark else alt, when
    )
    sign = {"right": "&#10003;", "wrong": "&#10007;"}.get(mark, "")
    badge = (
        f' <span class="mark {mark}" title="{escape(sample.reasons, quote=True)}">{sign} {mark}</span>' if mark else ""
    )
    return f'<figure class="{mark or "unmarked"}">{image}<figcaption>{when}, step {step}{badge}</figcaption></figure>'


def _source_figure(source: Sample, prompt: str) -> str:
    alt = f"source: {alternative_text(prompt) or 'the empty prompt'}"
    image = render_image(encode_image(source.image, MAX_SIDE * source.num_frames), alt, "source")
    return f'<figure class="unmarked">{image}<figcaption>source</figcaption></figure>'


def render_image(image: EmbeddedImage, alt: str, css_class: str = "") -> str:
    classes = " ".join(name for name in (css_class, "pixels" if image.is_small else "") if name)
    size = f'width="{image.width}" height="{image.height}"'
    return f'<img class="{classes}" src="{image.source}" alt="{escape(alt, quote=True)}" {size} loading="lazy">'


def alternative_text(prompt: str) -> str:
    """Return a prompt as part of the text that stands for an image, of which a page has many."""
    return truncate_text(prompt, MAX_ALTERNATIVE_CHARACTERS)


def render_prompt(prompt: str) -> str:
    if not prompt:
        return "<i>the empty prompt</i>"
    label = escape(truncate_text(prompt, MAX_LABEL_CHARACTERS), quote=True)
    return f'<span class="prompt" title="{label}">{label}</span>'


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
