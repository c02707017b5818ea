"""Benchmarks with published files from model to page, and the leaderboard that compares models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_samples import write_benchmark
from cli_runner import run_cli

from tastemaker.core.registry import ConfigError
from tastemaker.data.image_io import save_image
from tastemaker.evaluation.benchmark_files import PUBLISHED_BENCHMARKS
from tastemaker.evaluation.evaluate import REPORT, SCORES
from tastemaker.evaluation.leaderboard import group_entries, paired_difference, read_entries
from tastemaker.report.worst_cases import find_worst_cases, write_worst_cases

MODELS = {"vbench-lite": "grpo-playground-video"}


def evaluate_tiny(name: str, folder: Path, out: str, *overrides: str) -> int:
    model = MODELS.get(name, "grpo-toy-flow")
    arguments = ["--metadata", str(write_benchmark(name, folder)), "--count", "1", "--tiny", "--device", "cpu"]
    return run_cli("evaluate", name, "--model", model, *arguments, "--out", str(folder / out), *overrides)


def read_report(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / REPORT).read_text("utf-8"))
    return report


def test_evaluation_of_questions_resumes_and_models_are_compared(tmp_path: Path) -> None:
    assert evaluate_tiny("geneval2", tmp_path, "first") == 0
    report = (tmp_path / "first" / REPORT).read_text("utf-8")
    (tmp_path / "first" / SCORES).unlink()
    (tmp_path / "first" / REPORT).unlink()
    assert evaluate_tiny("geneval2", tmp_path, "first") == 0  # asks again about the samples that exist
    assert (tmp_path / "first" / REPORT).read_text("utf-8") == report
    assert evaluate_tiny("geneval2", tmp_path, "first", "model.seed=5") == 2  # another model
    assert evaluate_tiny("geneval2", tmp_path, "other", "--seed", "1") == 0
    folders = [str(tmp_path / name) for name in ("first", "other")]
    out = tmp_path / "leaderboard.jsonl"
    assert run_cli("leaderboard", *folders, "--out", str(out)) == 0
    entries = read_entries(out)
    assert len(entries) == 2 and entries[0]["model"] == entries[1]["model"]  # another seed of the same model
    assert all(entry["id"] in out.with_suffix(".md").read_text("utf-8") for entry in entries)
    assert entries[0]["mean"] >= entries[1]["mean"] and entries[0]["judge"] == "tiny"
    difference = paired_difference(entries[0], entries[1])
    assert difference and difference["mean"] == pytest.approx(entries[1]["mean"] - entries[0]["mean"], abs=1e-5)
    assert out.with_suffix(".md").read_text("utf-8").count("\n| ") == 3
    assert run_cli("leaderboard", str(out), folders[0], "--out", str(out)) == 0
    assert len(read_entries(out)) == 2  # the same evaluation is not counted twice


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PUBLISHED_BENCHMARKS if name != "geneval2"])
def test_every_published_benchmark_runs_from_model_to_page(name: str, tmp_path: Path) -> None:
    assert evaluate_tiny(name, tmp_path, "out") == 0
    report = read_report(tmp_path / "out")
    total = report["scores"][report["headline"]]["overall"]
    assert total["low"] <= total["mean"] <= total["high"] and report["benchmark"] == name
    page = (tmp_path / "out" / "worst.html").read_text("utf-8")
    assert page.count('class="card pair"') == report["prompts"] and "data:image/png" in page
    assert run_cli("leaderboard", str(tmp_path / "out"), "--out", str(tmp_path / "board.jsonl")) == 0


def test_folder_of_samples_is_scored_by_their_prompt_ids(tmp_path: Path) -> None:
    for number in (1, 401, 900):
        save_image(torch.rand(1, 3, 16, 16), tmp_path / "mine" / f"{number}.png")
    metadata, out = write_benchmark("wise", tmp_path), tmp_path / "out"
    arguments = ["--metadata", str(metadata), "--images", str(tmp_path / "mine"), "--tiny", "--device", "cpu"]
    assert run_cli("evaluate", "wise", *arguments, "--out", str(out)) == 0
    assert read_report(out)["unparsed"] == 3
    (tmp_path / "mine" / "401.png").unlink()
    assert run_cli("evaluate", "wise", *arguments, "--out", str(tmp_path / "again")) == 2


def test_worst_page_orders_samples_and_escapes_everything(tmp_path: Path) -> None:
    script = "<script>alert('x')</script>"
    rows = []
    for index, score in enumerate((0.9, 0.1, 0.5)):
        save_image(torch.full((1, 3, 8, 8), score), tmp_path / f"{index}.png")
        answer = {"question": f"{script}?", "expected": script, "answer": script, "score": score}
        row = {"file": f"{index}.png", "index": index, "prompt": f"{index} {script}", "tag": script}
        rows.append({**row, "gm": score, "answers": [answer], "reasons": [script]})
    rows.append({**rows[1], "gm": 0.7})  # a better sample of the same prompt
    rows.append({**rows[0], "index": 3, "file": "lost.png", "gm": 0.95})
    (tmp_path / SCORES).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    interval = {"mean": 0.5, "low": 0.1, "high": 0.9, "prompts": 4}
    report = {"benchmark": script, "model": script, "judge": script, "headline": "gm"}
    page = write_worst_cases(tmp_path, {**report, "scores": {"gm": {"overall": interval}}}).read_text("utf-8")
    assert "<script" not in page and page.count("&lt;script&gt;") > 12
    page = page.partition("</header>")[2]
    assert page.index("gm 0.100") < page.index("gm 0.500") < page.index("gm 0.900")
    assert page.count("<img ") == 3 and "cannot be read" in page
    assert [row["index"] for row in find_worst_cases(rows, "gm", 2)] == [1, 2]


def make_entry(model: str, scores: list[float], judge: str = "a") -> dict[str, Any]:
    mean = sum(scores) / len(scores)
    entry = {"id": model, "benchmark": "geneval2", "questions": "q", "judge": judge, "model": model, "score": "gm"}
    numbers = {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, "prompts": len(scores), "images": len(scores)}
    return {**entry, **numbers, "overall": "prompts", "by_prompt": {"all": scores}}


def test_only_entries_of_one_judge_and_file_are_compared() -> None:
    entries = [make_entry("x", [0.2, 0.4]), make_entry("y", [0.5, 0.7]), make_entry("z", [0.9, 0.9], "b")]
    groups = list(group_entries(entries).values())
    assert [[entry["model"] for entry in group] for group in groups] == [["y", "x"], ["z"]]


def test_paired_difference_is_sharper_than_the_intervals() -> None:
    scores = torch.rand(200, generator=torch.Generator().manual_seed(0)).tolist()
    better, worse = make_entry("x", scores), make_entry("y", [value - 0.05 for value in scores])
    difference = paired_difference(better, worse)
    assert difference is not None and difference["high"] < -0.0499 and difference["low"] > -0.0501
    assert paired_difference(better, make_entry("z", scores[:50])) is None  # other prompts
    assert paired_difference({**better, "mean": 0.9}, worse) is None  # an overall score of another kind


def test_files_that_are_no_leaderboard_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text('{"benchmark": "geneval2"}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="TM2177"):
        read_entries(tmp_path / "other.jsonl")
    with pytest.raises(ConfigError, match="TM2176"):
        read_entries(tmp_path / "none.jsonl")
    assert run_cli("leaderboard", str(tmp_path), "--out", str(tmp_path / "out.jsonl")) == 2
