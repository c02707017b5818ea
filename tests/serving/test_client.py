"""The client of a reward server: which answers are retried, and bounds on time and size."""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from tastemaker.core.interruption import Interrupted, StopRequest, current_stop, handle_signals
from tastemaker.core.reward import RewardError
from tastemaker.serving import client as module
from tastemaker.serving.chat_client import ChatClient
from tastemaker.serving.client import RewardClient, TemporaryError, parse_retry_after
from tastemaker.serving.replicas import ReplicaClient

Answer = Callable[[socket.socket], None]


def reply(status: int, body: bytes = b'{"error": "the reason"}', *headers: str, length: int | None = None) -> Answer:
    head = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body) if length is None else length}", *headers]
    return lambda connection: connection.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + body)


OK = reply(200, b'{"scores": [1]}')


@contextmanager
def serve(*answers: Answer) -> Iterator[tuple[str, list[float]]]:
    """A server that gives these answers in order, the last one again and again; yields the times of requests too."""
    times: list[float] = []
    threads: list[threading.Thread] = []

    def handle(connection: socket.socket, answer: Answer) -> None:
        with connection:
            try:
                connection.recv(100_000)
                answer(connection)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(100_000)
            except OSError:
                pass  # the client has gone

    def accept() -> None:
        for answer in itertools.chain(answers, itertools.repeat(answers[-1])):
            try:
                connection, _ = server.accept()
            except OSError:
                return
            times.append(time.monotonic())
            threads.append(threading.Thread(target=handle, args=(connection, answer)))
            threads[-1].start()

    server = socket.create_server(("127.0.0.1", 0))
    acceptor = threading.Thread(target=accept)
    acceptor.start()
    try:
        yield f"http://127.0.0.1:{server.getsockname()[1]}", times
    finally:
        server.shutdown(socket.SHUT_RDWR)
        acceptor.join(60)
        server.close()
        for thread in threads:
            thread.join(60)


def drip(connection: socket.socket) -> None:
    """One byte at a time, which no timeout of a single read ends."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while True:
        connection.sendall(b" ")
        time.sleep(0.02)


def pour(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b" " * 100_000)


def pour_headers(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"HTTP/1.1 100 Continue\r\nX: " + b"x" * 1000 + b"\r\n\r\n")


def hang(connection: socket.socket) -> None:
    connection.recv(1)


def test_temporary_errors_are_retried_without_a_random_stream() -> None:
    torch.manual_seed(0)
    random.seed(0)
    expected, states = torch.rand(1), random.getstate()
    torch.manual_seed(0)
    failures = [reply(status) for status in (408, 429, 500, 502, 503, 504)]
    with serve(*failures, lambda connection: None, reply(200, b'{"sc', length=100), OK) as (url, times):
        assert RewardClient(url, retry_delay=0.01).request("/score") == {"scores": [1]}
    assert len(times) == 9 and torch.rand(1) == expected and random.getstate() == states


def cut(answer: bytes, position: int) -> Answer:
    return lambda connection: connection.sendall(answer[:position])


CUT_ANSWERS = [
    cut(answer, position)
    for answer, positions in {
        b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{"scores": [1]}': (1, 4, 6, 9, 11, 12, 14, 16, 17, 34, 36, 45),
        b'HTTP/1.0 200 OK\r\nServer: x\r\n\r\n{"scores": [1]}': (22, 28, 30, 31, 38),
        b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nf\r\n{"scores": [1]}\r\n0\r\n\r\n': (47, 48, 50, 60),
    }.items()
    for position in positions
]  # fmt: skip


@pytest.mark.parametrize("client_class", [RewardClient, ChatClient])
def test_answers_that_are_cut_off_anywhere_are_temporary_errors(client_class: type[RewardClient]) -> None:
    with serve(*CUT_ANSWERS, OK) as (url, times):
        client = client_class(url)
        for _ in CUT_ANSWERS:
            with pytest.raises(TemporaryError):
                client.request_once("/score", "", b"", current_stop())
        assert client.request_once("/score", "", b"", current_stop()) == {"scores": [1]}
        assert len(times) == len(CUT_ANSWERS) + 1


def test_connection_that_ends_within_the_tls_handshake_is_a_temporary_error() -> None:
    with serve(lambda connection: None) as (url, _), pytest.raises(TemporaryError):
        RewardClient(url.replace("http:", "https:")).request_once("/score", "", b"", current_stop())


def test_refusals_are_final_and_repeat_the_text_of_the_server() -> None:
    for status in (400, 401, 403, 404, 411, 413, 422):
        with serve(reply(status)) as (url, times):
            with pytest.raises(RewardError, match=rf"refused \({status}\): the reason.*TM731"):
                RewardClient(url).request("/score")
            assert len(times) == 1


def test_retries_end_with_their_number_or_their_budget() -> None:
    with serve(reply(503)) as (url, times):
        with pytest.raises(RewardError, match=r"after 4 attempts \(status 503: the reason\).*TM727"):
            RewardClient(url, max_retries=3, retry_delay=0.01).request("/score")
        assert len(times) == 4
        with pytest.raises(RewardError, match=r"TM727"):
            RewardClient(url, max_retries=10**6, retry_delay=0.05, retry_budget=0.3).request("/score")
        assert 5 < len(times) < 30


def test_each_request_has_its_own_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that fails for ever costs each request the same: the delays of earlier requests do not add up."""
    waits, wait = list[float](), StopRequest.wait

    def record_wait(stop: StopRequest, seconds: float) -> None:
        waits.append(seconds)
        wait(stop, seconds)

    monkeypatch.setattr(StopRequest, "wait", record_wait)
    with serve(reply(503)) as (url, times):
        client = ReplicaClient([RewardClient(url, max_retries=3, retry_delay=0.02, retry_budget=60.0)])
        for _ in range(4):
            with pytest.raises(RewardError, match="TM727"):
                client.request("/score")
    assert len(times) == 16 and len(waits) == 12
    assert max(waits) <= 0.16  # after at most four failures in a row: 0.02, 0.04, 0.08 and 0.16 s


def test_retry_after_is_honored_within_the_budget() -> None:
    with serve(reply(429, b"{}", "Retry-After: 1"), OK) as (url, times):
        RewardClient(url, retry_delay=0.01).request("/score")
        assert times[1] - times[0] >= 1
    with serve(reply(503, b"{}", "Retry-After: 99999999999"), OK) as (url, times):
        RewardClient(url, retry_delay=0.01, retry_budget=0.2).request("/score")
        assert len(times) == 2
    assert 50 < parse_retry_after(time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 60))) < 61
    assert [parse_retry_after(text) for text in ("", "soon", "-1", "1e9", "Wed, 21 Oct 2015 07:28:00 GMT")] == [0.0] * 5


def test_answers_are_bounded_in_time_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_RESPONSE_BYTES", 300_000)
    cases = {
        "TM728": [drip, hang],
        "TM1051": [pour, reply(200, b" " * 300_001), pour_headers],
        "TM1050": [
            lambda connection: connection.sendall(b"SSH-2.0-OpenSSH\r\n"),
            reply(200, b"", "X: " + "x" * 70_000),
        ],
        "TM730": [reply(200, b"[" * 100_000)],
        "TM727": [reply(200, b"", length=10**15)],
    }
    for code, answers in cases.items():
        for answer in answers:
            timeout = 0.4 if code == "TM728" else 60
            with serve(answer) as (url, _), pytest.raises(RewardError, match=code):
                RewardClient(url, timeout=timeout, max_retries=0).request("/score")


def test_signal_ends_waiting_for_a_retry_and_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tastemaker.core.interruption.GRACE", 0.1)
    for answer in (reply(503), hang, drip):
        with serve(answer) as (url, _), handle_signals(raising=False):
            threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
            with pytest.raises(Interrupted):
                RewardClient(url, retry_delay=1000).request("/score")
