"""A remote reward whose server is late, silent, unwilling or wrong: asked again where that may help, then told."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence

import pytest
from reward_server import PIXELS, FunctionReward, score_locally, serve_on_free_port
from torch import Tensor

from tastemaker.core.registry import ConfigError
from tastemaker.core.reward import RewardError
from tastemaker.core.types import Metadata, Placement, Prompts
from tastemaker.rewards.color import Color
from tastemaker.rewards.remote import Remote
from tastemaker.rewards.stillness import Stillness


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def test_a_server_that_is_not_there_is_tried_again_and_then_told() -> None:
    with pytest.raises(RewardError, match=r"no reward answers at http://127.0.0.1:\d+, asked 3 times .*serve-reward"):
        Remote(f"http://127.0.0.1:{free_port()}", retries=2, pause=0.01).load(Placement())


def test_a_server_that_comes_late_is_waited_for() -> None:
    port, reward = free_port(), []
    url = f"http://127.0.0.1:{port}"
    waiting = threading.Thread(target=lambda: reward.append(Remote(url, retries=50, pause=0.01).load(Placement())))
    waiting.start()
    with serve_on_free_port(Color(), port=port):
        waiting.join(20)
        assert len(reward) == 1


def test_a_connection_that_breaks_is_tried_again_with_a_longer_pause_each_time() -> None:
    """A server that hangs up twice before it answers."""
    calls: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"

        def answer() -> None:
            for hang_up in (True, True, False):
                connection, _ = server.accept()
                with connection:
                    calls.append(len(connection.recv(10_000)))
                    if not hang_up:
                        told = b'{"reads": "frames"}'
                        connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(told), told))

        thread = threading.Thread(target=answer)
        thread.start()
        Remote(url, retries=2, pause=0.01).load(Placement())
        thread.join(20)
    assert len(calls) == 3


def test_refusals_and_slow_answers_are_not_tried_again() -> None:
    calls: list[int] = []

    def broken(pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        calls.append(len(pixels))
        raise ValueError("a bad day")

    with (
        serve_on_free_port(FunctionReward(broken)) as url,
        pytest.raises(RewardError, match=r"reward 'it' failed.*refused \(422\).*a bad day"),
    ):
        score_locally(Remote(url, pause=0.01), PIXELS[:, :1])
    assert calls == [5]
    go = threading.Event()

    def slow(pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        calls.append(len(pixels))
        assert go.wait(20)
        return pixels.mean((1, 2, 3, 4))

    with serve_on_free_port(FunctionReward(slow)) as url:
        with pytest.raises(RewardError, match=r"gave no answer within 0.2 seconds; raise 'timeout'"):
            score_locally(Remote(url, timeout=0.2, pause=0.01), PIXELS[:, :1])
        go.set()
    assert calls == [5, 5]


def test_a_request_above_the_servers_limit_is_not_sent() -> None:
    with (
        serve_on_free_port(Color(), limit=2000) as url,
        pytest.raises(RewardError, match=r"above the server's limit; lower batch"),
    ):
        score_locally(Remote(url))


def test_reading_otherwise_than_the_served_reward_is_refused() -> None:
    with serve_on_free_port(Stillness()) as url, pytest.raises(ConfigError, match="reads clip, but 'reads' is frames"):
        Remote(url).load(Placement())


@pytest.mark.parametrize(
    "answer", [b'{"scores": [1]}', b'{"scores": [1, null]}', b'{"scores": "no"}', b"[]", b"<html>"]
)
def test_an_answer_that_is_no_scores_is_refused(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reply() -> None:
            for body in (b'{"reads": "frames"}', answer):
                connection, _ = server.accept()
                with connection:
                    connection.recv(100_000)
                    connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
                    connection.shutdown(socket.SHUT_WR)
                    connection.recv(100_000)

        thread = threading.Thread(target=reply)
        thread.start()
        with pytest.raises(RewardError, match=r"expected a number each|no JSON object"):
            score_locally(Remote(f"http://127.0.0.1:{server.getsockname()[1]}"), PIXELS[:2, :1])
        thread.join(20)


@pytest.mark.parametrize("url", ["http://:1", "http://a:99999", "http://a:0"])
def test_a_url_that_leads_nowhere_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        Remote(url)
