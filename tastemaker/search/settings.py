"""Searches as the command line names them: how to search, whom to ask, and the curve of score against price."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..config.build import build_rubric
from ..config.registries import SEARCHES
from ..config.validate import build_component
from ..config.yaml_io import parse_yaml
from ..core.registry import ConfigError
from ..core.reward import Verifier, load_shared_reward
from ..evaluation.scoreboard.aggregate import ConfidenceInterval, ScoreboardRow
from ..evaluation.scoreboard.svg_charts import cost_chart
from ..rewards.scoring import parse_rewards
from ..training import distributed
from ..training.run import Run
from .base import RubricVerifier, Search
from .diffusers_scheduler import DiffusersSchedulerSearch
from .flops import format_flops

PRICES, PICTURE = "prices.json", "prices.svg"
Report = dict[str, Any]


def build_search(text: str, n: int | None = None) -> Search:
    """A search by its name or its settings, as in '{type: parm, first: 0.5}', of n candidates unless they say it."""
    told = _parse_settings(text)
    kind = SEARCHES.find(search_name(text), "--search")
    if n is not None and "n" in {field.name for field in fields(kind)}:
        told = {"n": n, **told}
    found: Search = build_component(Search, told, "--search")
    return found


def check_even_ranks(run: Run, search: Search) -> None:
    """Refuse a search that ranks would not go through alike, where they need one another."""
    if run.engine.mesh is not None and not search.even:
        raise ConfigError(
            f"--search: with engine.strategy {run.engine.config.strategy} all ranks call the network together, but "
            "this search ends once all is right, so that some would wait for ever; set engine.strategy=replicated"
        )


def wants_curve(text: str, counts: Sequence[int]) -> bool:
    """Whether a curve is asked for; a search whose candidates are no matter of `--n` has none."""
    if len(counts) == 1:
        return False
    kind = SEARCHES.find(search_name(text), "--search")
    if "n" in _parse_settings(text) or "n" not in {field.name for field in fields(kind)}:
        raise ConfigError(
            f"--n: found {len(counts)} numbers, but --search '{text:.60}' takes none of them; leave 'n' out of its "
            "settings, choose best_of_n, prm, parm or published_parm, or give one number"
        )
    return True


def build_sampler(text: str, n: int, scheduler: str, steps: int | None) -> Search:
    """Build the search, or plain sampling with a diffusers scheduler if one is named."""
    if not scheduler:
        if steps is not None:
            raise ConfigError("--steps goes with --scheduler; for the process's own sampler set process.steps")
        return build_search(text, n)
    if search_name(text) != "single":
        raise ConfigError(
            f"--scheduler makes one sample a prompt and --search is {search_name(text):.60}; leave one out"
        )
    return DiffusersSchedulerSearch(scheduler, steps)


def search_name(text: str) -> str:
    """A search in a word, for folders and titles."""
    return str(_parse_settings(text).get("type", ""))


def _parse_settings(text: str) -> dict[str, Any]:
    told = parse_yaml(text, "--search") if text.lstrip().startswith("{") else {"type": text}
    return told if isinstance(told, dict) else {}


def parse_candidates(text: str) -> tuple[int, ...]:
    """Of candidates, with commas between them."""
    try:
        found = tuple(dict.fromkeys(int(word) for word in text.split(",") if word.strip()))
    except ValueError as error:
        raise ConfigError(f"--n: found '{text:.60}'; expected whole numbers, as in 1,4,20") from error
    if not found or min(found) < 1:
        raise ConfigError(f"--n: found '{text:.60}'; expected numbers from 1")
    return found


def build_verifier(text: str, run: Run, *, tiny: bool) -> Verifier:
    """A reward that judges unfinished pictures too, or any other; for `run`, the run's own, all or the only one."""
    if text == "run":
        paid = [graded.reward for graded in run.rubric.rewards.values() if graded.weight]
        return paid[0] if len(paid) == 1 and isinstance(paid[0], Verifier) else RubricVerifier(run.rubric)
    rewards = parse_rewards([text])
    if tiny:
        rewards = {name: replace(reward, spec=reward.spec.tiny()) for name, reward in rewards.items()}
    placement = run.engine.placement()
    live = [load_shared_reward(reward.spec, placement) for reward in rewards.values()]
    return live[0] if isinstance(live[0], Verifier) else RubricVerifier(build_rubric(rewards, placement))


def evaluate_curve(
    name: str, counts: Sequence[int], examine: Callable[[int, Path], Report], out: Path, console: Console
) -> list[Report]:
    """One evaluation for each number of candidates, in a folder each; then all of them against their price."""
    reports = [examine(n, out / f"n{n}") for n in counts]
    if distributed.get_rank():
        return reports  # the first one speaks for all
    points = [{"n": n, **curve_point(report)} for n, report in zip(counts, reports, strict=True)]
    (out / PRICES).write_text(json.dumps({"search": name, "points": points}, indent=1) + "\n", encoding="utf-8")
    lines = [curve_line(name, report, n) for n, report in zip(counts, reports, strict=True)]
    (out / PICTURE).write_text(cost_chart(lines, f"Score against price: {name}"), encoding="utf-8")
    console.print(table(name, points))
    console.print(f"the curve is {out / PICTURE}, its numbers are {out / PRICES}")
    return reports


def curve_point(report: Report) -> dict[str, Any]:
    """What was reached, and what it cost a picture."""
    score, scores = next(iter(report["scores"].items()))
    paid = {key: report[key] for key in ("calls", "judged", "flops")}
    return {"score": score, **{key: scores["overall"][key] for key in ("mean", "low", "high")}, **paid}


def curve_line(name: str, report: Report, n: int) -> ScoreboardRow:
    """A report as the scoreboard draws it."""
    known = curve_point(report)
    found = ConfidenceInterval(known["mean"], known["low"], known["high"])
    return ScoreboardRow(
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
        paid = (f"{each['calls']:.4g}", f"{each['judged']:.3g}", format_flops(each["flops"]))
        shown.add_row(str(each["n"]), *paid, f"{each['mean']:.3f}", f"{each['low']:.3f}-{each['high']:.3f}")
    return shown
