"""Client of a reward server. Connection errors are retried; all other errors are raised."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ..core.reward import RewardError

MAX_RETRY_DELAY = 30.0  # seconds
CONNECT_TIMEOUT = 10.0  # seconds


class RewardServiceError(RewardError):
    """A reward server that does not respond, or whose response cannot be used."""


class ServerUnreachableError(Exception):
    """A server that could not be connected to."""


@dataclass(frozen=True)
class RewardClient:
    """Sends requests to one server, each over a new connection, without proxies or redirects."""

    url: str
    token: str = ""
    timeout: float = 600.0  # seconds for a response
    retries: int = 5  # after connection errors
    retry_delay: float = 0.5  # seconds before the first retry, doubled for each further one

    def request(self, path: str, content_type: str = "", body: bytes = b"") -> dict[str, Any]:
        """Return the JSON response of a path: POST if there is a body, otherwise GET."""
        attempts = 0
        while True:
            try:
                return self._request_once(path, content_type, body)
            except (ConnectionError, http.client.IncompleteRead, ServerUnreachableError) as error:
                attempts += 1
                if attempts > self.retries:
                    raise RewardServiceError(
                        f"no reward server responds at {self.url} after {attempts} attempts ({error}); start the "
                        "server with `tastemaker serve-reward`, or correct 'url' [TM727]"
                    ) from error
            time.sleep(min(MAX_RETRY_DELAY, self.retry_delay * 2 ** (attempts - 1)))

    def _request_once(self, path: str, content_type: str, body: bytes) -> dict[str, Any]:
        connection = self._connect()
        headers = {"Content-Type": content_type} if content_type else {}
        headers |= {"Authorization": f"Bearer {self.token}"} if self.token else {}
        try:
            connection.request("POST" if body else "GET", urlsplit(self.url).path.rstrip("/") + path, body, headers)
            response = connection.getresponse()
            return self._parse_response(response.status, response.read())
        except TimeoutError as error:
            raise RewardServiceError(
                f"{self.url} did not respond within {self.timeout:g} seconds; raise 'timeout', or lower "
                "'batch_size' [TM728]"
            ) from error
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        connection_class = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = connection_class(parts.hostname or "", parts.port, timeout=min(CONNECT_TIMEOUT, self.timeout))
        try:
            connection.connect()
            connection.sock.settimeout(self.timeout)
        except ssl.SSLError as error:
            raise RewardServiceError(
                f"the certificate of {self.url} is not trusted ({error}); check the certificate [TM729]"
            ) from error
        except OSError as error:
            raise ServerUnreachableError(str(error)) from error
        return connection

    def _parse_response(self, status: int, body: bytes) -> dict[str, Any]:
        try:
            response = json.loads(body)
        except ValueError:
            response = None
        if status == 200 and isinstance(response, dict):
            return response
        error = response.get("error") if isinstance(response, dict) else body[:200].decode("utf-8", "replace")
        if status == 200:
            raise RewardServiceError(
                f"the response of {self.url} is not a JSON object ({error}); check that 'url' is the address of a "
                "reward server [TM730]"
            )
        raise RewardServiceError(f"{self.url} refused ({status}): {error} [TM731]")
