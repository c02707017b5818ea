"""A chat-completions endpoint on loopback that judges images by their brightness, and can be made to misbehave."""

from __future__ import annotations

import base64
import io
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from PIL import Image
from request_deadlines import control_deadlines

Brightness = list[float]


@dataclass(frozen=True)
class Reply:
    """A response; `cut` bytes of it are missing, although its header promises them.

    The client's timeout passes before a `late` one, whatever it is.
    """

    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    cut: int = 0
    late: bool = False


def completion(content: str | None, logprobs: Any = None, finish_reason: str = "stop", **message: Any) -> Reply:
    choice = {"message": {"content": content, **message}, "logprobs": logprobs, "finish_reason": finish_reason}
    usage = {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100}
    return Reply(json.dumps({"choices": [choice], "usage": usage}).encode())


def point_answer(brightness: Brightness) -> Reply:
    """UnifiedReward's three lines; the score is the brightness."""
    score = 1 + 4 * brightness[0]
    return completion("".join(f"{axis} Score (1-5): {score:.6f}\n" for axis in ("Alignment", "Coherence", "Style")))


def pair_answer(brightness: Brightness) -> Reply:
    """UnifiedReward's shares, with a preference of the first image."""
    first, second = brightness[0] + 0.1, brightness[1]
    axis = f"Image 1: {first / (first + second):.4f}\n Image 2: {second / (first + second):.4f}\n\n"
    return completion("".join(f"{name} Score:\n {axis}" for name in ("Alignment", "Coherence", "Style")))


def yes_answer(brightness: Brightness) -> Reply:
    yes = min(max(sum(brightness) / len(brightness), 0.01), 0.99)
    top = [{"token": "Yes", "logprob": float(np.log(yes))}, {"token": " no", "logprob": float(np.log(1 - yes))}]
    return completion("Yes", {"content": [{**top[0], "top_logprobs": top}]}, "length")


def error(status: int, message: str, **headers: str) -> Reply:
    return Reply(json.dumps({"error": {"message": message}}).encode(), status, headers)


def read_images(request: dict[str, Any]) -> list[np.ndarray]:
    urls = [part["image_url"]["url"] for part in request["messages"][-1]["content"] if part["type"] == "image_url"]
    found = [re.fullmatch(r"data:image/(?:png|jpeg);base64,(.+)", url) for url in urls]
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(match[1])))) for match in found if match]


class JudgeStub:
    """Answers by brightness; `fault` may replace the reply to the n-th completion (from 0)."""

    def __init__(self, answer: Callable[[Brightness], Reply] = point_answer) -> None:
        self.answer = answer
        self.fault: Callable[[int, dict[str, Any]], Reply | None] = lambda n, request: None
        self.models: list[str] = ["judge"]
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.times: list[float] = []
        self.in_flight = self.most_in_flight = 0
        self._lock = threading.Lock()

    def reply(self, path: str, key: str | None, body: bytes) -> Reply:
        if path == "/v1/models":
            return Reply(json.dumps({"data": [{"id": name} for name in self.models]}).encode())
        assert path == "/v1/chat/completions"
        request = json.loads(body)
        with self._lock:
            number = len(self.requests)
            self.requests.append(request)
            self.keys.append(key)
            self.times.append(time.monotonic())
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            reply = self.fault(number, request)
            if reply is None:
                reply = self.answer([float(image.mean()) / 255 for image in read_images(request)])
            time.sleep(reply.delay)
            return reply
        finally:
            with self._lock:
                self.in_flight -= 1


@contextmanager
def serve_judge(stub: JudgeStub) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(b"")

        def do_POST(self) -> None:
            self._reply(self.rfile.read(int(self.headers["Content-Length"])))

        def _reply(self, body: bytes) -> None:
            reply = stub.reply(self.path, self.headers.get("Authorization"), body)
            try:
                if reply.late:
                    deadlines.end(self.client_address[1])
                    self.rfile.read(1)  # until the client has gone
                    return
                self.send_response(reply.status)
                for name, value in {"Content-Length": str(len(reply.body)), **reply.headers}.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                self.wfile.write(reply.body[: len(reply.body) - reply.cut])
            except OSError:
                pass  # the client has gone

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # connections beyond it are tried again a second later

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        with control_deadlines() as deadlines:
            yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
