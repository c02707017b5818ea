"""HTTP server for a reward: limits bytes and concurrent requests, and checks the token."""

from __future__ import annotations

import hmac
import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ..core.reward import RewardError
from .batch_queue import BatchQueue
from .protocol import ProtocolError, decode_request

READ_CHUNK = 2**20
READ_TIMEOUT = 60.0  # seconds for the next bytes of a request
HttpReply = tuple[int, Mapping[str, Any]]


@dataclass(frozen=True)
class RewardService:
    """A reward to be asked over HTTP, and on what terms."""

    desk: BatchQueue
    about: Mapping[str, Any]  # what /version tells
    token: str = ""  # nobody is asked for one if empty
    limit: int = 256 * 2**20  # bytes of a request, and numbers its pictures may unfold to
    queue: int = 64  # requests at a time, those still being read included
    failed: Callable[[str], None] = lambda sentence: None  # told of requests that could not be answered
    places: threading.BoundedSemaphore = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", threading.BoundedSemaphore(self.queue))

    def server(self, host: str, port: int) -> ThreadingHTTPServer:
        """Bound to its port, but not answering before `serve_forever`."""
        server = ThreadingHTTPServer((host, port), partial(RewardRequestHandler, self))
        server.daemon_threads = True
        return server


class RewardRequestHandler(BaseHTTPRequestHandler):
    """One request and its answer, in a thread of its own."""

    timeout = READ_TIMEOUT
    error_content_type = "application/json"
    error_message_format = '{"error": "%(message)s"}'

    def __init__(self, service: RewardService, *connection: Any) -> None:
        self.service = service
        super().__init__(*connection)  # which answers the request

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(200, {"status": "ok", "waiting": self.service.desk.waiting()})
        elif self.path != "/version":
            self._refuse(404, f"there is no {self.path:.60}; expected /health, /version or, to post to, /score")
        elif self._known():
            self._answer(200, {**self.service.about, "limit": self.service.limit})

    def do_POST(self) -> None:
        if not self._known():
            return
        if self.path != "/score":
            self._refuse(404, f"there is no {self.path:.60} to post to; expected /score")
        elif self._length() < 0:
            self._refuse(411, "the request does not say how long it is; expected a Content-Length")
        elif self._length() > self.service.limit:
            most = self.service.limit
            self._refuse(413, f"the request has {self._length()} bytes; at most {most} are taken, so send fewer rows")
        elif not self.service.places.acquire(blocking=False):
            most = self.service.queue
            self._refuse(503, f"{most} requests wait already; ask again later, or serve with a longer --queue")
        else:
            try:
                answered = self._scored()
            finally:
                self.service.places.release()  # before the answer, for who has it may ask again at once
            self._answer(*answered)

    def _scored(self) -> HttpReply:
        body = self.rfile.read(self._length())
        if len(body) < self._length():
            return 400, {"error": f"the request ended after {len(body)} of {self._length()} bytes"}
        try:
            question = decode_request(self.headers.get_content_type(), body, self.service.limit)
            return 200, {"scores": self.service.desk.ask(question).result()}
        except ProtocolError as error:
            return 400, {"error": str(error)}
        except RewardError as error:
            self.service.failed(str(error))
            return 422, {"error": str(error)}

    def _known(self) -> bool:
        """Whether the request may be answered; if not, it is refused."""
        if not self.service.token:
            return True
        given = self.headers.get("Authorization", "").removeprefix("Bearer ").encode("latin-1", "replace")
        if hmac.compare_digest(given, self.service.token.encode()):
            return True
        self._refuse(401, "the token is missing or wrong; expected it as 'Authorization: Bearer ...'")
        return False

    def _length(self) -> int:
        text = self.headers.get("Content-Length", "")
        return int(text) if text.isdecimal() and len(text) < 16 else -1

    def _refuse(self, status: int, sentence: str) -> None:
        """Read what is being sent and drop it: who is cut off while sending sees a broken connection, not why."""
        left = min(self._length(), self.service.limit)
        while left > 0 and (got := len(self.rfile.read(min(left, READ_CHUNK)))):
            left -= got
        self._answer(status, {"error": sentence})

    def _answer(self, status: int, told: Mapping[str, Any]) -> None:
        body = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        with suppress(ConnectionError):  # of one who did not wait for the answer
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *values: Any) -> None:
        """Nothing: a line for each request would bury what matters."""
