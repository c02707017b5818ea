"""`tastemaker serve-reward`: an HTTP server for one reward, with batching, a token, and limits on size and load."""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from rich.console import Console

from .. import __version__
from ..config.dump import to_plain
from ..core.registry import ConfigError
from ..core.reward import RewardError, RewardSpec, Rubric, WeightedReward, load_shared_reward
from ..core.types import Placement
from ..rewards.cached import reward_fingerprint
from ..rewards.folder_scorer import parse_reward
from .protocol import ProtocolError, ScoreRequest, decode_request

READ_CHUNK = 2**20
READ_TIMEOUT = 60.0  # seconds for the next bytes of a request
ScoreList = list[float]
HttpResponse = tuple[int, Mapping[str, Any]]  # status and JSON object


@dataclass(frozen=True)
class ServerOptions:
    """Address and limits of a reward server."""

    host: str = "127.0.0.1"
    port: int = 8800
    token_variable: str = ""  # name of the environment variable that holds the token
    max_requests: int = 64
    max_bytes: int = 256 * 2**20  # of a request


def run_reward_server(reward: str, options: ServerOptions, placement: Placement, console: Console) -> None:
    """Load a reward and serve it until interrupted."""
    token = read_token(options)
    name, spec = parse_reward(reward, "serve-reward")

    def log_error(text: str) -> None:
        console.print(f"refused: {text}", markup=False, highlight=False, soft_wrap=True)

    rubric = Rubric({name: WeightedReward(spec, load_shared_reward(spec, placement))})
    batch_queue = BatchQueue(rubric, placement.device)
    description = describe_reward(name, spec)
    service = RewardService(batch_queue, description, token, options.max_bytes, options.max_requests, log_error)
    try:
        server = service.create_server(options.host, options.port)
    except OSError as error:
        address = f"{options.host}:{options.port}"
        raise ConfigError(
            f"--port: cannot serve at {address} ({error}); choose another --port or --host [TM748]"
        ) from error
    url = f"http://{options.host}:{server.server_address[1]}"
    text = f"serving {name} at {url} on {placement.device}; use it with {{type: remote, url: '{url}'}}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            console.print("stopped", highlight=False)
    batch_queue.close()


def read_token(options: ServerOptions) -> str:
    """Read the token from the environment. A server that other machines can reach needs one."""
    token = os.environ.get(options.token_variable, "") if options.token_variable else ""
    if options.token_variable and not (token and token.isascii() and token.isprintable()):
        raise ConfigError(
            f"--token-env: the environment variable {options.token_variable} is empty or not plain ASCII text; "
            "set it to the token [TM749]"
        )
    if not token and not is_loopback(options.host):
        raise ConfigError(
            f"--host: other machines can reach {options.host}, so a token is needed; put a token into an "
            "environment variable, and give the name of the variable with --token-env [TM750]"
        )
    return token


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def describe_reward(name: str, spec: RewardSpec) -> dict[str, object]:
    """Return what `/version` tells about the reward."""
    return {
        "tastemaker": __version__,
        "name": name,
        "reward": to_plain(spec, None),
        "version": reward_fingerprint(spec),
        "differentiable": spec.differentiable,
        "modality": spec.modality,
        "batch_size": spec.batch_size,
    }


# Batching


@dataclass(frozen=True, eq=False)
class PendingRequest:
    request: ScoreRequest
    future: Future[ScoreList] = field(default_factory=Future)


class BatchQueue:
    """Scores requests in order of arrival in one thread, and batches requests whose samples have the same size."""

    def __init__(self, rubric: Rubric, device: torch.device) -> None:
        self.rubric, self.device = rubric, device
        self.max_batch_size = max(reward.spec.batch_size for reward in rubric.rewards.values())
        self._pending: deque[PendingRequest] = deque()
        self._changed, self._closed = threading.Condition(), False
        self._worker = threading.Thread(target=self._run, name="reward-batches", daemon=True)
        self._worker.start()

    def submit(self, request: ScoreRequest) -> Future[ScoreList]:
        pending = PendingRequest(request)
        with self._changed:
            self._pending.append(pending)
            self._changed.notify()
        return pending.future

    def num_pending(self) -> int:
        return len(self._pending)

    def close(self) -> None:
        """Score the pending requests, then stop the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._worker.join()

    def _run(self) -> None:
        while batch := self._next_batch():
            try:
                scores = self._score([pending.request for pending in batch])
            except Exception as error:
                self._score_one_by_one(batch, error)
                continue
            for pending, request_scores in zip(batch, scores, strict=True):
                pending.future.set_result(request_scores)

    def _next_batch(self) -> list[PendingRequest]:
        """Take the oldest request and later ones of the same size. Returns an empty list when closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._closed)
            batch: list[PendingRequest] = []
            num_samples = 0
            for pending in list(self._pending):
                same_size = not batch or pending.request.pixels.shape[1:] == batch[0].request.pixels.shape[1:]
                if same_size and (not batch or num_samples + len(pending.request) <= self.max_batch_size):
                    batch.append(pending)
                    num_samples += len(pending.request)
                    self._pending.remove(pending)
            return batch

    @torch.no_grad()
    def _score(self, requests: list[ScoreRequest]) -> list[ScoreList]:
        pixels = torch.cat([request.pixels for request in requests]).to(self.device)
        prompts = [prompt for request in requests for prompt in request.prompts]
        metadata = [each for request in requests for each in request.metadata]
        scores = self.rubric.score(pixels, prompts, metadata).total.cpu()
        return [part.tolist() for part in torch.split(scores, [len(request) for request in requests])]

    def _score_one_by_one(self, batch: list[PendingRequest], batch_error: Exception) -> None:
        """Score each request of a failed batch by itself, so that only the invalid ones fail."""
        for pending in batch:
            try:
                if len(batch) == 1:
                    raise batch_error
                pending.future.set_result(self._score([pending.request])[0])
            except Exception as error:
                reward_error = error if isinstance(error, RewardError) else RewardError(describe_error(error))
                pending.future.set_exception(reward_error)


def describe_error(error: Exception) -> str:
    """Describe an unexpected error to the client."""
    if isinstance(error, torch.OutOfMemoryError):
        return "the server is out of device memory; send fewer samples at a time, or serve with a smaller batch_size"
    return f"the server failed ({type(error).__name__}: {error!s:.300}); its console may say more"


# HTTP


@dataclass(frozen=True)
class RewardService:
    """A reward behind HTTP, with its token and limits."""

    batch_queue: BatchQueue
    description: Mapping[str, Any]  # the response of /version
    token: str = ""  # no token is required if empty
    max_bytes: int = 256 * 2**20  # of a request; also limits the number of decompressed pixel values
    max_requests: int = 64  # at a time, including those that are still being received
    on_error: Callable[[str], None] = lambda text: None  # called with the message of each failed request
    slots: threading.BoundedSemaphore = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "slots", threading.BoundedSemaphore(self.max_requests))

    def create_server(self, host: str, port: int) -> ThreadingHTTPServer:
        """Bind a server to its port. It responds once `serve_forever` is called."""
        server = ThreadingHTTPServer((host, port), partial(RewardRequestHandler, self))
        server.daemon_threads = True
        return server


class RewardRequestHandler(BaseHTTPRequestHandler):
    """Handles one request in its own thread."""

    timeout = READ_TIMEOUT
    error_content_type = "application/json"
    error_message_format = '{"error": "%(message)s"}'

    def __init__(self, service: RewardService, *connection: Any) -> None:
        self.service = service
        super().__init__(*connection)  # handles the request

    def do_GET(self) -> None:
        if self.path == "/health":
            self._respond(200, {"status": "ok", "waiting": self.service.batch_queue.num_pending()})
        elif self.path != "/version":
            self._refuse(404, f"unknown path {self.path:.60}; send GET to /health or /version, or POST to /score")
        elif self._check_token():
            self._respond(200, {**self.service.description, "limit": self.service.max_bytes})

    def do_POST(self) -> None:
        if not self._check_token():
            return
        length, max_bytes = self._content_length(), self.service.max_bytes
        if self.path != "/score":
            self._refuse(404, f"unknown path {self.path:.60}; send POST to /score")
        elif length < 0:
            self._refuse(411, "the length of the request is unknown; add a Content-Length header")
        elif length > max_bytes:
            self._refuse(
                413, f"the request has {length} bytes, but the limit is {max_bytes}; send fewer samples per request"
            )
        elif not self.service.slots.acquire(blocking=False):
            max_requests = self.service.max_requests
            self._refuse(
                503,
                f"{max_requests} requests are pending; try again later, or start the server with a larger --queue-size",
            )
        else:
            try:
                response = self._score()
            finally:
                self.service.slots.release()  # before responding, because the client may send its next request at once
            self._respond(*response)

    def _score(self) -> HttpResponse:
        length = self._content_length()
        body = self.rfile.read(length)
        if len(body) < length:
            return 400, {"error": f"the request ended after {len(body)} of {length} bytes"}
        try:
            request = decode_request(self.headers.get_content_type(), body, self.service.max_bytes)
            return 200, {"scores": self.service.batch_queue.submit(request).result()}
        except ProtocolError as error:
            return 400, {"error": str(error)}
        except RewardError as error:
            self.service.on_error(str(error))
            return 422, {"error": str(error)}

    def _check_token(self) -> bool:
        """Whether the request has the right token. If not, it is refused."""
        if not self.service.token:
            return True
        token = self.headers.get("Authorization", "").removeprefix("Bearer ").encode("latin-1", "replace")
        if hmac.compare_digest(token, self.service.token.encode()):
            return True
        self._refuse(
            401,
            "the token is missing or wrong; send the header 'Authorization: Bearer ...' with the token of the server",
        )
        return False

    def _content_length(self) -> int:
        text = self.headers.get("Content-Length", "")
        return int(text) if text.isdecimal() and len(text) < 16 else -1

    def _refuse(self, status: int, message: str) -> None:
        """Drain the request before responding, because a client that is still sending would see a broken connection."""
        remaining = min(self._content_length(), self.service.max_bytes)
        while remaining > 0 and (received := len(self.rfile.read(min(remaining, READ_CHUNK)))):
            remaining -= received
        self._respond(status, {"error": message})

    def _respond(self, status: int, response: Mapping[str, Any]) -> None:
        body = json.dumps(response).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        with suppress(ConnectionError):  # the client may have left
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *values: Any) -> None:
        """Do not log successful requests."""
