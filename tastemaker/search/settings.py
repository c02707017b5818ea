"""The search of a command line: its settings, its verifier, and the curve of score against cost."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ..config.build import build_rubric
from ..config.registries import SEARCHES
from ..config.validate import build_component
from ..config.yaml_io import parse_yaml
from ..console import Table
from ..core.registry import ConfigError
from ..core.reward import Verifier, load_shared_reward
from ..evaluation.scoreboard.results import ConfidenceInterval, ScoreboardRow
from ..evaluation.scoreboard.svg_charts import cost_chart
from ..rewards.folder_scorer import parse_rewards
from ..training import distributed
from ..training.run import Run
from .base import RubricVerifier, Search
from .diffusers_scheduler import DiffusersSchedulerSearch
from .flops import format_flops

CURVE_FILE, CURVE_CHART = "costs.json", "costs.svg"
Report = dict[str, Any]


def build_search(text: str, n: int | None = None) -> Search:
    """A search by name or by settings such as '{type: parm, start_progress: 0.5}', with n candidates by default."""
    settings = _parse_settings(text)
    if n is not None and takes_candidates(text):
        settings = {"n": n, **settings}
    search: Search = build_component(Search, settings, "--search")
    return search


def takes_candidates(text: str) -> bool:
    """Whether a search has a number of candidates `n`."""
    return "n" in {field.name for field in fields(SEARCHES.find(search_name(text), "--search"))}


def check_constant_cost(run: Run, search: Search) -> None:
    """Refuse a search with a varying number of network calls if the model is sharded over ranks."""
    if run.engine.mesh is not None and not search.constant_cost:
        raise ConfigError(
            f"--search: with engine.strategy={run.engine.config.strategy} all ranks must call the network equally "
            "often, but with this search the number of calls differs between ranks, which would deadlock; set "
            "engine.strategy=replicated [TM582]"
        )


def is_curve_requested(text: str, counts: Sequence[int]) -> bool:
    """Whether `--num-candidates` has several numbers; refuses them for a search without `n`."""
    if len(counts) == 1:
        return False
    if "n" in _parse_settings(text) or not takes_candidates(text):
        raise ConfigError(
            f"--num-candidates: got {len(counts)} numbers, but --search '{text:.60}' does not use them; remove "
            "'n' from the settings of --search, choose best_of_n, prm, parm, published_parm, fk_steering or "
            "noise_search, or give one number [TM583]"
        )
    return True


def build_sampler(text: str, n: int, scheduler: str, steps: int | None) -> Search:
    """Build the search, or plain sampling with a diffusers scheduler if one is named."""
    if not scheduler:
        if steps is not None:
            raise ConfigError(
                "--num-inference-steps: this option needs --scheduler; set process.num_steps for the sampler of "
                "the recipe [TM584]"
            )
        return build_search(text, n)
    if search_name(text) != "single":
        raise ConfigError(
            "--scheduler: it generates one sample per prompt and cannot be combined with --search "
            f"{search_name(text):.60}; remove one of the two options [TM585]"
        )
    return DiffusersSchedulerSearch(scheduler, steps)


def search_name(text: str) -> str:
    """The type of a search, for folders and titles."""
    return str(_parse_settings(text).get("type", ""))


def _parse_settings(text: str) -> dict[str, Any]:
    settings = parse_yaml(text, "--search") if text.lstrip().startswith("{") else {"type": text}
    return settings if isinstance(settings, dict) else {}


def parse_candidates(text: str) -> tuple[int, ...]:
    """The numbers of candidates in `--num-candidates`, with commas between them."""
    try:
        counts = tuple(dict.fromkeys(int(word) for word in text.split(",") if word.strip()))
    except ValueError as error:
        raise ConfigError(
            f"--num-candidates: expected integers, got '{text:.60}'; give for example --num-candidates 1,4,20 [TM586]"
        ) from error
    if not counts or min(counts) < 1:
        raise ConfigError(
            f"--num-candidates: expected integers of at least 1, got '{text:.60}'; give for example --num-candidates "
            "1,4,20 [TM587]"
        )
    return counts


def build_verifier(text: str, run: Run, *, tiny: bool) -> Verifier:
    """The verifier of a reward, or of the run's rewards for `run`; a reward that judges no previews is wrapped."""
    if text == "run":
        weighted = [weighted.reward for weighted in run.rubric.rewards.values() if weighted.weight]
        verifier = weighted[0].verifier() if len(weighted) == 1 else None
        return verifier or RubricVerifier(run.rubric)
    rewards = parse_rewards([text])
    if tiny:
        rewards = {name: replace(reward, spec=reward.spec.tiny()) for name, reward in rewards.items()}
    placement = run.engine.placement()
    first = load_shared_reward(next(iter(rewards.values())).spec, placement)
    return first.verifier() or RubricVerifier(build_rubric(rewards, placement))


def evaluate_curve(
    name: str, counts: Sequence[int], evaluate: Callable[[int, Path], Report], out: Path, console: Console
) -> Report:
    """Evaluate each number of candidates in a folder of its own, draw score against cost, and return the points."""
    reports = [evaluate(n, out / f"n{n}") for n in counts]
    points = [{"n": n, **curve_point(report)} for n, report in zip(counts, reports, strict=True)]
    curve: Report = {"search": name, "points": points}
    if distributed.get_rank():
        return curve
    (out / CURVE_FILE).write_text(json.dumps(curve, indent=1) + "\n", encoding="utf-8")
    lines = [curve_line(name, report, n) for n, report in zip(counts, reports, strict=True)]
    (out / CURVE_CHART).write_text(cost_chart(lines, f"Score against cost: {name}"), encoding="utf-8")
    console.print(format_curve_table(name, points))
    console.print(f"chart: {out / CURVE_CHART}, numbers: {out / CURVE_FILE}")
    return curve


def curve_point(report: Report) -> dict[str, Any]:
    """Mean and 95 % interval of the first score, and the cost per sample."""
    score, scores = next(iter(report["scores"].items()))
    cost = {key: report[key] for key in ("calls", "verifier_calls", "flops")}
    return {"score": score, **{key: scores["overall"][key] for key in ("mean", "low", "high")}, **cost}


def curve_line(name: str, report: Report, n: int) -> ScoreboardRow:
    """A point of the curve as a row of the scoreboard, which draws it."""
    point = curve_point(report)
    interval = ConfidenceInterval(point["mean"], point["low"], point["high"])
    return ScoreboardRow(
        *(f"{name}-{n}", name, name, report["benchmark"], "", n, True, 1, point["score"], 0.0, interval, interval),
        tasks={},
        lenient=None,
        set_metrics={},
        network_calls=point["calls"],
    )


def format_curve_table(name: str, points: Sequence[dict[str, Any]]) -> Table:
    """A table of score and cost per sample, by number of candidates."""
    columns = ("candidates", "network calls", "verifier calls", "operations", points[0]["score"], "95 %")
    table = Table(*columns, title=f"{name}: cost per sample")
    for point in points:
        cost = (f"{point['calls']:.4g}", f"{point['verifier_calls']:.3g}", format_flops(point["flops"]))
        table.add_row(str(point["n"]), *cost, f"{point['mean']:.3f}", f"{point['low']:.3f}-{point['high']:.3f}")
    return table
