"""Searches as the command line names them: how to search, whom to ask, and the curve of score against price."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..bench.aggregate import Interval, Line
from ..bench.pictures import prices
from ..config.build import judges
from ..config.registries import SEARCHES
from ..config.text import parse
from ..config.validate import build
from ..registry import ConfigError
from ..reward import Verifier, shared
from ..search.scheduled import Scheduled
from ..search.search import Outcome, Search
from ..train import ranks
from ..train.run import Run
from .pricing import amount
from .scoring import asked

PRICES, PICTURE = "prices.json", "prices.svg"
Report = dict[str, Any]


def chosen(text: str, n: int | None = None) -> Search:
    """A search by its name or its settings, as in '{type: parm, first: 0.5}', of n candidates unless they say it."""
    told = _told(text)
    kind = SEARCHES.find(named(text), "--search")
    if n is not None and "n" in {field.name for field in fields(kind)}:
        told = {"n": n, **told}
    found: Search = build(Search, told, "--search")
    return found


def together(run: Run, search: Search) -> None:
    """Refuse a search that ranks would not go through alike, where they need one another."""
    if run.engine.mesh is not None and not search.even:
        raise ConfigError(
            f"--search: with engine.strategy {run.engine.config.strategy} all ranks call the network together, but "
            "this search ends once all is right, so that some would wait for ever; set engine.strategy=replicated"
        )


def several(text: str, counts: Sequence[int]) -> bool:
    """Whether a curve is asked for; a search whose candidates are no matter of `--n` has none."""
    if len(counts) == 1:
        return False
    kind = SEARCHES.find(named(text), "--search")
    if "n" in _told(text) or "n" not in {field.name for field in fields(kind)}:
        raise ConfigError(
            f"--n: found {len(counts)} numbers, but --search '{text:.60}' takes none of them; leave 'n' out of its "
            "settings, choose best_of_n, prm, parm or published_parm, or give one number"
        )
    return True


def sampled(text: str, n: int, scheduler: str, steps: int | None) -> Search:
    """The same, unless samples are to be made by a scheduler of diffusers."""
    if not scheduler:
        if steps is not None:
            raise ConfigError("--steps goes with --scheduler; for the process's own sampler set process.steps")
        return chosen(text, n)
    if named(text) != "single":
        raise ConfigError(f"--scheduler makes one sample a prompt and --search is {named(text):.60}; leave one out")
    return Scheduled(scheduler, steps)


def named(text: str) -> str:
    """A search in a word, for folders and titles."""
    return str(_told(text).get("type", ""))


def _told(text: str) -> dict[str, Any]:
    told = parse(text, "--search") if text.lstrip().startswith("{") else {"type": text}
    return told if isinstance(told, dict) else {}


def numbers(text: str) -> tuple[int, ...]:
    """Of candidates, with commas between them."""
    try:
        found = tuple(dict.fromkeys(int(word) for word in text.split(",") if word.strip()))
    except ValueError as error:
        raise ConfigError(f"--n: found '{text:.60}'; expected whole numbers, as in 1,4,20") from error
    if not found or min(found) < 1:
        raise ConfigError(f"--n: found '{text:.60}'; expected numbers from 1")
    return found


def judge(text: str, run: Run, *, tiny: bool) -> Verifier:
    """A reward that judges unfinished pictures too, or any other; for `run`, the run's own, all or the only one."""
    if text == "run":
        paid = [graded.reward for graded in run.rubric.rewards.values() if graded.weight]
        return paid[0] if len(paid) == 1 and isinstance(paid[0], Verifier) else Outcome(run.rubric)
    rewards = asked([text])
    if tiny:
        rewards = {name: replace(reward, spec=reward.spec.tiny()) for name, reward in rewards.items()}
    placement = run.engine.placement()
    live = [shared(reward.spec, placement) for reward in rewards.values()]
    return live[0] if isinstance(live[0], Verifier) else Outcome(judges(rewards, placement))


def curve(
    name: str, counts: Sequence[int], examine: Callable[[int, Path], Report], out: Path, console: Console
) -> list[Report]:
    """One evaluation for each number of candidates, in a folder each; then all of them against their price."""
    reports = [examine(n, out / f"n{n}") for n in counts]
    if ranks.rank():
        return reports  # the first one speaks for all
    points = [{"n": n, **point(report)} for n, report in zip(counts, reports, strict=True)]
    (out / PRICES).write_text(json.dumps({"search": name, "points": points}, indent=1) + "\n", encoding="utf-8")
    lines = [line(name, report, n) for n, report in zip(counts, reports, strict=True)]
    (out / PICTURE).write_text(prices(lines, f"Score against price: {name}"), encoding="utf-8")
    console.print(table(name, points))
    console.print(f"the curve is {out / PICTURE}, its numbers are {out / PRICES}")
    return reports


def point(report: Report) -> dict[str, Any]:
    """What was reached, and what it cost a picture."""
    score, scores = next(iter(report["scores"].items()))
    paid = {key: report[key] for key in ("calls", "judged", "flops")}
    return {"score": score, **{key: scores["overall"][key] for key in ("mean", "low", "high")}, **paid}


def line(name: str, report: Report, n: int) -> Line:
    """A report as the scoreboard draws it."""
    known = point(report)
    found = Interval(known["mean"], known["low"], known["high"])
    return Line(
        *(f"{name}-{n}", name, name, report["benchmark"], "", n, True, 1, known["score"], 0.0, found, found),
        tasks={},
        lenient=None,
        pictures={},
        price=known["calls"],
    )


def table(name: str, points: Sequence[dict[str, Any]]) -> Table:
    head = ("candidates", "network calls", "judgements", "operations", points[0]["score"], "95 %")
    shown = Table(*head, title=f"{name}: what a picture costs")
    for each in points:
        paid = (f"{each['calls']:.4g}", f"{each['judged']:.3g}", amount(each["flops"]))
        shown.add_row(str(each["n"]), *paid, f"{each['mean']:.3f}", f"{each['low']:.3f}-{each['high']:.3f}")
    return shown
