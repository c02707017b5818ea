"""GenEval's prompts, detector and summary as published: read, fetched, verified, told, and marks by the rules."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runner import run
from rich.console import Console

from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.data.prompts import PromptFile
from tastemaker.evaluation import geneval_download
from tastemaker.evaluation.geneval import (
    METADATA_MD5,
    GenEvalBenchmarkScorer,
    format_summary,
    geneval,
    published_metadata,
    published_prompts,
    read_metadata,
)
from tastemaker.evaluation.geneval_detector import describe_detector, load_referee, parse_detector
from tastemaker.evaluation.geneval_rules import CLASSES, TASKS, GenEvalRules
from tastemaker.models.downloads import DownloadError
from tastemaker.rewards.backbones.published_files import DETECTOR
from tastemaker.rewards.geneval import Geneval


def test_the_prompts_are_the_published_ones() -> None:
    assert hashlib.md5(published_metadata().encode()).hexdigest() == METADATA_MD5 == "9a0ed515640279a48ed3380d90aec0ed"
    counts = Counter(fact["tag"] for fact in published_prompts())
    assert [counts[task] for task in TASKS] == [80, 99, 80, 94, 100, 100] and len(published_prompts()) == 553
    assert published_prompts()[0]["prompt"].startswith("a photo of a")


def test_the_benchmark_has_four_pictures_of_each_prompt_in_the_published_layout() -> None:
    benchmark = geneval()
    assert len(benchmark) == 553 and benchmark.seeds == 4 and benchmark.numbers == ("correct",)
    assert benchmark.layout.format(prompt=7, seed=3) == "images/00007/samples/0003.png"
    assert geneval(10).facts == benchmark.facts[:10]


def test_metadata_of_others_are_read_and_unknown_classes_are_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "evaluation_metadata.jsonl"
    file.write_text(published_metadata(), encoding="utf-8")
    assert (
        read_metadata(file) == published_prompts() and geneval(metadata=file).fingerprint() == geneval().fingerprint()
    )
    rows = [dict(published_prompts()[0]), {**published_prompts()[1], "include": [{"class": "unicorn", "count": 1}]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"line 2: GenEval knows no class 'unicorn'"):
        geneval(metadata=file)
    for text, sentence in (("", "holds no prompts"), ("{", "cannot be read"), ("{}", "line 1: has no 'prompt'")):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=sentence):
            read_metadata(file)


def test_details_name_classes_in_the_published_order() -> None:
    seen = Geneval().tiny().load(Placement())
    pixels = torch.rand(1, 1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    (told,) = GenEvalBenchmarkScorer(seen, torch.device("cpu")).mark(pixels, ["a bench"], [published_prompts()[0]])
    assert len(told["details"]) > 1
    assert list(told["details"]) == [name for name in CLASSES if name in told["details"]]


def test_settings_of_the_detector_are_given_and_told() -> None:
    found = parse_detector("{threshold: 0.5, most: 4, overlap: 0.9, offset: 0.2}", unchecked=True)
    assert found.rules == GenEvalRules(0.5, 0.9, 4, 0.9, 0.2) and not found.trial
    assert (
        parse_detector("mine.pth", unchecked=False) == Geneval(weights="mine.pth")
        and parse_detector("", unchecked=False) == Geneval()
    )
    assert "threshold=0.5" in describe_detector(load_referee(found, Placement(), tiny=True))
    assert describe_detector(load_referee(Geneval(), Placement(), tiny=True)) == "detector random, untried"
    for text, sentence in (("{treshold: 1}", "did you mean 'threshold'"), ("{type: jpeg}", "settings of GenEval's")):
        with pytest.raises(ConfigError, match=sentence):
            parse_detector(text, unchecked=False)


def test_the_summary_is_in_genevals_own_words() -> None:
    told = [("single_object", 0, 1.0), ("single_object", 0, 0.0), ("counting", 1, 0.0), ("counting", 1, 0.0)]
    told += [("counting", 2, 1.0), ("counting", 2, 1.0)]
    text = format_summary([{"tag": tag, "index": index, "correct": right} for tag, index, right in told])
    assert text.splitlines() == [
        "Summary", "=======", "Total images: 6", "Total prompts: 3", "% correct images: 50.00%",
        "% correct prompts: 66.67%", "", "Task breakdown", "==============", "single_object    = 50.00% (1 / 2)",
        "counting         = 50.00% (2 / 4)", "", "Overall score (avg. over tasks): 0.50000",
    ]  # fmt: skip


def test_the_referee_marks_by_the_rules() -> None:
    scorer = Geneval().tiny().load(Placement())
    pixels = torch.rand(3, 1, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    facts = [{"tag": "single_object", "include": [{"class": "dog", "count": 1}]}] * 3
    told = GenEvalBenchmarkScorer(scorer, torch.device("cpu")).mark(pixels, ["a dog"] * 3, facts)
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
    found = geneval_download.fetch_verified(file, quiet)
    assert found.read_bytes() == b"weights" * 1000 and file.here() == found
    (tmp_path / "far" / "weights.pth").unlink()
    assert geneval_download.fetch_verified(file, quiet) == found, "what is here needs no network"
    found.write_bytes(b"changed")
    with pytest.raises(ConfigError, match=r"has the SHA-256 .* begins with"):
        geneval_download.fetch_verified(file, quiet)
    found.unlink()
    with pytest.raises(DownloadError, match=r"could not be fetched .* copy the file to .* or give its path"):
        geneval_download.fetch_verified(file, quiet)
    wrong = replace(published_at_again(tmp_path), digest="00000000")
    with pytest.raises(ConfigError, match="begins with 00000000"):
        geneval_download.fetch_verified(wrong, quiet)
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
    first, second = geneval_download.write_prompts(tmp_path / "here")
    assert hashlib.md5(first.read_bytes()).hexdigest() == METADATA_MD5
    assert second.read_text("utf-8").splitlines() == [fact["prompt"] for fact in published_prompts()]


def test_the_published_metadata_are_facts_that_the_reward_reads(tmp_path: Path) -> None:
    (path, _) = geneval_download.write_prompts(tmp_path)
    batch = PromptFile(path).load(0).first(553)
    assert list(batch.prompts) == [fact["prompt"] for fact in published_prompts()]
    scorer = Geneval().tiny().load(Placement())
    some = [0, 100, 200, 260, 400, 500]  # a prompt of each task
    pixels = torch.rand(6, 1, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    scores = scorer.score(pixels, [batch.prompts[k] for k in some], [batch.facts[k] for k in some])
    assert {batch.facts[k]["tag"] for k in some} == set(TASKS) and scores.shape == (6,)
