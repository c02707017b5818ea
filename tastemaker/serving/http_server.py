"""The uvicorn server of a reward: bounded connections, deadlines of headers and writes, and signals."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from .app import RETRY_AFTER, DrainMiddleware, RewardService, create_app
from .closing_server import ClosingServer
from .limits import ServiceLimits

BACKLOG = 2048  # connections that the operating system keeps until they are accepted
KEEP_ALIVE_TIMEOUT = 5  # seconds without a request
SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def refuse_connection(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request on a connection beyond the limit."""
    headers = {"Retry-After": str(RETRY_AFTER), "Connection": "close"}
    response = JSONResponse({"error": "too many connections; try again later [TM1024]"}, 503, headers)
    await DrainMiddleware(response)(scope, receive, send)


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 of uvicorn, with a limit of connections, and deadlines where uvicorn waits without an end."""

    limits = ServiceLimits()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        if len(self.connections) > 2 * self.limits.max_connections:
            transport.abort()
        elif len(self.connections) > self.limits.max_connections:
            self.app = refuse_connection
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._deadline, self._write_deadline):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._deadline is not None and self.cycle is not None and not self.cycle.response_complete:
            self._deadline.cancel()  # the headers are complete, and the application has its own deadlines
            self._deadline = None

    def eof_received(self) -> None:
        """Answer a body that ends too early."""
        if self.cycle is not None and self.cycle.more_body and not self.cycle.response_started:
            self.conn.receive_data(b"")
            self.handle_events()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # otherwise the next request has begun
            self._start_deadline()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_deadline = self.loop.call_later(self.limits.receive_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._close_with_error(400, "the request is not valid HTTP; check its headers and its length [TM1025]")

    def _start_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(self.limits.header_timeout, self._end_connection)

    def _end_connection(self) -> None:
        """End a connection on which no complete headers, or not the rest of an answered request, have arrived."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # the client does not read its answers
        elif self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._close_with_error(408, "the headers did not arrive in time [TM1026]")
        else:
            self.transport.close()

    def _close_with_error(self, status: int, error: str) -> None:
        body = json.dumps({"error": error}).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        response = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
        with suppress(h11.LocalProtocolError):  # an answer has begun
            parts = [self.conn.send(event) or b"" for event in (response, h11.Data(data=body), h11.EndOfMessage())]
            self.transport.write(b"".join(parts))
        self.transport.close()


class RewardServer(ClosingServer):
    """Serves until the first SIGINT or SIGTERM, then finishes the requests in progress. A second signal kills it."""

    def __init__(self, service: RewardService) -> None:
        limits = service.limits
        super().__init__(
            uvicorn.Config(
                create_app(service),
                http=type("Protocol", (BoundedProtocol,), {"limits": limits}),
                loop="asyncio",
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                log_level="error",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_TIMEOUT,
                timeout_graceful_shutdown=max(1, round(limits.shutdown_timeout)),
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while serving. Unlike uvicorn's, this one does not raise them again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {each: signal.signal(each, self.handle_exit) for each in SIGNALS}
        try:
            yield
        finally:
            for each, handler in handlers.items():
                signal.signal(each, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.should_exit = True
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Connections wait in its backlog until the server runs."""
    family: Any = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)
