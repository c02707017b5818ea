"""The remote reward when its server is missing, late, slow or wrong: retries and errors."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence

import pytest
from free_ports import reserve_port
from request_deadlines import control_deadlines
from reward_server import PIXELS, FunctionReward, score_locally, serve_on_free_port
from torch import Tensor

from tastemaker.core.registry import ConfigError
from tastemaker.core.reward import RewardError
from tastemaker.core.types import Metadata, Placement, Prompts
from tastemaker.rewards.color import ColorReward
from tastemaker.rewards.motion import StillnessReward
from tastemaker.rewards.remote import RemoteReward


def test_missing_server_is_retried_then_reported() -> None:
    with pytest.raises(RewardError, match=r"after 3 attempts .*serve-reward.*TM727"):
        RemoteReward(f"http://127.0.0.1:{reserve_port()}", max_retries=2, retry_delay=0.01).load(Placement())


def test_late_server_is_waited_for() -> None:
    port, reward = reserve_port(), []
    url = f"http://127.0.0.1:{port}"
    client = threading.Thread(
        target=lambda: reward.append(RemoteReward(url, max_retries=50, retry_delay=0.01).load(Placement()))
    )
    client.start()
    with serve_on_free_port(ColorReward(), port=port):
        client.join(120)
        assert len(reward) == 1


def test_broken_connections_are_retried() -> None:
    """The server closes two connections before it responds."""
    calls: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"

        def answer() -> None:
            for hang_up in (True, True, False):
                connection, _ = server.accept()
                with connection:
                    calls.append(len(connection.recv(10_000)))
                    if not hang_up:
                        body = b'{"modality": "image"}'
                        connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

        thread = threading.Thread(target=answer)
        thread.start()
        RemoteReward(url, max_retries=2, retry_delay=0.01).load(Placement())
        thread.join(60)
    assert len(calls) == 3


def test_refusals_and_timeouts_are_not_retried() -> None:
    calls: list[int] = []

    def broken(pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        calls.append(len(pixels))
        raise ValueError("a bad day")

    with (
        serve_on_free_port(FunctionReward(broken)) as url,
        pytest.raises(RewardError, match=r"reward 'it' failed.*refused \(422\).*a bad day.*TM115"),
    ):
        score_locally(RemoteReward(url, retry_delay=0.01), PIXELS[:, :1])
    assert calls == [5]
    go = threading.Event()

    def slow(pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        calls.append(len(pixels))
        deadlines.end_all()
        assert go.wait(60)
        return pixels.mean((1, 2, 3, 4))

    with control_deadlines() as deadlines, serve_on_free_port(FunctionReward(slow)) as url:
        with pytest.raises(RewardError, match=r"within 90 seconds; raise 'timeout'.*TM728"):
            score_locally(RemoteReward(url, timeout=90.0, retry_delay=0.01), PIXELS[:, :1])
        go.set()
    assert calls == [5, 5]


def test_oversized_request_is_not_sent() -> None:
    with (
        serve_on_free_port(ColorReward(), max_bytes=2000) as url,
        pytest.raises(RewardError, match=r"limit.*batch_size.*TM405"),
    ):
        score_locally(RemoteReward(url))


def test_other_modality_than_the_served_reward_is_refused() -> None:
    with (
        serve_on_free_port(StillnessReward()) as url,
        pytest.raises(ConfigError, match=r"modality.*TM404"),
    ):
        RemoteReward(url).load(Placement())


def test_server_of_another_reward_is_refused() -> None:
    with serve_on_free_port(ColorReward()) as url:
        RemoteReward(url, served_reward="it").load(Placement())
        with pytest.raises(ConfigError, match=r"'it'.*served_reward.*TM892"):
            RemoteReward(url, served_reward="hps").load(Placement())


@pytest.mark.parametrize(
    "answer", [b'{"scores": [1]}', b'{"scores": [1, null]}', b'{"scores": "no"}', b"[]", b"<html>"]
)
def test_invalid_response_is_refused(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reply() -> None:
            for body in (b'{"modality": "image"}', answer):
                connection, _ = server.accept()
                with connection:
                    connection.recv(100_000)
                    connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
                    connection.shutdown(socket.SHUT_WR)
                    connection.recv(100_000)

        thread = threading.Thread(target=reply)
        thread.start()
        with pytest.raises(RewardError, match=r"TM115"):
            score_locally(RemoteReward(f"http://127.0.0.1:{server.getsockname()[1]}"), PIXELS[:2, :1])
        thread.join(60)


@pytest.mark.parametrize("url", ["http://:1", "http://a:99999", "http://a:0"])
def test_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        RemoteReward(url)
