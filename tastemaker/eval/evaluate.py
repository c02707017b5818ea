"""Samples, scores, report: three stages, each a file in the directory, skipped where the file is there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ..pictures import read_picture, save_picture
from ..registry import ConfigError
from ..types import Facts, PromptBatch, Prompts
from .benchmark import NUMBERS as NUMBERS
from .benchmark import Benchmark
from .metrics import diversity, frechet
from .summary import Interval, summarise

QUESTIONS, SAMPLES, SCORES, REPORT = "questions.json", "samples.jsonl", "scores.jsonl", "report.json"
ROWS = 64  # pictures at a time

# Pixels [B, F, 3, H, W] of prompts, row r of the benchmark with the same draws every time, and network calls paid.
Maker = Callable[[PromptBatch, Tensor], tuple[Tensor, int]]


class Marker(Protocol):
    """Who looks at the pictures."""

    def mark(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Facts]) -> list[dict[str, Any]]: ...
    def features(self, pixels: Tensor) -> Tensor: ...
    def real(self, prompts: Prompts, facts: Sequence[Facts], rows: Sequence[int]) -> Tensor: ...


@dataclass(frozen=True)
class Done:
    """How far a stage is."""

    stage: Literal["samples", "scores", "report"]
    count: int
    total: int


def evaluate(
    benchmark: Benchmark, make: Maker, marker: Marker, out: Path, model: str = "", rows: int = ROWS
) -> Iterator[Done]:
    """Go through the stages, or through what is left of them, so many rows at a time; the report is `report.json`."""
    out.mkdir(parents=True, exist_ok=True)
    _claim(benchmark, out, model)
    yield from _sample(benchmark, make, out, rows)
    yield from _score(benchmark, marker, out, rows)
    total = len(benchmark) * benchmark.seeds
    if not (out / REPORT).is_file():
        _write(out / REPORT, json.dumps(report(benchmark, marker, out, model, rows), indent=1) + "\n")
    yield Done("report", total, total)


def _claim(benchmark: Benchmark, out: Path, model: str) -> None:
    """Answers in a directory are to one set of questions and of one model."""
    file, asked = out / QUESTIONS, {"benchmark": benchmark.name, "questions": benchmark.fingerprint(), "model": model}
    if not file.is_file():
        _write(file, json.dumps(asked))
        return
    found = json.loads(file.read_text(encoding="utf-8"))
    if found != asked:
        raise ConfigError(f"{out} holds an evaluation of {found}, but {asked} was asked for; choose another --out")


def shares(benchmark: Benchmark, rows: int = ROWS) -> list[list[int]]:
    """Pictures by number, picture k being of prompt k // seeds, a few at a time."""
    total = len(benchmark) * benchmark.seeds
    return [list(range(i, min(i + rows, total))) for i in range(0, total, rows)]


def _sample(benchmark: Benchmark, make: Maker, out: Path, rows_at_once: int) -> Iterator[Done]:
    """Pictures in folders by prompt, and at last the list of them."""
    if (out / SAMPLES).is_file():
        return
    total, rows, prices = len(benchmark) * benchmark.seeds, [], out / ".prices"
    prices.mkdir(exist_ok=True)
    for share in shares(benchmark, rows_at_once):
        # Written after its pictures, so they are all there where it is.
        paid = prices / f"{share[0]}-{share[-1]}"
        if not paid.is_file():
            places = [k // benchmark.seeds for k in share]
            pixels, calls = make(benchmark.batch(places), torch.tensor(share))
            for k, picture in zip(share, pixels, strict=True):
                save_picture(picture, out / _name(benchmark, k))
            _write(paid, json.dumps(calls))
        calls = json.loads(paid.read_text(encoding="utf-8"))
        rows += [_row(benchmark, k, calls / len(share)) for k in share]
        yield Done("samples", share[-1] + 1, total)
    _write(out / SAMPLES, _lines(rows))


def _name(benchmark: Benchmark, k: int) -> str:
    """Clips are PNG too, for scores are of the very pixels that were made."""
    return f"samples/{k // benchmark.seeds:05d}/{k % benchmark.seeds:04d}.png"


def _row(benchmark: Benchmark, k: int, calls: float) -> dict[str, Any]:
    place = k // benchmark.seeds
    known = {"index": place, "seed": k % benchmark.seeds, "prompt": benchmark.prompts[place]}
    return {"file": _name(benchmark, k), **known, "tag": benchmark.tags[place], "calls": calls}


def _score(benchmark: Benchmark, marker: Marker, out: Path, rows_at_once: int) -> Iterator[Done]:
    """One line a picture."""
    if (out / SCORES).is_file():
        return
    samples, rows = read_lines(out / SAMPLES), []
    for share in shares(benchmark, rows_at_once):
        some = [samples[k] for k in share]
        batch = benchmark.batch([sample["index"] for sample in some])
        marks = marker.mark(_pixels(out, some), batch.prompts, batch.facts)
        rows += [{**sample, **mark} for sample, mark in zip(some, marks, strict=True)]
        yield Done("scores", len(rows), len(samples))
    _write(out / SCORES, _lines(rows))


def report(benchmark: Benchmark, marker: Marker, out: Path, model: str, rows_at_once: int = ROWS) -> dict[str, Any]:
    """Every score by tag with its interval, and the numbers of the whole set."""
    rows = read_lines(out / SCORES)
    told: dict[str, Any] = {"benchmark": benchmark.name, "model": model, "prompts": len(benchmark)}
    told |= {"pictures": len(rows), "calls": sum(row["calls"] for row in rows) / len(rows)}
    told["scores"] = _scores(benchmark, rows)
    made, real, groups = [], [], []
    for share in shares(benchmark, rows_at_once):
        some = [rows[k] for k in share]
        batch, pixels = benchmark.batch([row["index"] for row in some]), _pixels(out, some)
        made.append(marker.features(pixels))
        real.append(marker.features(marker.real(batch.prompts, batch.facts, share)))
        groups.append(pixels[:, pixels.shape[1] // 2])
    told["frechet"] = frechet(torch.cat(made), torch.cat(real))
    if benchmark.seeds > 1:
        pictures = torch.cat(groups)
        told["diversity"] = diversity(pictures.view(len(benchmark), benchmark.seeds, *pictures.shape[1:]))
    return told


def _scores(benchmark: Benchmark, rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Interval]]:
    """Lines of tags, of the facts that have some, and at last the mean over tags."""
    told = summarise(rows, benchmark.numbers)
    for fact in benchmark.lines:
        others = summarise([{**row, "tag": benchmark.facts[row["index"]][fact]} for row in rows], benchmark.numbers)
        for name, table in others.items():
            overall = told[name].pop("overall")
            told[name] |= {**table, "overall": overall}
    return told


def _pixels(out: Path, rows: Sequence[Mapping[str, Any]]) -> Tensor:
    return torch.stack([read_picture(out / row["file"]) for row in rows])


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _write(path: Path, text: str) -> None:
    """The file appears whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
