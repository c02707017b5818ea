"""A reward server on a real port: equal scores, batching, limits and errors."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from reward_server import CPU, PIXELS, PROMPTS, FunctionReward, score_locally, serve_on_free_port
from torch import Tensor

from tastemaker.core.registry import ConfigError
from tastemaker.core.reward import RewardError, RewardSpec, Rubric, WeightedReward
from tastemaker.core.types import Metadata, Placement, Prompts
from tastemaker.rewards.color import BrightnessReward, ColorReward
from tastemaker.rewards.compression import JpegReward
from tastemaker.rewards.motion import StillnessReward
from tastemaker.rewards.remote import RemoteReward
from tastemaker.serving.batch_queue import BatchQueue
from tastemaker.serving.protocol import JSON, NPZ, ScoreRequest, encode_request
from tastemaker.serving.server import describe_reward


def send(url: str, path: str, kind: str = "", body: bytes = b"", **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    headers |= {"Content-Type": kind} if kind else {}
    connection.request("POST" if kind else "GET", path, body or None, headers)
    response = connection.getresponse()
    content = json.loads(response.read())
    connection.close()
    return response.status, content


@pytest.mark.parametrize(
    "spec",
    [ColorReward(), JpegReward(), BrightnessReward(0.3), StillnessReward()],
    ids=["color", "jpeg", "target", "clip"],
)
def test_remote_reward_equals_local_reward(spec: RewardSpec) -> None:
    with serve_on_free_port(spec) as url:
        remote = RemoteReward(url, modality=spec.modality, batch_size=2)
        assert score_locally(remote).equal(score_locally(spec))


def test_png_requests_score_8bit_images() -> None:
    with serve_on_free_port(ColorReward()) as url:
        rounded = (PIXELS * 255).round() / 255
        torch.testing.assert_close(
            score_locally(RemoteReward(url, encoding="png")), score_locally(ColorReward(), rounded)
        )


def test_videos_are_sent_as_animated_png() -> None:
    with serve_on_free_port(StillnessReward()) as url:
        rounded = (PIXELS * 255).round() / 255
        torch.testing.assert_close(
            score_locally(RemoteReward(url, encoding="png", modality="video")),
            score_locally(StillnessReward(), rounded),
        )


def test_metadata_is_sent_with_frame_numbers() -> None:
    received: list[Metadata] = []

    def frame_number(pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        received.extend(metadata)
        return torch.tensor([float(each["row"] * 10 + each["frame"]) for each in metadata])

    with serve_on_free_port(FunctionReward(frame_number)) as url:
        metadata = [{"row": i, "objects": [{"class": "dog", "count": 2}], "text": "Grüße"} for i in range(5)]
        assert score_locally(RemoteReward(url), metadata=metadata).tolist() == [10.0 * i + 1 for i in range(5)]
        assert received[4] == {**metadata[1], "frame": 1}


def test_metadata_that_is_not_json_is_refused() -> None:
    with (
        serve_on_free_port(BrightnessReward()) as url,
        pytest.raises(RewardError, match=r"found a Tensor.*TM733"),
    ):
        score_locally(RemoteReward(url), metadata=[{"target": PIXELS[0]}] * 5)


def test_health_and_version() -> None:
    with serve_on_free_port(JpegReward(quality=80)) as url:
        assert send(url, "/health") == (200, {"status": "ok", "waiting": 0})
        status, response = send(url, "/version")
        assert status == 200 and response["modality"] == "image" and response["limit"] == 256 * 2**20
        assert response["reward"]["type"] == "jpeg" and response["reward"]["quality"] == 80
        assert response["version"] != describe_reward("it", JpegReward())["version"]


def test_pending_requests_of_one_size_are_batched() -> None:
    begun, go = threading.Event(), threading.Event()
    sizes: list[tuple[int, int]] = []

    def slow(pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        sizes.append((len(pixels), pixels.shape[-1]))
        begun.set()
        assert go.wait(60)
        return pixels.mean((1, 2, 3, 4))

    def request(rows: int, side: int) -> ScoreRequest:
        return ScoreRequest(torch.rand(rows, 1, 3, side, side), ("",) * rows, ({},) * rows)

    spec = FunctionReward(slow, batch_size=4)
    queue = BatchQueue(Rubric({"it": WeightedReward(spec, spec)}), CPU)
    first = queue.submit(request(1, 4))
    assert begun.wait(60)
    requests = [request(*sizes) for sizes in [(2, 4), (1, 8), (2, 4), (1, 4)]]
    futures = [queue.submit(each) for each in requests]
    assert queue.num_pending() == 4
    go.set()
    results = [future.result(60) for future in futures]
    queue.close()
    assert first.done() and sizes == [(1, 4), (4, 4), (1, 8), (1, 4)]
    for each, scores in zip(requests, results, strict=True):
        assert scores == pytest.approx(each.pixels.mean((1, 2, 3, 4)).tolist())


def test_failing_request_does_not_fail_its_batch() -> None:
    begun, go = threading.Event(), threading.Event()

    def picky(pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        begun.set()
        assert go.wait(60)
        if "bad" in prompts:
            raise ValueError("this prompt cannot be judged")
        return pixels.mean((1, 2, 3, 4))

    spec = FunctionReward(picky)
    queue = BatchQueue(Rubric({"it": WeightedReward(spec, spec)}), CPU)
    first = queue.submit(ScoreRequest(PIXELS[:1, :1], ("good",), ({},)))
    assert begun.wait(60)
    bad = queue.submit(ScoreRequest(PIXELS[:1, :1], ("bad",), ({},)))
    good = queue.submit(ScoreRequest(PIXELS[1:2, :1], ("good",), ({},)))
    go.set()
    assert len(first.result(60)) == len(good.result(60)) == 1
    assert "cannot be judged" in str(bad.exception(60))
    queue.close()


def test_full_queue_refuses_requests() -> None:
    begun, go = threading.Event(), threading.Event()

    def slow(pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        begun.set()
        assert go.wait(60)
        return pixels.mean((1, 2, 3, 4))

    kind, body = encode_request(ScoreRequest(PIXELS[:, :1], PROMPTS, ({},) * 5), "npz")
    with serve_on_free_port(FunctionReward(slow), max_requests=1) as url:
        responses: list[Any] = []
        client = threading.Thread(target=lambda: responses.append(send(url, "/score", kind, body)))
        client.start()
        assert begun.wait(60)
        status, response = send(url, "/score", kind, body)
        with pytest.raises(RewardError, match=r"status 429.*TM727"):
            score_locally(RemoteReward(url, max_retries=0))
        go.set()
        assert status == 429 and "TM1013" in response["error"]
        assert send(url, "/health")[0] == 200
        client.join(60)
        assert responses[0][0] == 200
        for _ in range(20):
            assert send(url, "/score", kind, body)[0] == 200  # the place is free again as soon as there is an answer


def test_token_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, body = encode_request(ScoreRequest(PIXELS[:1, :1], ("red",), ({},)), "npz")
    with serve_on_free_port(ColorReward(), token="hush") as url:
        assert send(url, "/health")[0] == 200
        for given in ({}, {"Authorization": "Bearer husk"}, {"Authorization": "Bearer h\xfcsh"}):
            assert send(url, "/version", **given)[0] == 401
            assert send(url, "/score", kind, body, **given)[0] == 401
        assert send(url, "/score", kind, body, Authorization="Bearer hush")[0] == 200
        monkeypatch.setenv("REWARD_TOKEN", "hush")
        assert score_locally(RemoteReward(url, token_env="REWARD_TOKEN")).equal(score_locally(ColorReward()))
        monkeypatch.setenv("REWARD_TOKEN", "wrong")
        with pytest.raises(RewardError, match=r"401.*token.*TM731"):
            score_locally(RemoteReward(url, token_env="REWARD_TOKEN", max_retries=1))
        monkeypatch.delenv("REWARD_TOKEN")
        with pytest.raises(ConfigError, match=r"REWARD_TOKEN.*TM403"):
            RemoteReward(url, token_env="REWARD_TOKEN").load(Placement())


@pytest.fixture(scope="module")
def small_server() -> Iterator[str]:
    """The URL of a server that accepts requests of 2000 bytes."""
    with serve_on_free_port(ColorReward(), max_bytes=2000) as url:
        yield url


@pytest.mark.parametrize(
    ("path", "kind", "body", "status", "message"),
    [
        ("/score", NPZ, b"not a zip", 400, "TM741"),
        ("/score", NPZ, b"", 400, "TM741"),
        ("/score", JSON, b"{", 400, "not JSON"),
        ("/score", JSON, b"[]", 400, "not a JSON object"),
        ("/score", JSON, b'{"images": [], "prompts": []}', 400, "0 images"),
        ("/score", JSON, b'{"images": ["?"], "prompts": ["a"]}', 400, "image 0 cannot be read"),
        ("/score", JSON, b'{"images": ["aGk="], "prompts": ["a"]}', 400, "image 0 cannot be read"),
        ("/score", "text/plain", b"{}", 400, "got 'text/plain'"),
        ("/score", "application/octet-stream", b"\x80\x04.", 400, "content type"),
        ("/scores", JSON, b"{}", 404, "POST to /score"),
        ("/nothing", "", b"", 404, "TM1019"),
        ("/score", "", b"", 405, "TM1019"),
        ("/score", JSON, b"x" * 3000, 413, "limit is 2000"),
    ],
)
def test_invalid_requests_are_refused(
    small_server: str, path: str, kind: str, body: bytes, status: int, message: str
) -> None:
    response_status, response = send(small_server, path, kind, body)
    assert response_status == status and message in response["error"]
