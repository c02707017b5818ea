"""The stages of an evaluation, resuming them, and the playground's benchmarks."""

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
from tastemaker.core.output_paths import write_text_atomically
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import PromptBatch
from tastemaker.data.image_io import ImageError, save_image
from tastemaker.evaluation.benchmark_run import (
    EvaluationOptions,
    describe_settings,
    scores_fingerprint,
    summarize_settings,
)
from tastemaker.evaluation.benchmarks import Benchmark, held_out_captions, playeval, wordeval
from tastemaker.evaluation.evaluate import REPORT, SCORES, evaluate, prefetch_images, read_jsonl
from tastemaker.evaluation.playeval import PlayEvalScorer, load_playeval_scorer, load_wordeval_scorer
from tastemaker.playground import signs
from tastemaker.playground.captions import TASKS, parse_captions
from tastemaker.playground.network_files import TINY
from tastemaker.playground.scenes import Painter, sample_scenes
from tastemaker.search.base import SearchCost
from tastemaker.search.best_of_n import BestOfN, SingleSample
from tastemaker.search.parm import PARMSearch


class ScenePainter:
    """Generates correct samples, counts its calls, and is interrupted after `max_calls`."""

    def __init__(self, max_calls: int = 10**6) -> None:
        self.calls, self.max_calls = 0, max_calls

    def __call__(self, batch: PromptBatch, indices: Tensor) -> tuple[Tensor, SearchCost]:
        if self.calls == self.max_calls:
            raise KeyboardInterrupt
        self.calls += 1
        rng = Randomness(0, 0, indices)
        return Painter().paint(sample_scenes(parse_captions(batch.prompts), rng), rng), SearchCost(3 * len(batch))


@pytest.fixture(scope="module")
def scorer() -> PlayEvalScorer:
    return load_playeval_scorer(TINY)


@pytest.fixture(scope="module")
def benchmark() -> Benchmark:
    return playeval(36, 4)


def test_evaluation_writes_samples_scores_and_report(
    benchmark: Benchmark, scorer: PlayEvalScorer, tmp_path: Path
) -> None:
    stages = [progress.stage for progress in evaluate(benchmark, ScenePainter(), scorer, tmp_path)]
    assert stages == ["samples"] * 3 + ["scores"] * 3 + ["report"]
    assert len(list(tmp_path.glob("samples/*/*.png"))) == 144
    report = json.loads((tmp_path / REPORT).read_text("utf-8"))
    assert set(report["scores"]["strict"]) == {*TASKS, "overall"}
    assert report["calls"] == 3 and report["images"] == 144 and report["diversity"] > 0
    rows = read_jsonl(tmp_path / SCORES)
    assert [row["strict"] == 1 for row in rows] == [not row["reasons"] for row in rows]


def test_frechet_distance_of_real_scenes_is_smaller_than_of_noise(
    benchmark: Benchmark, scorer: PlayEvalScorer, tmp_path: Path
) -> None:
    def noise(batch: PromptBatch, indices: Tensor) -> tuple[Tensor, SearchCost]:
        return Randomness(0, 0, indices).uniform("noise", 1, 3, 64, 64), SearchCost(0)

    distances = []
    for name, sample_fn in {"real": ScenePainter(), "noise": noise}.items():
        list(evaluate(benchmark, sample_fn, scorer, tmp_path / name))
        distances.append(json.loads((tmp_path / name / REPORT).read_text("utf-8"))["frechet"])
    assert distances[0] < 0.2 * distances[1]


def test_interrupted_evaluation_resumes(benchmark: Benchmark, scorer: PlayEvalScorer, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        list(evaluate(benchmark, ScenePainter(max_calls=2), scorer, tmp_path / "stopped"))
    painter = ScenePainter()
    list(evaluate(benchmark, painter, scorer, tmp_path / "stopped"))
    assert painter.calls == 1
    list(evaluate(benchmark, ScenePainter(), scorer, tmp_path / "uninterrupted"))
    first, second = ((tmp_path / name / REPORT).read_text("utf-8") for name in ("stopped", "uninterrupted"))
    assert first == second


def test_samples_that_cannot_be_written_stop_the_evaluation(scorer: PlayEvalScorer, tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("no folder")
    painter = ScenePainter()
    with pytest.raises(OSError, match="samples"):
        list(evaluate(playeval(36, 4), painter, scorer, tmp_path, batch_size=16))
    assert painter.calls == 2  # the second batch is sampled while the first one is written
    assert not list((tmp_path / ".costs").iterdir())


def test_finished_stages_are_skipped_and_missing_scores_recomputed(
    benchmark: Benchmark, scorer: PlayEvalScorer, tmp_path: Path
) -> None:
    list(evaluate(benchmark, ScenePainter(), scorer, tmp_path))
    before = (tmp_path / REPORT).read_text("utf-8")
    (tmp_path / SCORES).unlink()
    (tmp_path / REPORT).unlink()
    painter = ScenePainter(max_calls=0)
    assert [progress.stage for progress in evaluate(benchmark, painter, scorer, tmp_path)] == ["scores"] * 3 + [
        "report"
    ]
    assert (tmp_path / REPORT).read_text("utf-8") == before


def test_directory_of_another_benchmark_is_refused(scorer: PlayEvalScorer, tmp_path: Path) -> None:
    list(evaluate(playeval(6, 1), ScenePainter(), scorer, tmp_path))
    with pytest.raises(ConfigError, match=r"--out.*TM598"):
        list(evaluate(playeval(12, 1), ScenePainter(), scorer, tmp_path))


def test_playeval_has_equal_tasks_and_held_out_captions() -> None:
    captions = held_out_captions(60)
    assert torch.bincount(captions.task).tolist() == [10] * 6
    assert captions.held_out()[captions.task > 0].all()


def test_smaller_playeval_is_a_prefix_of_a_larger_one() -> None:
    assert playeval(60).prompts[:30] == playeval(30).prompts


def test_too_few_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 6.*TM594"):
        playeval(5)


@pytest.mark.parametrize("search", ["single", "parm"])
def test_evaluate_command_runs_a_recipe(search: str, tmp_path: Path) -> None:
    arguments = ["evaluate", "playeval", "--model", "grpo-toy-flow", "--tiny", "--num-prompts", "6", "--device", "cpu"]
    with pytest.raises(SystemExit) as exit_info:
        main([*arguments, "--search", search, "--num-candidates", "2", "--out", str(tmp_path)])
    assert exit_info.value.code == 0
    report = json.loads((tmp_path / REPORT).read_text("utf-8"))
    assert report["images"] == 12 and (search == "parm") == (report["calls"] > 10)
    settings = report["settings"]
    assert (settings["recipe"], settings["weights"], settings["snapshot"]) == ("grpo-toy-flow", "tiny", "live")
    if search == "parm":
        assert settings["search"] == {"type": "parm", "n": 2, "start_progress": 0.0, "prune": True, "top_k": None}
        assert settings["judge"]["type"] == "playground_judge"
    else:
        assert settings["search"] == {"type": "single"} and settings["judge"] is None


def test_reports_tell_the_sixteen_published_combinations_apart() -> None:
    searches = {
        "none": (SingleSample(), "vlm"),
        "orm_zs": (BestOfN(20), "vlm"),
        "orm_ft": (BestOfN(20), "{type: vlm, weights: orm_ft}"),
        "parm": (PARMSearch(20), "{type: vlm, weights: parm}"),
    }
    lines = {}
    for weights in ("showlab/show-o", "dpo", "dpo_iter", "dpo_iter_parm_guide"):
        config = load("dpo-showo", [f"model.weights={weights}"])
        for name, (search, verifier) in searches.items():
            options = EvaluationOptions(playeval(6, 1), search, verifier)
            settings = describe_settings(config, None, options, tiny=False)
            assert settings["weights"] == weights and json.loads(json.dumps(settings)) == settings
            assert (settings["judge"] is None) == (name == "none")
            by_name = describe_settings(config, None, replace(options, verifier=name), tiny=False)
            assert name == "none" or by_name == settings  # --reward_model's names work as verifiers
            lines[weights, name] = summarize_settings(settings)
    assert len(set(lines.values())) == 16
    assert lines["dpo_iter", "parm"] == (
        "dpo-showo, weights dpo_iter, search parm with 20 candidates, judge vlm parm orm yes_no_logits"
    )


def test_evaluate_command_refuses_a_directory_of_other_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["evaluate", "playeval", "--model", "grpo-toy-masked", "--tiny", "--num-prompts", "6", "--count", "1"]
    arguments += ["--device", "cpu", "--out", str(tmp_path)]
    for overrides, code in (([], 0), ([], 0), (["process.num_steps=2"], 2), (["model.seed=5"], 2)):
        with pytest.raises(SystemExit) as exit_info:
            main([*arguments, *overrides])
        assert exit_info.value.code == code
    assert "--out" in capsys.readouterr().err


def test_scores_fingerprint_contains_the_verifier_of_a_search() -> None:
    config, options = load("grpo-toy-masked"), EvaluationOptions(playeval(6, 1), BestOfN(2), "playground_judge")
    other = replace(options, verifier="playground_taste")
    assert scores_fingerprint(config, None, options, True) != scores_fingerprint(config, None, other, True)
    single, other_single = (replace(each, search=SingleSample()) for each in (options, other))  # uses no verifier
    assert scores_fingerprint(config, None, single, True) == scores_fingerprint(config, None, other_single, True)


def test_unknown_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["evaluate", "imagenet", "--model", "grpo-toy-flow", "--tiny"])
    assert exit_info.value.code == 2
    assert "imagenet" in capsys.readouterr().err


def test_wordeval_scores_signs_with_held_out_words(tmp_path: Path) -> None:
    benchmark = wordeval(8, 2)
    assert benchmark.prompts == wordeval(20).prompts[:8] and len(wordeval()) == signs.held_out_words().sum()
    assert {signs.WORDS.index(metadata["text"]) for metadata in benchmark.metadata} <= set(
        signs.held_out_words().nonzero()[:, 0].tolist()
    )

    def paint(batch: PromptBatch, indices: Tensor) -> tuple[Tensor, SearchCost]:
        word_ids = torch.tensor([signs.WORDS.index(word) for word in signs.requested_words(batch.prompts)])
        return signs.SignPainter().paint(word_ids, Randomness(0, 0, indices)), SearchCost(0)

    list(evaluate(benchmark, paint, load_wordeval_scorer(TINY), tmp_path))
    scores = json.loads((tmp_path / REPORT).read_text("utf-8"))["scores"]
    assert scores["strict"]["overall"]["mean"] >= 0.9 and scores["graded"]["overall"]["mean"] >= 0.95
    assert all(tag.endswith(" letters") for tag in list(scores["strict"])[:-1])
    first = read_jsonl(tmp_path / SCORES)[0]
    assert (first["read"] == benchmark.metadata[0]["text"].lower()) == (first["strict"] == 1)


def test_evaluate_command_runs_wordeval(tmp_path: Path) -> None:
    arguments = [
        "evaluate",
        "wordeval",
        "--model",
        "nft-playground-words",
        "--tiny",
        "--num-prompts",
        "3",
        "--device",
        "cpu",
    ]
    with pytest.raises(SystemExit) as exit_info:
        main([*arguments, "--device", "cpu", "--out", str(tmp_path)])
    assert exit_info.value.code == 0
    assert json.loads((tmp_path / REPORT).read_text("utf-8"))["prompts"] == 3


def test_concurrent_atomic_writes_leave_one_complete_file(tmp_path: Path) -> None:
    file, text = tmp_path / "benchmark.json", "x" * 10**5
    with ThreadPoolExecutor(8) as pool:  # threads share a process id, as containers may
        list(pool.map(lambda _: write_text_atomically(file, text), range(200)))
    assert file.read_text("utf-8") == text and list(tmp_path.iterdir()) == [file]


def test_images_are_prefetched_in_order(tmp_path: Path) -> None:
    pixels = torch.rand(5, 1, 3, 4, 4)
    files = [tmp_path / f"{k}.png" for k in range(5)]
    for image, file in zip(pixels, files, strict=True):
        save_image(image, file)
    batches = prefetch_images([files[:2], files[2:4], files[4:]])
    first = next(batches)
    files[4].unlink()  # its batch is read only after the second one is requested
    assert [len(first), len(next(batches))] == [2, 2]
    assert all((image - expected).abs().max() <= 1 / 255 for image, expected in zip(first, pixels, strict=False))
    with pytest.raises(ImageError, match=r"4\.png.*TM166"):
        next(batches)
    assert list(prefetch_images([])) == []
