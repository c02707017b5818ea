"""Attacks on the client of a reward server by servers that fail, drip, hang or never stop sending."""

from __future__ import annotations

import io
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from .lab import Lab, attack, count_logged_steps, expect, list_steps, train_arguments

VERSION = {"tastemaker": "0", "name": "brightness", "version": "1", "modality": "image", "limit": 2**28}
INTERRUPTED = 130


class Misbehavior:
    """What a server does with the requests for scores: `plan` names it for each in turn, then `finally_`."""

    def __init__(self, *plan: str, finally_: str = "right") -> None:
        self.plan, self.finally_, self.count = plan, finally_, 0
        self.stopped, self.lock = threading.Event(), threading.Lock()

    def next(self) -> str:
        with self.lock:
            self.count += 1
            return self.plan[self.count - 1] if self.count <= len(self.plan) else self.finally_


class Handler(BaseHTTPRequestHandler):
    """Answers /version as it should and /score as its server's misbehavior says."""

    def do_GET(self) -> None:
        self.answer(200, json.dumps(VERSION).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        behavior: Misbehavior = self.server.behavior  # type: ignore[attr-defined]
        what = behavior.next()
        with suppress(OSError):
            if what == "right":
                self.answer(200, json.dumps({"scores": right_scores(body)}).encode())
            elif what.isdecimal():
                self.answer(int(what), b'{"error": "not now"}')
            elif what == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
                self.connection.close()
            elif what == "hang":
                behavior.stopped.wait(300)
            elif what in ("drip", "endless"):
                self.send_without_end(behavior, drips=what == "drip")
            else:
                self.answer(200, what.encode())

    def send_without_end(self, behavior: Misbehavior, *, drips: bool) -> None:
        self.wfile.write(b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n" + b'{"scores": [')
        while not behavior.stopped.is_set():
            self.wfile.write(b" " if drips else b" " * 2**20)
            if drips:
                time.sleep(0.2)

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status in (429, 503):
            self.send_header("Retry-After", "1")
        if 300 <= status < 400:
            self.send_header("Location", "http://127.0.0.1:1/")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: Any) -> None:
        """Print nothing."""


def right_scores(body: bytes) -> list[float]:
    with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
        return [float(x) for x in arrays["pixels"].astype(np.float32).mean((1, 2, 3, 4))]


@contextmanager
def serve(behavior: Misbehavior) -> Iterator[str]:
    """Serve on a free port of the loopback interface; yield the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.behavior, server.daemon_threads = behavior, True  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        behavior.stopped.set()
        server.shutdown()
        server.server_close()


def make_images(lab: Lab) -> Path:
    folder = lab.folder / "images"
    folder.mkdir(exist_ok=True)
    for value in (64, 191):
        Image.new("RGB", (16, 16), (value, value, value)).save(folder / f"{value}.png")
    return folder


def remote_reward(url: str, **settings: Any) -> str:
    chosen = {"type": "remote", "url": url, "retry_delay": 0.05, **settings}
    return "{" + ", ".join(f"{key}: {value!r}" for key, value in chosen.items()) + "}"


@attack("server-fails-for-a-while", "the client tries again and gets the right scores", quick=True)
def fail_for_a_while(lab: Lab) -> None:
    images = make_images(lab)
    plans = {"503 twice": ("503", "503"), "500 twice": ("500", "500"), "429": ("429",), "reset": ("reset", "reset")}
    for name, plan in list(plans.items())[: lab.count(4, 1)]:
        with lab.attempt(name), serve(Misbehavior(*plan)) as url:
            out = lab.folder / f"{name.replace(' ', '-')}.jsonl"
            lab.run("score", str(images), "--reward", remote_reward(url), "--out", str(out)).expect_success()
            rows = [json.loads(line) for line in out.read_text().splitlines()]
            means = sorted(value for row in rows for value in flatten(row) if isinstance(value, float))
            expect(np.allclose([means[0], means[-1]], [64 / 255, 191 / 255]), f"the scores are {means}")


def flatten(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [x for each in value.values() for x in flatten(each)]
    return [value]


ANSWERS = {
    "an answer that drips": ("drip", 3),
    "an answer without end": ("endless", 10),
    "no answer": ("hang", 3),
    "503 for ever": ("503", 3),
    "a redirect": ("302", 3),
    "no JSON": ("scores: 1, 2", 3),
    "100,000 brackets": ("[" * 100_000 + "]" * 100_000, 3),
    "infinite scores": ('{"scores": [Infinity, NaN]}', 3),
    "too many scores": ('{"scores": [1, 2, 3]}', 3),
    "scores of 5,000 digits": ('{"scores": [' + "9" * 5000 + ", 1]}", 3),
    "scores that are true": ('{"scores": [true, {}]}', 3),
}


@attack("misbehaving-servers", "a message within 60 s and 1.5 GiB")
def misbehave(lab: Lab) -> None:
    images = make_images(lab)
    for name, (what, timeout) in ANSWERS.items():
        with lab.attempt(name), serve(Misbehavior(finally_=what)) as url:
            reward = remote_reward(url, timeout=timeout, max_retries=2)
            result = lab.run("score", str(images), "--reward", reward, seconds=60)
            result.expect_message().expect_memory(1.5)


@attack("hung-reward", "SIGTERM, SIGHUP or Ctrl-C ends the run within 30 s, and completed steps are saved")
def hang(lab: Lab) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        behavior = Misbehavior("right", "right", "right", finally_="hang")
        with lab.attempt(number.name), serve(behavior) as url:
            directory = lab.folder / number.name
            rewards = f"rewards={{r: {remote_reward(url, batch_size=16)}}}"
            process = lab.start(*train_arguments(lab.folder, number.name, 50, rewards, every=1000))
            process.wait_until(lambda behavior=behavior: behavior.count >= 4)
            time.sleep(0.5)
            process.send(number)
            result = process.wait(30)
            expect(result.code == INTERRUPTED, f"exit code {result.code}: {result.last_line}")
            saved, logged = max(list_steps(directory), default=0), count_logged_steps(directory)
            expect(saved == logged > 0, f"step {saved} of {logged} was saved")
    behavior = Misbehavior(finally_="hang")
    with lab.attempt("Ctrl-C twice"), serve(behavior) as url:
        process = lab.start(*train_arguments(lab.folder, "twice", 50, f"rewards={{r: {remote_reward(url)}}}"))
        process.wait_until(lambda: behavior.count)
        for _ in range(2):
            if process.poll() is None:
                process.send(signal.SIGINT)
            time.sleep(0.5)
        expect(process.wait(15).code != 0, "exit code 0")
