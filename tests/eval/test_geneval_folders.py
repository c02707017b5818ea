"""GenEval's prompts, folders of anybody's pictures, from a model or a folder to a table, and what is fetched."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from tastemaker.cli import main
from tastemaker.commands import fetching
from tastemaker.commands.downloading import FetchError
from tastemaker.commands.refereeing import eyes, judged_by, referee
from tastemaker.data.prompts import PromptFile
from tastemaker.eval.benchmark import Benchmark
from tastemaker.eval.evaluate import REPORT, SAMPLES, SCORES, Ranks, evaluate, evaluate_files, read_lines
from tastemaker.eval.geneval import (
    MD5,
    RESULTS,
    Referee,
    gathered,
    geneval,
    prompts,
    published,
    read_metadata,
    results,
    summary,
)
from tastemaker.geneval import CLASSES, TASKS, Rules
from tastemaker.pictures import save_picture
from tastemaker.registry import ConfigError
from tastemaker.rewards.geneval import Geneval
from tastemaker.rewards.nets.published_files import DETECTOR
from tastemaker.types import Facts, Placement, PromptBatch, Prompts

ROOT = Path(__file__).parent.parent.parent


def lay_out(folder: Path, benchmark: Benchmark, side: int = 16) -> Path:
    """Pictures as GenEval's own scripts write them."""
    for place, fact in enumerate(benchmark.facts):
        home = folder / f"{place:05d}"
        for seed in range(benchmark.seeds):
            rng = torch.Generator().manual_seed(100 * place + seed)
            save_picture(torch.rand(1, 3, side + place, side, generator=rng), home / "samples" / f"{seed:05d}.png")
        (home / "metadata.jsonl").write_text(json.dumps(fact), encoding="utf-8")
    return folder


class Oracle:
    """Says that every second picture is right, until its patience ends."""

    def __init__(self, patience: int = 10**6) -> None:
        self.left, self.seen = patience, 0

    def mark(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Facts]) -> list[dict[str, Any]]:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        self.seen += len(pixels)
        bright = (pixels[:, 0, 0, 0, 0] > 0.5).tolist()
        return [{"correct": float(x), "reasons": [] if x else ["no"], "details": {}} for x in bright]


def test_the_prompts_are_the_published_ones() -> None:
    assert hashlib.md5(published().encode()).hexdigest() == MD5 == "9a0ed515640279a48ed3380d90aec0ed"
    counts = Counter(fact["tag"] for fact in prompts())
    assert [counts[task] for task in TASKS] == [80, 99, 80, 94, 100, 100] and len(prompts()) == 553
    assert prompts()[0]["prompt"].startswith("a photo of a")


def test_the_benchmark_has_four_pictures_of_each_prompt_in_the_published_layout() -> None:
    benchmark = geneval()
    assert len(benchmark) == 553 and benchmark.seeds == 4 and benchmark.numbers == ("correct",)
    assert benchmark.layout.format(prompt=7, seed=3) == "images/00007/samples/0003.png"
    assert geneval(10).facts == benchmark.facts[:10]


def test_metadata_of_others_are_read_and_unknown_classes_are_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "evaluation_metadata.jsonl"
    file.write_text(published(), encoding="utf-8")
    assert read_metadata(file) == prompts() and geneval(metadata=file).fingerprint() == geneval().fingerprint()
    rows = [dict(prompts()[0]), {**prompts()[1], "include": [{"class": "unicorn", "count": 1}]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"line 2: GenEval knows no class 'unicorn'"):
        geneval(metadata=file)
    for text, sentence in (("", "holds no prompts"), ("{", "cannot be read"), ("{}", "line 1: has no 'prompt'")):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=sentence):
            read_metadata(file)


def test_pictures_of_others_are_found_in_order(tmp_path: Path) -> None:
    benchmark = geneval(3, 2)
    lay_out(tmp_path, benchmark)
    (tmp_path / "00001" / "grid.png").write_bytes(b"")  # GenEval's script for diffusers leaves one
    (tmp_path / "00001" / "samples" / ".DS_Store").write_bytes(b"")
    files = [str(file.relative_to(tmp_path)) for file in gathered(benchmark, tmp_path)]
    assert files == [f"0000{place}/samples/0000{seed}.png" for place in range(3) for seed in range(2)]


def test_metadata_of_a_folder_may_be_on_many_lines_as_image_generation_cot_writes_them(tmp_path: Path) -> None:
    benchmark = geneval(3, 2)
    lay_out(tmp_path, benchmark)
    for place, fact in enumerate(benchmark.facts):
        (tmp_path / f"{place:05d}" / "metadata.jsonl").write_text(json.dumps(fact, indent=4), encoding="utf-8")
        (tmp_path / f"{place:05d}" / "process").mkdir()
    assert len(gathered(benchmark, tmp_path)) == 6
    (tmp_path / "00001" / "metadata.jsonl").write_text('["a dog"]', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"00001.metadata.jsonl: has no 'prompt'; expected a mapping"):
        gathered(benchmark, tmp_path)


def test_details_name_classes_in_the_published_order() -> None:
    seen = Geneval().tiny().load(Placement())
    pixels = torch.rand(1, 1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    (told,) = Referee(seen, torch.device("cpu")).mark(pixels, ["a bench"], [prompts()[0]])
    assert len(told["details"]) > 1
    assert list(told["details"]) == [name for name in CLASSES if name in told["details"]]


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
            save_picture(torch.ones(1, 3, 16, 16), folder / "00000" / "samples" / "00001.png")
        (tmp_path / "again").touch()


def test_settings_of_the_detector_are_given_and_told() -> None:
    found = eyes("{threshold: 0.5, most: 4, overlap: 0.9, offset: 0.2}", unchecked=True)
    assert found.rules == Rules(0.5, 0.9, 4, 0.9, 0.2) and not found.trial
    assert eyes("mine.pth", unchecked=False) == Geneval(weights="mine.pth") and eyes("", unchecked=False) == Geneval()
    assert "threshold=0.5" in judged_by(referee(found, Placement(), tiny=True))
    assert judged_by(referee(Geneval(), Placement(), tiny=True)) == "detector random, untried"
    for text, sentence in (("{treshold: 1}", "did you mean 'threshold'"), ("{type: jpeg}", "settings of GenEval's")):
        with pytest.raises(ConfigError, match=sentence):
            eyes(text, unchecked=False)


def test_the_summary_is_in_genevals_own_words() -> None:
    told = [("single_object", 0, 1.0), ("single_object", 0, 0.0), ("counting", 1, 0.0), ("counting", 1, 0.0)]
    told += [("counting", 2, 1.0), ("counting", 2, 1.0)]
    text = summary([{"tag": tag, "index": index, "correct": right} for tag, index, right in told])
    assert text.splitlines() == [
        "Summary", "=======", "Total images: 6", "Total prompts: 3", "% correct images: 50.00%",
        "% correct prompts: 66.67%", "", "Task breakdown", "==============", "single_object    = 50.00% (1 / 2)",
        "counting         = 50.00% (2 / 4)", "", "Overall score (avg. over tasks): 0.50000",
    ]  # fmt: skip


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
        (folder / "00001" / "metadata.jsonl").write_text(json.dumps(prompts()[7]), encoding="utf-8")
    if fault == "class":
        strange = {**prompts()[1], "include": [{"class": "unicorn", "count": 1}]}
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
        gathered(benchmark, tmp_path)
    with pytest.raises(ConfigError, match="is no folder"):
        gathered(benchmark, tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"lacks 5\d\d folders, 0000"):
        gathered(geneval(553, 2), tmp_path)


def test_a_stopped_evaluation_goes_on_where_it_was(tmp_path: Path) -> None:
    benchmark = geneval(50, 4)  # four shares of at most 64
    files = gathered(benchmark, lay_out(tmp_path / "images", benchmark, side=2))
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
    files = gathered(benchmark, lay_out(tmp_path / "images", benchmark, side=1))
    list(evaluate_files(benchmark, files, Oracle(), tmp_path / "out", "it"))
    told = json.loads((tmp_path / "out" / REPORT).read_text("utf-8"))
    rows = read_lines(tmp_path / "out" / SCORES)
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
    files = gathered(benchmark, lay_out(tmp_path / "images", benchmark))
    list(evaluate_files(benchmark, files, Oracle(), tmp_path / "out", "it"))
    rows = read_lines(results(benchmark, tmp_path / "out"))
    names = ["filename", "tag", "prompt", "correct", "reason", "metadata", "details"]
    assert [list(row) for row in rows] == [names] * 4
    assert json.loads(rows[0]["metadata"]) == prompts()[0] and isinstance(rows[0]["correct"], bool)
    assert rows[3]["filename"].endswith("00001/samples/00001.png")


def test_pictures_made_here_lie_in_the_published_layout(tmp_path: Path) -> None:
    def make(batch: PromptBatch, rows: Tensor) -> tuple[Tensor, int]:
        return torch.rand(len(rows), 1, 3, 8, 8, generator=torch.Generator().manual_seed(0)), 5

    benchmark = geneval(20, 4)
    list(evaluate(benchmark, make, Oracle(), tmp_path))
    assert gathered(benchmark, tmp_path / "images") == [
        tmp_path / row["file"] for row in read_lines(tmp_path / SAMPLES)
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
        party = Ranks(rank, 2, wait)
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


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    return int(left.value.code or 0)


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


def test_the_referee_marks_by_the_rules() -> None:
    scorer = Geneval().tiny().load(Placement())
    pixels = torch.rand(3, 1, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    facts = [{"tag": "single_object", "include": [{"class": "dog", "count": 1}]}] * 3
    told = Referee(scorer, torch.device("cpu")).mark(pixels, ["a dog"] * 3, facts)
    assert [row["correct"] for row in told] == scorer.score(pixels, ["a dog"] * 3, facts).tolist()
    assert all(len(box) == 5 for row in told for boxes in row["details"].values() for box in boxes)


def published_at(folder: Path, data: bytes) -> Any:
    """The detector as if it were published in a folder here."""
    (folder / "far").mkdir()
    (folder / "far" / "weights.pth").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()[:8]
    return replace(DETECTOR, address=(folder / "far" / "weights.pth").as_uri(), digest=digest)


def test_the_detector_is_fetched_verified_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    file, quiet = published_at(tmp_path, b"weights" * 1000), Console(quiet=True)
    with pytest.raises(ConfigError, match=r"not here.*`tastemaker download geneval` fetches"):
        file.here()
    found = fetching.obtained(file, quiet)
    assert found.read_bytes() == b"weights" * 1000 and file.here() == found
    (tmp_path / "far" / "weights.pth").unlink()
    assert fetching.obtained(file, quiet) == found, "what is here needs no network"
    found.write_bytes(b"changed")
    with pytest.raises(ConfigError, match=r"has the SHA-256 .* begins with"):
        fetching.obtained(file, quiet)
    found.unlink()
    with pytest.raises(FetchError, match=r"could not be fetched .* copy the file to .* or give its path"):
        fetching.obtained(file, quiet)
    wrong = replace(published_at_again(tmp_path), digest="00000000")
    with pytest.raises(ConfigError, match="begins with 00000000"):
        fetching.obtained(wrong, quiet)
    assert not list(found.parent.glob("*.partial"))


def published_at_again(folder: Path) -> Any:
    (folder / "far").rmdir()
    return published_at(folder, b"other")


def test_downloading_tells_the_addresses_and_writes_the_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path))
    assert run("download", "geneval", "--list") == 0
    told = capsys.readouterr().err
    assert "download.openmmlab.com" in told and "raw.githubusercontent.com/djghosh13/geneval" in told
    assert "openai/clip-vit" in told and not list(tmp_path.rglob("*.jsonl"))
    first, second = fetching.written(tmp_path / "here")
    assert hashlib.md5(first.read_bytes()).hexdigest() == MD5
    assert second.read_text("utf-8").splitlines() == [fact["prompt"] for fact in prompts()]


def test_the_published_metadata_are_facts_that_the_reward_reads(tmp_path: Path) -> None:
    (path, _) = fetching.written(tmp_path)
    batch = PromptFile(path).load(0).first(553)
    assert list(batch.prompts) == [fact["prompt"] for fact in prompts()]
    scorer = Geneval().tiny().load(Placement())
    some = [0, 100, 200, 260, 400, 500]  # a prompt of each task
    pixels = torch.rand(6, 1, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    scores = scorer.score(pixels, [batch.prompts[k] for k in some], [batch.facts[k] for k in some])
    assert {batch.facts[k]["tag"] for k in some} == set(TASKS) and scores.shape == (6,)
