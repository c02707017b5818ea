"""Folders of anybody's pictures in GenEval's layout, and from a model or a folder to GenEval's table."""

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
from cli_runner import run
from torch import Tensor

from tastemaker.cli import main
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Metadata, PromptBatch, Prompts
from tastemaker.data.image_io import save_image
from tastemaker.evaluation.benchmarks import Benchmark
from tastemaker.evaluation.evaluate import REPORT, SAMPLES, SCORES, WorkerGroup, evaluate, evaluate_files, read_jsonl
from tastemaker.evaluation.geneval import RESULTS, find_images, geneval, published_prompts, write_results

ROOT = Path(__file__).parent.parent.parent


def lay_out(folder: Path, benchmark: Benchmark, side: int = 16) -> Path:
    """Pictures as GenEval's own scripts write them."""
    for place, fact in enumerate(benchmark.facts):
        home = folder / f"{place:05d}"
        for seed in range(benchmark.seeds):
            rng = torch.Generator().manual_seed(100 * place + seed)
            save_image(torch.rand(1, 3, side + place, side, generator=rng), home / "samples" / f"{seed:05d}.png")
        (home / "metadata.jsonl").write_text(json.dumps(fact), encoding="utf-8")
    return folder


class Oracle:
    """Says that every second picture is right, until its patience ends."""

    def __init__(self, patience: int = 10**6) -> None:
        self.left, self.seen = patience, 0

    def mark(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> list[dict[str, Any]]:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        self.seen += len(pixels)
        bright = (pixels[:, 0, 0, 0, 0] > 0.5).tolist()
        return [{"correct": float(x), "reasons": [] if x else ["no"], "details": {}} for x in bright]


def test_pictures_of_others_are_found_in_order(tmp_path: Path) -> None:
    benchmark = geneval(3, 2)
    lay_out(tmp_path, benchmark)
    (tmp_path / "00001" / "grid.png").write_bytes(b"")  # GenEval's script for diffusers leaves one
    (tmp_path / "00001" / "samples" / ".DS_Store").write_bytes(b"")
    files = [str(file.relative_to(tmp_path)) for file in find_images(benchmark, tmp_path)]
    assert files == [f"0000{place}/samples/0000{seed}.png" for place in range(3) for seed in range(2)]


def test_metadata_of_a_folder_may_be_on_many_lines_as_image_generation_cot_writes_them(tmp_path: Path) -> None:
    benchmark = geneval(3, 2)
    lay_out(tmp_path, benchmark)
    for place, fact in enumerate(benchmark.facts):
        (tmp_path / f"{place:05d}" / "metadata.jsonl").write_text(json.dumps(fact, indent=4), encoding="utf-8")
        (tmp_path / f"{place:05d}" / "process").mkdir()
    assert len(find_images(benchmark, tmp_path)) == 6
    (tmp_path / "00001" / "metadata.jsonl").write_text('["a dog"]', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"00001.metadata.jsonl: has no 'prompt'; expected a mapping"):
        find_images(benchmark, tmp_path)


def test_other_pictures_in_the_same_places_are_not_taken_for_those_scored_before(tmp_path: Path) -> None:
    folder, benchmark = tmp_path / "pictures", geneval(1, 2)
    lay_out(folder, benchmark)
    asked = ["evaluate", "geneval", "--images", str(folder), "--prompts", "1", "--count", "2", "--tiny"]
    asked += ["--device", "cpu", "--out", str(tmp_path / "out")]
    for code in (0, 0, 2):
        with pytest.raises(SystemExit) as left:
            main(asked)
        assert left.value.code == code
        if code == 0 and (tmp_path / "again").exists():
            save_image(torch.ones(1, 3, 16, 16), folder / "00000" / "samples" / "00001.png")
        (tmp_path / "again").touch()


def spoil(folder: Path, fault: str) -> None:
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
        strange = {**published_prompts()[1], "include": [{"class": "unicorn", "count": 1}]}
        (folder / "00001" / "metadata.jsonl").write_text(json.dumps(strange), encoding="utf-8")


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("lost", r"samples lacks 1 pictures, 0001.png the first"),
        ("extra", r"samples holds beyond what was asked for 1 pictures, 00002.png the first"),
        ("stray", r"samples holds beyond what was asked for 1 pictures, note.txt the first"),
        ("folder", r"holds beyond what was asked for 1 folders, 00003 the first"),
        ("metadata", r"00001 lacks metadata.jsonl or samples/"),
        ("other", r"asks for 'a photo of .*', but prompt 1 is 'a photo of"),
        ("class", r"GenEval knows no class 'unicorn'"),
    ],
)
def test_a_folder_that_is_not_whole_is_a_sentence(fault: str, sentence: str, tmp_path: Path) -> None:
    benchmark = geneval(3, 2)
    spoil(lay_out(tmp_path, benchmark), fault)
    with pytest.raises(ConfigError, match=sentence):
        find_images(benchmark, tmp_path)
    with pytest.raises(ConfigError, match="is no folder"):
        find_images(benchmark, tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"lacks 5\d\d folders, 0000"):
        find_images(geneval(553, 2), tmp_path)


def test_a_stopped_evaluation_goes_on_where_it_was(tmp_path: Path) -> None:
    benchmark = geneval(50, 4)  # four shares of at most 64
    files = find_images(benchmark, lay_out(tmp_path / "images", benchmark, side=2))
    out, stopped = tmp_path / "out", Oracle(patience=30)  # each prompt's pictures are of a size of their own
    with pytest.raises(KeyboardInterrupt):
        list(evaluate_files(benchmark, files, stopped, out, "it"))
    assert 0 < stopped.seen < 200 and not (out / SCORES).is_file()
    again = Oracle()
    list(evaluate_files(benchmark, files, again, out, "it"))
    assert again.seen < 200
    list(evaluate_files(benchmark, files, Oracle(), tmp_path / "whole", "it"))
    assert (out / SCORES).read_text() == (tmp_path / "whole" / SCORES).read_text()
    with pytest.raises(ConfigError, match="choose another --out"):
        list(evaluate_files(benchmark, files, Oracle(), out, "other"))


def test_the_report_is_genevals_summary_with_intervals(tmp_path: Path) -> None:
    benchmark = geneval(170, 2)  # single objects and some of two
    files = find_images(benchmark, lay_out(tmp_path / "images", benchmark, side=1))
    list(evaluate_files(benchmark, files, Oracle(), tmp_path / "out", "it"))
    told = json.loads((tmp_path / "out" / REPORT).read_text("utf-8"))
    rows = read_jsonl(tmp_path / "out" / SCORES)
    by_tag = {tag: [row["correct"] for row in rows if row["tag"] == tag] for tag in ("single_object", "two_object")}
    for tag, values in by_tag.items():
        cell = told["scores"]["correct"][tag]
        assert cell["mean"] == pytest.approx(sum(values) / len(values)) and cell["low"] < cell["mean"] < cell["high"]
    means = [sum(values) / len(values) for values in by_tag.values()]
    assert told["scores"]["correct"]["overall"]["mean"] == pytest.approx(sum(means) / 2), "tasks count alike"
    once = [max(rows[2 * k]["correct"], rows[2 * k + 1]["correct"]) for k in range(170)]
    assert told["any"]["correct"] == pytest.approx(sum(once) / 170)
    assert "frechet" not in told


def test_results_are_written_as_the_published_evaluation_writes_them(tmp_path: Path) -> None:
    benchmark = geneval(2, 2)
    files = find_images(benchmark, lay_out(tmp_path / "images", benchmark))
    list(evaluate_files(benchmark, files, Oracle(), tmp_path / "out", "it"))
    rows = read_jsonl(write_results(benchmark, tmp_path / "out"))
    names = ["filename", "tag", "prompt", "correct", "reason", "metadata", "details"]
    assert [list(row) for row in rows] == [names] * 4
    assert json.loads(rows[0]["metadata"]) == published_prompts()[0] and isinstance(rows[0]["correct"], bool)
    assert rows[3]["filename"].endswith("00001/samples/00001.png")


def test_pictures_made_here_lie_in_the_published_layout(tmp_path: Path) -> None:
    def make(batch: PromptBatch, rows: Tensor) -> tuple[Tensor, int]:
        return torch.rand(len(rows), 1, 3, 8, 8, generator=torch.Generator().manual_seed(0)), 5

    benchmark = geneval(20, 4)
    list(evaluate(benchmark, make, Oracle(), tmp_path))
    assert find_images(benchmark, tmp_path / "images") == [
        tmp_path / row["file"] for row in read_jsonl(tmp_path / SAMPLES)
    ]


def test_ranks_share_the_pictures_and_the_scores(tmp_path: Path) -> None:
    """Two ranks as two walks through the stages in turn; each wait is a place where the other catches up."""
    made: list[list[int]] = [[], []]

    def maker(rank: int) -> Any:
        def make(batch: PromptBatch, rows: Tensor) -> tuple[Tensor, int]:
            made[rank] += rows.tolist()
            return torch.rand(len(rows), 1, 3, 8, 8, generator=torch.Generator().manual_seed(int(rows[0]))), 1

        return make

    barrier, benchmark, markers = threading.Barrier(2), geneval(40, 4), [Oracle(), Oracle()]

    def wait() -> None:
        barrier.wait(60)

    def work(rank: int) -> None:
        party = WorkerGroup(rank, 2, wait)
        list(evaluate(benchmark, maker(rank), markers[rank], tmp_path / "two", ranks=party))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made[0] == [*range(64), *range(128, 160)] and made[1] == [*range(64, 128), *range(128, 160)]
    assert markers[0].seen == 96 and markers[1].seen == 64
    list(evaluate(benchmark, maker(0), Oracle(), tmp_path / "one"))
    assert (tmp_path / "one" / REPORT).read_text() == (tmp_path / "two" / REPORT).read_text()


def test_the_command_scores_a_folder_of_mixed_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lay_out(tmp_path / "images", geneval(4, 2), side=40)
    asked = ["evaluate", "geneval", "--images", str(tmp_path / "images"), "--prompts", "4", "--count", "2", "--tiny"]
    assert run(*asked, "--device", "cpu", "--out", str(tmp_path / "out")) == 0
    told = json.loads((tmp_path / "out" / REPORT).read_text("utf-8"))
    assert told["pictures"] == 8 and "detector random" in told["model"] and (tmp_path / "out" / RESULTS).is_file()
    shown = capsys.readouterr().err
    assert "single_object" in shown and "overall" in shown and "of prompts right once" in shown


def test_the_command_goes_from_a_model_to_a_table_and_again_from_its_folder(tmp_path: Path) -> None:
    asked = ["evaluate", "geneval", "--model", "grpo-toy-flow", "--tiny", "--prompts", "3", "--count", "2"]
    out = tmp_path / "out"
    assert (
        run(*asked, "--device", "cpu", "--out", str(out), "--search", "best_of_n", "--n", "2", "--judge", "jpeg") == 0
    )
    first = json.loads((out / REPORT).read_text("utf-8"))
    assert first["prompts"] == 3 and first["calls"] > 0
    asked = ["evaluate", "geneval", "--images", str(out / "images"), "--prompts", "3", "--count", "2", "--tiny"]
    assert run(*asked, "--device", "cpu", "--out", str(tmp_path / "again")) == 0
    second = json.loads((tmp_path / "again" / REPORT).read_text("utf-8"))
    assert first["scores"] == second["scores"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["geneval"], "there is nothing to evaluate"),
        (["geneval", "--images", "nowhere", "--tiny"], "nowhere is no folder"),
        (["playeval", "--images", "nowhere"], "only geneval scores a folder"),
        (["playeval", "--model", "grpo-toy-flow", "--metadata", "it.jsonl"], "only geneval takes others"),
        (["geneval", "--model", "grpo-toy-flow", "--objective-run", "nosuch"], "nosuch"),
    ],
)
def test_what_cannot_be_evaluated_is_a_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("evaluate", *arguments) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.ranks
def test_two_processes_score_a_folder_together(tmp_path: Path) -> None:
    lay_out(tmp_path / "images", geneval(40, 2), side=40)
    asked = [
        "evaluate",
        "geneval",
        "--images",
        "images",
        "--prompts",
        "40",
        "--count",
        "2",
        "--tiny",
        "--device",
        "cpu",
    ]
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "tastemaker"]
    for way, out in ((launch, "two"), (["-m", "tastemaker"], "one")):
        command = [sys.executable, *way, *asked, "--out", out]
        done = subprocess.run(
            command, cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "one" / SCORES).read_text() == (tmp_path / "two" / SCORES).read_text()
