"""One measurement of a bench: train or search, evaluate on the benchmark, and write the result."""

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
from ...core.rollout_scope import ROLLOUTS
from ...core.safe_files import read_json
from ...core.weights import FrozenCopyWeights
from ...models.weight_files import shipped_weights_path
from ...playground.network_files import TINY
from ...report.run_record import read_run
from ...search.base import Search
from ...search.best_of_n import SingleSample
from ...training import checkpoint, run_directory
from ...training.device_precision import resolve_locally
from ...training.events import Event, GuardChecked, StepCompleted, TrainingFinished
from ...training.loggers.jsonl import JsonlLogger
from ...training.loop import train
from ...training.run import Run
from ..benchmark_run import SCORERS, EvaluationOptions, build_sample_fn, load_benchmark
from ..benchmarks import Benchmark
from ..evaluate import COST_FIELDS, REPORT, evaluate
from . import results
from .plan import ScoreboardJob, ScoreboardPlan, SearchSettings, describe_cell
from .results import Result

FRAMES_PER_BATCH, GPU_FRAMES_PER_BATCH = 64, 512  # frames generated at a time
MIN_BATCH_SIZE = 16
cached_benchmark = cache(load_benchmark)


class MeasurementInterrupted(Exception):
    """Training was asked to stop before its end. It can be resumed."""


@dataclass(frozen=True)
class Bench:
    """Settings that all measurements of a bench share."""

    plan: ScoreboardPlan
    out: Path
    prompts: int = 504
    samples_per_prompt: int = 2
    overrides: tuple[str, ...] = ()
    tiny: bool = False

    @cached_property
    def _cells(self) -> dict[tuple[str, bool], tuple[RunConfig, list[Any]]]:
        """Cache of `_cell`."""
        return {}

    def _cell(self, cell: str, control: bool = False) -> tuple[RunConfig, list[Any]]:
        """Return the configuration of a cell or its control, and what identifies its evaluation."""
        if (cell, control) not in self._cells:
            # Sample grids cost time, and no one looks at those of a bench.
            config = self.plan.config(cell, [*self.overrides, "sample.every=0"], control=control)
            config = replace(config, engine=resolve_locally(config.engine)[0])
            process = self.plan.process(self.plan.cells[cell].family)
            process_identity = [type(process).__name__, dataclass_to_dict(process, terse=True)]
            self._cells[cell, control] = config, [self.benchmark(cell).fingerprint(), *process_identity, self.tiny]
        return self._cells[cell, control]

    def config(self, job: ScoreboardJob) -> RunConfig:
        """Return the configuration of a job's run."""
        config = replace(self._cell(job.cell, job.kind == "control")[0], seed=job.seed, name=job.key)
        return make_tiny(config) if self.tiny else config

    def benchmark(self, cell: str) -> Benchmark:
        family = self.plan.families[self.plan.cells[cell].family]
        return cached_benchmark(family.benchmark, self.prompts, self.samples_per_prompt)

    def with_baseline(self, job: ScoreboardJob) -> ScoreboardJob:
        """Return the job with the key of its baseline, which has the same weights and the same evaluation."""
        config, evaluation = self._cell(job.cell)
        components = [to_plain(component, None, terse=True) for component in (config.model, config.guidance)]
        digest = _digest([evaluation, *components, config.engine.precision])
        return replace(job, baseline=f"before-{self.plan.cells[job.cell].family}-{digest[:6]}")

    def fingerprint(self, job: ScoreboardJob) -> str:
        """Return a hash of everything the measurement depends on: recipe, weights and prompts."""
        if job.kind == "before":
            return job.baseline
        # Defaults are left out, so that a new key changes no fingerprint.
        config = dataclass_to_dict(self.config(job), terse=True)
        config = {key: value for key, value in config.items() if key not in run_directory.IGNORED_KEYS}
        search = self.plan.cells[job.cell].search
        search_identity = search.fingerprint_parts if search else []
        return _digest([self._cell(job.cell)[1], config, job.num_candidates, search_identity, job.baseline])


def _digest(identity: Any) -> str:
    """Return a hash of settings and of the contents of the weights files that they name."""
    files = {text: _file_digest(shipped_weights_path(text)) for text in sorted(set(_strings(identity))) if _ships(text)}
    return hashlib.sha256(json.dumps([identity, files], sort_keys=True, default=str).encode()).hexdigest()[:16]


def _strings(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping):
        yield from (text for value in tree.values() for text in _strings(value))
    elif isinstance(tree, list | tuple):
        yield from (text for value in tree for text in _strings(value))


@cache
def _ships(name: str) -> bool:
    """Whether a name is that of weights in the package."""
    try:
        return "/" in name and shipped_weights_path(name).is_file()
    except ConfigError:
        return False


@cache
def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run_measurement(bench: Bench, job: ScoreboardJob) -> Result:
    """Run a job, or what is left of it, and write its result."""
    before = None
    if job.kind != "before":
        before = results.read_result(bench.out, job.baseline)
        if before is None:
            raise ConfigError(
                f"{job.key} cannot be compared, because its baseline {job.baseline} was not measured; run the bench "
                f"for {job.baseline} first [TM644]"
            )
    start, cell = time.perf_counter(), bench.plan.cells[job.cell]
    trains = job.kind != "before" and (cell.search is None or cell.search.trained)
    name = job.key if job.kind == "before" else f"{job.key}-{bench.fingerprint(job)[:6]}"
    run_dir = bench.out / "runs" / name
    run = build(bench.config(job), run_dir)
    peak: dict[str, float] = {}
    if trains:
        peak = train_to_end(run, bench.config(job), run_dir)
    after = evaluate_run(bench, job, run, run_dir)
    result: Result = {
        "key": job.key,
        "cell": job.cell,
        "kind": job.kind,
        "seed": job.seed,
        "n": job.num_candidates,
        "fingerprint": bench.fingerprint(job),
        "about": describe_cell(cell),
        "after": after,
    }
    if before is not None:
        result["before"] = before["after"]
        result["difference"] = results.score_differences(before["after"]["rows"], after["rows"])
    if trains:
        result["training"] = results.summarize_training(read_run(run_dir)) | peak
    result |= {"environment": describe_environment(run), "took": round(time.perf_counter() - start, 2)}
    results.write_result(result, bench.out)
    run.engine.close()
    del run
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # other processes may share the device
    return result


def train_to_end(run: Run, config: RunConfig, run_dir: Path) -> dict[str, float]:
    """Train to the last step, resuming an earlier attempt, and return the peak memory of a GPU.

    Only metrics.jsonl is written.
    """
    on_gpu = run.engine.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(run.engine.device)
    latest = checkpoint.latest_checkpoint(run_dir)
    if latest is not None:
        run.resume(latest)
    run_directory.write_run_config(config, run_dir)
    logger, counter, last_step = JsonlLogger(), NetworkCallCounter(run), 0
    try:
        for event in train(run):
            logger.log(counter.annotate(event))
            last_step = event.step if isinstance(event, TrainingFinished) else last_step
    finally:
        logger.close()
        counter.close()
    if last_step < run.steps and not run.guard.stop_on_warning:
        raise MeasurementInterrupted
    return {"peak_gib": round(torch.cuda.max_memory_allocated(run.engine.device) / 2**30, 2)} if on_gpu else {}


class NetworkCallCounter:
    """Counts the network calls of each training step, per sample. Calls of the guard do not count."""

    def __init__(self, run: Run) -> None:
        weights = run.policy.weights
        nets = [weights.net, *(weights.copies.values() if isinstance(weights, FrozenCopyWeights) else ())]
        self.calls = 0
        self._hooks = [net.register_forward_hook(self._count) for net in nets]

    def _count(self, net: nn.Module, inputs: Any, output: Any) -> None:
        self.calls += len(output if isinstance(output, torch.Tensor) else output[0])

    def annotate(self, event: Event) -> Event:
        """Add the calls since the last event to the metrics of a step."""
        if isinstance(event, StepCompleted | GuardChecked):
            calls, self.calls = self.calls, 0
            if isinstance(event, StepCompleted):
                return replace(event, metrics={**event.metrics, "network_calls": calls})
        return event

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def evaluate_run(bench: Bench, job: ScoreboardJob, run: Run, run_dir: Path) -> dict[str, Any]:
    """Evaluate a run's weights on the benchmark, sampling with the process of its family."""
    cell, benchmark = bench.plan.cells[job.cell], bench.benchmark(job.cell)
    run.policy = replace(run.policy, process=bench.plan.process(cell.family))
    weights = "ema" if run.ema_decay else "live"
    settings = cell.search if job.kind == "after" else None
    # Trained models are evaluated on the same noise as before training; the seed of a search is that of its candidates.
    options = EvaluationOptions(
        benchmark,
        _build_search(settings, job.num_candidates),
        settings.verifier if settings else "",
        weights,
        seed=job.seed if settings else 0,
    )
    scorer = SCORERS[benchmark.name](TINY if bench.tiny else options.detector, run.engine.device)
    sample_fn = build_sample_fn(run, options, weights, tiny=bench.tiny)
    num_frames = GPU_FRAMES_PER_BATCH if run.engine.device.type == "cuda" else FRAMES_PER_BATCH
    batch_size = max(MIN_BATCH_SIZE, num_frames // (job.num_candidates or 1) // run.policy.model.pixels[0])
    folder = run_dir / "evaluations" / benchmark.name
    with ROLLOUTS.exact():  # cells that differ in engine.rollout_precision are compared in the training precision
        for _ in evaluate(benchmark, sample_fn, scorer, folder, job.key, batch_size):
            pass
    report: dict[str, Any] = read_json(folder / REPORT)
    kept = ("benchmark", "prompts", "images", *COST_FIELDS, "scores", "frechet", "diversity")
    return {
        **{key: report[key] for key in kept if key in report},
        "rows": results.mean_scores_by_prompt(folder, benchmark.score_names),
    }


def _build_search(settings: SearchSettings | None, num_candidates: int | None) -> Search:
    if settings is None:
        return SingleSample()
    pruning = {"start_progress": settings.start_progress, "top_k": settings.top_k}
    search: Search = SEARCHES.find(settings.type)(
        n=num_candidates, **{key: value for key, value in pruning.items() if value}
    )
    return search


def describe_environment(run: Run) -> dict[str, str]:
    """Return device, precision and versions of a measurement."""
    device = run.engine.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    precision = run.engine.config.precision
    return {"device": name, "precision": precision, "torch": str(torch.__version__), "tastemaker": __version__}
