"""Evaluation of image folders in GenEval's layout, and of models on GenEval."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runner import run_cli
from torch import Tensor

from tastemaker.cli import main
from tastemaker.core.objective import SingleProcess
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Metadata, PromptBatch, Prompts
from tastemaker.data.image_io import save_image
from tastemaker.evaluation.benchmarks import Benchmark
from tastemaker.evaluation.evaluate import (
    REPORT,
    SAMPLES,
    SCORES,
    BenchmarkScorer,
    evaluate,
    evaluate_files,
    read_jsonl,
)
from tastemaker.evaluation.geneval import RESULTS, find_images, geneval, published_prompts, write_results
from tastemaker.search.base import SearchCost

ROOT = Path(__file__).parent.parent.parent


def write_images(folder: Path, benchmark: Benchmark, side: int = 16) -> Path:
    """Write random images in the layout of GenEval's scripts. Each prompt has another height."""
    for prompt, metadata in enumerate(benchmark.metadata):
        prompt_folder = folder / f"{prompt:05d}"
        for seed in range(benchmark.samples_per_prompt):
            rng = torch.Generator().manual_seed(100 * prompt + seed)
            save_image(
                torch.rand(1, 3, side + prompt, side, generator=rng), prompt_folder / "samples" / f"{seed:05d}.png"
            )
        (prompt_folder / "metadata.jsonl").write_text(json.dumps(metadata), encoding="utf-8")
    return folder


class BrightnessScorer(BenchmarkScorer):
    """Scores images by their first pixel, and is interrupted after `max_calls`."""

    def __init__(self, max_calls: int = 10**6) -> None:
        self.calls_left, self.num_scored = max_calls, 0

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> list[dict[str, Any]]:
        self.calls_left -= 1
        if self.calls_left < 0:
            raise KeyboardInterrupt
        self.num_scored += len(pixels)
        bright = (pixels[:, 0, 0, 0, 0] > 0.5).tolist()
        return [{"correct": float(x), "reasons": [] if x else ["no"], "details": {}} for x in bright]


def test_images_are_listed_by_prompt(tmp_path: Path) -> None:
    benchmark = geneval(3, 2)
    write_images(tmp_path, benchmark)
    (tmp_path / "00001" / "grid.png").write_bytes(b"")  # GenEval's script for diffusers leaves one
    (tmp_path / "00001" / "samples" / ".DS_Store").write_bytes(b"")
    files = [str(file.relative_to(tmp_path)) for file in find_images(benchmark, tmp_path)]
    assert files == [f"0000{prompt}/samples/0000{seed}.png" for prompt in range(3) for seed in range(2)]


def test_folder_metadata_may_span_several_lines(tmp_path: Path) -> None:
    benchmark = geneval(3, 2)
    write_images(tmp_path, benchmark)
    for prompt, metadata in enumerate(benchmark.metadata):
        (tmp_path / f"{prompt:05d}" / "metadata.jsonl").write_text(json.dumps(metadata, indent=4), encoding="utf-8")
        (tmp_path / f"{prompt:05d}" / "process").mkdir()
    assert len(find_images(benchmark, tmp_path)) == 6
    (tmp_path / "00001" / "metadata.jsonl").write_text('["a dog"]', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"00001.metadata\.jsonl.*'prompt'.*TM607"):
        find_images(benchmark, tmp_path)


def test_changed_images_are_not_taken_for_those_scored_before(tmp_path: Path) -> None:
    folder, benchmark = tmp_path / "images", geneval(1, 2)
    write_images(folder, benchmark)
    arguments = ["evaluate", "geneval", "--images", str(folder), "--num-prompts", "1", "--count", "2", "--tiny"]
    arguments += ["--device", "cpu", "--out", str(tmp_path / "out")]
    for code in (0, 0, 2):
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        assert exit_info.value.code == code
        if code == 0 and (tmp_path / "second_run").exists():
            save_image(torch.ones(1, 3, 16, 16), folder / "00000" / "samples" / "00001.png")
        (tmp_path / "second_run").touch()


def damage(folder: Path, fault: str) -> None:
    samples = folder / "00001" / "samples"
    if fault == "lost":
        (samples / "00001.png").unlink()
    if fault == "extra":
        (samples / "00002.png").write_bytes(b"")
    if fault == "stray":
        (samples / "note.txt").write_bytes(b"")
    if fault == "folder":
        (folder / "00003").mkdir()
    if fault == "metadata":
        (folder / "00001" / "metadata.jsonl").unlink()
    if fault == "other":
        (folder / "00001" / "metadata.jsonl").write_text(json.dumps(published_prompts()[7]), encoding="utf-8")
    if fault == "class":
        unknown_class = {**published_prompts()[1], "include": [{"class": "unicorn", "count": 1}]}
        (folder / "00001" / "metadata.jsonl").write_text(json.dumps(unknown_class), encoding="utf-8")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("lost", r"00001.samples.*lacks.*0001\.png"),
        ("extra", r"00001.samples.*should not have.*00002\.png"),
        ("stray", r"00001.samples.*should not have.*note\.txt"),
        ("folder", r"should not have.*00003"),
        ("metadata", r"00001 .*metadata\.jsonl"),
        ("other", r"'a photo of .*', .*prompt 1 .*'a photo of"),
        ("class", r"class 'unicorn'"),
    ],
)
def test_incomplete_folder_is_refused(fault: str, message: str, tmp_path: Path) -> None:
    benchmark = geneval(3, 2)
    damage(write_images(tmp_path, benchmark), fault)
    with pytest.raises(ConfigError, match=message):
        find_images(benchmark, tmp_path)
    with pytest.raises(ConfigError, match=r"nowhere.*TM608"):
        find_images(benchmark, tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"5\d\d .*0000.*TM611"):
        find_images(geneval(553, 2), tmp_path)


def test_interrupted_scoring_resumes(tmp_path: Path) -> None:
    benchmark = geneval(50, 4)  # four batches of at most 64
    files = find_images(benchmark, write_images(tmp_path / "images", benchmark, side=2))
    out, stopped = tmp_path / "out", BrightnessScorer(max_calls=30)  # images of each prompt have another size
    with pytest.raises(KeyboardInterrupt):
        list(evaluate_files(benchmark, files, stopped, out, "it"))
    assert 0 < stopped.num_scored < 200 and not (out / SCORES).is_file()
    resumed = BrightnessScorer()
    list(evaluate_files(benchmark, files, resumed, out, "it"))
    assert resumed.num_scored < 200
    list(evaluate_files(benchmark, files, BrightnessScorer(), tmp_path / "uninterrupted", "it"))
    assert (out / SCORES).read_text() == (tmp_path / "uninterrupted" / SCORES).read_text()
    with pytest.raises(ConfigError, match=r"--out.*TM598"):
        list(evaluate_files(benchmark, files, BrightnessScorer(), out, "other"))


def test_report_has_genevals_scores_with_intervals(tmp_path: Path) -> None:
    benchmark = geneval(170, 2)  # single objects and some of two
    files = find_images(benchmark, write_images(tmp_path / "images", benchmark, side=1))
    list(evaluate_files(benchmark, files, BrightnessScorer(), tmp_path / "out", "it"))
    report = json.loads((tmp_path / "out" / REPORT).read_text("utf-8"))
    rows = read_jsonl(tmp_path / "out" / SCORES)
    by_tag = {tag: [row["correct"] for row in rows if row["tag"] == tag] for tag in ("single_object", "two_object")}
    for tag, values in by_tag.items():
        cell = report["scores"]["correct"][tag]
        assert cell["mean"] == pytest.approx(sum(values) / len(values)) and cell["low"] < cell["mean"] < cell["high"]
    means = [sum(values) / len(values) for values in by_tag.values()]
    assert report["scores"]["correct"]["overall"]["mean"] == pytest.approx(sum(means) / 2), (
        "all tasks have equal weight"
    )
    any_correct = [max(rows[2 * k]["correct"], rows[2 * k + 1]["correct"]) for k in range(170)]
    assert report["any"]["correct"] == pytest.approx(sum(any_correct) / 170)
    assert "frechet" not in report


def test_results_have_the_format_of_the_published_evaluation(tmp_path: Path) -> None:
    benchmark = geneval(2, 2)
    files = find_images(benchmark, write_images(tmp_path / "images", benchmark))
    list(evaluate_files(benchmark, files, BrightnessScorer(), tmp_path / "out", "it"))
    rows = read_jsonl(write_results(benchmark, tmp_path / "out"))
    names = ["filename", "tag", "prompt", "correct", "reason", "metadata", "details"]
    assert [list(row) for row in rows] == [names] * 4
    assert json.loads(rows[0]["metadata"]) == published_prompts()[0] and isinstance(rows[0]["correct"], bool)
    assert rows[3]["filename"].endswith("00001/samples/00001.png")


def test_generated_images_have_the_published_layout(tmp_path: Path) -> None:
    def sample(batch: PromptBatch, indices: Tensor) -> tuple[Tensor, SearchCost]:
        return torch.rand(len(indices), 1, 3, 8, 8, generator=torch.Generator().manual_seed(0)), SearchCost(5)

    benchmark = geneval(20, 4)
    list(evaluate(benchmark, sample, BrightnessScorer(), tmp_path))
    assert find_images(benchmark, tmp_path / "images") == [
        tmp_path / row["file"] for row in read_jsonl(tmp_path / SAMPLES)
    ]


def test_ranks_share_sampling_and_scoring(tmp_path: Path) -> None:
    """Two threads take the part of two ranks and synchronize at the barriers."""
    sampled: list[list[int]] = [[], []]

    def sample_fn(rank: int) -> Any:
        def sample(batch: PromptBatch, indices: Tensor) -> tuple[Tensor, SearchCost]:
            sampled[rank] += indices.tolist()
            generator = torch.Generator().manual_seed(int(indices[0]))
            return torch.rand(len(indices), 1, 3, 8, 8, generator=generator), SearchCost(1)

        return sample

    barrier, benchmark, scorers = threading.Barrier(2), geneval(40, 4), [BrightnessScorer(), BrightnessScorer()]

    class TwoWorkers(SingleProcess):
        def barrier(self) -> None:
            barrier.wait(60)

    def work(rank: int) -> None:
        workers = TwoWorkers(rank, 2)
        list(evaluate(benchmark, sample_fn(rank), scorers[rank], tmp_path / "two", workers=workers))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sampled[0] == [*range(64), *range(128, 160)] and sampled[1] == [*range(64, 128), *range(128, 160)]
    assert scorers[0].num_scored == 96 and scorers[1].num_scored == 64
    list(evaluate(benchmark, sample_fn(0), BrightnessScorer(), tmp_path / "one"))
    assert (tmp_path / "one" / REPORT).read_text() == (tmp_path / "two" / REPORT).read_text()


def test_evaluate_command_scores_a_folder_of_mixed_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_images(tmp_path / "images", geneval(4, 2), side=40)
    arguments = [
        "evaluate",
        "geneval",
        "--images",
        str(tmp_path / "images"),
        "--num-prompts",
        "4",
        "--count",
        "2",
        "--tiny",
    ]
    assert run_cli(*arguments, "--device", "cpu", "--out", str(tmp_path / "out")) == 0
    report = json.loads((tmp_path / "out" / REPORT).read_text("utf-8"))
    assert report["images"] == 8 and "detector random" in report["model"] and (tmp_path / "out" / RESULTS).is_file()
    output = capsys.readouterr().err
    assert "single_object" in output and "overall" in output and "correct image" in " ".join(output.split())


def test_evaluating_a_model_and_its_image_folder_agree(tmp_path: Path) -> None:
    arguments = ["evaluate", "geneval", "--model", "grpo-toy-flow", "--tiny", "--num-prompts", "3", "--count", "2"]
    out = tmp_path / "out"
    assert (
        run_cli(
            *arguments,
            "--device",
            "cpu",
            "--out",
            str(out),
            "--search",
            "best_of_n",
            "--num-candidates",
            "2",
            "--verifier",
            "jpeg",
        )
        == 0
    )
    first = json.loads((out / REPORT).read_text("utf-8"))
    assert first["prompts"] == 3 and first["calls"] > 0
    arguments = ["evaluate", "geneval", "--images", str(out / "images"), "--num-prompts", "3", "--count", "2", "--tiny"]
    assert run_cli(*arguments, "--device", "cpu", "--out", str(tmp_path / "rescored")) == 0
    second = json.loads((tmp_path / "rescored" / REPORT).read_text("utf-8"))
    assert first["scores"] == second["scores"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["geneval"], "TM592"),
        (["geneval", "--images", "nowhere", "--tiny"], "nowhere"),
        (["playeval", "--images", "nowhere"], "TM593"),
        (["playeval", "--model", "grpo-toy-flow", "--metadata", "it.jsonl"], "TM589"),
        (["geneval", "--model", "grpo-toy-flow", "--model", "nosuch"], "nosuch"),
    ],
)
def test_invalid_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("evaluate", *arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_score_a_folder_like_one(tmp_path: Path) -> None:
    write_images(tmp_path / "images", geneval(40, 2), side=40)
    arguments = ["evaluate", "geneval", "--images", "images", "--num-prompts", "40", "--count", "2", "--tiny"]
    arguments += ["--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "tastemaker"]
    for launcher, out in ((torchrun, "two"), (["-m", "tastemaker"], "one")):
        command = [sys.executable, *launcher, *arguments, "--out", out]
        completed = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900, check=False
        )
        assert completed.returncode == 0, completed.stderr
    assert (tmp_path / "one" / SCORES).read_text() == (tmp_path / "two" / SCORES).read_text()
