"""`tastemaker evaluate`: a benchmark's pictures, scores and report, from a recipe or a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

from ..config.build import build, make_tiny
from ..config.schema import RunConfig
from ..core import output_paths
from ..core.randomness import Randomness
from ..core.registry import ConfigError
from ..core.types import Placement, PromptBatch
from ..playground.network_files import TINY
from ..rewards.geneval import Geneval
from ..search.base import RubricVerifier, Search, SearchCost
from ..search.flops import FlopCosts, format_flops, measure_flop_costs
from ..search.generation import check_weights_exist
from ..search.settings import build_verifier, check_even_ranks
from ..search.single import SingleSample
from ..training import distributed
from ..training.device_precision import resolve_locally
from ..training.run import Run
from ..training.sample_grid import sampling_policy
from .benchmarks import Benchmark, playeval, playeval_motion, wordeval
from .detector_metrics import HELD_OUT_DETECTOR, load_playeval_scorer
from .evaluate import (
    BATCH_SIZE,
    REPORT,
    BenchmarkScorer,
    SampleFn,
    StageProgress,
    WorkerGroup,
    evaluate,
    evaluate_files,
    is_finished,
)
from .geneval import GenEvalBenchmarkScorer, find_images, geneval, write_results
from .geneval_detector import describe_detector, load_referee
from .ocr_metrics import load_wordeval_scorer
from .video_metrics import load_playeval_motion_scorer

BENCHMARKS: dict[str, Callable[[int, int], Benchmark]] = {
    "playeval": playeval,
    "playeval-motion": playeval_motion,
    "wordeval": wordeval,
}
METRICS: dict[str, Callable[[str, torch.device], BenchmarkScorer]] = {
    "playeval": load_playeval_scorer,
    "playeval-motion": load_playeval_motion_scorer,
    "wordeval": load_wordeval_scorer,
}
STATE = "state.json"  # of a checkpoint: with the checksum of each of its files
FEW, MANY = (504, 2), (553, 4)  # prompts and pictures of each: the playground's benchmarks, and GenEval's own


ProgressNote = Callable[[StageProgress], str]  # what to show beside the bar of the stage that runs


@dataclass(frozen=True)
class EvaluationOptions:
    """What to ask, and how the answers are made."""

    benchmark: Benchmark
    search: Search = SingleSample()
    judge: str = "playground_judge"  # of the search
    weights: str = ""  # live or a snapshot; the average if there is one
    detector: str = HELD_OUT_DETECTOR
    seed: int = 0
    eyes: Geneval = Geneval()  # GenEval's detector and colours


def load_benchmark(name: str, prompts: int | None, count: int | None, metadata: Path | None = None) -> Benchmark:
    known = [*BENCHMARKS, "geneval"]
    if name not in known:
        raise ConfigError(f"there is no benchmark '{name:.60}'; expected one of {', '.join(known)}")
    if metadata is not None and name != "geneval":
        raise ConfigError(f"--metadata: {name} has prompts of its own; only geneval takes others")
    usual = MANY if name == "geneval" else FEW
    asked = usual[0] if prompts is None else prompts, usual[1] if count is None else count
    try:
        return geneval(*asked, metadata) if name == "geneval" else BENCHMARKS[name](*asked)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"--prompts, --count: {error}") from error


def default_verifier(name: str) -> str:
    """Whom a search asks where nobody was named: who knows the playground knows no photographs."""
    return "vlm" if name == "geneval" else "playground_judge"


def evaluation_directory(name: str, config: RunConfig, found: Path | None, search: str) -> Path:
    """Where an evaluation lies: in the run's directory, or beside other things made of a recipe."""
    home = found.parents[1] / "evaluations" if found else Path("evaluations")
    return home / f"{name}-{search}-{found.name if found else config.name or 'run'}"


def evaluate_model(
    config: RunConfig, found: Path | None, exam: EvaluationOptions, out: Path, *, tiny: bool, console: Console,
    note: ProgressNote | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Go through the stages, show how far they are, and tell the report."""
    if exam.benchmark.moving and config.model.frames == 1:
        raise ConfigError(f"{exam.benchmark.name} asks for clips, but the model makes stills; name another")
    output_paths.check_output_directory(out)
    config = replace(config, engine=replace(config.engine, context=1))  # every rank makes pictures of its own
    run = build(make_tiny(config) if tiny else config, fed=False)
    config = replace(config, engine=run.engine.config)  # with the precision that `auto` stands for here
    if found is not None:
        run.resume(found)
    weights = evaluated_weights(config, exam)
    check_weights_exist(run, weights)
    check_even_ranks(run, exam.search)
    marker = _marker(exam, run.engine.placement(), tiny=tiny)
    model = describe_model(
        config, found, exam, describe_detector(marker) if isinstance(marker, GenEvalBenchmarkScorer) else "", tiny=tiny
    )
    comm = run.engine.comm
    party = WorkerGroup(comm.rank, comm.world, comm.barrier)
    make, rows = (
        sample_maker(run, exam, weights, tiny=tiny),
        run.batch.rollout or BATCH_SIZE,
    )  # where the recipe says how many fit
    stages = evaluate(exam.benchmark, make, marker, out, model, rows, party)
    told = run_stages(stages, exam.benchmark, out, console, party, note)
    run.engine.close()
    return told


def evaluated_weights(config: RunConfig, exam: EvaluationOptions) -> str:
    return exam.weights or ("ema" if config.ema else "live")


def describe_model(
    config: RunConfig, found: Path | None, exam: EvaluationOptions, judge: str = "", *, tiny: bool
) -> str:
    """Everything that an evaluation's samples depend on, as one line that its directory keeps."""
    parts = [config.name or "run", found.name if found else "untrained", evaluated_weights(config, exam)]
    parts += [f"{exam.search}", f"seed {exam.seed}", *([judge] if judge else [])]
    return ", ".join([*parts, f"settings {scores_fingerprint(config, found, exam, tiny)}"])


def is_evaluated(config: RunConfig, found: Path | None, exam: EvaluationOptions, out: Path) -> bool:
    """Whether a directory holds the complete result of an evaluation; answered without building the model."""
    config = replace(config, engine=resolve_locally(config.engine)[0])
    return is_finished(exam.benchmark, out, describe_model(config, found, exam, tiny=False))


def scores_fingerprint(config: RunConfig, found: Path | None, exam: EvaluationOptions, tiny: bool) -> str:
    """A name for all else that scores depend on: those of other settings must not be taken for these."""
    asks = not isinstance(exam.search, SingleSample)
    judged = (exam.judge, config.rewards if exam.judge == "run" else None) if asks else None
    told = (config.model, config.process, config.guidance, config.tuning, config.engine.precision, judged, tiny)
    whole = f"{(*told, exam.eyes, exam.detector)!r}".encode() + ((found / STATE).read_bytes() if found else b"")
    return hashlib.sha256(whole).hexdigest()[:12]


def images_fingerprint(files: Sequence[Path]) -> str:
    """A name for pictures as they are now, which others in their places have not."""
    told = [(file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:12]


def _marker(exam: EvaluationOptions, placement: Placement, *, tiny: bool) -> BenchmarkScorer:
    if exam.benchmark.name == "geneval":
        return load_referee(exam.eyes, replace(placement, dtype=torch.float32), tiny=tiny)
    return METRICS[exam.benchmark.name](TINY if tiny else exam.detector, placement.device)


def score_folder(
    questions: Benchmark, images: Path | None, spec: Geneval, out: Path | None, placement: Placement, *, tiny: bool,
    console: Console,
) -> dict[str, Any]:  # fmt: skip
    """Score pictures in the layout of GenEval's scripts, on as many ranks as there are; again, it goes on."""
    if images is None:
        raise ConfigError("there is nothing to evaluate; name a recipe or a run by --model, or a folder by --images")
    if questions.name != "geneval":
        raise ConfigError(f"--images: {questions.name} is of pictures that are made here; only geneval scores a folder")
    place = output_paths.check_output_directory(out or Path("evaluations") / f"geneval-{images.resolve().name}")
    files = find_images(questions, images)
    comm, started = distributed.init_process_group(placement.device)
    marker = load_referee(spec, placement, tiny=tiny)
    party = WorkerGroup(comm.rank, comm.world, comm.barrier)
    model = f"{images.resolve()}, pictures {images_fingerprint(files)}, {describe_detector(marker)}"
    told = run_stages(evaluate_files(questions, files, marker, place, model, party), questions, place, console, party)
    if started:
        distributed.destroy_process_group()
    return told


def run_stages(
    stages: Iterator[StageProgress],
    questions: Benchmark,
    out: Path,
    console: Console,
    party: WorkerGroup,
    note: ProgressNote | None = None,
) -> dict[str, Any]:
    """Show how far the stages are, and then what they say; one rank speaks for all."""
    console = console if party.rank == 0 else Console(quiet=True)
    noted = (TextColumn("{task.description}"), BarColumn(20), TaskProgressColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*(noted if note else ()), console=console) as progress:
        shown: dict[str, Any] = {}
        for done in stages:
            update_progress(progress, shown, done, note(done) if note else "")
    told: dict[str, Any] = json.loads((out / REPORT).read_text(encoding="utf-8"))
    console.print(table(told))
    console.print(f"the report is {out / REPORT}, pictures and scores are beside it")
    if questions.name == "geneval" and party.rank == 0:
        console.print(f"{write_results(questions, out)} says the same as GenEval's own evaluation would write it")
    return told


def update_progress(progress: Progress, shown: dict[str, Any], done: StageProgress, note: str) -> None:
    """A bar for each stage, from when it begins, with a note beside the one that runs."""
    if done.stage not in shown:
        for task in shown.values():
            progress.update(task, note="")
        shown[done.stage] = progress.add_task(done.stage, total=done.total, note="")
    progress.update(shown[done.stage], completed=done.count, note=note)


def sample_maker(run: Run, exam: EvaluationOptions, weights: str, *, tiny: bool) -> SampleFn:
    """Who makes the pictures: the run's model under the search, each picture with draws of its own."""
    asks = not isinstance(exam.search, SingleSample)
    verifier = build_verifier(exam.judge, run, tiny=tiny) if asks else RubricVerifier(run.rubric)
    known: list[FlopCosts] = []

    @torch.no_grad()
    def make(batch: PromptBatch, rows: torch.Tensor) -> tuple[torch.Tensor, SearchCost]:
        rng = Randomness(exam.seed, 0, rows.to(run.engine.device))
        borrowed = nullcontext() if weights == "live" else run.policy.weights.use(weights)
        with run.engine.computing(), borrowed:
            policy = sampling_policy(run.policy)
            found = exam.search.find(policy, verifier, batch, rng)
            pixels = policy.decode(found.x).float().clamp(0, 1).cpu()
            known[:] = known or [measure_flop_costs(policy, verifier if asks else None, batch, rng)]
        return pixels, known[0].of(found.price)

    return make


def table(report: dict[str, Any]) -> Table:
    """A line for each task: means and where 95 % of them lie."""
    distance = f"Frechet distance {report['frechet']:.3g}, " if "frechet" in report else ""
    calls = f"{report['calls']:.3g} network calls"
    judged = f", {report['judged']:.3g} judgements" if report.get("judged") else ""
    calls += f"{judged} and {format_flops(report['flops'])} a picture" if report.get("flops") else f"{judged} a picture"
    spread = f"diversity {report['diversity']:.3g}, " if "diversity" in report else ""
    title = f"{report['benchmark']}: {report['prompts']} prompts, {report['pictures']} pictures"
    names = tuple(report["scores"])
    right = f"{report['any']['correct']:.1%} of prompts right once, " if "correct" in names else ""
    shown = Table("task", *names, title=title, caption=f"{distance}{spread}{right}{calls}")
    for tag in report["scores"][names[0]]:
        cells = [report["scores"][name][tag] for name in names]
        shown.add_row(tag, *(f"{c['mean']:.3f} [dim]{c['low']:.3f}-{c['high']:.3f}[/]" for c in cells))
    return shown
