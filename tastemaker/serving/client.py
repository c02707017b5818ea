"""Asking a served reward: connection errors are tried again, all others are told."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ..core.reward import RewardError

MAX_RETRY_DELAY = 30.0  # seconds between two tries
CONNECT_TIMEOUT = 10.0  # seconds for a connection


class RewardServiceError(RewardError):
    """A served reward that does not answer, or answers what cannot be used."""


@dataclass(frozen=True)
class RewardClient:
    """One server, asked over a connection of its own each time, without proxies or redirections."""

    url: str
    token: str = ""
    timeout: float = 600.0  # seconds for an answer
    retries: int = 5  # after connection errors
    pause: float = 0.5  # seconds before the first of them, doubled each time

    def ask(self, path: str, kind: str = "", body: bytes = b"") -> dict[str, Any]:
        """What a path answers; posted to if there is a body."""
        tried = 0
        while True:
            try:
                return self._once(path, kind, body)
            except (ConnectionError, http.client.IncompleteRead, ServerUnreachableError) as error:
                tried += 1
                if tried > self.retries:
                    raise RewardServiceError(
                        f"no reward answers at {self.url}, asked {tried} times ({error}); "
                        "start it with `tastemaker serve-reward`, or correct the url"
                    ) from error
            time.sleep(min(MAX_RETRY_DELAY, self.pause * 2 ** (tried - 1)))

    def _once(self, path: str, kind: str, body: bytes) -> dict[str, Any]:
        connection = self._connected()
        headers = {"Content-Type": kind} if kind else {}
        headers |= {"Authorization": f"Bearer {self.token}"} if self.token else {}
        try:
            connection.request("POST" if body else "GET", urlsplit(self.url).path.rstrip("/") + path, body, headers)
            response = connection.getresponse()
            return self._read(response.status, response.read())
        except TimeoutError as error:
            raise RewardServiceError(
                f"{self.url} gave no answer within {self.timeout:g} seconds; raise 'timeout', or lower batch_size"
            ) from error
        finally:
            connection.close()

    def _connected(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=min(CONNECT_TIMEOUT, self.timeout))
        try:
            connection.connect()
            connection.sock.settimeout(self.timeout)
        except ssl.SSLError as error:
            raise RewardServiceError(f"{self.url} is not trusted ({error}); check its certificate") from error
        except OSError as error:
            raise ServerUnreachableError(str(error)) from error
        return connection

    def _read(self, status: int, body: bytes) -> dict[str, Any]:
        try:
            told = json.loads(body)
        except ValueError:
            told = None
        if status == 200 and isinstance(told, dict):
            return told
        said = told.get("error") if isinstance(told, dict) else body[:200].decode("utf-8", "replace")
        if status == 200:
            raise RewardServiceError(f"{self.url} answered what is no JSON object ({said}); is it a served reward?")
        raise RewardServiceError(f"{self.url} refused ({status}): {said}")


class ServerUnreachableError(Exception):
    """A server that could not be connected to."""
