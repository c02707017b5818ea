"""The HTTP interface of one or several rewards as a Starlette application: access, limits, deadlines and answers."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..core.reward import RewardError
from .access import AccessRules
from .batch_queue import BatchQueue, ScoreList
from .limits import BudgetExceededError, MemoryBudget, MemoryReservation, ServiceLimits
from .protocol import OversizedRequestError, ProtocolError, ScoreRequest, decode_request
from .server_metrics import CONTENT_TYPE, RequestMetrics, render_by_reward, render_metric

RETRY_AFTER = 1  # seconds
DRAIN_TIMEOUT = 2.0  # seconds for the rest of a request that is answered before it is complete
NUM_DECODERS = 2  # threads
SMALL_BYTES = 2**20  # of a request that is decoded in the thread of the server


class NotSmallError(Exception):
    """A request that needs a thread of its own to be decoded."""


@dataclass(frozen=True, eq=False)
class ServedReward:
    """A reward of a server: the queue that scores its requests, and what `/version` says about it."""

    batch_queue: BatchQueue
    description: Mapping[str, Any]


@dataclass(eq=False)
class RewardService:
    """Rewards behind HTTP, with their token, common limits and what is in progress."""

    rewards: Mapping[str, ServedReward]  # by the name in the URL
    token: str = ""  # no token is required if empty
    limits: ServiceLimits = ServiceLimits()
    allowed_hosts: tuple[str, ...] = ()  # names in the Host header besides those of this machine; "*" allows any
    on_error: Callable[[str], None] = lambda text: None  # called with the message of each failed request
    num_requests: int = field(default=0, init=False)
    num_receiving: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.budget = MemoryBudget(self.limits.max_total_bytes)
        self.decoders = ThreadPoolExecutor(NUM_DECODERS, "reward-decoders")
        self.metrics = RequestMetrics()

    def find_reward(self, name: str | None) -> str:
        """The name of a reward that is served; a request that names none means the only one."""
        names = ", ".join(self.rewards)
        if name is None and len(self.rewards) > 1:
            raise HTTPException(
                400,
                f"this server has several rewards ({names:.300}); set 'served_reward' to one of them, or send POST to "
                "/rewards/NAME/score [TM2051]",
            )
        if name is not None and name not in self.rewards:
            raise HTTPException(404, f"this server has no reward '{name:.60}', only {names:.300} [TM2052]")
        return name or next(iter(self.rewards))

    def num_pending(self) -> int:
        """Requests of all rewards that wait for their turn."""
        return sum(each.batch_queue.num_pending() for each in self.rewards.values())

    def is_alive(self) -> bool:
        """Whether every reward still scores requests."""
        return all(each.batch_queue.is_alive() for each in self.rewards.values())

    def close(self, timeout: float | None = None) -> bool:
        """Score the pending requests, then stop. Returns whether all threads stopped, each in `timeout` seconds."""
        stopped = [each.batch_queue.close(timeout) for each in self.rewards.values()]
        return all(stopped)

    def describe(self) -> dict[str, Any]:
        """The response of /version: every reward by name, and of a single one also its own fields."""
        rewards = {name: dict(each.description) for name, each in self.rewards.items()}
        only = next(iter(rewards.values())) if len(rewards) == 1 else {}
        return {**only, "rewards": rewards, "limit": self.limits.max_bytes}

    def render_metrics(self) -> str:
        """The response of /metrics."""
        queues = {name: each.batch_queue for name, each in self.rewards.items()}
        parts = [
            self.metrics.render(),
            render_by_reward(
                "samples_total", "counter", "Samples scored.", {k: q.num_samples for k, q in queues.items()}
            ),
            render_by_reward(
                "batches_total", "counter", "Batches scored.", {k: q.num_batches for k, q in queues.items()}
            ),
            render_by_reward(
                "scoring_seconds_total",
                "counter",
                "Seconds of scoring.",
                {k: q.busy_seconds for k, q in queues.items()},
            ),
            render_by_reward(
                "pending_requests", "gauge", "Requests that wait.", {k: q.num_pending() for k, q in queues.items()}
            ),
            render_metric("request_bytes", "gauge", "Memory of requests in progress.", [("", (), self.budget.used)]),
        ]
        return "".join(parts)

    async def score(self, request: Request, name: str) -> ScoreList:
        """Receive, decode and score one request for a reward. Refusals are `HTTPException`s."""
        reservation = MemoryReservation(self.budget)
        future = None
        try:
            with self._count_receiving():
                body = await self._receive(request, reservation)
            with self._count_request():
                deadline = time.monotonic() + self.limits.answer_timeout
                decoded = await self._decode(request.headers.get("content-type", ""), body, reservation)
                reservation.shrink(len(body))
                del body
                future = self.rewards[name].batch_queue.submit(decoded, reservation.release)
                del decoded
                return await wait_for_scores(asyncio.wrap_future(future), request, deadline)
        except BudgetExceededError as error:
            if error.needed > self.budget.total:
                raise HTTPException(
                    413,
                    f"the request needs {error.needed} bytes while it is decoded, but all requests together may use "
                    f"{self.budget.total}; send fewer samples per request [TM1028]",
                ) from None
            raise HTTPException(
                429,
                f"the requests in progress occupy {self.budget.used} of {self.budget.total} bytes; try again later, or "
                "start the server with a larger --max-total-mb [TM1011]",
                {"Retry-After": str(RETRY_AFTER)},
            ) from None
        finally:
            if future is None:  # otherwise the queue releases it
                reservation.release()

    @contextmanager
    def _count_receiving(self) -> Iterator[None]:
        if self.num_receiving >= self.limits.max_receiving:
            raise HTTPException(
                429,
                f"{self.num_receiving} requests are being received; try again later [TM1012]",
                {"Retry-After": str(RETRY_AFTER)},
            )
        self.num_receiving += 1
        try:
            yield
        finally:
            self.num_receiving -= 1

    @contextmanager
    def _count_request(self) -> Iterator[None]:
        """Take a place in the queue, which only a request that has arrived gets."""
        if self.num_requests >= self.limits.max_requests:
            raise HTTPException(
                429,
                f"{self.num_requests} requests are pending; try again later, or start the server with a larger "
                "--queue-size [TM1013]",
                {"Retry-After": str(RETRY_AFTER)},
            )
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    async def _receive(self, request: Request, reservation: MemoryReservation) -> bytes:
        """Return the body. Each part is reserved when it arrives, so that a slow request holds what it has sent.

        After some seconds it has to arrive at a minimum rate, so that a byte now and then holds no place for long.
        """
        limits, max_bytes = self.limits, self.limits.max_bytes
        length = request.headers.get("content-length")
        if length is None and "transfer-encoding" not in request.headers:
            raise HTTPException(411, "the length of the request is unknown; add a Content-Length header [TM1014]")
        file = io.BytesIO()
        too_large = int(length or 0) > max_bytes
        try:
            start = asyncio.get_running_loop().time()
            async with asyncio.timeout(min(limits.receive_timeout, limits.slow_seconds)) as deadline:
                chunks = request.stream()
                while not too_large and (chunk := await anext(chunks, None)) is not None:
                    reservation.grow(len(chunk))
                    file.write(chunk)
                    allowed = limits.slow_seconds + file.tell() / limits.min_rate
                    deadline.reschedule(start + min(limits.receive_timeout, allowed))
                    too_large = file.tell() > max_bytes
        except TimeoutError:
            raise HTTPException(
                408,
                f"the request arrived too slowly: the limits are {limits.receive_timeout:g} seconds, and after "
                f"{limits.slow_seconds:g} seconds {limits.min_rate:g} bytes per second; send smaller requests, or "
                "start the server with a larger --receive-timeout [TM1015]",
                {"Connection": "close"},
            ) from None
        if too_large:
            raise HTTPException(
                413,
                f"the request has {length or 'too many'} bytes, but the limit is {max_bytes}; send fewer samples per "
                "request [TM1016]",
            )
        return file.getvalue()

    async def _decode(self, content_type: str, body: bytes, reservation: MemoryReservation) -> ScoreRequest:
        content_type = content_type.partition(";")[0].strip().lower()
        size_before = reservation.size

        def reserve_small(size: int) -> None:
            if size > SMALL_BYTES:
                raise NotSmallError
            reservation.grow(size)

        try:
            if len(body) <= SMALL_BYTES:  # not worth another thread, unless it decompresses to more
                with suppress(NotSmallError):
                    return decode_request(content_type, body, self.limits.max_bytes, reserve_small)
                reservation.shrink(reservation.size - size_before)
            work = (content_type, body, self.limits.max_bytes, reservation.grow)
            return await asyncio.get_running_loop().run_in_executor(self.decoders, decode_request, *work)
        except OversizedRequestError as error:
            raise HTTPException(413, str(error)) from error
        except ProtocolError as error:
            raise HTTPException(400, str(error)) from error


async def wait_for_scores(scores: asyncio.Future[ScoreList], request: Request, deadline: float) -> ScoreList:
    """Wait for the scores until the deadline, or until the client leaves. Otherwise the request is cancelled."""
    disconnect = asyncio.ensure_future(request.receive())  # of a complete request, this returns when the client leaves
    try:
        timeout = deadline - time.monotonic()
        await asyncio.wait((scores, disconnect), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if scores.done():
            return scores.result()
    except asyncio.CancelledError:  # when a stopped server waits no longer
        if (task := asyncio.current_task()) is not None:
            task.uncancel()
        raise HTTPException(
            503, "the server was stopped; try again later [TM1017]", {"Retry-After": str(RETRY_AFTER)}
        ) from None
    finally:
        disconnect.cancel()
        scores.cancel()  # does nothing if they are done
    if disconnect.done() and not disconnect.cancelled():
        raise ClientDisconnect
    raise HTTPException(
        504,
        "the request was not scored in time; send fewer samples per request, or start the server with a larger "
        "--answer-timeout [TM1018]",
    )


# HTTP


def create_app(service: RewardService) -> Starlette:
    """Create the application of the rewards: `/health`, `/metrics`, `/version` and `/rewards/NAME/score`.

    `/score` is the score of the only reward.
    """

    async def answer_health(request: Request) -> Response:
        alive = service.is_alive()
        content = {"status": "ok" if alive else "failed", "waiting": service.num_pending()}
        return JSONResponse(content, 200 if alive else 503)

    async def answer_metrics(request: Request) -> Response:
        return PlainTextResponse(service.render_metrics(), headers={"Content-Type": CONTENT_TYPE})

    async def answer_version(request: Request) -> Response:
        return JSONResponse(service.describe())

    async def answer_score(request: Request) -> Response:
        start, name = time.monotonic(), service.find_reward(request.path_params.get("name"))
        status = 500
        try:
            response = await answer_request(service, request, name)
            status = response.status_code
            return response
        except HTTPException as error:
            status = error.status_code
            raise
        finally:
            service.metrics.add(name, status, time.monotonic() - start)

    async def answer_refusal(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = error.detail
        if message in ("Not Found", "Method Not Allowed"):  # of the router
            message = (
                f"unknown request {request.method:.10} {request.scope['path']:.60}; send GET to /health, /metrics or "
                "/version, or POST to /score or /rewards/NAME/score [TM1019]"
            )
        return JSONResponse({"error": message}, error.status_code, error.headers)

    async def answer_failure(request: Request, error: Exception) -> Response:
        service.on_error(f"{type(error).__name__}: {error}")
        return JSONResponse({"error": "the server failed; its console says more [TM1020]"}, 500)

    app = Starlette(
        routes=[
            Route("/health", answer_health),
            Route("/metrics", answer_metrics),
            Route("/version", answer_version),
            Route("/score", answer_score, methods=["POST"]),
            Route("/rewards/{name}/score", answer_score, methods=["POST"]),
        ],
        middleware=[Middleware(DrainMiddleware), Middleware(AccessMiddleware, service=service)],
        exception_handlers={HTTPException: answer_refusal, Exception: answer_failure},
    )
    app.router.redirect_slashes = False
    return app


async def answer_request(service: RewardService, request: Request, name: str) -> Response:
    """Score a request for a reward. Refusals are `HTTPException`s."""
    try:
        scores = await service.score(request, name)
    except RewardError as error:
        service.on_error(str(error))
        return JSONResponse({"error": str(error)}, 422)
    except ClientDisconnect:
        return Response(status_code=499)  # nobody reads it
    version = service.rewards[name].description.get("version")
    return JSONResponse({"scores": scores, **({"version": version} if version else {})})


class DrainMiddleware:
    """Reads the rest of a request that is answered early, because a client that is still sending sees a closed
    connection instead of the answer. The complete answer is sent before."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        complete = False

        async def receive_and_note() -> Message:
            nonlocal complete
            message = await receive()
            complete = complete or not message.get("more_body", False)
            return message

        async def send_and_drain(message: Message) -> None:
            if complete or message["type"] != "http.response.body" or message.get("more_body", False):
                return await send(message)
            await send({**message, "more_body": True})
            try:
                async with asyncio.timeout(DRAIN_TIMEOUT):
                    while not complete:
                        await receive_and_note()
            except TimeoutError:
                pass  # the connection is closed by its own timeout
            return await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self.app(scope, receive_and_note, send_and_drain)


class AccessMiddleware:
    """Refuses foreign hosts and origins, and requests without the token. `/health` needs no token."""

    def __init__(self, app: ASGIApp, service: RewardService) -> None:
        self.app, self.rules = app, AccessRules(service.allowed_hosts, service.token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._find_refusal(scope) if scope["type"] == "http" else None
        await (refusal or self.app)(scope, receive, send)

    def _find_refusal(self, scope: Scope) -> Response | None:
        request = Request(scope)
        host, origins = request.headers.get("host", ""), request.headers.getlist("origin")
        if not self.rules.is_own_host(host, scope):
            error = f"the host '{host:.60}' is not a name of this server; start it with --allowed-host NAME [TM1021]"
            return JSONResponse({"error": error}, 403)
        if not self.rules.is_own_origin(origins, host):
            error = "requests from web pages of other origins are refused; use a client without a browser [TM1022]"
            return JSONResponse({"error": error}, 403)
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        # The URL of a request is built from its Host header, the path is not.
        if scope["path"] != "/health" and not self.rules.is_token(token):
            error = (
                "the token is missing or wrong; send the header 'Authorization: Bearer ...' with the token of the "
                "server [TM1023]"
            )
            return JSONResponse({"error": error}, 401, {"WWW-Authenticate": "Bearer"})
        return None
