"""The scoreboard as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from ..registry import ConfigError
from .aggregate import Ends, Interval, Line
from .results import Result

BEGIN, END = "<!-- bench: written by `tastemaker bench`, do not edit -->", "<!-- bench: end -->"
HEADINGS = {
    "single_object": "single",
    "two_object": "two",
    "counting": "counting",
    "colors": "colours",
    "position": "position",
    "color_attr": "attribution",
}


def section(lines: Sequence[Line], results: Sequence[Result], folder: str, moving: str | None = None) -> str:
    """All tables and pictures, with what they were measured on; `moving` is the table of clips."""
    trained, searched = [line for line in lines if not line.searched], [line for line in lines if line.searched]
    parts = [measured_on(results), f"![every cell, before and after]({folder}/overview.svg)"]
    if trained:
        parts += ["### Training", _table(trained), *_told(trained), "### Task by task, after training", _tasks(trained)]
        parts += ["### Clips: reward, motion and diversity", moving] if moving else []
        parts.append(f"![training rewards and their controls]({folder}/curves.svg)")
    if searched:
        parts += ["### Search instead of training, and after it", _searches(searched), *_told(searched)]
        parts.append(f"![score against price]({folder}/prices.svg)")
    return "\n\n".join(parts)


def marked(text: str, body: str, where: str) -> str:
    """A page with what stands between its marks replaced."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ConfigError(f"{where} has no place for the results; expected the lines '{BEGIN}' and '{END}' in it")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{body}\n\n{END}{rest.partition(END)[2]}"


def measured_on(results: Sequence[Result]) -> str:
    places = sorted({_place(result["environment"]) for result in results})
    asked = sorted({f"{r['after']['prompts']} prompts, {r['after']['pictures']} pictures" for r in results})
    return (
        f"Measured on {'; '.join(places)}: {len(results)} measurements of {'; '.join(asked)}. Numbers are means over "
        "seeds; brackets hold 95 % of the means of prompts and seeds drawn again. Seconds are those of training steps, "
        "while other runs shared the machine; calls are rows times network calls of training."
    )


def _place(environment: dict[str, str]) -> str:
    return f"{environment['device']}, {environment['precision']}, torch {environment['torch']}"


def _table(lines: Sequence[Line]) -> str:
    head = "method, family, reward, seeds, before, after, change, control's change, lenient rule, diversity"
    head += ", Frechet distance, training reward, samples, seconds, calls, guard, aim"
    rows = [
        [
            *(line.objective, line.family, line.reward, str(line.seeds), short(line.before), spread(line.after)),
            *(spread(line.change, signed=True), spread(line.control, signed=True) if line.control else "-"),
            *(
                way(line.lenient, 3),
                way(line.pictures["diversity"], 3),
                way(line.pictures["frechet"], 2),
                way(line.earned, 3),
            ),
            *(count(line.samples), f"{line.seconds:.0f}", count(line.calls)),
            *("silent" if line.warned is None else f"warns at {line.warned}", reached(line)),
        ]
        for line in lines
    ]
    return grid(head.split(", "), rows)


def _tasks(lines: Sequence[Line]) -> str:
    tags = list(dict.fromkeys(tag for line in lines for tag in line.tasks))
    head = ["method", "family", "reward", "score", *(HEADINGS.get(tag, tag.replace("_", " ")) for tag in tags)]
    rows = [
        [line.objective, line.family, line.reward, line.score]
        + [short(line.tasks[tag]) if tag in line.tasks else "-" for tag in tags]
        for line in lines
    ]
    return grid(head, rows)


def _searches(lines: Sequence[Line]) -> str:
    head = ["search", "family", "seeds", "candidates", "calls a picture", "judgements", "operations"]
    head += ["before", "after", "change", "diversity", "aim"]
    rows = [
        [
            *(line.objective, line.family, str(line.seeds), str(line.n), f"{line.price:.0f}"),
            *(f"{line.judged:.0f}" if line.judged else "-", count(line.flops) if line.flops else "-"),
            *(short(line.before), spread(line.after), spread(line.change, signed=True)),
            *(way(line.pictures["diversity"], 3), reached(line)),
        ]
        for line in lines
    ]
    return grid(head, rows)


def _told(lines: Sequence[Line]) -> list[str]:
    """In words: aims that were not reached, and what the guard said."""
    missed = [f"- {line.key}: {', '.join(line.missed)}" for line in lines if line.missed]
    warned = [f"- {line.key}, step {line.warned}: {line.warning}" for line in lines if line.warned is not None]
    parts = ["Aims that were not reached:\n\n" + "\n".join(missed)] if missed else []
    return parts + (["What the guard said:\n\n" + "\n".join(warned)] if warned else [])


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def short(value: float, digits: int = 3) -> str:
    """.483 rather than 0.483."""
    text = f"{value:.{digits}f}"
    return text.replace("0.", ".", 1) if abs(value) < 1 and not text.lstrip("-").startswith("1") else text


def spread(found: Interval, *, signed: bool = False) -> str:
    sign = "+" if signed and found.mean >= 0 else ""
    return f"{sign}{short(found.mean)} ({short(found.low)} to {short(found.high)})"


def way(ends: Ends | None, digits: int) -> str:
    return f"{short(ends[0], digits)} -> {short(ends[1], digits)}" if ends else "-"


def count(number: float) -> str:
    """Three digits at most: 115 k, 1.2 M."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.0f}"


def reached(line: Line) -> str:
    if line.missed is None:
        return "-"
    return "**not reached**" if line.missed else "reached"
