"""Attacks on a reward server: bombs, slow and malformed requests, foreign pages, floods, and clients that leave."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import zipfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reward_server import PIXELS, PROMPTS, FunctionReward, create_service, run_service, serve_on_free_port
from starlette.datastructures import URL
from starlette.requests import Request
from torch import Tensor
from waiting import handles_signal, wait_until

import tastemaker.serving
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Metadata, Prompts
from tastemaker.rewards.color import ColorReward
from tastemaker.serving.app import create_app
from tastemaker.serving.protocol import NPZ, ScoreRequest, encode_request
from tastemaker.serving.server import import_web_modules

KIND, BODY = encode_request(ScoreRequest(PIXELS[:, :1], PROMPTS, ({},) * 5), "npz")
TESTS = Path(__file__).parent.parent


def send(url: str, body: bytes = BODY, path: str = "/score", **headers: str) -> tuple[int, Any, Any]:
    """Status, JSON object and headers of the answer to a request."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
    try:
        connection.request("POST" if path == "/score" else "GET", path, body, {"Content-Type": NPZ, **headers})
        response = connection.getresponse()
        return response.status, json.loads(response.read()), response.headers
    finally:
        connection.close()


def connect(url: str, data: bytes) -> socket.socket:
    line = socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), 120)
    with suppress(BrokenPipeError, ConnectionResetError):  # an answer may come before all is sent
        line.sendall(data)
    return line


def read_answer(line: socket.socket) -> tuple[int, str]:
    """Status and body of an answer. The status is 0 if the server closes the connection instead."""
    with line:
        if not line.recv(1, socket.MSG_PEEK):
            return 0, ""
        response = http.client.HTTPResponse(line)
        response.begin()
        return response.status, response.read().decode()


def head(length: str = f"Content-Length: {len(BODY)}", host: str = "localhost") -> bytes:
    return f"POST /score HTTP/1.1\r\nHost: {host}\r\nContent-Type: {NPZ}\r\n{length}\r\n\r\n".encode()


class BlockingReward:
    """A reward that waits for `go`, and notes the prompts that it scored."""

    def __init__(self) -> None:
        self.begun, self.go, self.prompts = threading.Event(), threading.Event(), list[str]()
        self.spec = FunctionReward(self.score, batch_size=1)

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        self.prompts += prompts
        self.begun.set()
        assert self.go.wait(120)
        return pixels.mean((1, 2, 3, 4))


def named_request(name: str, side: int = 8) -> bytes:
    return encode_request(ScoreRequest(torch.zeros(1, 1, 3, side, side), (name,), ({},)), "npz")[1]


def compress_zeros(side: int) -> bytes:
    """An npz of a black image with uint8 pixels, in a thousandth of its size."""
    header, text, file = io.BytesIO(), io.BytesIO(), io.BytesIO()
    shape = (1, 1, 3, side, side)
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
    np.save(text, np.frombuffer(b'{"prompts": ["a"]}', np.uint8))
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("pixels.npy", "w") as member:
            member.write(header.getvalue())
            for _ in range(3 * side):
                member.write(bytes(side))
        archive.writestr("json.npy", text.getvalue())
    return file.getvalue()


# Memory


def test_compressed_bomb_is_refused_before_it_is_decompressed() -> None:
    service = create_service(ColorReward(), max_bytes=2**20)
    reserved: list[int] = []
    add = service.budget.add
    service.budget.add = lambda size: reserved.append(size) or add(size)  # type: ignore[func-returns-value, method-assign]
    with run_service(service) as url:
        status, answer, _ = send(url, compress_zeros(500))  # 750,000 values, which are below the limit as bytes
    assert status == 413 and "TM1002" in answer["error"]
    assert max(reserved) < 10_000 and service.budget.used == 0


def test_all_requests_share_one_budget_of_memory() -> None:
    reward = BlockingReward()
    service = create_service(reward.spec, max_bytes=2**20, max_total_bytes=3 * 2**20)
    body = named_request("a", 256)  # 768 KB, and as much again while it is decoded
    with run_service(service) as url, ThreadPoolExecutor(3) as clients:
        answers = [clients.submit(send, url, body)]
        wait_until(lambda: reward.begun.is_set() and service.budget.used < 2**20)
        answers.append(clients.submit(send, url, body))
        wait_until(lambda: service.num_pending() == 1)
        status, answer, headers = send(url, body)
        reward.go.set()
        assert status == 429 and "TM1011" in answer["error"] and int(headers["Retry-After"]) > 0
        assert [future.result()[0] for future in answers] == [200, 200]
        assert send(url, body)[0] == 200 and service.budget.used == 0
    with run_service(create_service(ColorReward(), max_bytes=2**20, max_total_bytes=2**20)) as url:
        status, answer, _ = send(url, body)  # it can never fit, so that a client need not try again
        assert status == 413 and "TM1028" in answer["error"]


# Deadlines and limits


def test_slow_bodies_hold_no_place_in_the_queue() -> None:
    with serve_on_free_port(ColorReward(), max_requests=1, receive_timeout=1.0, header_timeout=0.8) as url:
        lines = [connect(url, head() + BODY[:100]) for _ in range(8)]
        assert send(url)[0] == 200
        for line in lines:
            status, answer = read_answer(line)
            assert status == 408 and "TM1015" in answer
        assert send(url)[0] == 200


def test_bodies_have_a_minimum_rate() -> None:
    """A body that is slow, but not too slow, is received."""
    with serve_on_free_port(ColorReward(), receive_timeout=600.0, slow_seconds=0.5, min_rate=20.0) as url:
        lines = [connect(url, head() + BODY[:sent]) for sent in (0, 1, 10)]
        steady = connect(url, head() + BODY[:1200])  # which may take a minute
        for line in lines:
            line.settimeout(60)
            status, answer = read_answer(line)
            assert status == 408 and "TM1015" in answer
        steady.sendall(BODY[1200:])
        assert read_answer(steady)[0] == 200


@pytest.mark.parametrize("old", [False, True])
def test_host_header_does_not_open_other_paths_than_health(old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old versions of Starlette take part of such a header for the path of the URL."""
    if old:
        monkeypatch.setattr(Request, "url", URL("http://localhost/health?/score"))
    service = create_service(ColorReward())
    service.allowed_hosts, service.token = ("*",), "secret"
    with run_service(service) as url:
        for host in ("localhost/health?", "localhost/health#", "a/health?b=", "localhost"):
            assert read_answer(connect(url, head(host=host) + BODY))[0] == 401, host
            assert read_answer(connect(url, f"GET /version HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()))[0] == 401, host
            assert read_answer(connect(url, f"GET /health HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()))[0] == 200, host


def test_requests_being_received_are_bounded() -> None:
    service = create_service(ColorReward(), max_receiving=1)
    with run_service(service) as url, connect(url, head() + BODY[:100]) as line:
        wait_until(lambda: service.num_receiving == 1)
        status, answer, headers = send(url)
        assert status == 429 and "TM1012" in answer["error"] and headers["Retry-After"]
        line.sendall(BODY[100:])
        assert line.recv(15) == b"HTTP/1.1 200 OK"
        assert send(url)[0] == 200


def test_idle_connections_end_and_their_number_is_bounded() -> None:
    with serve_on_free_port(ColorReward(), header_timeout=1.0, max_connections=3) as url:
        lines = [connect(url, b""), connect(url, b"GET /health HT"), connect(url, b"GET /health HTTP/1.1\r\nHost: loc")]
        status, answer, headers = send(url)
        assert status == 503 and "TM1024" in answer["error"] and headers["Retry-After"]
        answers = [read_answer(line) for line in lines]
        assert [status for status, _ in answers] == [0, 408, 408] and "TM1026" in answers[1][1]
        assert send(url)[0] == 200


def test_unscored_request_is_answered_at_its_deadline_and_skipped() -> None:
    reward = BlockingReward()
    service = create_service(reward.spec, answer_timeout=0.5)
    with run_service(service) as url, ThreadPoolExecutor(2) as clients:
        answers = [clients.submit(send, url, named_request("first"))]
        assert reward.begun.wait(60)
        answers.append(clients.submit(send, url, named_request("late")))
        assert [future.result()[0] for future in answers] == [504, 504]
        wait_until(lambda: service.num_pending() == 0)  # shortly after the answer
        service.limits = replace(service.limits, answer_timeout=60.0)
        reward.go.set()
        assert send(url, named_request("last"))[0] == 200
    assert reward.prompts == ["first", "last"]


def test_request_of_a_client_that_left_is_skipped() -> None:
    reward = BlockingReward()
    service = create_service(reward.spec)
    with run_service(service) as url, ThreadPoolExecutor(2) as clients:
        first = clients.submit(send, url, named_request("first"))
        assert reward.begun.wait(60)
        body = named_request("gone")
        line = connect(url, head(f"Content-Length: {len(body)}") + body)
        wait_until(lambda: service.num_pending() == 1)
        line.close()
        wait_until(lambda: service.num_pending() == 0)
        connect(url, head() + BODY[:100]).close()  # and one that leaves while it sends
        last = clients.submit(send, url, named_request("last"))
        reward.go.set()
        assert first.result()[0] == last.result()[0] == 200
        wait_until(lambda: service.num_requests == service.num_receiving == service.budget.used == 0)
    assert reward.prompts == ["first", "last"]


def test_requests_in_progress_are_finished_when_the_server_stops() -> None:
    reward = BlockingReward()
    with ThreadPoolExecutor(2) as clients:
        with serve_on_free_port(reward.spec) as url:
            answer = clients.submit(send, url)
            assert reward.begun.wait(60)
            threading.Timer(0.3, reward.go.set).start()
        assert answer.result()[0] == 200
    reward = BlockingReward()
    service = create_service(reward.spec, shutdown_timeout=1.0)
    with ThreadPoolExecutor(2) as clients:
        with run_service(service) as url:
            answer = clients.submit(send, url)
            assert reward.begun.wait(60)
            threading.Thread(target=lambda: (answer.exception(60), reward.go.set())).start()
        assert answer.result()[0] == 503 and "TM1017" in answer.result()[1]["error"]


# Access


def test_foreign_hosts_and_origins_are_refused() -> None:
    with serve_on_free_port(ColorReward()) as url:
        own = url.removeprefix("http://")
        for host in (own, "localhost", "[::1]:80", socket.gethostname()):
            assert send(url, Host=host)[0] == 200
        for host in ("evil.example", "evil.example:8800", "127.0.0.1.evil.example", "", "a@localhost", "10.0.0.1"):
            for path in ("/score", "/health"):
                status, answer, _ = send(url, path=path, Host=host)
                assert status == 403 and "TM1021" in answer["error"], host
        assert send(url, Host=own, Origin=url)[0] == 200
        for origin in ("http://evil.example", "null", "http://localhost:1", "https://127.0.0.1"):
            status, answer, _ = send(url, Host=own, Origin=origin)
            assert status == 403 and "TM1022" in answer["error"], origin
    service = create_service(ColorReward())
    service.allowed_hosts = ("gpu.example",)
    with run_service(service) as url:
        assert send(url, Host="GPU.example:8800")[0] == 200 and send(url, Host="evil.example")[0] == 403


def test_malformed_requests_get_an_answer() -> None:
    chunks = b"%x\r\n%b\r\n" % (1500, bytes(1500))
    cases: dict[bytes, tuple[int, str]] = {
        head("Content-Length: 9") + b"{": (400, "TM1025"),  # a body that ends too early
        head("Content-Length: 1000000000000000"): (413, "TM1016"),
        head("Content-Length: " + "9" * 40): (400, "TM1025"),
        head("Content-Length: -1"): (400, "TM1025"),
        head("Content-Length: 1\r\nContent-Length: 2"): (400, "TM1025"),
        head("X-Other: 1"): (411, "TM1014"),
        head("Transfer-Encoding: chunked") + 3 * chunks + b"0\r\n\r\n": (413, "TM1016"),
        head("Transfer-Encoding: chunked") + chunks + b"0\r\n\r\n": (400, "TM741"),
        head("Transfer-Encoding: chunked") + b"zz\r\n": (400, "TM1025"),
        head("Transfer-Encoding: gzip"): (400, "TM1025"),
        b"POST /score HTTP/1.1\r\nHost localhost\r\n\r\n": (400, "TM1025"),
        b"GET /version HTTP/1.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n": (400, "TM1025"),
        b"\x16\x03\x01\x02\x00\x01\x00" * 9 + b"\r\n\r\n": (400, "TM1025"),
        b"POST /score HTTP/1.0\r\nHost: localhost\r\nContent-Type: a/b\r\n\r\n": (411, "TM1014"),
    }
    with serve_on_free_port(ColorReward(), max_bytes=4000) as url:
        for request, (status, code) in cases.items():
            line = connect(url, request)
            if request.endswith(b"{"):
                line.shutdown(socket.SHUT_WR)
            answer = read_answer(line)
            assert answer[0] == status and code in answer[1], (request[:200], answer)
        assert send(url, named_request("red"))[0] == 200


def test_app_answers_without_a_socket() -> None:
    service = create_service(ColorReward())
    sent: list[Any] = []

    async def call() -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": BODY, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"host", b"localhost")]
        await create_app(service)(
            {"type": "http", "method": "GET", "path": "/health", "query_string": b"", "headers": headers}, receive, send
        )

    asyncio.run(call())
    service.close()
    assert sent[0]["status"] == 200 and json.loads(sent[1]["body"]) == {"status": "ok", "waiting": 0}


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(tastemaker.serving, "app", raising=False)
    monkeypatch.setitem(sys.modules, "tastemaker.serving.app", None)
    with pytest.raises(ConfigError, match=r"tastemaker\[serve\].*TM1000"):
        import_web_modules()


# Processes and load

SLOW_SERVER = """
import time
from reward_server import FunctionReward, create_service
from tastemaker.serving.http_server import RewardServer, bind

def score(pixels, prompts, metadata):
    print("scoring", flush=True)
    time.sleep(float(prompts[0]))
    return pixels.mean((1, 2, 3, 4))

listener = bind("127.0.0.1", 0)
service = create_service(FunctionReward(score))
print(listener.getsockname()[1], flush=True)
RewardServer(service).run([listener])
"""


def start_server() -> tuple[subprocess.Popen[str], str]:
    settings = {**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(SLOW_SERVER)]
    process = subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, f"http://127.0.0.1:{int(process.stdout.readline())}"


@pytest.mark.slow
def test_server_process_survives_bombs_and_stops_gracefully() -> None:
    process, url = start_server()
    bomb = compress_zeros(9459)  # 256 MB of zeros, which would be a gigabyte of floats
    assert len(bomb) < 300_000
    with process, ThreadPoolExecutor(8) as clients:
        assert process.stdout is not None
        assert send(url, named_request("0"))[0] == 200 and process.stdout.readline() == "scoring\n"
        before = read_peak(process.pid)
        assert Counter(answer[0] for answer in clients.map(lambda _: send(url, bomb), range(8))) == {413: 8}
        assert read_peak(process.pid) - before < 64 * 2**10
        answer = clients.submit(send, url, named_request("1"))
        assert process.stdout.readline() == "scoring\n"
        process.terminate()
        assert process.wait(60) == 0 and answer.result()[0] == 200


@pytest.mark.slow
def test_second_signal_ends_the_server_at_once() -> None:
    process, url = start_server()
    with process, ThreadPoolExecutor(1) as clients:
        assert process.stdout is not None
        answer = clients.submit(send, url, named_request("60"))
        assert process.stdout.readline() == "scoring\n"
        process.terminate()
        wait_until(lambda: not handles_signal(process.pid, signal.SIGTERM))  # it has received the first one
        process.terminate()
        assert process.wait(20) == -signal.SIGTERM and answer.exception() is not None


def read_peak(pid: int) -> int:
    """The largest resident memory of a process, in KB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


@pytest.mark.slow
def test_two_hundred_simultaneous_clients_are_all_answered() -> None:
    barrier = threading.Barrier(200)

    def flood(i: int) -> int:
        barrier.wait(60)
        return send(url)[0]

    with serve_on_free_port(ColorReward()) as url, ThreadPoolExecutor(200) as clients:
        statuses = Counter(clients.map(flood, range(200)))
        assert set(statuses) <= {200, 429} and statuses[200] >= 64
        assert send(url)[0] == 200
