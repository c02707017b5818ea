"""The three stages of an evaluation: samples, scores, report. Each writes a file, and is skipped if the file exists."""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from ..core.objective import Comm, SingleProcess
from ..core.output_paths import SOURCE_FILE, write_text_atomically
from ..core.registry import ConfigError
from ..core.safe_files import parse_json, read_json, read_json_object, read_text
from ..core.types import Metadata, PromptBatch, Prompts
from ..data.image_io import read_image, save_image
from ..rewards.reference_images import reference_images
from ..search.base import SearchCost
from .benchmarks import Benchmark
from .metrics import IntervalDict, diversity, frechet_distance, summarize_scores

MANIFEST, SAMPLES, SCORES, REPORT = "questions.json", "samples.jsonl", "scores.jsonl", "report.json"
BATCH_SIZE = 64  # samples
COST_FIELDS = ("calls", "verifier_calls", "flops")  # of a sample
NUM_READERS, NUM_WRITERS = 8, 4  # threads that read and write images
SINGLE_PROCESS = SingleProcess()

# Generates pixels [B, F, 3, H, W] of prompts, given the sample indices [B] that seed the noise, and their total cost.
SampleFn = Callable[[PromptBatch, Tensor], tuple[Tensor, SearchCost]]


class BenchmarkScorer(ABC):
    """Scores the samples of a benchmark."""

    has_real_images: ClassVar[bool] = False  # whether `features` and `real_samples` are implemented

    @property
    def detector(self) -> str:
        """Name of the detector and its settings, if scores depend on it. Scores of other detectors differ."""
        return ""

    @abstractmethod
    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> list[dict[str, Any]]:
        """Return a row of scores for each sample of pixels [B, F, 3, H, W]."""

    def summarize(self, benchmark: Benchmark, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return more entries of the report, given the scores of all samples. `scores` is added to the table."""
        return {}

    def features(self, pixels: Tensor) -> Tensor:
        """Return features [B, C] for Frechet distances."""
        raise NotImplementedError(
            f"{type(self).__name__} does not define features; define features(pixels) in the scorer [TM596]"
        )

    def real_samples(self, prompts: Prompts, metadata: Sequence[Metadata], indices: Sequence[int]) -> Tensor:
        """Return real images or videos [B, F, 3, H, W] of the prompts. Sample indices seed the random choices."""
        raise NotImplementedError(
            f"{type(self).__name__} does not define real_samples; define real_samples(prompts, metadata, indices) in "
            "the scorer [TM597]"
        )


@dataclass(frozen=True)
class StageProgress:
    """How many samples a stage has finished."""

    stage: Literal["samples", "scores", "report"]
    completed: int
    total: int


def evaluate(
    benchmark: Benchmark,
    sample_fn: SampleFn,
    scorer: BenchmarkScorer,
    out: Path,
    model: str = "",
    batch_size: int = BATCH_SIZE,
    workers: Comm = SINGLE_PROCESS,
    settings: Mapping[str, Any] | None = None,
) -> Iterator[StageProgress]:
    """Run the stages that are left, generating `batch_size` samples at a time. `report.json` is written last."""
    _check_directory(benchmark, out, model)
    yield from _generate_samples(benchmark, sample_fn, out, batch_size, workers)
    # A scorer needs less memory than a generator.
    yield from _score_and_report(benchmark, scorer, out, model, max(batch_size, BATCH_SIZE), workers, settings)


def evaluate_files(
    benchmark: Benchmark,
    files: Sequence[Path],
    scorer: BenchmarkScorer,
    out: Path,
    model: str,
    workers: Comm = SINGLE_PROCESS,
) -> Iterator[StageProgress]:
    """Score existing images and write the report. Files are ordered by prompt."""
    _check_directory(benchmark, out, model)
    rows = [{**_sample_row(benchmark, k, SearchCost(0)), "file": str(file.resolve())} for k, file in enumerate(files)]
    if not (out / SAMPLES).is_file():
        write_text_atomically(out / SAMPLES, _to_jsonl(rows))
    yield from _score_and_report(benchmark, scorer, out, model, BATCH_SIZE, workers)


def _score_and_report(
    benchmark: Benchmark,
    scorer: BenchmarkScorer,
    out: Path,
    model: str,
    batch_size: int,
    workers: Comm,
    settings: Mapping[str, Any] | None = None,
) -> Iterator[StageProgress]:
    yield from _score_samples(benchmark, scorer, out, batch_size, workers)
    if workers.rank == 0 and not (out / REPORT).is_file():
        report = build_report(benchmark, scorer, out, model, batch_size, settings)
        write_text_atomically(out / REPORT, json.dumps(report, indent=1) + "\n")
    workers.barrier()
    yield StageProgress("report", benchmark.num_samples, benchmark.num_samples)


def _check_directory(benchmark: Benchmark, out: Path, model: str) -> None:
    """Refuse a directory that holds the evaluation of another benchmark or model."""
    file, expected = out / MANIFEST, _manifest(benchmark, model)
    if not file.is_file():
        write_text_atomically(file, json.dumps(expected))
    existing = read_json(file)
    if existing != expected:
        raise ConfigError(
            f"--out: {out} already contains an evaluation of {existing}, not of {expected}; choose another --out "
            "[TM598]"
        )


def _manifest(benchmark: Benchmark, model: str) -> dict[str, str]:
    return {"benchmark": benchmark.name, "questions": benchmark.fingerprint(), "model": model}


def is_finished(benchmark: Benchmark, out: Path, model: str) -> bool:
    """Whether a directory holds the report of this evaluation of this model."""
    file = out / MANIFEST
    if not (file.is_file() and (out / REPORT).is_file()):
        return False
    return bool(read_json(file) == _manifest(benchmark, model))


# Stage 1: samples


def sample_batches(benchmark: Benchmark, batch_size: int = BATCH_SIZE) -> list[list[int]]:
    """Split the sample indices into batches. Sample k belongs to prompt k // samples_per_prompt."""
    total = benchmark.num_samples
    return [list(range(i, min(i + batch_size, total))) for i in range(0, total, batch_size)]


def _generate_samples(
    benchmark: Benchmark, sample_fn: SampleFn, out: Path, batch_size: int, workers: Comm
) -> Iterator[StageProgress]:
    """Generate images in folders by prompt, batches distributed over the workers, and finally list them."""
    if (out / SAMPLES).is_file():
        return
    costs, batches = out / ".costs", sample_batches(benchmark, batch_size)
    costs.mkdir(exist_ok=True)
    pending = [batch for batch in batches if not _batch_file(costs, batch).is_file()]
    workers.barrier()  # every worker lists the pending batches before one of them writes
    with SampleWriter(benchmark, out, costs) as writer:
        for first in range(0, len(pending), workers.world_size):
            # A sharded network needs all workers in every call, so a worker without a batch repeats the last one.
            batch = pending[min(first + workers.rank, len(pending) - 1)]
            prompts = benchmark.batch([benchmark.prompt_index(k) for k in batch])
            pixels, cost = sample_fn(prompts, torch.tensor(batch))
            if first + workers.rank < len(pending):
                writer.write(batch, prompts, pixels, cost)
            completed = _num_completed(benchmark, pending[first + workers.world_size :])
            yield StageProgress("samples", completed, benchmark.num_samples)
    workers.barrier()
    if workers.rank == 0:
        rows = []
        for batch in batches:
            cost = SearchCost(**read_json_object(_batch_file(costs, batch)))
            rows += [_sample_row(benchmark, k, cost.per_sample(len(batch))) for k in batch]
        write_text_atomically(out / SAMPLES, _to_jsonl(rows))
    workers.barrier()


class SampleWriter:
    """Encodes and writes the images of a batch while the next one is sampled; at the end everything is written."""

    def __init__(self, benchmark: Benchmark, out: Path, costs: Path) -> None:
        self.benchmark, self.out, self.costs = benchmark, out, costs
        self._encoders = ThreadPoolExecutor(NUM_WRITERS, thread_name_prefix="sample-encoder")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sample-writer")
        self._writing: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            self._finish()
        finally:
            self._thread.shutdown()
            self._encoders.shutdown()

    def write(self, batch: Sequence[int], prompts: PromptBatch, pixels: Tensor, cost: SearchCost) -> None:
        """Begin to write a batch after the one before is written; a failure of that one is raised here."""
        self._finish()
        self._writing = self._thread.submit(self._write, batch, prompts, pixels, cost)

    def _finish(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, batch: Sequence[int], prompts: PromptBatch, pixels: Tensor, cost: SearchCost) -> None:
        paths = [self.out / _image_name(self.benchmark, k) for k in batch]
        list(self._encoders.map(save_image, pixels, paths))
        for k, path, text, metadata in zip(batch, paths, prompts.prompts, prompts.metadata, strict=True):
            if metadata.get("image") is not None:
                source = reference_images("image", [text], [metadata])[0][0]
                save_image(source[None], path.with_name(SOURCE_FILE))
            if self.benchmark.metadata_path:
                prompt = self.benchmark.prompt_index(k)
                file = self.out / self.benchmark.metadata_path.format(prompt=prompt)
                write_text_atomically(file, json.dumps(self.benchmark.metadata[prompt]) + "\n")
        # Written after the images, so that its existence proves that they are complete.
        write_text_atomically(_batch_file(self.costs, batch), json.dumps(asdict(cost)))


def _batch_file(folder: Path, batch: Sequence[int]) -> Path:
    return folder / f"{batch[0]}-{batch[-1]}"


def _num_completed(benchmark: Benchmark, pending: Sequence[Sequence[int]]) -> int:
    return benchmark.num_samples - sum(map(len, pending))


def _image_name(benchmark: Benchmark, k: int) -> str:
    """Path of a sample. Videos are PNG files too, so that scores are computed from the exact pixels."""
    seed = k % benchmark.samples_per_prompt
    return benchmark.image_path.format(prompt=benchmark.prompt_index(k), seed=seed)


def _sample_row(benchmark: Benchmark, k: int, cost: SearchCost) -> dict[str, Any]:
    prompt = benchmark.prompt_index(k)
    return {
        "file": _image_name(benchmark, k),
        "index": prompt,
        "seed": k % benchmark.samples_per_prompt,
        "prompt": benchmark.prompts[prompt],
        "tag": benchmark.tags[prompt],
        **asdict(cost),
    }


# Stage 2: scores


def _score_samples(
    benchmark: Benchmark, scorer: BenchmarkScorer, out: Path, batch_size: int, workers: Comm
) -> Iterator[StageProgress]:
    """Write a line of scores for each sample. Each batch has its own file until all are scored."""
    if (out / SCORES).is_file():
        return
    samples, parts, batches = read_jsonl(out / SAMPLES), out / ".scores", sample_batches(benchmark, batch_size)
    parts.mkdir(exist_ok=True)
    pending = [batch for batch in batches if not _batch_file(parts, batch).is_file()]
    workers.barrier()
    assigned = list(enumerate(pending))[workers.rank :: workers.world_size]
    images = prefetch_images([[out / samples[k]["file"] for k in batch] for _, batch in assigned])
    for (number, batch), batch_images in zip(assigned, images, strict=True):
        rows = [samples[k] for k in batch]
        scores = _score_images(scorer, batch_images, benchmark.batch([row["index"] for row in rows]))
        lines = [{**row, **row_scores} for row, row_scores in zip(rows, scores, strict=True)]
        write_text_atomically(_batch_file(parts, batch), _to_jsonl(lines))
        yield StageProgress("scores", _num_completed(benchmark, pending[number + 1 :]), len(samples))
    workers.barrier()
    if workers.rank == 0:
        text = "".join(read_text(_batch_file(parts, batch)) for batch in batches)
        write_text_atomically(out / SCORES, text)
        shutil.rmtree(parts)
    workers.barrier()


def prefetch_images(batches: Sequence[Sequence[Path]]) -> Iterator[list[Tensor]]:
    """Yield the images of each batch of files, reading the next batch while the caller uses the current one."""
    with ThreadPoolExecutor(NUM_READERS) as pool:
        upcoming: list[Future[Tensor]] = []
        for files in [*batches, []]:
            current, upcoming = upcoming, [pool.submit(read_image, file) for file in files]
            if current:
                yield [image.result() for image in current]


def _score_images(scorer: BenchmarkScorer, images: Sequence[Tensor], batch: PromptBatch) -> list[dict[str, Any]]:
    """Score images of different sizes, those of one size together."""
    scores: dict[int, dict[str, Any]] = {}
    for size in dict.fromkeys(image.shape for image in images):
        indices = [i for i, image in enumerate(images) if image.shape == size]
        pixels = torch.stack([images[i] for i in indices])
        prompts, metadata = [batch.prompts[i] for i in indices], [batch.metadata[i] for i in indices]
        scores |= zip(indices, scorer.score(pixels, prompts, metadata), strict=True)
    return [scores[i] for i in range(len(images))]


# Stage 3: report


def build_report(
    benchmark: Benchmark,
    scorer: BenchmarkScorer,
    out: Path,
    model: str,
    batch_size: int = BATCH_SIZE,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return every score by tag with its interval, mean costs, metrics of the whole set, and the settings given."""
    rows = read_jsonl(out / SCORES)
    report: dict[str, Any] = {
        "benchmark": benchmark.name,
        "model": model,
        "headline": benchmark.headline or benchmark.score_names[0],
        "overall": benchmark.overall,
        "tag_weights": dict(benchmark.tag_weights),
        **({"settings": dict(settings)} if settings else {}),
        "prompts": len(benchmark),
        "images": len(rows),
        **{name: sum(row[name] for row in rows) / len(rows) for name in COST_FIELDS},
        "scores": _score_tables(benchmark, rows),
        "any": {name: _mean_best_score(rows, name) for name in benchmark.score_names},
    }
    summary = scorer.summarize(benchmark, rows)
    report["scores"] |= summary.pop("scores", {})
    report |= summary
    return report | (_set_metrics(benchmark, scorer, rows, out, batch_size) if scorer.has_real_images else {})


def _score_tables(benchmark: Benchmark, rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, IntervalDict]]:
    """Summarize scores by tag, then by the values of the breakdown keys, then overall."""
    weights = dict(benchmark.tag_weights)
    tables = summarize_scores(rows, benchmark.score_names, benchmark.overall, weights)
    for key in benchmark.breakdown_keys:
        retagged = [{**row, "tag": benchmark.metadata[row["index"]][key]} for row in rows]
        for name, table in summarize_scores(retagged, benchmark.score_names).items():
            overall = tables[name].pop("overall", None)
            tables[name] |= {**table, **({"overall": overall} if overall else {})}
    return tables


def _mean_best_score(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """Mean over prompts of the best score among each prompt's samples."""
    best: dict[int, float] = {}
    for row in rows:
        if row[name] is not None:
            best[row["index"]] = max(float(row[name]), best.get(row["index"], 0.0))
    return sum(best.values()) / max(len(best), 1)


def _set_metrics(
    benchmark: Benchmark, scorer: BenchmarkScorer, rows: Sequence[Mapping[str, Any]], out: Path, batch_size: int
) -> dict[str, float]:
    """Compute the Frechet distance to real samples and the diversity within prompts."""
    features, real_features, frames = [], [], []
    for batch in sample_batches(benchmark, batch_size):
        prompts = benchmark.batch([rows[k]["index"] for k in batch])
        pixels = torch.stack([read_image(out / rows[k]["file"]) for k in batch])
        features.append(scorer.features(pixels))
        real_features.append(scorer.features(scorer.real_samples(prompts.prompts, prompts.metadata, batch)))
        frames.append(pixels[:, pixels.shape[1] // 2])
    metrics = {"frechet": frechet_distance(torch.cat(features), torch.cat(real_features))}
    if benchmark.samples_per_prompt > 1:
        images = torch.cat(frames)
        metrics["diversity"] = diversity(images.view(len(benchmark), -1, *images.shape[1:]))
    return metrics


# Files


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [parse_json(line, f"{path}, line {number}") for number, line in enumerate(read_text(path).splitlines(), 1)]


def _to_jsonl(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
