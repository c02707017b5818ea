"""`tastemaker evaluate`: a benchmark's pictures, scores and report, from a recipe or a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ..config.build import build, judges, shrunk
from ..config.run import RunConfig
from ..eval.benchmark import Benchmark, playeval, playeval_motion, wordeval
from ..eval.evaluate import REPORT, Done, Maker, Marker, evaluate
from ..eval.examiner import HELD_OUT, examiner
from ..eval.proofreader import proofreader
from ..eval.spectator import spectator
from ..playground.trained import TINY
from ..randomness import Randomness
from ..registry import ConfigError
from ..reward import Verifier, shared
from ..search.search import Outcome, Search
from ..search.single import Single
from ..train.looking import viewed
from ..train.run import Run
from ..types import PromptBatch
from .generating import try_on
from .scoring import asked

BENCHMARKS: dict[str, Callable[[int, int], Benchmark]] = {
    "playeval": playeval,
    "playeval-motion": playeval_motion,
    "wordeval": wordeval,
}
MARKERS: dict[str, Callable[[str, torch.device], Marker]] = {
    "playeval": examiner,
    "playeval-motion": spectator,
    "wordeval": proofreader,
}


@dataclass(frozen=True)
class Examination:
    """What to ask, and how the answers are made."""

    benchmark: Benchmark
    search: Search = Single()
    judge: str = "playground_judge"  # of the search
    weights: str = ""  # live or a snapshot; the average if there is one
    detector: str = HELD_OUT
    seed: int = 0


def benchmark(name: str, prompts: int, count: int) -> Benchmark:
    if name not in BENCHMARKS:
        raise ConfigError(f"there is no benchmark '{name:.60}'; expected one of {', '.join(BENCHMARKS)}")
    try:
        return BENCHMARKS[name](prompts, count)
    except ValueError as error:
        raise ConfigError(f"--prompts, --count: {error}") from error


def folder(name: str, config: RunConfig, found: Path | None, search: str) -> Path:
    """Where an evaluation lies: in the run's directory, or beside other things made of a recipe."""
    home = found.parents[1] / "evaluations" if found else Path("evaluations")
    return home / f"{name}-{search}-{found.name if found else config.name or 'run'}"


def examine(
    config: RunConfig, found: Path | None, exam: Examination, out: Path, *, tiny: bool, console: Console
) -> dict[str, Any]:
    """Go through the stages, show how far they are, and tell the report."""
    if exam.benchmark.moving and config.model.frames == 1:
        raise ConfigError(f"{exam.benchmark.name} asks for clips, but the model makes stills; name another")
    run = build(shrunk(config) if tiny else config)
    if found is not None:
        run.resume(found)
    weights = exam.weights or ("ema" if run.ema else "live")
    try_on(run, weights)
    marker = MARKERS[exam.benchmark.name](TINY if tiny else exam.detector, run.engine.device)
    model = (
        f"{config.name or 'run'}, {found.name if found else 'untrained'}, {weights}, {exam.search}, seed {exam.seed}"
    )
    stages = evaluate(exam.benchmark, maker(run, exam, weights, tiny=tiny), marker, out, model)
    with Progress(console=console) as progress:
        shown: dict[str, Any] = {}
        for done in stages:
            follow(progress, shown, done)
    run.engine.close()
    told: dict[str, Any] = json.loads((out / REPORT).read_text(encoding="utf-8"))
    console.print(table(told))
    console.print(f"the report is {out / REPORT}, pictures and scores are beside it")
    return told


def follow(progress: Progress, shown: dict[str, Any], done: Done) -> None:
    """A bar for each stage, from when it begins."""
    if done.stage not in shown:
        shown[done.stage] = progress.add_task(done.stage, total=done.total)
    progress.update(shown[done.stage], completed=done.count)


def maker(run: Run, exam: Examination, weights: str, *, tiny: bool) -> Maker:
    """Who makes the pictures: the run's model under the search, each picture with draws of its own."""
    verifier = Outcome(run.rubric) if isinstance(exam.search, Single) else judge(exam.judge, run, tiny=tiny)

    @torch.no_grad()
    def make(batch: PromptBatch, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        rng = Randomness(exam.seed, 0, rows.to(run.engine.device))
        borrowed = nullcontext() if weights == "live" else run.policy.weights.use(weights)
        with run.engine.computing(), borrowed:
            policy = viewed(run.policy)
            found = exam.search.find(policy, verifier, batch, rng)
            pixels = policy.decode(found.x).float().clamp(0, 1).cpu()
        return pixels, found.price.calls

    return make


def judge(text: str, run: Run, *, tiny: bool) -> Verifier:
    """A reward that judges unfinished pictures too, or any other, or the run's own for `run`."""
    if text == "run":
        return Outcome(run.rubric)
    rewards = asked([text])
    if tiny:
        rewards = {name: replace(reward, spec=reward.spec.tiny()) for name, reward in rewards.items()}
    placement = run.engine.placement()
    live = [shared(reward.spec, placement) for reward in rewards.values()]
    return live[0] if isinstance(live[0], Verifier) else Outcome(judges(rewards, placement))


def table(report: dict[str, Any]) -> Table:
    """A line for each task: means and where 95 % of them lie."""
    distance, calls = f"Frechet distance {report['frechet']:.3g}", f"{report['calls']:.3g} network calls a picture"
    spread = f"diversity {report['diversity']:.3g}, " if "diversity" in report else ""
    title = f"{report['benchmark']}: {report['prompts']} prompts, {report['pictures']} pictures"
    names = tuple(report["scores"])
    shown = Table("task", *names, title=title, caption=f"{distance}, {spread}{calls}")
    for tag in report["scores"][names[0]]:
        cells = [report["scores"][name][tag] for name in names]
        shown.add_row(tag, *(f"{c['mean']:.3f} [dim]{c['low']:.3f}-{c['high']:.3f}[/]" for c in cells))
    return shown
