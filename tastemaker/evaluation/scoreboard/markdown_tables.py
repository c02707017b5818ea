"""The scoreboard as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.registry import ConfigError
from .aggregate import BeforeAfter, ConfidenceInterval, ScoreboardRow
from .results import Result

BEGIN_MARK, END_MARK = "<!-- bench: written by `tastemaker bench`, do not edit -->", "<!-- bench: end -->"
HEADINGS = {
    "single_object": "single",
    "two_object": "two",
    "counting": "counting",
    "colors": "colours",
    "position": "position",
    "color_attr": "attribution",
}


def format_section(
    lines: Sequence[ScoreboardRow], results: Sequence[Result], folder: str, moving: str | None = None
) -> str:
    """All tables and pictures, with what they were measured on; `moving` is the table of clips."""
    trained, searched = [line for line in lines if not line.searched], [line for line in lines if line.searched]
    parts = [describe_measurements(results), f"![every cell, before and after]({folder}/overview.svg)"]
    if trained:
        parts += [
            "### Training",
            _table(trained),
            *_format_notes(trained),
            "### Task by task, after training",
            _tasks(trained),
        ]
        parts += ["### Clips: reward, motion and diversity", moving] if moving else []
        parts.append(f"![training rewards and their controls]({folder}/curves.svg)")
    if searched:
        parts += ["### Search instead of training, and after it", _searches(searched), *_format_notes(searched)]
        parts.append(f"![score against price]({folder}/prices.svg)")
    return "\n\n".join(parts)


def replace_section(text: str, body: str, where: str) -> str:
    """A page with what stands between its marks replaced."""
    if text.count(BEGIN_MARK) != 1 or text.count(END_MARK) != 1 or text.index(BEGIN_MARK) > text.index(END_MARK):
        raise ConfigError(
            f"{where} has no place for the results; expected the lines '{BEGIN_MARK}' and '{END_MARK}' in it"
        )
    before, _, rest = text.partition(BEGIN_MARK)
    return f"{before}{BEGIN_MARK}\n\n{body}\n\n{END_MARK}{rest.partition(END_MARK)[2]}"


def describe_measurements(results: Sequence[Result]) -> str:
    places = sorted({_place(result["environment"]) for result in results})
    asked = sorted({f"{r['after']['prompts']} prompts, {r['after']['pictures']} pictures" for r in results})
    return (
        f"Measured on {'; '.join(places)}: {len(results)} measurements of {'; '.join(asked)}. Numbers are means over "
        "seeds; brackets hold 95 % of the means of prompts and seeds drawn again. Seconds are those of training steps, "
        "while other runs shared the machine; calls are rows times network calls of training."
    )


def _place(environment: dict[str, str]) -> str:
    return f"{environment['device']}, {environment['precision']}, torch {environment['torch']}"


def _table(lines: Sequence[ScoreboardRow]) -> str:
    head = "method, family, reward, seeds, before, after, change, control's change, lenient rule, diversity"
    head += ", Frechet distance, training reward, samples, seconds, calls, guard, aim"
    rows = [
        [
            *(
                line.objective,
                line.family,
                line.reward,
                str(line.seeds),
                format_score(line.before),
                format_interval(line.after),
            ),
            *(
                format_interval(line.change, signed=True),
                format_interval(line.control, signed=True) if line.control else "-",
            ),
            *(
                format_change(line.lenient, 3),
                format_change(line.pictures["diversity"], 3),
                format_change(line.pictures["frechet"], 2),
                format_change(line.earned, 3),
            ),
            *(format_count(line.samples), f"{line.seconds:.0f}", format_count(line.calls)),
            *("silent" if line.warned is None else f"warns at {line.warned}", format_target(line)),
        ]
        for line in lines
    ]
    return format_table(head.split(", "), rows)


def _tasks(lines: Sequence[ScoreboardRow]) -> str:
    tags = list(dict.fromkeys(tag for line in lines for tag in line.tasks))
    head = ["method", "family", "reward", "score", *(HEADINGS.get(tag, tag.replace("_", " ")) for tag in tags)]
    rows = [
        [line.objective, line.family, line.reward, line.score]
        + [format_score(line.tasks[tag]) if tag in line.tasks else "-" for tag in tags]
        for line in lines
    ]
    return format_table(head, rows)


def _searches(lines: Sequence[ScoreboardRow]) -> str:
    head = ["search", "family", "seeds", "candidates", "calls a picture", "judgements", "operations"]
    head += ["before", "after", "change", "diversity", "aim"]
    rows = [
        [
            *(line.objective, line.family, str(line.seeds), str(line.n), f"{line.price:.0f}"),
            *(f"{line.judged:.0f}" if line.judged else "-", format_count(line.flops) if line.flops else "-"),
            *(format_score(line.before), format_interval(line.after), format_interval(line.change, signed=True)),
            *(format_change(line.pictures["diversity"], 3), format_target(line)),
        ]
        for line in lines
    ]
    return format_table(head, rows)


def _format_notes(lines: Sequence[ScoreboardRow]) -> list[str]:
    """In words: aims that were not reached, and what the guard said."""
    missed = [f"- {line.key}: {', '.join(line.missed)}" for line in lines if line.missed]
    warned = [f"- {line.key}, step {line.warned}: {line.warning}" for line in lines if line.warned is not None]
    parts = ["Aims that were not reached:\n\n" + "\n".join(missed)] if missed else []
    return parts + (["What the guard said:\n\n" + "\n".join(warned)] if warned else [])


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def format_score(value: float, digits: int = 3) -> str:
    """.483 rather than 0.483."""
    text = f"{value:.{digits}f}"
    return text.replace("0.", ".", 1) if abs(value) < 1 and not text.lstrip("-").startswith("1") else text


def format_interval(found: ConfidenceInterval, *, signed: bool = False) -> str:
    sign = "+" if signed and found.mean >= 0 else ""
    return f"{sign}{format_score(found.mean)} ({format_score(found.low)} to {format_score(found.high)})"


def format_change(ends: BeforeAfter | None, digits: int) -> str:
    return f"{format_score(ends[0], digits)} -> {format_score(ends[1], digits)}" if ends else "-"


def format_count(number: float) -> str:
    """Three digits at most: 115 k, 1.2 M."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.0f}"


def format_target(line: ScoreboardRow) -> str:
    if line.missed is None:
        return "-"
    return "**not reached**" if line.missed else "reached"
