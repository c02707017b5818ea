"""The three stages, what is left of them when stopped, and the benchmark they go through."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tastemaker.cli import main
from tastemaker.config.load import load
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import PromptBatch
from tastemaker.data.image_io import ImageError, save_image
from tastemaker.evaluation.benchmark_run import EvaluationOptions, scores_fingerprint
from tastemaker.evaluation.benchmarks import Benchmark, held_out_captions, playeval, wordeval
from tastemaker.evaluation.detector_metrics import PlayEvalScorer, load_playeval_scorer
from tastemaker.evaluation.evaluate import REPORT, SCORES, _write, evaluate, read_jsonl
from tastemaker.evaluation.image_prefetch import prefetch_images
from tastemaker.evaluation.ocr_metrics import load_wordeval_scorer
from tastemaker.playground import signs
from tastemaker.playground.captions import TASKS, parse_captions
from tastemaker.playground.network_files import TINY
from tastemaker.playground.scenes import Painter, sample_scenes
from tastemaker.search.best_of_n import BestOfN
from tastemaker.search.single import SingleSample


class Artist:
    """Paints true scenes, and counts how often it was asked."""

    def __init__(self, patience: int = 10**6) -> None:
        self.asked, self.patience = 0, patience

    def __call__(self, batch: PromptBatch, rows: Tensor) -> tuple[Tensor, int]:
        if self.asked == self.patience:
            raise KeyboardInterrupt
        self.asked += 1
        rng = Randomness(0, 0, rows)
        return Painter().paint(sample_scenes(parse_captions(batch.prompts), rng), rng), 3 * len(batch)


@pytest.fixture(scope="module")
def marker() -> PlayEvalScorer:
    return load_playeval_scorer(TINY)


@pytest.fixture(scope="module")
def questions() -> Benchmark:
    return playeval(36, 4)


def test_an_evaluation_writes_pictures_scores_and_a_report(
    questions: Benchmark, marker: PlayEvalScorer, tmp_path: Path
) -> None:
    stages = [done.stage for done in evaluate(questions, Artist(), marker, tmp_path)]
    assert stages == ["samples"] * 3 + ["scores"] * 3 + ["report"]
    assert len(list(tmp_path.glob("samples/*/*.png"))) == 144
    told = json.loads((tmp_path / REPORT).read_text("utf-8"))
    assert set(told["scores"]["strict"]) == {*TASKS, "overall"}
    assert told["calls"] == 3 and told["pictures"] == 144 and told["diversity"] > 0
    rows = read_jsonl(tmp_path / SCORES)
    assert [row["strict"] == 1 for row in rows] == [not row["reasons"] for row in rows]


def test_real_scenes_are_nearer_to_real_scenes_than_noise(
    questions: Benchmark, marker: PlayEvalScorer, tmp_path: Path
) -> None:
    def noise(batch: PromptBatch, rows: Tensor) -> tuple[Tensor, int]:
        return Randomness(0, 0, rows).uniform("noise", 1, 3, 64, 64), 0

    distances = []
    for name, make in {"real": Artist(), "noise": noise}.items():
        list(evaluate(questions, make, marker, tmp_path / name))
        distances.append(json.loads((tmp_path / name / REPORT).read_text("utf-8"))["frechet"])
    assert distances[0] < 0.2 * distances[1]


def test_a_stopped_evaluation_goes_on_where_it_was(
    questions: Benchmark, marker: PlayEvalScorer, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        list(evaluate(questions, Artist(patience=2), marker, tmp_path / "stopped"))
    artist = Artist()
    list(evaluate(questions, artist, marker, tmp_path / "stopped"))
    assert artist.asked == 1
    list(evaluate(questions, Artist(), marker, tmp_path / "whole"))
    first, second = ((tmp_path / name / REPORT).read_text("utf-8") for name in ("stopped", "whole"))
    assert first == second


def test_a_finished_evaluation_is_not_made_again_and_lost_scores_are(
    questions: Benchmark, marker: PlayEvalScorer, tmp_path: Path
) -> None:
    list(evaluate(questions, Artist(), marker, tmp_path))
    before = (tmp_path / REPORT).read_text("utf-8")
    (tmp_path / SCORES).unlink()
    (tmp_path / REPORT).unlink()
    artist = Artist(patience=0)
    assert [done.stage for done in evaluate(questions, artist, marker, tmp_path)] == ["scores"] * 3 + ["report"]
    assert (tmp_path / REPORT).read_text("utf-8") == before


def test_answers_to_other_questions_are_refused(marker: PlayEvalScorer, tmp_path: Path) -> None:
    list(evaluate(playeval(6, 1), Artist(), marker, tmp_path))
    with pytest.raises(ConfigError, match="choose another --out"):
        list(evaluate(playeval(12, 1), Artist(), marker, tmp_path))


def test_playeval_asks_every_task_alike_and_nothing_that_was_trained_on() -> None:
    captions = held_out_captions(60)
    assert torch.bincount(captions.task).tolist() == [10] * 6
    assert captions.held_out()[captions.task > 0].all()


def test_a_smaller_playeval_is_the_beginning_of_a_larger_one() -> None:
    assert playeval(60).prompts[:30] == playeval(30).prompts


def test_too_few_prompts_are_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="at least 6 and 1"):
        playeval(5)


@pytest.mark.parametrize("search", ["single", "parm"])
def test_the_command_evaluates_a_recipe(search: str, tmp_path: Path) -> None:
    asked = ["evaluate", "playeval", "--model", "grpo-toy-flow", "--tiny", "--prompts", "6", "--device", "cpu"]
    with pytest.raises(SystemExit) as left:
        main([*asked, "--search", search, "--n", "2", "--out", str(tmp_path)])
    assert left.value.code == 0
    told = json.loads((tmp_path / REPORT).read_text("utf-8"))
    assert told["pictures"] == 12 and (search == "parm") == (told["calls"] > 10)


def test_an_evaluation_of_other_settings_is_not_taken_for_one_that_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["evaluate", "playeval", "--model", "grpo-toy-masked", "--tiny", "--prompts", "6", "--count", "1"]
    asked += ["--device", "cpu", "--out", str(tmp_path)]
    for changes, code in (([], 0), ([], 0), (["process.steps=2"], 2), (["model.seed=5"], 2)):
        with pytest.raises(SystemExit) as left:
            main([*asked, *changes])
        assert left.value.code == code
    assert "choose another --out" in capsys.readouterr().err


def test_the_judge_of_a_search_is_part_of_what_was_evaluated() -> None:
    config, exam = load("grpo-toy-masked"), EvaluationOptions(playeval(6, 1), BestOfN(2), "playground_judge")
    other = replace(exam, judge="playground_taste")
    assert scores_fingerprint(config, None, exam, True) != scores_fingerprint(config, None, other, True)
    alone = [replace(each, search=SingleSample()) for each in (exam, other)]
    assert scores_fingerprint(config, None, alone[0], True) == scores_fingerprint(
        config, None, alone[1], True
    )  # nobody is asked


def test_the_command_refuses_a_benchmark_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["evaluate", "imagenet", "--model", "grpo-toy-flow", "--tiny"])
    assert left.value.code == 2
    assert "expected one of playeval" in capsys.readouterr().err


def test_wordeval_reads_signs_of_words_that_no_training_saw(tmp_path: Path) -> None:
    questions = wordeval(8, 2)
    assert questions.prompts == wordeval(20).prompts[:8] and len(wordeval()) == signs.held_out().sum()
    assert {signs.WORDS.index(fact["text"]) for fact in questions.facts} <= set(
        signs.held_out().nonzero()[:, 0].tolist()
    )

    def paint(batch: PromptBatch, rows: Tensor) -> tuple[Tensor, int]:
        places = torch.tensor([signs.WORDS.index(word) for word in signs.requested_words(batch.prompts)])
        return signs.SignPainter().paint(places, Randomness(0, 0, rows)), 0

    list(evaluate(questions, paint, load_wordeval_scorer(TINY), tmp_path))
    told = json.loads((tmp_path / REPORT).read_text("utf-8"))["scores"]
    assert told["strict"]["overall"]["mean"] >= 0.9 and told["graded"]["overall"]["mean"] >= 0.95
    assert all(tag.endswith(" letters") for tag in list(told["strict"])[:-1])
    first = read_jsonl(tmp_path / SCORES)[0]
    assert (first["read"] == questions.facts[0]["text"].lower()) == (first["strict"] == 1)


def test_the_command_evaluates_words(tmp_path: Path) -> None:
    asked = ["evaluate", "wordeval", "--model", "nft-playground-words", "--tiny", "--prompts", "3", "--device", "cpu"]
    with pytest.raises(SystemExit) as left:
        main([*asked, "--out", str(tmp_path)])
    assert left.value.code == 0
    assert json.loads((tmp_path / REPORT).read_text("utf-8"))["prompts"] == 3


def test_ranks_of_several_machines_write_the_same_file_whatever_their_process_numbers(tmp_path: Path) -> None:
    file, text = tmp_path / "questions.json", "x" * 10**5
    with ThreadPoolExecutor(8) as pool:  # threads have one process number, as containers may
        list(pool.map(lambda _: _write(file, text), range(200)))
    assert file.read_text("utf-8") == text and list(tmp_path.iterdir()) == [file]


def test_pictures_are_read_ahead_and_come_in_order(tmp_path: Path) -> None:
    pixels = torch.rand(5, 1, 3, 4, 4)
    files = [tmp_path / f"{k}.png" for k in range(5)]
    for picture, file in zip(pixels, files, strict=True):
        save_image(picture, file)
    seen = prefetch_images([files[:2], files[2:4], files[4:]])
    first = next(seen)
    files[4].unlink()  # not begun before the second share is asked for
    assert [len(first), len(next(seen))] == [2, 2]
    assert all((picture - known).abs().max() <= 1 / 255 for picture, known in zip(first, pixels, strict=False))
    with pytest.raises(ImageError, match=r"4\.png"):
        next(seen)
    assert list(prefetch_images([])) == []
