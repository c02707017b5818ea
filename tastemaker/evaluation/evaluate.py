"""Samples, scores, report: three stages, each a file in the directory, skipped where the file is there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable
from uuid import uuid4

import torch
from torch import Tensor

from ..core.registry import ConfigError
from ..core.types import Metadata, PromptBatch, Prompts
from ..data.image_io import read_image, save_image
from ..search.base import SearchCost
from .benchmarks import SCORE_NAMES as SCORE_NAMES
from .benchmarks import Benchmark
from .confidence_intervals import IntervalDict, summarize_scores
from .image_prefetch import prefetch_images
from .metrics import diversity, frechet_distance

QUESTIONS, SAMPLES, SCORES, REPORT = "questions.json", "samples.jsonl", "scores.jsonl", "report.json"
BATCH_SIZE = 64  # pictures at a time
COST_FIELDS = ("calls", "judged", "flops")  # of a picture

# Pixels [B, F, 3, H, W] of prompts, row r of the benchmark with the same draws every time, and what was paid for them,
# in network calls where nothing else was.
SampleFn = Callable[[PromptBatch, Tensor], tuple[Tensor, SearchCost | int]]


class BenchmarkScorer(Protocol):
    """Scores the samples of a benchmark."""

    def mark(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> list[dict[str, Any]]: ...


@runtime_checkable
class FrechetScorer(Protocol):
    """A scorer with features and real images, for Frechet distances."""

    def features(self, pixels: Tensor) -> Tensor: ...
    def real(self, prompts: Prompts, facts: Sequence[Metadata], rows: Sequence[int]) -> Tensor: ...


@dataclass(frozen=True)
class WorkerGroup:
    """Rank, world size and barrier of the processes that share an evaluation."""

    rank: int = 0
    world: int = 1
    wait: Callable[[], None] = lambda: None


SINGLE_WORKER = WorkerGroup()


@dataclass(frozen=True)
class StageProgress:
    """How far a stage is."""

    stage: Literal["samples", "scores", "report"]
    count: int
    total: int


def evaluate(
    benchmark: Benchmark,
    make: SampleFn,
    marker: BenchmarkScorer,
    out: Path,
    model: str = "",
    rows: int = BATCH_SIZE,
    ranks: WorkerGroup = SINGLE_WORKER,
) -> Iterator[StageProgress]:
    """Go through the stages, or through what is left of them, making so many rows at a time; `report.json` is last."""
    out.mkdir(parents=True, exist_ok=True)
    _check_directory(benchmark, out, model)
    yield from _sample(benchmark, make, out, rows, ranks)
    yield from _score_and_report(
        benchmark, marker, out, model, max(rows, BATCH_SIZE), ranks
    )  # a generator may bear fewer


def evaluate_files(
    benchmark: Benchmark,
    files: Sequence[Path],
    marker: BenchmarkScorer,
    out: Path,
    model: str,
    ranks: WorkerGroup = SINGLE_WORKER,
) -> Iterator[StageProgress]:
    """The stages after the first, of pictures that are there, those of a prompt one after the other."""
    out.mkdir(parents=True, exist_ok=True)
    _check_directory(benchmark, out, model)
    known = [{**_row(benchmark, k, SearchCost(0)), "file": str(file.resolve())} for k, file in enumerate(files)]
    if not (out / SAMPLES).is_file():
        _write(out / SAMPLES, _lines(known))
    yield from _score_and_report(benchmark, marker, out, model, BATCH_SIZE, ranks)


def _score_and_report(
    benchmark: Benchmark, marker: BenchmarkScorer, out: Path, model: str, rows: int, ranks: WorkerGroup
) -> Iterator[StageProgress]:
    yield from _score(benchmark, marker, out, rows, ranks)
    total = len(benchmark) * benchmark.seeds
    if ranks.rank == 0 and not (out / REPORT).is_file():
        _write(out / REPORT, json.dumps(build_report(benchmark, marker, out, model, rows), indent=1) + "\n")
    ranks.wait()
    yield StageProgress("report", total, total)


def _check_directory(benchmark: Benchmark, out: Path, model: str) -> None:
    """Answers in a directory are to one set of questions and of one model."""
    file, asked = out / QUESTIONS, _directory_key(benchmark, model)
    if not file.is_file():
        _write(file, json.dumps(asked))
        return
    found = json.loads(file.read_text(encoding="utf-8"))
    if found != asked:
        raise ConfigError(f"{out} holds an evaluation of {found}, but {asked} was asked for; choose another --out")


def _directory_key(benchmark: Benchmark, model: str) -> dict[str, str]:
    return {"benchmark": benchmark.name, "questions": benchmark.fingerprint(), "model": model}


def is_finished(benchmark: Benchmark, out: Path, model: str) -> bool:
    """Whether a directory holds the report of this evaluation of this model."""
    file = out / QUESTIONS
    if not (file.is_file() and (out / REPORT).is_file()):
        return False
    found: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    return found == _directory_key(benchmark, model)


def sample_batches(benchmark: Benchmark, rows: int = BATCH_SIZE) -> list[list[int]]:
    """Pictures by number, picture k being of prompt k // seeds, a few at a time."""
    total = len(benchmark) * benchmark.seeds
    return [list(range(i, min(i + rows, total))) for i in range(0, total, rows)]


def _sample(
    benchmark: Benchmark, make: SampleFn, out: Path, rows_at_once: int, ranks: WorkerGroup
) -> Iterator[StageProgress]:
    """Pictures in folders by prompt, each rank its shares, and at last the list of them."""
    if (out / SAMPLES).is_file():
        return
    prices, every = out / ".prices", sample_batches(benchmark, rows_at_once)
    prices.mkdir(exist_ok=True)
    left = [share for share in every if not _part(prices, share).is_file()]
    ranks.wait()  # all have looked before anyone writes
    for first in range(0, len(left), ranks.world):
        # Without a share of its own a rank makes another's once more, for a sharded network takes all of them.
        share = left[min(first + ranks.rank, len(left) - 1)]
        pixels, paid = make(benchmark.batch([k // benchmark.seeds for k in share]), torch.tensor(share))
        if first + ranks.rank < len(left):
            _save_images(benchmark, out, share, pixels)
            price = paid if isinstance(paid, SearchCost) else SearchCost(paid)
            _write(_part(prices, share), json.dumps(asdict(price)))  # after its pictures, so they are there where it is
        yield StageProgress(
            "samples", _samples_done(benchmark, left[first + ranks.world :]), len(benchmark) * benchmark.seeds
        )
    ranks.wait()
    if ranks.rank == 0:
        each = [SearchCost(**json.loads(_part(prices, s).read_text(encoding="utf-8"))).each(len(s)) for s in every]
        rows = [_row(benchmark, k, price) for s, price in zip(every, each, strict=True) for k in s]
        _write(out / SAMPLES, _lines(rows))
    ranks.wait()


def _part(folder: Path, share: Sequence[int]) -> Path:
    return folder / f"{share[0]}-{share[-1]}"


def _samples_done(benchmark: Benchmark, left: Sequence[Sequence[int]]) -> int:
    return len(benchmark) * benchmark.seeds - sum(map(len, left))


def _save_images(benchmark: Benchmark, out: Path, share: Sequence[int], pixels: Tensor) -> None:
    """Write pictures down, and what is known of their prompts where the benchmark has it beside them."""
    for k, picture in zip(share, pixels, strict=True):
        save_image(picture, out / _name(benchmark, k))
        if benchmark.metadata:
            place = k // benchmark.seeds
            _write(out / benchmark.metadata.format(prompt=place), json.dumps(benchmark.facts[place]) + "\n")


def _name(benchmark: Benchmark, k: int) -> str:
    """Clips are PNG too, for scores are of the very pixels that were made."""
    return benchmark.layout.format(prompt=k // benchmark.seeds, seed=k % benchmark.seeds)


def _row(benchmark: Benchmark, k: int, price: SearchCost) -> dict[str, Any]:
    place = k // benchmark.seeds
    known = {"index": place, "seed": k % benchmark.seeds, "prompt": benchmark.prompts[place]}
    return {"file": _name(benchmark, k), **known, "tag": benchmark.tags[place], **asdict(price)}


def _score(
    benchmark: Benchmark, marker: BenchmarkScorer, out: Path, rows_at_once: int, ranks: WorkerGroup
) -> Iterator[StageProgress]:
    """One line a picture; what is scored is kept share by share, until all of it is."""
    if (out / SCORES).is_file():
        return
    samples, parts, every = read_jsonl(out / SAMPLES), out / ".scores", sample_batches(benchmark, rows_at_once)
    parts.mkdir(exist_ok=True)
    left = [share for share in every if not _part(parts, share).is_file()]
    ranks.wait()
    mine = list(enumerate(left))[ranks.rank :: ranks.world]
    seen = prefetch_images([[out / samples[k]["file"] for k in share] for _, share in mine])
    for (place, share), pictures in zip(mine, seen, strict=True):
        some = [samples[k] for k in share]
        marks = _score_images(marker, pictures, benchmark.batch([sample["index"] for sample in some]))
        _write(_part(parts, share), _lines([{**sample, **mark} for sample, mark in zip(some, marks, strict=True)]))
        yield StageProgress("scores", _samples_done(benchmark, left[place + 1 :]), len(samples))
    ranks.wait()
    if ranks.rank == 0:
        _write(out / SCORES, "".join(_part(parts, share).read_text(encoding="utf-8") for share in every))
        shutil.rmtree(parts)
    ranks.wait()


def _score_images(marker: BenchmarkScorer, pictures: Sequence[Tensor], batch: PromptBatch) -> list[dict[str, Any]]:
    """Marks of pictures of any sizes, those of one size together."""
    found: dict[int, dict[str, Any]] = {}
    for size in dict.fromkeys(picture.shape for picture in pictures):
        places = [place for place, picture in enumerate(pictures) if picture.shape == size]
        pixels = torch.stack([pictures[place] for place in places])
        known = [batch.prompts[place] for place in places], [batch.facts[place] for place in places]
        found |= zip(places, marker.mark(pixels, *known), strict=True)
    return [found[place] for place in range(len(pictures))]


def build_report(
    benchmark: Benchmark, marker: BenchmarkScorer, out: Path, model: str, rows_at_once: int = BATCH_SIZE
) -> dict[str, Any]:
    """Every score by tag with its interval, and the numbers of the whole set."""
    rows = read_jsonl(out / SCORES)
    told: dict[str, Any] = {"benchmark": benchmark.name, "model": model, "prompts": len(benchmark)}
    told |= {"pictures": len(rows), **{name: sum(row[name] for row in rows) / len(rows) for name in COST_FIELDS}}
    told["scores"] = _scores(benchmark, rows)
    told["any"] = {name: _best_per_prompt(rows, name) for name in benchmark.numbers}
    return {
        **told,
        **(_set_metrics(benchmark, marker, rows, out, rows_at_once) if isinstance(marker, FrechetScorer) else {}),
    }


def _best_per_prompt(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """The mean over prompts of the best of each prompt's pictures."""
    best: dict[int, float] = {}
    for row in rows:
        best[row["index"]] = max(float(row[name]), best.get(row["index"], 0.0))
    return sum(best.values()) / len(best)


def _set_metrics(
    benchmark: Benchmark, marker: FrechetScorer, rows: Sequence[Mapping[str, Any]], out: Path, rows_at_once: int
) -> dict[str, float]:
    """Numbers of the whole set."""
    made, real, groups = [], [], []
    for share in sample_batches(benchmark, rows_at_once):
        some = [rows[k] for k in share]
        batch, pixels = benchmark.batch([row["index"] for row in some]), _pixels(out, some)
        made.append(marker.features(pixels))
        real.append(marker.features(marker.real(batch.prompts, batch.facts, share)))
        groups.append(pixels[:, pixels.shape[1] // 2])
    told = {"frechet": frechet_distance(torch.cat(made), torch.cat(real))}
    if benchmark.seeds > 1:
        pictures = torch.cat(groups)
        told["diversity"] = diversity(pictures.view(len(benchmark), benchmark.seeds, *pictures.shape[1:]))
    return told


def _scores(benchmark: Benchmark, rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, IntervalDict]]:
    """Lines of tags, of the facts that have some, and at last the mean over tags."""
    told = summarize_scores(rows, benchmark.numbers)
    for fact in benchmark.lines:
        others = summarize_scores(
            [{**row, "tag": benchmark.facts[row["index"]][fact]} for row in rows], benchmark.numbers
        )
        for name, table in others.items():
            overall = told[name].pop("overall")
            told[name] |= {**table, "overall": overall}
    return told


def _pixels(out: Path, rows: Sequence[Mapping[str, Any]]) -> Tensor:
    return torch.stack([read_image(out / row["file"]) for row in rows])


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _write(path: Path, text: str) -> None:
    """The file appears whole or not at all; of several ranks, whose process numbers may be alike, each has its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid4().hex}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
