"""`openai_judge` against an endpoint on loopback that answers late, wrongly, with errors and with cut-off JSON."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runner import run_cli
from judge_stub import (
    JudgeStub,
    Reply,
    completion,
    error,
    pair_answer,
    point_answer,
    read_images,
    serve_judge,
    yes_answer,
)
from torch import Tensor
from waiting import wait_until

from tastemaker.cli import EXIT_FAILURE
from tastemaker.config.build import build
from tastemaker.config.load import load
from tastemaker.config.validate import build_component
from tastemaker.core.interruption import Interrupted, handle_signals
from tastemaker.core.registry import ConfigError
from tastemaker.core.reward import RewardError, RewardSpec, Rubric, WeightedReward
from tastemaker.core.types import Placement
from tastemaker.data.image_io import save_image
from tastemaker.rewards.judge_templates import load_template
from tastemaker.rewards.openai_judge import DEFAULT_RANGE, DEFAULT_TEMPLATE, OpenaiJudgeReward, sample_frames
from tastemaker.serving.chat_client import JudgeBudget, Usage
from tastemaker.serving.judge_usage import UsageFiles, read_count
from tastemaker.training import checkpoint
from tastemaker.training.events import CheckpointSaved, StepCompleted
from tastemaker.training.loop import train

FIXTURES = Path(__file__).parent.parent / "fixtures" / "judges"
KEY = "sk-very-secret-0123456789"
PIXELS = torch.linspace(0.1, 0.9, 6)[:, None, None, None, None].expand(6, 1, 3, 8, 8)
BRIGHTNESS = (PIXELS[:, 0, 0, 0, 0] * 255).round() / 255
PROMPTS = [f"prompt {i} with {{braces}}" for i in range(6)]


@pytest.fixture
def stub() -> JudgeStub:
    return JudgeStub()


@pytest.fixture
def url(stub: JudgeStub) -> Iterator[str]:
    with serve_judge(stub) as address:
        yield address


def judge(url: str, **settings: Any) -> OpenaiJudgeReward:
    return OpenaiJudgeReward(urls=(url,), **{"retry_delay": 0.01, **settings})


def from_config(name: str = "openai_judge", **settings: Any) -> Any:
    return build_component(RewardSpec, {"type": name, **settings})


def score(
    spec: Any, pixels: Tensor = PIXELS, prompts: Any = PROMPTS, metadata: Any = (), group_size: int = 1
) -> Tensor:
    rubric = Rubric({"judge": WeightedReward(spec, spec.load(Placement()))})
    return rubric.score(pixels, prompts, metadata, group_size).total


def test_listed_defaults_are_those_of_the_default_template() -> None:
    template = load_template(DEFAULT_TEMPLATE)
    assert (template.range, template.modality, template.pairwise) == (DEFAULT_RANGE, "image", False)


def test_scores_belong_to_their_samples_within_the_concurrency_limit(stub: JudgeStub, url: str) -> None:
    together = threading.Barrier(3)  # three requests are under way before one of them is answered

    def answer_three(n: int, request: dict[str, Any]) -> Reply:
        together.wait(60)
        return replace(point_answer([float(read_images(request)[0].mean()) / 255]), delay=0.03)  # time for a fourth

    stub.fault = answer_three
    torch.testing.assert_close(score(judge(url, concurrency=3)), BRIGHTNESS, atol=1e-5, rtol=0)
    assert stub.most_in_flight == 3 and len(stub.requests) == 6
    request = stub.requests[0]
    assert request["temperature"] == 0 and request["model"] == "judge" and request["max_tokens"] == 512
    assert {r["messages"][0]["content"][1]["text"].split("Caption: ")[1] for r in stub.requests} == {
        f"[{prompt}]" for prompt in PROMPTS
    }


def test_every_kind_of_failure_on_the_way_is_repaired(stub: JudgeStub, url: str) -> None:
    faults = {
        0: error(429, "slow down", Retry_After="0"),
        1: error(500, "broken"),
        2: Reply(b"<html>502 Bad Gateway</html>", 502),
        3: Reply(b'{"choices": [{"mess', 200),  # complete by its header, but no JSON
        4: replace(completion("Style Score"), cut=20),
        5: Reply(b"{}", late=True),
        6: completion("I like it."),  # no score: asked again
        7: Reply(b'{"error": {"message": "at capacity"}}'),
    }
    stub.fault = lambda n, request: faults.get(n)
    # One request may meet all seven temporary failures, if the other one waits.
    spec = judge(url, concurrency=2, max_retries=7)
    reward = spec.load(Placement())
    torch.testing.assert_close(reward.score(PIXELS, PROMPTS, [{}] * 6), BRIGHTNESS, atol=1e-5, rtol=0)
    metrics = reward.metrics()
    assert metrics["bad_answers"] == pytest.approx(1 / 7) and metrics["failed_samples"] == 0
    assert metrics["requests"] == len(stub.requests) == 14 and metrics["retries"] == 7
    again = [request for request in stub.requests if request["temperature"] == 0.7]
    assert len({r["seed"] for r in again}) == 1 and len({r["seed"] for r in stub.requests}) == 7
    assert reward.metrics()["bad_answers"] == 0  # since the last call


def test_recorded_transport_errors(stub: JudgeStub, url: str) -> None:
    for case in json.loads((FIXTURES / "transport.json").read_text()):
        body = case["response"]
        content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        first, start = len(stub.requests), time.monotonic()
        reply = Reply(content, case["status"], case["headers"])
        stub.fault = lambda n, request, first=first, reply=reply: reply if n == first else None
        action = case["expected"]["action"]
        if action == "stop":
            with pytest.raises(RewardError, match="TM2011") as caught:
                score(judge(url), PIXELS[:1], PROMPTS[:1])
            assert case["expected"]["message"] in str(caught.value) and len(stub.requests) == first + 1
        elif action == "retry":
            score(judge(url), PIXELS[:1], PROMPTS[:1])
            assert len(stub.requests) == first + 2
            assert time.monotonic() - start >= case["expected"].get("wait_s", 0)
        else:
            template = "yes_no" if "logprobs" in case["name"] else "unifiedreward_point"
            with pytest.raises(RewardError, match="TM2031"):
                score(judge(url, parse_retries=0, template=template), PIXELS[:1], PROMPTS[:1])


def test_endpoint_that_stays_down_is_reported(stub: JudgeStub, url: str) -> None:
    stub.fault = lambda n, request: error(503, "overloaded")
    with pytest.raises(RewardError, match=r"after 3 attempts .*overloaded.*TM2014"):
        score(judge(url, max_retries=2, concurrency=1), PIXELS[:1], PROMPTS[:1])
    assert len(stub.requests) == 3


def test_timeout_is_the_one_of_the_settings(stub: JudgeStub, url: str) -> None:
    stub.fault = lambda n, request: Reply(b"{}", late=True)
    with pytest.raises(RewardError, match=r"no complete answer within 77 seconds.*TM2014"):
        score(judge(url, timeout=77.0, max_retries=1), PIXELS[:1], PROMPTS[:1])
    assert len(stub.requests) == 2


def test_least_loaded_endpoint_is_chosen_and_a_dead_one_left_out() -> None:
    slow, fast, dead = JudgeStub(), JudgeStub(), JudgeStub()
    most_are_answered = threading.Event()

    def answer_slowly(n: int, request: dict[str, Any]) -> Reply:
        most_are_answered.wait(60)
        return slow.answer([0.5])

    def answer_fast(n: int, request: dict[str, Any]) -> Reply:
        if n == 16:
            most_are_answered.set()
        return fast.answer([0.5])

    slow.fault, fast.fault = answer_slowly, answer_fast
    dead.fault = lambda n, request: error(503, "starting")
    with serve_judge(slow) as a, serve_judge(fast) as b, serve_judge(dead) as c:
        spec = OpenaiJudgeReward(urls=(a, b, c), concurrency=4, retry_delay=30.0)
        pixels = torch.rand(24, 1, 3, 4, 4)
        assert torch.allclose(score(spec, pixels, ["x"] * 24), torch.tensor(0.5))
    assert len(slow.requests) + len(fast.requests) == 24
    assert len(fast.requests) >= 2 * len(slow.requests) > 0
    assert 1 <= len(dead.requests) <= 2  # then it is paused


def test_cache_is_shared_and_depends_on_template_model_and_image(stub: JudgeStub, url: str, tmp_path: Path) -> None:
    spec = judge(url, cache=tmp_path)
    first = score(spec)
    stub.fault = lambda n, request: error(500, "nobody is asked")
    reward = spec.load(Placement())
    assert torch.equal(reward.score(PIXELS, PROMPTS, [{}] * 6), first)
    assert len(stub.requests) == 6 and reward.metrics()["cached_samples"] == 1
    stub.fault, stub.models = lambda n, request: None, ["judge", "other"]
    stub.answer = lambda brightness: point_answer([0.25])
    changes = [replace(spec, model="other"), replace(spec, model="judge", template="unifiedreward1_point")]
    for changed in [*changes, replace(spec, model="judge", temperature=0.5)]:
        stub.answer = (
            (lambda b: completion("Final Score: 2")) if "1" in changed.template else lambda b: point_answer([0.25])
        )
        assert torch.allclose(score(changed), torch.tensor(0.25))
    other = PIXELS.clone()
    other[0] += 2 / 255
    asked = len(stub.requests)
    score(replace(spec, model="judge"), other)
    assert len(stub.requests) == asked + 1


def test_failed_samples_are_not_cached(stub: JudgeStub, url: str, tmp_path: Path) -> None:
    stub.answer = lambda brightness: completion("hm")
    spec = judge(url, cache=tmp_path, parse_retries=0, on_failure=0.5, max_bad_share=1.0)
    reward = spec.load(Placement())
    assert torch.equal(reward.score(PIXELS, PROMPTS, [{}] * 6), torch.full((6,), 0.5))
    assert reward.metrics()["failed_samples"] == 1
    stub.answer = point_answer
    torch.testing.assert_close(score(spec), BRIGHTNESS, atol=1e-5, rtol=0)


def test_budget_stops_requests(stub: JudgeStub, url: str) -> None:
    with pytest.raises(RewardError, match="TM2012"):
        score(from_config(urls=[url], concurrency=1, budget={"requests": 4}))
    assert len(stub.requests) == 4
    settings = {"cost": 0.003, "prompt_price": 1.0, "completion_price": 5.0}  # 0.0015 for a request
    for budget, allowed in ((settings, 2), ({"tokens": 3000}, 3)):
        first = len(stub.requests)
        with pytest.raises(RewardError, match="TM2012"):
            score(from_config(urls=[url], concurrency=1, budget=budget))
        assert len(stub.requests) == first + allowed


def test_judge_that_cannot_be_understood_stops(stub: JudgeStub, url: str) -> None:
    stub.fault = lambda n, request: completion("Great picture!") if n % 2 else None
    spec = judge(url, concurrency=1, max_bad_share=0.3)
    pixels = torch.rand(40, 1, 3, 4, 4)
    with pytest.raises(RewardError, match=r"Great picture!.*TM2030"):
        score(spec, pixels, ["x"] * 40)
    assert len(stub.requests) == 20  # as soon as there are enough answers
    stub.fault = lambda n, request: completion("Great picture!")
    with pytest.raises(RewardError, match="TM2031"):
        score(spec, pixels[:1], ["x"])


def test_pairs_are_compared_in_both_orders_by_win_rate(stub: JudgeStub, url: str) -> None:
    stub.answer = pair_answer
    inner = {"type": "openai_judge", "urls": [url], "template": "unifiedreward_pair"}
    spec = from_config("win_rate", reward=inner)
    reward = spec.load(Placement())
    rates = reward.score_groups(PIXELS[:3], ["x"] * 3, [{}] * 3, 3)
    assert len(stub.requests) == 6 and rates.argsort().tolist() == [0, 1, 2]
    assert rates.sum().item() == pytest.approx(1.5) and reward.metrics()["requests"] == 6
    assert all(len(read_images(request)) == 2 for request in stub.requests)
    with pytest.raises(ConfigError, match="TM1586"):
        Rubric({"it": WeightedReward(spec.reward, spec.reward.load(Placement()))})


def test_videos_are_frames_and_edits_show_their_source(stub: JudgeStub, url: str, tmp_path: Path) -> None:
    clip = torch.linspace(0, 1, 16)[None, :, None, None, None].expand(1, 16, 3, 8, 8)
    stub.answer = yes_answer
    assert score(judge(url, template="yes_no_video", frames=4), clip, ["x"]).item() == pytest.approx(0.4, abs=0.01)
    assert [round(float(image.mean()) / 17) for image in read_images(stub.requests[-1])] == [0, 4, 8, 12]
    assert stub.requests[-1]["logprobs"] and stub.requests[-1]["top_logprobs"] == 20
    assert sample_frames(16, 4, "linspace") == [0, 5, 10, 15] and sample_frames(2, 4, "floor") == [0, 1]

    save_image(torch.full((1, 3, 8, 8), 0.2), tmp_path / "source.png")
    stub.answer = lambda b: completion('{"reasoning": "", "score": [20, 5]}' if len(b) == 2 else '{"score": [20, 20]}')
    entry = {"image": str(tmp_path / "source.png")}
    result = score(judge(url, template="editscore", image_format="jpeg95"), PIXELS[5:], ["make it red"], [entry])
    assert result.item() == pytest.approx((2.0 * 8.0) ** 0.5)
    following, quality = stub.requests[-2:]
    assert [round(float(i.mean()) / 255, 1) for i in read_images(following)] == [0.2, 0.9]
    assert len(read_images(quality)) == 1 and following["seed"] == 42 and following["top_k"] == 20
    assert following["messages"][0] == {"role": "system", "content": "You are a helpful assistant."}
    kinds = [part.get("text", "image")[:8] for part in following["messages"][1]["content"]]
    assert kinds[:4] == ["<img1>: ", "image", "<img2>: ", "image"]
    assert "make it red" in following["messages"][1]["content"][-1]["text"]
    several = {"image": [str(tmp_path / "source.png"), torch.full((1, 3, 4, 6), 0.6)]}  # of different sizes
    score(judge(url, template="editscore"), PIXELS[5:], ["make it red"], [several])
    following = next(request for request in stub.requests[-2:] if len(read_images(request)) > 1)
    assert [round(float(i.mean()) / 255, 1) for i in read_images(following)] == [0.2, 0.6, 0.9]
    with pytest.raises(RewardError, match="TM2032"):
        score(judge(url, template="editscore"), PIXELS[:1], ["x"])


def test_pairs_of_edits_show_their_source_and_checklists_ask_each_question(
    stub: JudgeStub, url: str, tmp_path: Path
) -> None:
    stub.answer = lambda b: completion(f"Edited image 1: {b[1]:.3f}, edited image 2: {b[2]:.3f}.")
    settings = {"type": "openai_judge", "urls": [url], "template": "unifiedreward_edit_pair_score"}
    sources = [torch.full((3, 6, 10), 0.2), torch.full((1, 3, 8, 8), 0.4)]  # pixels of two sizes
    entries = [{"image": sources}] * 4
    stub.fault = lambda n, request: stub.answer([0, *(float(x.mean()) / 255 for x in read_images(request)[2:])])
    wins = score(from_config("win_rate", reward=settings), PIXELS[:4], ["dark"] * 4, entries, group_size=4)
    assert wins.tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert [round(float(image.mean()) / 255, 1) for image in read_images(stub.requests[0])[:2]] == [0.2, 0.4]

    path = tmp_path / "list.yaml"
    path.write_text("checklist: [{question: 'Is {prompt} there?', weight: 2}, 'Is it dark?']\n", encoding="utf-8")
    stub.fault = lambda n, request: yes_answer([0.9 if "prompt 0" in str(request) else 0.3])
    found = score(judge(url, template=str(path)), PIXELS[:1], PROMPTS[:1])
    assert found.item() == pytest.approx((2 * 0.8 - 0.4) / 2, abs=1e-5) and len(stub.requests) == 14


def repeat_key(key: str) -> str:
    """The body of an answer without a score that repeats a key."""
    return completion(f"Your key is {key}.").body.decode()


def test_missing_columns_are_named(stub: JudgeStub, url: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("text: 'Rate {promt} in {Style_2}.'\nanswer: {type: yes_no_text}\n")
    entries = [{"Style_2": "oil", "level": 3, "image": torch.rand(1, 3, 8, 8)}]
    with pytest.raises(RewardError, match=r"\{promt\}.*Style_2, instruction, level, prompt;.*TM2060"):
        score(judge(url, template=str(path)), PIXELS[:1], ["x"], entries)
    with pytest.raises(RewardError, match=r"\{requirement\}.*TM2060"):
        score(judge(url, template="edit_digits"), PIXELS[:1], ["x"], entries)
    assert not stub.requests
    path.write_text("text: 'Rate {prompt} in {Style_2}, as {\"a\": 1}.'\nanswer: {type: yes_no_text}\n")
    stub.fault = lambda n, request: completion("yes")
    assert score(judge(url, template=str(path)), PIXELS[:1], ["red"], entries).item() == 1
    assert stub.requests[0]["messages"][0]["content"][-1]["text"] == 'Rate red in oil, as {"a": 1}.'


def test_key_is_sent_and_never_shown(
    stub: JudgeStub, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("JUDGE_KEY", KEY)
    spec = judge(url, api_key_env="JUDGE_KEY", max_retries=1)
    score(spec)
    assert set(stub.keys) == {f"Bearer {KEY}"}
    texts = [repr(spec), repr(vars(spec.load(Placement())))]
    for status in (401, 500):
        stub.fault = lambda n, request, status=status: error(status, f"the key {KEY} is wrong")
        with pytest.raises(RewardError) as caught:
            score(spec)
        problem: BaseException | None = caught.value
        while problem:
            texts.append(f"{problem!r} {problem}")
            problem = problem.__cause__ or problem.__context__
    for judged, code in ((replace(spec, parse_retries=30), "TM2030"), (replace(spec, parse_retries=0), "TM2031")):
        for body in (repeat_key(KEY), repeat_key(KEY).replace(KEY[:2], "".join(f"\\u{ord(c):04x}" for c in KEY[:2]))):
            stub.fault = lambda n, request, body=body: Reply(body.encode())
            pixels = torch.rand(1, 1, 3, 4, 4)
            with pytest.raises(RewardError, match=rf"\*\*\*.*{code}") as caught:
                score(judged, pixels, ["x"])
            texts.append(str(caught.value))
    assert KEY not in "".join([*texts, caplog.text]) and any("***" in text for text in texts)
    monkeypatch.setenv("JUDGE_KEY", "1")  # a placeholder, which may occur in a verdict
    stub.fault = lambda n, request: point_answer([0.25])
    assert torch.allclose(score(spec), torch.tensor(0.25))
    for wrong, code in ((KEY, "TM2022"), ("sk_looks_like_a_name", "TM2025")):
        with pytest.raises(ValueError, match=code) as refused:
            judge(url, api_key_env=wrong).load(Placement())
        assert wrong not in str(refused.value)
    with pytest.raises(ValueError, match="TM2021") as refused:
        judge(f"http://me:{KEY}@127.0.0.1:1")
    assert KEY not in str(refused.value)


def test_model_is_compared_with_those_that_are_served(stub: JudgeStub, url: str) -> None:
    with pytest.raises(ConfigError, match="TM2027"):
        judge(url, model="another").load(Placement())
    stub.models = ["a", "b"]
    with pytest.raises(ConfigError, match="TM2026"):
        judge(url).load(Placement())
    with pytest.raises(ValueError, match="TM2020"):
        judge("ftp://127.0.0.1")


def test_failure_ends_the_other_requests_at_once(stub: JudgeStub, url: str) -> None:
    """Slow answers and waits for another attempt do not keep a run alive that has to stop."""
    all_sent, over = threading.Barrier(3), threading.Event()

    def answer(n: int, request: dict[str, Any]) -> Reply:
        all_sent.wait(60)
        if n == 0:
            over.wait(60)
        if n == 2:
            wait_until(lambda: reward.judge.pool.usage.retries == 1)  # the second request waits for its next attempt
        return [Reply(b"{}"), error(429, "later", Retry_After="600"), error(400, "no")][n]

    stub.fault = answer
    reward = judge(url, concurrency=3).load(Placement())
    start = time.monotonic()
    try:
        with pytest.raises(RewardError, match="TM2011"):
            reward.score(PIXELS, PROMPTS, [{}] * 6)
        reward.judge._threads.shutdown()  # waits for all of them
        assert time.monotonic() - start < 30 and len(stub.requests) == 3
    finally:
        over.set()


def test_stop_request_ends_a_wait_for_the_next_attempt(stub: JudgeStub, url: str) -> None:
    stub.fault = lambda n, request: error(429, "later", Retry_After="600")
    spec, start = judge(url), time.monotonic()
    reward = spec.load(Placement())
    with handle_signals(raising=False):
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(Interrupted):
            reward.score(PIXELS[:2], PROMPTS[:2], [{}] * 2)
    assert time.monotonic() - start < 60


TRAINING = ["sample.every=0", "guard.every=0", "checkpoint.every=100", "batch.prompts=2", "objective.group_size=4"]


def start_run(directory: Path, url: str, steps: int = 4, **settings: Any) -> Any:
    reward = {"type": "openai_judge", "urls": [url], "retry_delay": 0.01, **settings}
    config = load("grpo-toy-flow", [*TRAINING, f"steps={steps}", f"rewards={json.dumps({'judge': reward})}"])
    return build(config, directory)


def weights(run: Any) -> dict[str, Tensor]:
    return {key: value.detach().clone() for key, value in run.policy.weights.trainable().items()}


def test_run_goes_on_through_faults_or_stops_with_its_work_saved(
    stub: JudgeStub, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    calm = start_run(tmp_path / "calm", url)
    list(train(calm))
    asked = len(stub.requests)
    turn = itertools.cycle(
        [error(429, KEY, Retry_After="0"), error(500, "x"), Reply(b'{"cut'), Reply(b"{}", late=True)]
    )
    stub.fault = lambda n, request: next(turn) if n % 6 == 0 else None
    faulty = start_run(tmp_path / "faulty", url, max_retries=20, api_key_env="JUDGE_KEY")
    events = [event for event in train(faulty) if isinstance(event, StepCompleted)]
    expected, found = weights(calm), weights(faulty)
    assert asked == 4 * 8 and all(torch.equal(found[key], expected[key]) for key in expected)
    assert [event.metrics["scoring/judge/bad_answers"] for event in events] == [0] * 4
    assert events[-1].metrics["scoring/judge/retries"] >= 4

    first = len(stub.requests)
    stub.fault = lambda n, request: completion("no idea") if n >= first + 16 else None
    stopped = start_run(tmp_path / "stopped", url)
    saved = []
    with pytest.raises(RewardError, match=r"no idea.*TM203[01]"):
        saved.extend(event for event in train(stopped) if isinstance(event, CheckpointSaved))
    assert [event.step for event in saved] == [2]
    stub.fault = lambda n, request: None
    resumed = start_run(tmp_path / "stopped", url)
    resumed.resume(checkpoint.latest_checkpoint(resumed.directory))
    list(train(resumed))
    found = weights(resumed)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_command_stops_with_the_reason_and_shows_no_key(
    stub: JudgeStub, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    monkeypatch.chdir(tmp_path)
    stub.fault = lambda n, request: error(401, f"{KEY} has expired") if n >= 16 else None
    reward = {"type": "openai_judge", "urls": [url], "api_key_env": "JUDGE_KEY"}
    settings = [*TRAINING, "steps=4", f"rewards={json.dumps({'judge': reward})}"]
    assert run_cli("train", "grpo-toy-flow", *settings, "name=made") == EXIT_FAILURE
    assert (tmp_path / "runs/made/checkpoints/step-000002").is_dir()
    assert run_cli("report", "runs/made") == 0
    shown = "".join(capfd.readouterr())
    assert "TM2011" in shown and "*** has expired" in shown
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"JUDGE_KEY" in written and KEY.encode() not in written and KEY not in shown


@pytest.mark.slow
def test_budget_of_a_run_survives_restarts(
    stub: JudgeStub, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def run(requests: int) -> int:
        inner = {"type": "openai_judge", "urls": [url], "concurrency": 1, "budget": {"requests": requests}}
        rewards = {"judge": {"type": "cached", "reward": inner}}
        return run_cli("train", "grpo-toy-flow", *TRAINING, "steps=4", f"rewards={json.dumps(rewards)}", "name=made")

    assert run(20) == EXIT_FAILURE and len(stub.requests) == 20  # in the third step
    assert run(20) == EXIT_FAILURE and len(stub.requests) == 20  # the third step begins again, without a request
    assert "requests: 20 of 20" in capfd.readouterr().err
    assert run(40) == 0 and len(stub.requests) == 36
    folder = tmp_path / "runs/made/rewards/judge"
    assert len(list(folder.iterdir())) == 2 and sum(read_count(path).requests for path in folder.iterdir()) == 36


def test_usage_counts_what_other_processes_spent(tmp_path: Path) -> None:
    budget = JudgeBudget(requests=5, tokens=5000, cost=0.01, prompt_price=2.0, completion_price=10.0)
    response = {"usage": {"prompt_tokens": 1000, "completion_tokens": 100}}
    first, second, other = Usage(budget), Usage(budget), Usage(budget)
    first.start_request()  # before the files are named: of no run
    for usage, name in ((first, "judge"), (second, "judge"), (other, "another")):
        usage.keep_in(UsageFiles(tmp_path / "usage", name))
    for _ in range(2):
        first.start_request()
        first.add(response)
    second.start_request()
    second.add(response)
    other.start_request()
    restarted = Usage(budget)
    restarted.keep_in(UsageFiles(tmp_path / "usage", "judge"))
    restarted.start_request()  # 3 requests, 3300 tokens and 0.009 were spent
    restarted.add(response)
    with pytest.raises(RewardError, match=r"cost: 0\.012 of 0\.01.*TM2012"):
        restarted.start_request()
    assert restarted.requests == 1 and restarted.cost == pytest.approx(0.003)  # metrics are those of the process
    (tmp_path / "usage" / restarted._files.path.name).write_text('{"requests": "many"}')  # type: ignore[union-attr]
    last = Usage(budget)
    last.keep_in(UsageFiles(tmp_path / "usage", "judge"))
    with pytest.raises(ConfigError, match="TM2307"):
        last.start_request()
