"""Samples in the page: the same prompts and seeds before and after, and on the way between."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .embedded_images import EmbeddedImage, embed_samples, embed_video
from .run_record import RunRecord, SampleGrid

PAIRS = 16  # prompts shown before and after
ROWS, STEPS = 6, 10  # of the filmstrip
THUMBNAIL = 160  # pixels


def render_before_and_after(record: RunRecord) -> str:
    """A card for each prompt with its first and its last picture."""
    if len(record.sheets) < 2:
        return '<p class="quiet">Samples of only one step were kept, so there is nothing to compare.</p>'
    first, last = record.sheets[0], record.sheets[-1]
    befores, afters = embed_samples(first, PAIRS), embed_samples(last, PAIRS)
    clips = " clips" if first.frames > 1 else ""
    cards = []
    for prompt, before, after in zip(last.prompts, befores, afters, strict=False):
        two = _figure(before, "before", first, prompt) + _figure(after, "after", last, prompt)
        cards.append(f'<div class="card pair"><p>{_prompt_label(prompt)}</p><div class="two{clips}">{two}</div></div>')
    if not cards:
        return '<p class="quiet">The sample files cannot be read.</p>'
    grid = f'<div class="cards pairs">{"".join(cards)}</div>'
    return f'<p class="quiet">{_scores(first, last)}</p>{grid}{_embedded_videos(first, last)}'


def render_filmstrip(record: RunRecord) -> str:
    """Some prompts through training, a column for each of some steps."""
    sheets = _spaced_grids(record.sheets)
    if len(sheets) < 3:
        return ""
    columns = [embed_samples(sheet, ROWS, THUMBNAIL) for sheet in sheets]
    shown = [(sheet, column) for sheet, column in zip(sheets, columns, strict=True) if column]
    head = "".join(f'<th scope="col">step {sheet.step}</th>' for sheet, _ in shown)
    rows = []
    for i, prompt in enumerate(record.sheets[-1].prompts[:ROWS]):
        cells = "".join(
            f"<td>{_image(column[i], f'{prompt}, step {sheet.step}') if i < len(column) else ''}</td>"
            for sheet, column in shown
        )
        rows.append(f'<tr><th scope="row">{_prompt_label(prompt)}</th>{cells}</tr>')
    clips = " clips" if record.sheets[0].frames > 1 else ""
    label = escape(f"Samples of {record.name} through training", quote=True)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table class="film{clips}">'
        f'<thead><tr><th scope="col">prompt</th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _spaced_grids(sheets: Sequence[SampleGrid]) -> list[SampleGrid]:
    count = min(STEPS, len(sheets))
    places = {round(i * (len(sheets) - 1) / max(1, count - 1)) for i in range(count)}
    return [sheets[i] for i in sorted(places)]


def _figure(picture: EmbeddedImage, when: str, sheet: SampleGrid, prompt: str) -> str:
    image = _image(picture, f"{when} training, step {sheet.step}: {prompt or 'the empty prompt'}", when)
    return f"<figure>{image}<figcaption>{when}, step {sheet.step}</figcaption></figure>"


def _image(picture: EmbeddedImage, words: str, kind: str = "") -> str:
    kinds = " ".join(each for each in (kind, "pixels" if picture.small else "") if each)
    size = f'width="{picture.width}" height="{picture.height}"'
    return f'<img class="{kinds}" src="{picture.source}" alt="{escape(words, quote=True)}" {size} loading="lazy">'


def _prompt_label(prompt: str) -> str:
    if not prompt:
        return "<i>the empty prompt</i>"
    return f'<span class="prompt" title="{escape(prompt, quote=True)}">{escape(prompt)}</span>'


def _scores(first: SampleGrid, last: SampleGrid) -> str:
    told = [
        f"{escape(name)} {first.scores[name]:.3g} &rarr; {score:.3g}"
        for name, score in last.scores.items()
        if name in first.scores
    ]
    start = "The same prompts from the same noise."
    return f"{start} Their mean scores: {', '.join(told)}." if told else start


def _embedded_videos(first: SampleGrid, last: SampleGrid) -> str:
    shown = []
    for when, sheet in (("before", first), ("after", last)):
        source = embed_video(sheet)
        if source:
            words = escape(f"All samples {when} training, moving", quote=True)
            player = f'<video src="{source}" controls loop muted autoplay playsinline aria-label="{words}"></video>'
            moving = player if sheet.path.suffix == ".mp4" else f'<img src="{source}" alt="{words}">'
            shown.append(
                f'<figure class="card">{moving}<figcaption><p>{when}, step {sheet.step}</p></figcaption></figure>'
            )
    return f'<div class="cards">{"".join(shown)}</div>' if shown else ""
