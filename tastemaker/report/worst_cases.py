"""The page of an evaluation's worst samples: images with the questions, the answers and the scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..core.output_paths import write_text_atomically
from ..core.text_layout import truncate_text
from ..data.image_io import ImageError, read_image
from ..evaluation.evaluate import SCORES, read_jsonl
from .page import STYLE
from .samples import MAX_SIDE, alternative_text, encode_image, make_sample, render_image, render_prompt

PAGE = "worst.html"
NUM_CASES = 24
MAX_QUESTIONS, MAX_TEXT = 40, 600  # of a sample; characters of a question or an answer
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def write_worst_cases(out: Path, report: Mapping[str, Any], count: int = NUM_CASES) -> Path:
    """Write `worst.html` of an evaluation directory: the samples with the lowest scores, one per prompt."""
    score = str(report.get("headline") or next(iter(report["scores"])))
    cases = find_worst_cases(read_jsonl(out / SCORES), score, count)
    write_text_atomically(out / PAGE, render_worst_cases(cases, score, report, out))
    return out / PAGE


def find_worst_cases(rows: Sequence[Mapping[str, Any]], score: str, count: int) -> list[Mapping[str, Any]]:
    """Return the worst sample of each prompt, from the lowest score on. Samples without the score are left out."""
    worst: dict[int, Mapping[str, Any]] = {}
    for row in rows:
        if row.get(score) is None:
            continue
        if row["index"] not in worst or row[score] < worst[row["index"]][score]:
            worst[row["index"]] = row
    return sorted(worst.values(), key=lambda row: (row[score], row["index"]))[:count]


def render_worst_cases(cases: Sequence[Mapping[str, Any]], score: str, report: Mapping[str, Any], out: Path) -> str:
    """Render the HTML document. Styles and images are inline; nothing of the samples is taken as markup."""
    name, total = str(report["benchmark"]), report["scores"][score].get("overall")
    heading = f"Worst samples of {name}"
    overall = f"{score} {total['mean']:.3f}, 95 % from {total['low']:.3f} to {total['high']:.3f}" if total else score
    judge = f", judge {report['judge']}" if report.get("judge") else ""
    summary = f"{report['model']}: {overall}{judge}. The worst sample of each prompt, from the lowest {score} on."
    cards = "".join(_render_case(case, score, out) for case in cases)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{escape(heading)} - Tastemaker</title><style>{STYLE.read_text(encoding='utf-8')}</style></head>"
        f'<body><header><h1>{escape(heading)}</h1><p class="quiet">{escape(summary)}</p></header>'
        f'<main><div class="cards pairs">{cards}</div></main>'
        "<footer><p>Written by Tastemaker. This file contains all of its images and needs no network.</p></footer>"
        "</body></html>\n"
    )


def _render_case(row: Mapping[str, Any], score: str, out: Path) -> str:
    prompt = str(row["prompt"])
    try:
        sample = make_sample(read_image(out / str(row["file"])))
        embedded = encode_image(sample.image, MAX_SIDE * sample.num_frames)
        image = render_image(embedded, alternative_text(prompt) or "the empty prompt")
    except ImageError:
        image = '<p class="quiet">The image cannot be read.</p>'
    caption = f"{score} {float(row[score]):.3f}, {row['tag']}, {row['file']}"
    return (
        f'<div class="card pair"><p>{render_prompt(prompt)}</p><figure>{image}'
        f"<figcaption>{escape(caption)}</figcaption></figure>{_render_answers(row)}</div>"
    )


def _render_answers(row: Mapping[str, Any]) -> str:
    """Render the questions from the lowest score on, or the reasons why a sample is wrong."""
    reasons = "".join(f"<li>{_text(reason)}</li>" for reason in row.get("reasons", ()))
    answers = sorted(row.get("answers", ()), key=lambda answer: float(answer["score"]))
    lines = "".join(
        f'<tr><th scope="row">{_text(answer["question"])}</th><td>{_text(answer.get("expected", ""))}</td>'
        f"<td>{_text(answer.get('answer', ''))}</td><td>{float(answer['score']):.3f}</td></tr>"
        for answer in answers[:MAX_QUESTIONS]
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("question", "expected", "answer", "score"))
    table = f'<table class="settings"><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>'
    more = f'<p class="quiet">{len(answers) - MAX_QUESTIONS} more questions</p>' if len(answers) > MAX_QUESTIONS else ""
    return (f"<ul>{reasons}</ul>" if reasons else "") + (f'<div class="scroll">{table}</div>{more}' if lines else "")


def _text(value: Any) -> str:
    return escape(truncate_text(str(value), MAX_TEXT))
