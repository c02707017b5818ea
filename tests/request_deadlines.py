"""Requests of this process that time out when a test says so, and not because a machine is slow."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from tastemaker.serving.client import BoundedSocket


class RequestDeadlines:
    """Deadlines of requests that wait for an answer."""

    def __init__(self) -> None:
        self._ports: set[int] = set()
        self._time = -math.inf

    def end(self, client_port: int) -> None:
        """Let the deadline of the request that was sent from a port pass."""
        self._ports.add(client_port)

    def end_all(self) -> None:
        """Let the deadlines of all requests under way pass."""
        self._time = time.monotonic()

    def check(self, connection: BoundedSocket) -> None:
        """Raise TimeoutError, after which the connection looks at its deadline, if that was ended."""
        port = connection._socket.getsockname()[1]
        if port in self._ports or connection._start <= self._time:
            self._ports.discard(port)  # a later request may be sent from the same port
            connection._deadline = -math.inf
            raise TimeoutError


@contextmanager
def control_deadlines() -> Iterator[RequestDeadlines]:
    """Yield what ends deadlines within this block. A test can then leave them at values that no machine exceeds."""
    deadlines, repeat = RequestDeadlines(), BoundedSocket._repeat

    def repeat_until_ended(connection: BoundedSocket, call: Callable[[], Any]) -> Any:
        def check_and_call() -> Any:
            deadlines.check(connection)
            return call()

        return repeat(connection, check_and_call)

    with patch.object(BoundedSocket, "_repeat", repeat_until_ended):
        yield deadlines
