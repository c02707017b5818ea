"""Client of a reward server: retries within a budget, answers bounded in time and size, waits that a signal ends."""

from __future__ import annotations

import http.client
import io
import json
import random
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

from ..core.errors import ConfigError
from ..core.interruption import POLL_SECONDS, Interrupted, StopRequest, current_stop
from ..core.reward import RewardError
from ..core.safe_files import parse_json

MAX_RETRY_DELAY = 30.0  # seconds, unless the server asks for more
CONNECT_TIMEOUT = 10.0  # seconds
MAX_RESPONSE_BYTES = 16 << 20  # headers and body: a score takes about 25 bytes
RETRIED_STATUSES = (408, 429, 500, 502, 503, 504)
_jitter = random.SystemRandom()  # the operating system's: no random stream of a run depends on a server

T = TypeVar("T")


class RewardServiceError(RewardError):
    """A reward server that does not respond, or whose response cannot be used."""


class AnswerTimeoutError(RewardServiceError):
    """A server that accepted a request and did not answer it in time."""


class TemporaryError(Exception):
    """A request that failed and may succeed later: no connection, a cut-off answer, or a server that is overloaded."""

    def __init__(self, message: str, retry_after: float = 0.0, status: int = 0) -> None:
        super().__init__(message)
        self.retry_after = retry_after  # seconds that the server asks to wait
        self.status = status  # of the answer; 0 if there was no complete one


@dataclass(frozen=True)
class RewardClient:
    """Sends requests to one server, each over a new connection, without proxies or redirects.

    It keeps no state between requests, so that several threads can use it.
    """

    url: str
    token: str = field(default="", repr=False)
    timeout: float = 600.0  # seconds for a whole response
    max_retries: int = 8  # after temporary errors
    retry_delay: float = 0.5  # seconds before the first retry, doubled for each further one
    retry_budget: float = 300.0  # seconds from the first temporary error to the last retry

    def request(self, path: str, content_type: str = "", body: bytes = b"") -> dict[str, Any]:
        """Return the JSON response of a path: POST if there is a body, otherwise GET.

        Raises Interrupted if the process was asked to stop and the server does not answer.
        """
        stop, attempts, last_retry = current_stop(), 0, None
        while True:
            try:
                return self.request_once(path, content_type, body, stop)
            except TemporaryError as error:
                attempts, now = attempts + 1, time.monotonic()
                last_retry = now + self.retry_budget if last_retry is None else last_retry
                if attempts > self.max_retries or now >= last_retry:
                    raise no_answer(self.url, attempts, error) from error
                stop.wait(min(self.choose_delay(attempts, error.retry_after), last_retry - now))

    def choose_delay(self, attempts: int, retry_after: float) -> float:
        """Seconds before the next attempt, different for each client so that not all of them return at once."""
        delay = min(MAX_RETRY_DELAY, self.retry_delay * 2.0 ** min(attempts - 1, 30))
        if retry_after > delay:
            return retry_after + _jitter.uniform(0, delay)
        return _jitter.uniform(delay / 2, delay)

    def request_once(self, path: str, content_type: str, body: bytes, stop: StopRequest) -> dict[str, Any]:
        """Return the JSON response of one attempt. Raises TemporaryError if another one may succeed."""
        headers = {"Content-Type": content_type} if content_type else {}
        headers |= {"Authorization": f"Bearer {self.token}"} if self.token else {}
        connection, bounded = self._connect(stop)
        try:
            connection.request("POST" if body else "GET", urlsplit(self.url).path.rstrip("/") + path, body, headers)
            response = connection.getresponse()
            if bounded.closed:  # http.client takes the end of a connection for the end of the headers
                raise TemporaryError("the answer was cut off in its headers")
            return self._read_response(response)
        except ssl.SSLError as error:
            raise self._tls_error(error) from error
        except TimeoutError as error:
            raise AnswerTimeoutError(
                f"{self.url} did not answer completely within {self.timeout:g} seconds; raise 'timeout', or lower "
                "'batch_size' [TM728]"
            ) from error
        except (OSError, http.client.IncompleteRead, http.client.RemoteDisconnected) as error:
            raise TemporaryError(f"{type(error).__name__}: {error}") from error
        except http.client.HTTPException as error:
            line = str(error) if isinstance(error, http.client.BadStatusLine) else ""
            if bounded.closed and line and "HTTP/".startswith(line[:5]):
                raise TemporaryError(f"the answer was cut off in its first line, {line!r:.80}") from error
            raise RewardServiceError(
                f"{self.url} does not speak HTTP ({type(error).__name__}: {error!s:.200}); check that 'url' is the "
                "address of a reward server [TM1050]"
            ) from error
        finally:
            bounded.end()

    def _connect(self, stop: StopRequest) -> tuple[http.client.HTTPConnection, BoundedSocket]:
        parts = urlsplit(self.url)
        host, secure = parts.hostname or "", parts.scheme == "https"
        connection_class = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = connection_class(host, parts.port)
        deadline = time.monotonic() + self.timeout
        try:
            plain = socket.create_connection(
                (connection.host, connection.port), timeout=min(CONNECT_TIMEOUT, self.timeout)
            )
        except OSError as error:
            raise TemporaryError(str(error)) from error
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bounded: Any = BoundedSocket(plain, deadline, stop, self.url)
        connection.sock = bounded
        if secure:
            try:
                bounded.encrypt(host)
            except BaseException as error:
                bounded.end()
                if isinstance(error, ssl.SSLError):
                    raise self._tls_error(error) from error
                if isinstance(error, OSError):  # a deadline too
                    raise TemporaryError(f"{type(error).__name__}: {error}") from error
                raise
        return connection, bounded

    def _tls_error(self, error: ssl.SSLError) -> Exception:
        """What a failure of TLS means: a connection that ended early, or a certificate that is not trusted."""
        if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
            return TemporaryError(f"{type(error).__name__}: {error}")
        return RewardServiceError(
            f"the certificate of {self.url} is not trusted ({error}); check the certificate [TM729]"
        )

    def _read_response(self, response: http.client.HTTPResponse) -> dict[str, Any]:
        status, retry_after = response.status, parse_retry_after(response.getheader("Retry-After", ""))
        ends_with_connection = response.length is None and not response.chunked
        # Bounded, because a declared length would be allocated before the first byte of it arrives.
        body = response.read(MAX_RESPONSE_BYTES)
        if response.length:  # the declared bytes that did not arrive
            if len(body) == MAX_RESPONSE_BYTES:
                raise too_large(self.url)
            raise TemporaryError(f"the answer was cut off after {len(body)} bytes")
        if status == 200 and ends_with_connection and is_cut_off(body):
            raise TemporaryError(f"the answer ends within a JSON object, after {len(body)} bytes")
        return self._parse_response(status, body, retry_after)

    def _parse_response(self, status: int, body: bytes, retry_after: float) -> dict[str, Any]:
        try:
            response = parse_json(body.decode(), self.url)
        except ValueError:
            response = None
        if status == 200 and isinstance(response, dict):
            return response
        text = response.get("error") if isinstance(response, dict) else body[:200].decode("utf-8", "replace")
        if status in RETRIED_STATUSES:
            raise TemporaryError(f"status {status}: {text!s:.500}", retry_after, status)
        if status == 200:
            raise RewardServiceError(
                f"the response of {self.url} is not a JSON object ({text!s:.200}); check that 'url' is the address of "
                "a reward server [TM730]"
            )
        raise RewardServiceError(f"{self.url} refused ({status}): {text!s:.2000} [TM731]")


def is_cut_off(body: bytes) -> bool:
    """Whether a body without a declared length may be the beginning of a JSON object."""
    try:
        parse_json(body.decode(errors="replace"), "answer")
    except ConfigError as error:  # too deep or too many parts is no reason to ask again
        return isinstance(error.__cause__, json.JSONDecodeError) and body.lstrip()[:1] in (b"", b"{")
    return False


class BoundedReader(io.RawIOBase):
    """What a bounded socket receives, as a file."""

    def __init__(self, receive: Callable[[Any], int]) -> None:
        self._receive = receive

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._receive(buffer)


class BoundedSocket:
    """A socket that a deadline, a number of received bytes and a stop request of this process end."""

    def __init__(self, plain: socket.socket, deadline: float, stop: StopRequest, url: str) -> None:
        self._socket, self._deadline, self._stop, self._url = plain, deadline, stop, url
        self._start, self._received = time.monotonic(), 0
        self.closed = False  # whether the server has closed the connection
        plain.settimeout(POLL_SECONDS)

    def encrypt(self, host: str) -> None:
        """Continue with TLS."""
        context = ssl.create_default_context()
        secure = context.wrap_socket(self._socket, server_hostname=host, do_handshake_on_connect=False)
        self._socket = secure
        self._repeat(secure.do_handshake)

    def receive(self, buffer: Any) -> int:
        count = self._repeat(lambda: self._socket.recv_into(buffer))
        self._received, self.closed = self._received + count, not count
        if self._received > MAX_RESPONSE_BYTES:
            raise too_large(self._url)
        return count

    def sendall(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            part = left  # of this turn: the closure is called within it
            left = left[self._repeat(lambda: self._socket.send(part)) :]  # noqa: B023

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(BoundedReader(self.receive))

    def close(self) -> None:
        """Do nothing: http.client closes the socket of a response that it has not read yet."""

    def end(self) -> None:
        self._socket.close()

    def _repeat(self, call: Callable[[], T]) -> T:
        """Call until it does not time out, which leaves a socket as it was. Every call is short."""
        while True:
            if time.monotonic() > self._deadline:
                raise TimeoutError("the deadline has passed")
            if self._stop.is_expired(self._start):
                raise Interrupted
            try:
                return call()
            except TimeoutError:
                continue


def no_answer(url: str, attempts: int, error: TemporaryError) -> RewardServiceError:
    return RewardServiceError(
        f"no answer from the reward server at {url} after {attempts} attempts ({error}); start the server with "
        "`tastemaker serve-reward`, correct 'url', or raise 'max_retries' and 'retry_budget' [TM727]"
    )


def too_large(url: str) -> RewardServiceError:
    return RewardServiceError(
        f"the response of {url} has more than {MAX_RESPONSE_BYTES} bytes; check that 'url' is the address of a reward "
        "server [TM1051]"
    )


def parse_retry_after(text: str | None) -> float:
    """Seconds of a Retry-After header, which holds a number or a date; 0 if it holds neither."""
    text = (text or "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError, OSError):
        return 0.0
