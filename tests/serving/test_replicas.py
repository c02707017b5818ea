"""Several rewards per server, and clients that spread over servers which fail, restart, are late or answer in part."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import urlopen

import pytest
import torch
from free_ports import reserve_port
from request_deadlines import RequestDeadlines, control_deadlines
from reward_server import CPU, PIXELS, PROMPTS, FunctionReward, run_service, score_locally, serve_on_free_port
from torch import Tensor

from tastemaker.core.registry import ConfigError
from tastemaker.core.reward import RewardError, RewardSpec, Rubric, WeightedReward
from tastemaker.core.types import Metadata, Placement, Prompts
from tastemaker.rewards.color import BrightnessReward, ColorReward
from tastemaker.rewards.compression import JpegReward
from tastemaker.rewards.remote import RemoteReward
from tastemaker.serving.app import RewardService, ServedReward
from tastemaker.serving.batch_queue import BatchQueue
from tastemaker.serving.client import RewardClient
from tastemaker.serving.protocol import ScoreRequest
from tastemaker.serving.server import describe_reward, parse_served_rewards

ROOT = Path(__file__).parent.parent.parent
IMAGES = PIXELS[:, :1]


def serve_rewards(*texts: str) -> RewardService:
    def serve(name: str, spec: RewardSpec) -> ServedReward:
        queue = BatchQueue(Rubric({name: WeightedReward(spec, spec.load(Placement()))}), CPU)
        return ServedReward(queue, describe_reward(name, spec))

    return RewardService({name: serve(name, spec) for name, spec in parse_served_rewards(texts).items()})


def read_metrics(url: str) -> dict[str, float]:
    with urlopen(f"{url}/metrics", timeout=60) as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = response.read().decode().splitlines()
    return {key: float(value) for key, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def test_one_server_has_several_rewards() -> None:
    service = serve_rewards("color", "{type: jpeg, quality: 80}", "{type: jpeg, quality: 20}")
    with run_service(service) as url:
        assert list(service.rewards) == ["color", "jpeg", "jpeg-2"]
        expected = {"color": ColorReward(), "jpeg": JpegReward(quality=80), "jpeg-2": JpegReward(quality=20)}
        for name, spec in expected.items():
            remote = RemoteReward(url, served_reward=name, batch_size=2)
            assert score_locally(remote, IMAGES).equal(score_locally(spec, IMAGES)), name
        for served, code in (("", "TM2054"), ("hps", "TM892")):
            with pytest.raises(ConfigError, match=code):
                RemoteReward(url, served_reward=served).load(Placement())
        with pytest.raises(RewardError, match=r"404.*TM2052"):
            RewardClient(url).request("/rewards/hps/score", "a", b"b")
        metrics = read_metrics(url)
    for name in expected:
        assert metrics[f'tastemaker_reward_requests_total{{reward="{name}",status="200"}}'] == 3
        assert metrics[f'tastemaker_reward_samples_total{{reward="{name}"}}'] == 5
        assert metrics[f'tastemaker_reward_request_seconds_bucket{{reward="{name}",le="+Inf"}}'] == 3
        assert metrics[f'tastemaker_reward_pending_requests{{reward="{name}"}}'] == 0
    assert metrics["tastemaker_reward_request_bytes"] == 0


def test_a_batch_waits_for_other_clients() -> None:
    sizes: list[int] = []

    def count(pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        sizes.append(len(pixels))
        return pixels.mean((1, 2, 3, 4))

    spec = FunctionReward(count, batch_size=3)
    queue = BatchQueue(Rubric({"it": WeightedReward(spec, spec)}), CPU, max_wait=120.0)
    requests = [ScoreRequest(IMAGES[k : k + 1], ("",), ({},)) for k in range(3)]
    cancelled = queue.submit(requests[0])
    cancelled.cancel()  # an empty queue after that does not end the thread
    futures = [queue.submit(request) for request in requests]
    scores = [future.result(60) for future in futures]  # a full batch does not wait
    queue.close()
    assert sizes == [3] and scores == [[pytest.approx(float(image.mean()))] for image in IMAGES[:3]]


def test_requests_go_to_the_least_loaded_replica() -> None:
    """Both servers wait until each of them has two of the four requests, so any other split fails."""
    barrier, counts = threading.Barrier(2), Counter[str]()

    def make(name: str) -> FunctionReward:
        def score(pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
            counts[name] += 1
            barrier.wait(60)
            return pixels.mean((1, 2, 3, 4))

        return FunctionReward(score, batch_size=1)

    with serve_on_free_port(make("a")) as first, serve_on_free_port(make("b")) as second:
        remote = RemoteReward((first, second), batch_size=1, concurrency=2)
        assert score_locally(remote, IMAGES[:4]).equal(IMAGES[:4].mean((1, 2, 3, 4)))
    assert counts == {"a": 2, "b": 2}


Answer = Callable[[socket.socket, RequestDeadlines], None]


def hang_up(connection: socket.socket, deadlines: RequestDeadlines) -> None:
    pass


def answer_in_part(connection: socket.socket, deadlines: RequestDeadlines) -> None:
    connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{"scores": [0.1, ')


def cut_status_line(connection: socket.socket, deadlines: RequestDeadlines) -> None:
    connection.sendall(b"HTTP/1.1 2")


def cut_after_status(connection: socket.socket, deadlines: RequestDeadlines) -> None:
    connection.sendall(b"HTTP/1.1 200 O")


def cut_header(connection: socket.socket, deadlines: RequestDeadlines) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Le")


def cut_body_of_unknown_length(connection: socket.socket, deadlines: RequestDeadlines) -> None:
    connection.sendall(b'HTTP/1.0 200 OK\r\n\r\n{"scores": [0.1, ')


def fail(connection: socket.socket, deadlines: RequestDeadlines) -> None:
    connection.sendall(b"HTTP/1.1 500 X\r\nContent-Length: 2\r\n\r\n{}")


def answer_late(connection: socket.socket, deadlines: RequestDeadlines) -> None:
    deadlines.end(connection.getpeername()[1])
    with suppress(OSError):
        connection.recv(1)  # until the client leaves


@contextmanager
def break_server(url: str, answer: Answer) -> Iterator[tuple[str, list[bytes]]]:
    """A replica whose /version is that of a real server, and which answers scores in its own way."""
    requests: list[bytes] = []
    with urlopen(f"{url}/version", timeout=60) as response:
        version = response.read()
    server = socket.create_server(("127.0.0.1", 0))

    def handle(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            request = connection.recv(10**6)
            if request.startswith(b"GET /version"):
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(version), version))
            else:
                requests.append(request)
                answer(connection, deadlines)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(10**6):
                pass

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = server.accept()
                threading.Thread(target=handle, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        with control_deadlines() as deadlines:
            yield f"http://127.0.0.1:{server.getsockname()[1]}", requests
    finally:
        server.shutdown(socket.SHUT_RDWR)
        thread.join(60)
        server.close()


CUT_OFF = [cut_status_line, cut_after_status, cut_header, cut_body_of_unknown_length]


@pytest.mark.parametrize("answer", [hang_up, answer_in_part, *CUT_OFF, fail, answer_late])
def test_another_replica_takes_over(answer: Answer) -> None:
    with serve_on_free_port(ColorReward()) as good, break_server(good, answer) as (bad, requests):
        remote = RemoteReward((bad, good), batch_size=1, retry_delay=0.01, max_retries=20)
        scorer, expected = remote.load(Placement()), score_locally(ColorReward(), IMAGES)
        for _ in range(3):
            assert scorer.score(IMAGES, PROMPTS, [{}] * 5).equal(expected)
        assert requests


def test_a_replica_with_another_reward_is_refused_also_after_a_restart() -> None:
    with (
        serve_on_free_port(BrightnessReward(0.3)) as first,
        serve_on_free_port(BrightnessReward(0.4)) as second,
        pytest.raises(RewardError, match="TM2053"),
    ):
        RemoteReward((first, second)).load(Placement())
    port = reserve_port()
    with serve_on_free_port(BrightnessReward(0.3), port=port) as url:
        scorer = RemoteReward(url, retry_delay=0.01).load(Placement())
        scorer.score(IMAGES, PROMPTS, [{}] * 5)
    with (
        serve_on_free_port(BrightnessReward(0.4), port=port),
        pytest.raises(RewardError, match="TM2053"),
    ):
        scorer.score(IMAGES, PROMPTS, [{}] * 5)


# Load


def start_server(port: int) -> subprocess.Popen[str]:
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tastemaker", "serve-reward", "{type: color, batch_size: 64}", "brightness"]
    command += ["--port", str(port), "--device", "cpu", "--queue-size", "400", "--batch-wait-ms", "2"]
    return subprocess.Popen(command, env=settings, stderr=subprocess.DEVNULL, text=True)


def wait_for_server(url: str) -> None:
    end = time.monotonic() + 120
    while True:
        with suppress(OSError), urlopen(f"{url}/health", timeout=5) as response:
            assert response.status == 200
            return
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("num_clients", "num_requests"),
    [
        pytest.param(20, 300, marks=pytest.mark.slow, id="short"),
        pytest.param(200, 10_000, marks=pytest.mark.long, id="full"),
    ],
)
def test_no_score_is_wrong_lost_or_duplicated_when_a_replica_is_killed(num_clients: int, num_requests: int) -> None:
    """Many clients, two replicas of two rewards; one is killed in the middle and restarted at the same address.

    The last third of the requests waits for the restarted server, so that it gets some of them.
    """
    ports = [reserve_port(), reserve_port()]
    servers, urls = [start_server(port) for port in ports], tuple(f"http://127.0.0.1:{port}" for port in ports)
    pixels = torch.rand(num_requests, 1, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    prompts = [PROMPTS[k % len(PROMPTS)] for k in range(num_requests)]
    expected = {
        "color": ColorReward().load(Placement()).score(pixels, prompts, [{}] * num_requests),
        "brightness": BrightnessReward().load(Placement()).score(pixels, prompts, [{}] * num_requests),
    }
    answers: dict[int, list[float]] = {}
    seconds: list[float] = []
    answered, restarted = threading.Semaphore(0), threading.Event()

    def run_client(client: int) -> None:
        name = list(expected)[client % 2]
        scorer = RemoteReward(urls, served_reward=name, max_retries=200, retry_delay=0.05).load(Placement())
        for k in range(client, num_requests, num_clients):
            assert k < num_requests * 2 // 3 or restarted.wait(120)
            start = time.perf_counter()
            scores = scorer.score(pixels[k : k + 1], prompts[k : k + 1], [{}])
            seconds.append(time.perf_counter() - start)
            answers.setdefault(k, []).append(float(scores[0]))
            answered.release()

    try:
        for url in urls:
            wait_for_server(url)
        start = time.perf_counter()
        with ThreadPoolExecutor(num_clients) as clients:
            futures = [clients.submit(run_client, client) for client in range(num_clients)]
            for _ in range(num_requests // 3):
                assert answered.acquire(timeout=120)
            servers[0].send_signal(signal.SIGKILL)
            servers[0].wait(60)
            servers[0] = start_server(ports[0])
            wait_for_server(urls[0])
            restarted.set()
            for future in futures:
                future.result(600)
        total = time.perf_counter() - start
        metrics = [read_metrics(url) for url in urls]
    finally:
        for server in servers:
            server.kill()
            server.wait(60)
    assert sorted(answers) == list(range(num_requests)) and all(len(each) == 1 for each in answers.values())
    wrong = [
        k
        for k, each in answers.items()
        if abs(each[0] - float(expected[list(expected)[k % num_clients % 2]][k])) > 1e-6
    ]
    assert not wrong
    done = [sum(v for key, v in each.items() if re.search(r'requests_total.*"200"', key)) for each in metrics]
    batches = sum(v for each in metrics for key, v in each.items() if "batches_total" in key)
    assert min(done) > 0
    ordered = sorted(seconds)
    print(
        f"\n{num_clients} clients, {num_requests} requests: {total:.1f} s, {num_requests / total:.0f} requests/s, "
        f"median {1000 * ordered[len(ordered) // 2]:.0f} ms, 99 % {1000 * ordered[int(len(ordered) * 0.99)]:.0f} ms, "
        f"longest {ordered[-1]:.1f} s; answered by the restarted and the other server {done}, "
        f"{sum(done) / batches:.1f} requests per batch"
    )
