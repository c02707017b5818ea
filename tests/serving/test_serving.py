"""A reward served on a real port and asked over it: the same numbers, and a sentence where there are none."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from reward_server import CPU, PIXELS, PROMPTS, FunctionReward, score_locally, serve_on_free_port
from torch import Tensor

from tastemaker.core.registry import ConfigError
from tastemaker.core.reward import RewardError, RewardSpec, Rubric, WeightedReward
from tastemaker.core.types import Metadata, Placement, Prompts
from tastemaker.rewards.color import Brightness, Color
from tastemaker.rewards.jpeg import Jpeg
from tastemaker.rewards.remote import Remote
from tastemaker.rewards.stillness import Stillness
from tastemaker.serving.batch_queue import BatchQueue
from tastemaker.serving.launcher import describe_reward
from tastemaker.serving.protocol import JSON, NPZ, ScoreRequest, encode_request


def ask(url: str, path: str, kind: str = "", body: bytes = b"", **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
    headers |= {"Content-Type": kind} if kind else {}
    connection.request("POST" if kind else "GET", path, body or None, headers)
    response = connection.getresponse()
    told = json.loads(response.read())
    connection.close()
    return response.status, told


@pytest.mark.parametrize(
    "spec", [Color(), Jpeg(), Brightness(0.3), Stillness()], ids=["color", "jpeg", "target", "clip"]
)
def test_a_remote_reward_gives_the_very_numbers_of_a_local_one(spec: RewardSpec) -> None:
    with serve_on_free_port(spec) as url:
        remote = Remote(url, reads=spec.reads, batch_size=2)
        assert score_locally(remote).equal(score_locally(spec))


def test_png_bodies_give_the_numbers_of_pictures_in_files() -> None:
    with serve_on_free_port(Color()) as url:
        rounded = (PIXELS * 255).round() / 255
        torch.testing.assert_close(score_locally(Remote(url, form="png")), score_locally(Color(), rounded))


def test_clips_travel_as_animated_png() -> None:
    with serve_on_free_port(Stillness()) as url:
        rounded = (PIXELS * 255).round() / 255
        torch.testing.assert_close(
            score_locally(Remote(url, form="png", reads="clip")), score_locally(Stillness(), rounded)
        )


def test_facts_travel_and_say_which_frame_a_row_was() -> None:
    seen: list[Metadata] = []

    def which(pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        seen.extend(facts)
        return torch.tensor([float(fact["row"] * 10 + fact["frame"]) for fact in facts])

    with serve_on_free_port(FunctionReward(which)) as url:
        facts = [{"row": i, "objects": [{"class": "dog", "count": 2}], "text": "Grüße"} for i in range(5)]
        assert score_locally(Remote(url), facts=facts).tolist() == [10.0 * i + 1 for i in range(5)]
        assert seen[4] == {**facts[1], "frame": 1}


def test_facts_that_cannot_travel_are_a_sentence() -> None:
    with (
        serve_on_free_port(Brightness()) as url,
        pytest.raises(RewardError, match=r"facts cannot travel as JSON \(found a Tensor"),
    ):
        score_locally(Remote(url), facts=[{"target": PIXELS[0]}] * 5)


def test_health_and_version_tell_of_the_reward() -> None:
    with serve_on_free_port(Jpeg(quality=80)) as url:
        assert ask(url, "/health") == (200, {"status": "ok", "waiting": 0})
        status, told = ask(url, "/version")
        assert status == 200 and told["reads"] == "frames" and told["limit"] == 256 * 2**20
        assert told["reward"]["type"] == "jpeg" and told["reward"]["quality"] == 80
        assert told["version"] != describe_reward("it", Jpeg())["version"]


def test_what_waits_is_scored_together_and_sizes_are_kept_apart() -> None:
    begun, go = threading.Event(), threading.Event()
    sizes: list[tuple[int, int]] = []

    def slow(pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        sizes.append((len(pixels), pixels.shape[-1]))
        begun.set()
        assert go.wait(20)
        return pixels.mean((1, 2, 3, 4))

    def question(rows: int, side: int) -> ScoreRequest:
        return ScoreRequest(torch.rand(rows, 1, 3, side, side), ("",) * rows, ({},) * rows)

    spec = FunctionReward(slow, batch_size=4)
    desk = BatchQueue(Rubric({"it": WeightedReward(spec, spec)}), CPU)
    first = desk.ask(question(1, 4))
    assert begun.wait(20)
    asked = [question(*sizes) for sizes in [(2, 4), (1, 8), (2, 4), (1, 4)]]
    waiting = [desk.ask(one) for one in asked]
    assert desk.waiting() == 4
    go.set()
    found = [future.result(20) for future in waiting]
    desk.close()
    assert first.done() and sizes == [(1, 4), (4, 4), (1, 8), (1, 4)]
    for one, scores in zip(asked, found, strict=True):
        assert scores == pytest.approx(one.pixels.mean((1, 2, 3, 4)).tolist())


def test_a_bad_request_does_not_fail_those_it_is_scored_with() -> None:
    begun, go = threading.Event(), threading.Event()

    def picky(pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        begun.set()
        assert go.wait(20)
        if "bad" in prompts:
            raise ValueError("this prompt cannot be judged")
        return pixels.mean((1, 2, 3, 4))

    spec = FunctionReward(picky)
    desk = BatchQueue(Rubric({"it": WeightedReward(spec, spec)}), CPU)
    first = desk.ask(ScoreRequest(PIXELS[:1, :1], ("good",), ({},)))
    assert begun.wait(20)
    bad = desk.ask(ScoreRequest(PIXELS[:1, :1], ("bad",), ({},)))
    good = desk.ask(ScoreRequest(PIXELS[1:2, :1], ("good",), ({},)))
    go.set()
    assert len(first.result(20)) == len(good.result(20)) == 1
    assert "cannot be judged" in str(bad.exception(20))
    desk.close()


def test_a_full_queue_refuses_in_a_sentence_and_health_still_answers() -> None:
    begun, go = threading.Event(), threading.Event()

    def slow(pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        begun.set()
        assert go.wait(20)
        return pixels.mean((1, 2, 3, 4))

    kind, body = encode_request(ScoreRequest(PIXELS[:, :1], PROMPTS, ({},) * 5), "npz")
    with serve_on_free_port(FunctionReward(slow), queue=1) as url:
        found: list[Any] = []
        asking = threading.Thread(target=lambda: found.append(ask(url, "/score", kind, body)))
        asking.start()
        assert begun.wait(20)
        status, told = ask(url, "/score", kind, body)
        assert status == 503 and "1 requests wait already; ask again later" in told["error"]
        assert ask(url, "/health")[0] == 200
        with pytest.raises(RewardError, match=r"refused \(503\): 1 requests wait already"):
            score_locally(Remote(url))
        go.set()
        asking.join(20)
        assert found[0][0] == 200
        for _ in range(20):
            assert ask(url, "/score", kind, body)[0] == 200  # the place is free again as soon as there is an answer


def test_a_token_is_asked_for_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, body = encode_request(ScoreRequest(PIXELS[:1, :1], ("red",), ({},)), "npz")
    with serve_on_free_port(Color(), token="hush") as url:
        assert ask(url, "/health")[0] == 200
        for given in ({}, {"Authorization": "Bearer husk"}, {"Authorization": "Bearer h\xfcsh"}):
            assert ask(url, "/version", **given)[0] == 401
            assert ask(url, "/score", kind, body, **given)[0] == 401
        assert ask(url, "/score", kind, body, Authorization="Bearer hush")[0] == 200
        monkeypatch.setenv("REWARD_TOKEN", "hush")
        assert score_locally(Remote(url, token="REWARD_TOKEN")).equal(score_locally(Color()))
        monkeypatch.setenv("REWARD_TOKEN", "wrong")
        with pytest.raises(RewardError, match=r"refused \(401\): the token is missing or wrong"):
            score_locally(Remote(url, token="REWARD_TOKEN", retries=1))
        monkeypatch.delenv("REWARD_TOKEN")
        with pytest.raises(ConfigError, match="environment variable REWARD_TOKEN"):
            Remote(url, token="REWARD_TOKEN").load(Placement())


@pytest.mark.parametrize(
    ("path", "kind", "body", "status", "sentence"),
    [
        ("/score", NPZ, b"not a zip", 400, "the npz cannot be read"),
        ("/score", NPZ, b"", 400, "the npz cannot be read"),
        ("/score", JSON, b"{", 400, "not JSON"),
        ("/score", JSON, b"[]", 400, "no JSON object"),
        ("/score", JSON, b'{"pictures": [], "prompts": []}', 400, "0 pictures"),
        ("/score", JSON, b'{"pictures": ["?"], "prompts": ["a"]}', 400, "picture 0 cannot be read"),
        ("/score", JSON, b'{"pictures": ["aGk="], "prompts": ["a"]}', 400, "picture 0 cannot be read"),
        ("/score", "text/plain", b"{}", 400, "content type is 'text/plain'"),
        ("/score", "application/octet-stream", b"\x80\x04.", 400, "content type"),
        ("/scores", JSON, b"{}", 404, "expected /score"),
        ("/score", JSON, b"x" * 3000, 413, "at most 2000 are taken"),
    ],
)
def test_a_request_that_cannot_be_read_is_a_sentence(
    path: str, kind: str, body: bytes, status: int, sentence: str
) -> None:
    with serve_on_free_port(Color(), limit=2000) as url:
        found, told = ask(url, path, kind, body)
        assert found == status and sentence in told["error"]
        assert ask(url, "/nothing")[0] == 404


def test_a_request_without_a_length_or_cut_short_is_refused() -> None:
    with (
        serve_on_free_port(Color()) as url,
        socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), 20) as line,
    ):
        line.sendall(b"POST /score HTTP/1.0\r\nContent-Type: application/json\r\n\r\n")
        assert b"411" in line.recv(100)
    with (
        serve_on_free_port(Color()) as url,
        socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), 20) as line,
    ):
        line.sendall(b"POST /score HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{")
        line.shutdown(socket.SHUT_WR)
        assert b"400" in line.recv(100)
