"""One measurement of a bench: train or search, make the benchmark's pictures, and write down what came of it."""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ... import __version__
from ...config.build import build, make_tiny
from ...config.dump import dataclass_to_dict, to_plain
from ...config.registries import SEARCHES
from ...config.schema import RunConfig
from ...core.registry import ConfigError
from ...core.weights import FrozenCopyWeights
from ...models.weight_files import shipped_weights_path
from ...playground.network_files import TINY
from ...report.run_record import read_run
from ...search.single import SingleSample
from ...training import checkpoint, resume
from ...training.device_precision import resolve_locally
from ...training.events import Event, GuardChecked, StepCompleted, TrainingFinished
from ...training.loggers.jsonl import JsonlLogger
from ...training.loop import train
from ...training.run import Run
from .. import benchmark_run
from ..benchmarks import Benchmark
from ..evaluate import COST_FIELDS, REPORT, evaluate
from . import results
from .plan import ScoreboardJob, ScoreboardPlan, describe_cell, with_shuffled_rewards
from .results import Result

ROWS, ROWS_ON_A_GPU = 64, 512  # frames of samples made at a time


class MeasurementInterrupted(Exception):
    """The run was asked to stop before its end; it can go on."""


@dataclass(frozen=True)
class Bench:
    """What all measurements of a bench share."""

    plan: ScoreboardPlan
    out: Path
    prompts: int = 504
    count: int = 2  # pictures of each prompt
    overrides: tuple[str, ...] = ()
    tiny: bool = False

    @cached_property
    def _known(self) -> dict[str, tuple[RunConfig, list[Any]]]:
        """Of every cell asked about its run, and what says how its pictures are made and judged."""
        return {}

    def _cell(self, cell: str) -> tuple[RunConfig, list[Any]]:
        if cell not in self._known:
            # Nobody looks at samples while so many runs go on, and each look would cost.
            config = self.plan.config(cell, [*self.overrides, "sample.every=0"])
            config = replace(config, engine=resolve_locally(config.engine)[0])
            process = self.plan.process(self.plan.cells[cell].family)
            made = [type(process).__name__, dataclass_to_dict(process, terse=True)]
            asked = [self.benchmark(cell).fingerprint(), *made, self.tiny]
            self._known[cell] = config, asked
        return self._known[cell]

    def config(self, job: ScoreboardJob) -> RunConfig:
        """The run of a job."""
        config = replace(self._cell(job.cell)[0], seed=job.seed, name=job.key)
        config = with_shuffled_rewards(config) if job.kind == "control" else config
        return make_tiny(config) if self.tiny else config

    def benchmark(self, cell: str) -> Benchmark:
        family = self.plan.families[self.plan.cells[cell].family]
        return _benchmark(family.benchmark, self.prompts, self.count)

    def based(self, job: ScoreboardJob) -> ScoreboardJob:
        """The same job with the measurement it is compared with: of the same weights, sampled in the same way."""
        config, asked = self._cell(job.cell)
        told = [
            asked,
            *(to_plain(x, None, terse=True) for x in (config.model, config.guidance)),
            config.engine.precision,
        ]
        return replace(job, base=f"before-{self.plan.cells[job.cell].family}-{_digest(told)[:6]}")

    def fingerprint(self, job: ScoreboardJob) -> str:
        """Return a hash of everything the measurement depends on: recipe, weights and prompts."""
        if job.kind == "before":
            return job.base
        told = dataclass_to_dict(self.config(job), terse=True)  # so that a key added later changes no fingerprint
        config = {key: value for key, value in told.items() if key not in resume.IGNORED_KEYS}
        search = self.plan.cells[job.cell].search
        return _digest([self._cell(job.cell)[1], config, job.n, search.told if search else [], job.base])


@cache
def _benchmark(name: str, prompts: int, count: int) -> Benchmark:
    return benchmark_run.load_benchmark(name, prompts, count)


def _digest(told: Any) -> str:
    """Of settings and of the files of weights they name."""
    files = {text: _contents(shipped_weights_path(text)) for text in sorted(set(_texts(told))) if _ships(text)}
    return hashlib.sha256(json.dumps([told, files], sort_keys=True, default=str).encode()).hexdigest()[:16]


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping):
        yield from (text for value in tree.values() for text in _texts(value))
    elif isinstance(tree, list | tuple):
        yield from (text for value in tree for text in _texts(value))


@cache
def _ships(text: str) -> bool:
    try:
        return "/" in text and shipped_weights_path(text).is_file()
    except ConfigError:
        return False


@cache
def _contents(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run_measurement(bench: Bench, job: ScoreboardJob) -> Result:
    """Do one job, or what is left of it, and write its result."""
    before = None
    if job.kind != "before":
        before = results.read_result(bench.out, job.base)
        if before is None:
            raise ConfigError(f"{job.key} cannot be compared: {job.base} is not measured")
    began, cell = time.perf_counter(), bench.plan.cells[job.cell]
    trains = job.kind != "before" and (cell.search is None or cell.search.trained)
    place = bench.out / "runs" / (job.key if job.kind == "before" else f"{job.key}-{bench.fingerprint(job)[:6]}")
    run = build(bench.config(job), place)
    if trains:
        train_to_end(run, bench.config(job), place)
    after = evaluate_run(bench, job, run, place)
    result: Result = {"key": job.key, "cell": job.cell, "kind": job.kind, "seed": job.seed, "n": job.n}
    result |= {"fingerprint": bench.fingerprint(job), "about": describe_cell(cell), "after": after}
    if before is not None:
        result["before"] = before["after"]
        result["difference"] = results.score_differences(before["after"]["rows"], after["rows"])
    if trains:
        result["training"] = results.summarize_training(read_run(place))
    result |= {"environment": describe_environment(run), "took": round(time.perf_counter() - began, 2)}
    results.write_result(result, bench.out)
    run.engine.close()
    del run
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # other processes may share the device
    return result


def train_to_end(run: Run, config: RunConfig, place: Path) -> None:
    """Train to the end, going on where an earlier try stopped; only the record watches."""
    found = checkpoint.latest(place)
    if found is not None:
        run.resume(found)
    resume.write_run_config(config, place)
    record, counter, last = JsonlLogger(), NetworkCallCounter(run), 0
    try:
        for event in train(run):
            record.see(counter.noted(event))
            last = event.step if isinstance(event, TrainingFinished) else last
    finally:
        record.close()
        counter.close()
    if last < run.steps and not run.guard.stop:
        raise MeasurementInterrupted


class NetworkCallCounter:
    """Counts rows times network calls of each step, leaving out what the guard looks at."""

    def __init__(self, run: Run) -> None:
        weights = run.policy.weights
        nets = [weights.net, *(weights.twins.values() if isinstance(weights, FrozenCopyWeights) else ())]
        self.calls = 0
        self._hooks = [net.register_forward_hook(self._count) for net in nets]

    def _count(self, net: nn.Module, inputs: Any, output: Any) -> None:
        self.calls += len(output if isinstance(output, torch.Tensor) else output[0])

    def noted(self, event: Event) -> Event:
        if isinstance(event, StepCompleted | GuardChecked):
            paid, self.calls = self.calls, 0
            if isinstance(event, StepCompleted):
                return replace(event, metrics={**event.metrics, "calls": paid})
        return event

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def evaluate_run(bench: Bench, job: ScoreboardJob, run: Run, place: Path) -> dict[str, Any]:
    """What the benchmark says of the run's weights, sampled as its family is."""
    cell, questions = bench.plan.cells[job.cell], bench.benchmark(job.cell)
    run.policy = replace(run.policy, process=bench.plan.process(cell.family))
    hunt, weights = cell.search if job.kind == "after" else None, "ema" if run.ema else "live"
    early = {key: x for key, x in (("first", hunt.first), ("keep", hunt.keep)) if x} if hunt else {}
    search = SEARCHES.find(hunt.type)(n=job.n, **early) if hunt else SingleSample()
    # Training is judged on the noise it was judged on before; a search's seed is that of its candidates.
    exam = benchmark_run.EvaluationOptions(
        questions, search, hunt.judge if hunt else "", weights, seed=job.seed if hunt else 0
    )
    marker = benchmark_run.METRICS[questions.name](TINY if bench.tiny else exam.detector, run.engine.device)
    at_once = ROWS_ON_A_GPU if run.engine.device.type == "cuda" else ROWS
    rows = max(16, at_once // (job.n or 1) // run.policy.model.pixels[0])
    folder = place / "evaluations" / questions.name
    for _ in evaluate(
        questions, benchmark_run.sample_maker(run, exam, weights, tiny=bench.tiny), marker, folder, job.key, rows
    ):
        pass
    told: dict[str, Any] = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    kept = ("benchmark", "prompts", "pictures", *COST_FIELDS, "scores", "frechet", "diversity")
    return {
        **{key: told[key] for key in kept if key in told},
        "rows": results.mean_scores_by_prompt(folder, questions.numbers),
    }


def describe_environment(run: Run) -> dict[str, str]:
    """What it was measured on."""
    device = run.engine.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    precision = run.engine.config.precision
    return {"device": name, "precision": precision, "torch": str(torch.__version__), "tastemaker": __version__}
