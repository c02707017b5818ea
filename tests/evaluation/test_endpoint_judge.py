"""Benchmarks that are judged by a chat-completions endpoint, from the command line to the report."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_samples import write_benchmark
from cli_runner import run_cli
from judge_stub import JudgeStub, Reply, completion, error, read_images, serve_judge

from tastemaker.cli import EXIT_FAILURE
from tastemaker.core.registry import ConfigError
from tastemaker.core.reward import RewardError
from tastemaker.data.image_io import save_image
from tastemaker.evaluation.benchmark_files import load_published_benchmark
from tastemaker.evaluation.benchmark_run import parse_judge
from tastemaker.evaluation.endpoint_judge import match_word, sum_logprobs
from tastemaker.evaluation.evaluate import REPORT, SCORES, read_jsonl
from tastemaker.evaluation.question_scorers import (
    describe_testpoints,
    dimension_interval,
    mean_over_dimensions,
    parse_testpoint_scores,
    read_unigenbench_texts,
)
from tastemaker.rewards.judge_answers import JudgeAnswer
from tastemaker.vlm.question_judge import NO, YES

TWO = ("two", "Two", "2", " two", " Two", " 2")


def question_of(request: Mapping[str, Any]) -> str:
    return str(next(part["text"] for part in request["messages"][-1]["content"] if part["type"] == "text"))


def word_reply(**probabilities: float) -> Reply:
    """An answer of one token with the log-probabilities of several."""
    top = [{"token": token, "logprob": math.log(p)} for token, p in probabilities.items()]
    return completion(top[0]["token"], {"content": [{**top[0], "top_logprobs": top}]}, "length")  # type: ignore[arg-type]


def answer_by_brightness(request: Mapping[str, Any]) -> Reply:
    """Yes with the probability of the brightness; every count is two; WISE and UniGenBench++ as text."""
    question, p = question_of(request), float(read_images(dict(request))[0].mean()) / 255
    if "Checkpoints" in question:
        count = 3 if "cups" in question else 1
        scores = [1] * (count - 1) + [int(p > 0.5)]
        return completion(f"<analysis>{['fine'] * count}</analysis>\n<score>{scores}</score>")
    if "explanation" in question or "correct image" in question:
        return completion(f"**Score: {int(p > 0.5)}**")
    if question.startswith("How many"):
        return word_reply(**{"two": 0.5, " 2": 0.25, "three": 0.2})
    return word_reply(Yes=p / 2, **{" yes": p / 2}, no=1 - p)


@pytest.fixture
def stub() -> JudgeStub:
    stub = JudgeStub()
    stub.fault = lambda n, request: answer_by_brightness(request)
    return stub


@pytest.fixture
def url(stub: JudgeStub) -> Iterator[str]:
    with serve_judge(stub) as address:
        yield address


def save_samples(name: str, folder: Path, brightness: float = 0.8) -> list[str]:
    """Arguments of `evaluate` for gray images of each prompt."""
    metadata = write_benchmark(name, folder / "file")
    benchmark = load_published_benchmark(name, None, 1, metadata)
    for i in range(len(benchmark)):
        save_image(torch.full((1, 3, 16, 16), brightness), folder / "images" / f"{i:05d}" / "0000.png")
    images = str(folder / "images")
    return ["evaluate", name, "--metadata", str(metadata), "--images", images, "--count", "1", "--device", "cpu"]


def read_report(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / REPORT).read_text("utf-8"))
    return report


def test_geneval2_reads_log_probabilities_and_resumes_within_its_budget(
    stub: JudgeStub, url: str, tmp_path: Path
) -> None:
    command, out = save_samples("geneval2", tmp_path), tmp_path / "out"

    def run(budget: int) -> int:
        judge = f"{{endpoint: {{urls: ['{url}'], concurrency: 1, retry_delay: 0.01, budget: {{requests: {budget}}}}}}}"
        return run_cli(*command, "--judge", judge, "--out", str(out))

    assert run(3) == EXIT_FAILURE and len(stub.requests) == 3  # of four questions
    stub.fault = lambda n, request: error(503, "restarting") if n == 4 else answer_by_brightness(request)
    assert run(7) == EXIT_FAILURE and len(stub.requests) == 7  # what was spent before the restart counts
    assert run(100) == 0
    assert not list((out / ".judge").glob("*.partial")) and len(list((out / ".judge").glob("*.json"))) == 3
    first, second = read_jsonl(out / SCORES)
    gray = round(0.8 * 255) / 255
    assert first["am"] == pytest.approx((gray + 0.75 + gray) / 3) and second["gm"] == pytest.approx(gray)
    assert read_report(out)["judge"] == "judge at an endpoint"
    request = stub.requests[-1]
    assert request["max_tokens"] == 1 and request["logprobs"] and request["top_logprobs"] == 20
    assert request["temperature"] == 0 and request["messages"][0]["content"][0]["type"] == "image_url"
    assert run_cli(*command, "--judge", url, "--out", str(out)) == 0  # finished: nothing is asked
    assert len(stub.requests) == 11


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "brightness", "expected"),
    [("dpg", 0.4, 0.0), ("wise", 0.8, 1.0), ("t2i-compbench", 0.8, (0.8**2 + 0.8) / 2), ("unigenbench", 0.4, 1 / 3)],
)
def test_every_benchmark_of_questions_runs_with_an_endpoint(
    name: str, brightness: float, expected: float, url: str, stub: JudgeStub, tmp_path: Path
) -> None:
    command, out = save_samples(name, tmp_path, brightness), tmp_path / "out"
    assert run_cli(*command, "--judge", url, "--out", str(out)) == 0
    report = read_report(out)
    total = report["scores"][report["headline"]]["overall"]
    assert total["mean"] == pytest.approx(expected, abs=0.01)
    assert report["judge"].startswith("judge at an endpoint") and report.get("unparsed", 0) == 0
    assert run_cli("leaderboard", str(out), "--out", str(tmp_path / "board.jsonl")) == 0
    assert "judge at an endpoint" in (tmp_path / "board.md").read_text("utf-8")


@pytest.mark.slow
def test_wise_is_asked_with_a_system_message_and_again_with_another_seed(
    stub: JudgeStub, url: str, tmp_path: Path
) -> None:
    command, out = save_samples("wise", tmp_path), tmp_path / "out"
    template = tmp_path / "question.txt"
    template.write_text("PROMPT: {prompt}\nexplanation: {explanation}", encoding="utf-8")
    stub.fault = lambda n, request: answer_by_brightness(request) if request["seed"] > 2_000_000 else completion("?")
    judge = f"{{endpoint: {{urls: ['{url}']}}, template: {template}, system: You are an auditor.}}"
    assert run_cli(*command, "--judge", judge, "--out", str(out)) == 0
    assert len(stub.requests) == 9 and read_report(out)["unparsed"] == 0  # three attempts at each
    for request in stub.requests:
        system, user = request["messages"]
        assert system == {"role": "system", "content": "You are an auditor."}
        assert [part["type"] for part in user["content"]] == ["text", "image_url"]
        assert (request["temperature"], request["max_tokens"]) == (0.7 if request["seed"] else 0, 500)
    stub.fault = lambda n, request: completion("?")
    assert run_cli(*command, "--judge", judge, "--out", str(tmp_path / "unclear")) == 0
    assert read_report(tmp_path / "unclear")["unparsed"] == 3


@pytest.mark.slow
def test_model_is_evaluated_with_an_endpoint_that_may_move(stub: JudgeStub, url: str, tmp_path: Path) -> None:
    metadata = ["--metadata", str(write_benchmark("geneval2", tmp_path / "file")), "--tiny", "--device", "cpu"]
    command = ["evaluate", "geneval2", "--model", "grpo-toy-flow", "--out", str(tmp_path / "out"), *metadata]
    limited = f"{{endpoint: {{urls: ['{url}'], budget: {{requests: 2}}}}}}"
    assert run_cli(*command, "--judge", limited) == EXIT_FAILURE
    with serve_judge(stub) as other:
        assert run_cli(*command, "--judge", f"{{endpoint: {{urls: ['{other}', '{url}'], concurrency: 2}}}}") == 0
    assert read_report(tmp_path / "out")["judge"] == "judge at an endpoint"


@pytest.mark.slow
def test_endpoint_without_log_probabilities_answers_in_words(stub: JudgeStub, url: str, tmp_path: Path) -> None:
    stub.fault = lambda n, request: completion("2." if "How many" in question_of(request) else "Yes, it does.")
    command = save_samples("geneval2", tmp_path)
    assert run_cli(*command, "--judge", url, "--out", str(tmp_path / "none")) == EXIT_FAILURE
    judge = f"{{endpoint: {{urls: ['{url}'], answers: text}}}}"
    assert run_cli(*command, "--judge", judge, "--out", str(tmp_path / "words")) == 0
    report = read_report(tmp_path / "words")
    assert report["scores"]["gm"]["overall"]["mean"] == 1 and report["judge"].endswith("answers as text")
    assert stub.requests[-1]["max_tokens"] == 16 and "logprobs" not in stub.requests[-1]


def test_probabilities_are_sums_over_the_spellings_of_an_answer() -> None:
    tokens = (("Yes", 0.25), ("\u0120yes", 0.125), ("\u2581No", 0.25), ("YES!", 0.1), ("Yes ", 0.1))
    answer = JudgeAnswer("Yes", "length", tuple((token, math.log(p)) for token, p in tokens))
    assert sum_logprobs(answer, (YES, NO)) == pytest.approx((0.375, 0.25))
    for likely in (None, (("Yes", math.nan),), (("Yes", 1.5),)):
        with pytest.raises(RewardError, match="TM2306"):
            sum_logprobs(JudgeAnswer("Yes", "length", likely), (YES,))
    assert match_word("**Two** dogs", (TWO, YES)) == (1, 0) and match_word(" 2.", (TWO,)) == (1,)
    assert match_word("", (YES, NO)) == (0, 0) and match_word("Yesterday", (YES,)) == (0,)


def test_unigenbench_is_asked_and_read_as_published(tmp_path: Path) -> None:
    benchmark = load_published_benchmark("unigenbench", None, None, write_benchmark("unigenbench", tmp_path))
    assert benchmark.samples_per_prompt == 4 and benchmark.metadata[1]["item_id"] == "1"
    text = describe_testpoints(str(read_unigenbench_texts()["question"]), benchmark.metadata[0])
    assert "from the angles specified in ['Attribute - Color', 'Attribute - Quantity', 'Grammar - Negation']." in text
    assert "\u300c\nAttribute - Color: Assessment of different colors\nAttribute - Quantity: Focuses" in text
    assert "Description:\u300c\nAttribute - Color: The cups are red\nAttribute - Quantity: There are" in text
    assert "{" not in text and len(read_unigenbench_texts()["explanations"]) == 27
    explanations = json.dumps(read_unigenbench_texts()["explanations"], sort_keys=True)
    assert hashlib.sha256(explanations.encode()).hexdigest().startswith("c769a7fdb91440e3")  # of the published ones
    answer = "<analysis>['a', \"b\"]</analysis> <score>\n[1, 0]</score>"
    assert parse_testpoint_scores(answer, 2) == [1, 0]
    broken = ["", "[1, 0]", answer.replace("1,", "2,"), answer.replace("1,", "True,"), answer.replace("[1, 0]", "[1]")]
    broken += [answer.replace("['a', \"b\"]", "['a']"), answer.replace("[1, 0]", "__import__('os')"), "<score>[1, 0]"]
    assert [parse_testpoint_scores(text, 2) for text in broken] == [None] * len(broken)
    points = [(0, "Attribute", 1.0), (0, "Attribute", 0.0), (0, "Style", 1.0), (1, "Style", 0.0), (1, "Style", 0.0)]
    assert mean_over_dimensions([point[1:] for point in points]) == pytest.approx((1 / 2 + 1 / 3) / 2)
    interval = dimension_interval(points)
    assert interval["mean"] == pytest.approx((1 / 2 + 1 / 3) / 2) and interval["low"] <= interval["mean"]


def test_wrong_files_and_settings_are_refused(tmp_path: Path) -> None:
    file = write_benchmark("unigenbench", tmp_path)
    text = file.read_text("utf-8")
    cases = {"prompt_en": ("prompt", "TM2308"), "Attribute - Color": ("Attribute - Taste", "TM2309")}
    for old, (new, code) in cases.items():
        file.write_text(text.replace(old, new), encoding="utf-8")
        with pytest.raises(ConfigError, match=code):
            load_published_benchmark("unigenbench", None, None, file)
    with pytest.raises(ConfigError, match="TM2310"):
        parse_judge("{weights: some/model, endpoint: {urls: ['http://x']}}", "dpg")
    with pytest.raises(ConfigError, match="TM2020"):
        parse_judge("{endpoint: {urls: ['x']}}", "dpg")
    settings = parse_judge("https://api.example.com/v1", "wise")
    assert settings.endpoint is not None and settings.endpoint.urls == ("https://api.example.com/v1",)
