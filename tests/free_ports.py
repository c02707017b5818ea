"""Ports for servers that a test starts later, perhaps again and again."""

from __future__ import annotations

import atexit
import socket


def reserve_port() -> int:
    """Return a port of the loopback interface that no other process is given as long as this one lives.

    The socket that holds it never listens, so that connections are refused until a server listens there. Any server
    can that sets SO_REUSEADDR, as those of Python, uvicorn and PyTorch do.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    atexit.register(holder.close)
    return int(holder.getsockname()[1])
