"""GenEval's published prompts, detector and summary."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runner import run_cli
from rich.console import Console

from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.data.prompts import PromptFile
from tastemaker.evaluation.geneval import (
    METADATA_MD5,
    GenEvalBenchmarkScorer,
    fetch_verified,
    format_summary,
    geneval,
    load_geneval_scorer,
    parse_detector,
    published_metadata,
    published_prompts,
    read_metadata,
    write_prompts,
)
from tastemaker.evaluation.geneval_rules import CLASSES, TASKS, GenEvalRules
from tastemaker.models.downloads import DownloadError
from tastemaker.rewards.backbones.mask2former import GENEVAL_DETECTOR
from tastemaker.rewards.geneval import GenevalReward


def test_regenerated_prompts_match_the_published_md5() -> None:
    assert hashlib.md5(published_metadata().encode()).hexdigest() == METADATA_MD5 == "9a0ed515640279a48ed3380d90aec0ed"
    counts = Counter(row["tag"] for row in published_prompts())
    assert [counts[task] for task in TASKS] == [80, 99, 80, 94, 100, 100] and len(published_prompts()) == 553
    assert published_prompts()[0]["prompt"].startswith("a photo of a")


def test_benchmark_has_four_images_per_prompt_in_the_published_layout() -> None:
    benchmark = geneval()
    assert len(benchmark) == 553 and benchmark.samples_per_prompt == 4 and benchmark.score_names == ("correct",)
    assert benchmark.image_path.format(prompt=7, seed=3) == "images/00007/samples/0003.png"
    assert geneval(10).metadata == benchmark.metadata[:10]


def test_metadata_file_is_read_and_validated(tmp_path: Path) -> None:
    file = tmp_path / "evaluation_metadata.jsonl"
    file.write_text(published_metadata(), encoding="utf-8")
    assert (
        read_metadata(file) == published_prompts() and geneval(metadata=file).fingerprint() == geneval().fingerprint()
    )
    rows = [dict(published_prompts()[0]), {**published_prompts()[1], "include": [{"class": "unicorn", "count": 1}]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"line 2.*'unicorn'.*TM616"):
        geneval(metadata=file)
    for text, message in (("", "TM606"), ("{", "cannot be read"), ("{}", "line 1.*'prompt'")):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=message):
            read_metadata(file)


def test_details_list_classes_in_the_published_order() -> None:
    scorer = GenevalReward().tiny().load(Placement())
    pixels = torch.rand(1, 1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    (row,) = GenEvalBenchmarkScorer(scorer, torch.device("cpu")).score(pixels, ["a bench"], [published_prompts()[0]])
    assert len(row["details"]) > 1
    assert list(row["details"]) == [name for name in CLASSES if name in row["details"]]


def test_detector_settings_are_parsed_and_described() -> None:
    spec = parse_detector(
        "{threshold: 0.5, max_objects: 4, nms_threshold: 0.9, position_threshold: 0.2}", self_test=False
    )
    assert spec.rules == GenEvalRules(0.5, 0.9, 4, 0.9, 0.2) and not spec.self_test
    assert (
        parse_detector("mine.pth", self_test=True) == GenevalReward(weights="mine.pth")
        and parse_detector("", self_test=True) == GenevalReward()
    )
    assert "threshold=0.5" in load_geneval_scorer(spec, Placement(), tiny=True).detector
    default = load_geneval_scorer(GenevalReward(), Placement(), tiny=True).detector
    assert "random" in default and "without self-test" in default
    for text, message in (("{treshold: 1}", "'threshold'"), ("{type: jpeg}", "settings of the geneval reward")):
        with pytest.raises(ConfigError, match=message):
            parse_detector(text, self_test=True)


def test_summary_has_the_format_of_genevals_script() -> None:
    rows = [("single_object", 0, 1.0), ("single_object", 0, 0.0), ("counting", 1, 0.0), ("counting", 1, 0.0)]
    rows += [("counting", 2, 1.0), ("counting", 2, 1.0)]
    text = format_summary([{"tag": tag, "index": index, "correct": correct} for tag, index, correct in rows])
    assert text.splitlines() == [
        "Summary", "=======", "Total images: 6", "Total prompts: 3", "% correct images: 50.00%",
        "% correct prompts: 66.67%", "", "Task breakdown", "==============", "single_object    = 50.00% (1 / 2)",
        "counting         = 50.00% (2 / 4)", "", "Overall score (avg. over tasks): 0.50000",
    ]  # fmt: skip


def test_benchmark_scorer_agrees_with_the_reward() -> None:
    scorer = GenevalReward().tiny().load(Placement())
    pixels = torch.rand(3, 1, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    metadata = [{"tag": "single_object", "include": [{"class": "dog", "count": 1}]}] * 3
    rows = GenEvalBenchmarkScorer(scorer, torch.device("cpu")).score(pixels, ["a dog"] * 3, metadata)
    assert [row["correct"] for row in rows] == scorer.score(pixels, ["a dog"] * 3, metadata).tolist()
    assert all(len(box) == 5 for row in rows for boxes in row["details"].values() for box in boxes)


def publish_file(folder: Path, data: bytes) -> Any:
    """Return a file that is published in a local folder."""
    (folder / "far").mkdir()
    (folder / "far" / "weights.pth").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()[:8]
    return replace(GENEVAL_DETECTOR, url=(folder / "far" / "weights.pth").as_uri(), sha256_prefix=digest)


def test_detector_is_downloaded_verified_and_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    file, console = publish_file(tmp_path, b"weights" * 1000), Console(quiet=True)
    with pytest.raises(ConfigError, match=r"tastemaker download geneval.*TM359"):
        file.local_path()
    path = fetch_verified(file, console)
    assert path.read_bytes() == b"weights" * 1000 and file.local_path() == path
    (tmp_path / "far" / "weights.pth").unlink()
    assert fetch_verified(file, console) == path, "a cached file needs no network"
    path.write_bytes(b"changed")
    with pytest.raises(ConfigError, match=r"SHA-256.*TM360"):
        fetch_verified(file, console)
    path.unlink()
    with pytest.raises(DownloadError, match=r"weights\.pth.*TM613"):
        fetch_verified(file, console)
    wrong = replace(republish_file(tmp_path), sha256_prefix="00000000")
    with pytest.raises(ConfigError, match=r"00000000.*TM360"):
        fetch_verified(wrong, console)
    assert not list(path.parent.glob("*.partial"))


def republish_file(folder: Path) -> Any:
    (folder / "far").rmdir()
    return publish_file(folder, b"other")


def test_download_command_lists_urls_and_writes_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path))
    assert run_cli("download", "geneval", "--list") == 0
    output = capsys.readouterr().err
    assert "download.openmmlab.com" in output and "raw.githubusercontent.com/djghosh13/geneval" in output
    assert "openai/clip-vit" in output and not list(tmp_path.rglob("*.jsonl"))
    first, second = write_prompts(tmp_path / "here")
    assert hashlib.md5(first.read_bytes()).hexdigest() == METADATA_MD5
    assert second.read_text("utf-8").splitlines() == [row["prompt"] for row in published_prompts()]


def test_published_metadata_works_with_the_reward(tmp_path: Path) -> None:
    path, _ = write_prompts(tmp_path)
    batch = PromptFile(path).load(0).first_prompts(553)
    assert list(batch.prompts) == [row["prompt"] for row in published_prompts()]
    scorer = GenevalReward().tiny().load(Placement())
    indices = [0, 100, 200, 260, 400, 500]  # a prompt of each task
    pixels = torch.rand(6, 1, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    scores = scorer.score(pixels, [batch.prompts[k] for k in indices], [batch.metadata[k] for k in indices])
    assert {batch.metadata[k]["tag"] for k in indices} == set(TASKS) and scores.shape == (6,)
