"""A uvicorn server that leaves nothing open when it stops, so that it can also run within another process."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from typing_extensions import override

CANCEL_SECONDS = 1  # in which requests that were cancelled answer that the server was stopped


class ClosingServer(uvicorn.Server):
    """Ends the connections that are left after the time for a graceful shutdown."""

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=CANCEL_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # in which the transports close their sockets
