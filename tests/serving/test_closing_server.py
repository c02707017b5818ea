"""What a server leaves behind when it stops."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import pytest

uvicorn = pytest.importorskip("uvicorn", reason="needs uvicorn: pip install 'tastemaker[serve]'")

from tastemaker.serving import closing_server  # noqa: E402
from tastemaker.serving.closing_server import ClosingServer  # noqa: E402


def test_connections_are_closed_though_a_request_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing_server, "CANCEL_SECONDS", 0.05)
    begun = threading.Event()

    async def answer_never(scope: Any, receive: Any, send: Any) -> None:
        begun.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:  # as an answer that is still being written does
            await asyncio.sleep(600)

    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(answer_never, lifespan="off", log_level="critical", timeout_graceful_shutdown=0.05)
    server = ClosingServer(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    with socket.create_connection(listener.getsockname(), timeout=60) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert begun.wait(60)
        connections = list(server.server_state.connections)
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive() and client.recv(100) == b""  # the connection is held by nobody but the list
    assert connections[0].transport.is_closing()
