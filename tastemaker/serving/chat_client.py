"""Requests to OpenAI-compatible chat-completions endpoints: the least loaded of several, within a budget.

Connections, deadlines and bounds are those of the reward client. The API key is sent in a header and nowhere else: it
is removed from everything that a server writes into an error.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from ..core.interruption import POLL_SECONDS, StopRequest, current_stop
from .client import RETRIED_STATUSES, AnswerTimeoutError, RewardClient, RewardServiceError, TemporaryError
from .judge_usage import UsageCount, UsageFiles

_jitter = random.SystemRandom()
MIN_SECRET_LENGTH = 8  # characters: shorter keys are placeholders, and may occur in the verdict of an answer
MILLION = 1e6  # tokens that a price is for


@dataclass(frozen=True)
class JudgeBudget:
    """Limits of what a run asks on all ranks, with its restarts; None is no limit.

    Tokens and cost may be exceeded by requests under way, and all limits by what other ranks ask within a second.
    """

    requests: PositiveInt | None = None  # with retries
    tokens: PositiveInt | None = None  # of questions and answers
    cost: PositiveFloat | None = None  # in the currency of the prices
    prompt_price: NonNegativeFloat = 0.0  # of a million tokens of questions
    completion_price: NonNegativeFloat = 0.0  # of a million tokens of answers

    def __post_init__(self) -> None:
        if self.cost and not self.prompt_price + self.completion_price:
            raise ValueError(
                "'budget.cost' needs prices; set 'prompt_price' and 'completion_price', per million tokens [TM2010]"
            )


class RefusedRequest(RewardServiceError):
    """A request that the server will not accept later either."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class AbandonedRequest(Exception):
    """A request that is given up, because the caller does not need its answer anymore."""


class BatchStop(StopRequest):
    """The stop request of the process for one batch of requests; `abandoned` ends their attempts and waits too."""

    def __init__(self, abandoned: threading.Event) -> None:
        super().__init__()
        self._process, self._abandoned = current_stop(), abandoned

    def is_set(self) -> bool:
        return self._process.is_set()

    def is_expired(self, start: float) -> bool:
        if self._abandoned.is_set():
            raise AbandonedRequest
        return self._process.is_expired(start)

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._abandoned.is_set():
                raise AbandonedRequest
            self._process.wait(min(left, POLL_SECONDS))


@dataclass(frozen=True)
class ChatClient(RewardClient):
    """Makes single attempts at one endpoint. `url` is a server, or a base URL with a path, such as .../v1."""

    def attempt(self, path: str, stop: StopRequest, body: bytes = b"", field: str = "choices") -> dict[str, Any]:
        """The JSON object at a path such as /chat/completions, which must have a list `field`.

        Raises TemporaryError if another attempt may succeed: also after a timeout and for JSON that is cut off.
        """
        path = path if urlsplit(self.url).path.strip("/") else f"/v1{path}"
        try:
            response = self.request_once(path, "application/json" if body else "", body, stop)
        except AnswerTimeoutError as error:
            raise TemporaryError(f"no complete answer within {self.timeout:g} seconds") from error
        if not isinstance(response.get(field), list):
            raise TemporaryError(f"the answer has no {field}: {self._describe(response, b'')}")
        return response

    def _parse_response(self, status: int, body: bytes, retry_after: float) -> dict[str, Any]:
        try:
            response = json.loads(body)
            if len(self.token) >= MIN_SECRET_LENGTH:  # messages quote answers
                response = json.loads(self._mask(json.dumps(response, ensure_ascii=False), escaped=True))
        except (ValueError, RecursionError):
            response = None
        if status == 200 and isinstance(response, dict):
            return response
        text = self._describe(response, body)
        if status in RETRIED_STATUSES:
            raise TemporaryError(f"status {status}: {text}", retry_after)
        if status == 200:
            raise TemporaryError(f"the answer is no complete JSON object: {text}")
        raise RefusedRequest(
            f"{self.url} refused a request ({status}): {text}; check 'model', 'api_key_env' and the limits of the "
            "server [TM2011]",
            status,
        )

    def _describe(self, response: object, body: bytes) -> str:
        """The sentence of an error, or the beginning of something else, without the key."""
        error = response.get("error") if isinstance(response, dict) else None
        message = error.get("message") if isinstance(error, dict) else error
        text = str(message or response or body.decode("utf-8", "replace"))
        return self._mask(text)[:500]

    def _mask(self, text: str, escaped: bool = False) -> str:
        """A text, or the JSON of one, in which the key is replaced by asterisks."""
        token = json.dumps(self.token, ensure_ascii=False)[1:-1] if escaped else self.token
        return text.replace(token, "***") if token else text


class Endpoint:
    """A client and its load."""

    def __init__(self, client: ChatClient) -> None:
        self.client = client
        self.in_flight = self.served = self.failures = 0  # failures since the last answer
        self.resume_at = 0.0  # on the monotonic clock: no requests before


class Usage:
    """What was asked so far, and whether the budget allows more."""

    def __init__(self, budget: JudgeBudget) -> None:
        self.budget = budget
        self.requests = self.retries = self.prompt_tokens = self.completion_tokens = 0  # of this process
        self._files: UsageFiles | None = None
        self._start = UsageCount()  # what this process had counted when the files were named

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def cost(self) -> float:
        return self._cost(self._count())

    def keep_in(self, files: UsageFiles) -> None:
        """Count what other processes spent too, and write down what this one spends from now on."""
        self._files, self._start = files, self._count()

    def _count(self) -> UsageCount:
        return UsageCount(self.requests, self.prompt_tokens, self.completion_tokens)

    def _cost(self, count: UsageCount) -> float:
        prices = self.budget.prompt_price, self.budget.completion_price
        return (count.prompt_tokens * prices[0] + count.completion_tokens * prices[1]) / MILLION

    def _write(self) -> None:
        if self._files is not None:
            self._files.write(self._count() - self._start)

    def start_request(self) -> None:
        """Count a request; raise if the budget does not allow it."""
        spent = self._count()
        if self._files is not None:
            spent = spent - self._start + self._files.read_others()
        limits = {
            "requests": (spent.requests, self.budget.requests),
            "tokens": (spent.prompt_tokens + spent.completion_tokens, self.budget.tokens),
            "cost": (self._cost(spent), self.budget.cost),
        }
        for name, (used, limit) in limits.items():
            if limit is not None and used >= limit:
                raise RewardServiceError(
                    f"the judge's budget is used up ({name}: {used:g} of {limit:g}); raise budget.{name} and run the "
                    "same command to resume [TM2012]"
                )
        self.requests += 1
        self._write()

    def add(self, response: Mapping[str, Any]) -> None:
        """Count the tokens of a response."""
        usage = response.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if type(prompt) is int and type(completion) is int and min(prompt, completion) >= 0:
            self.prompt_tokens, self.completion_tokens = (
                self.prompt_tokens + prompt,
                self.completion_tokens + completion,
            )
            self._write()
        elif self.budget.tokens or self.budget.cost:
            raise RewardServiceError(
                "the judge's endpoint does not report its usage, so that tokens cannot be counted; use budget.requests "
                "instead of budget.tokens and budget.cost [TM2013]"
            )


class EndpointPool:
    """Sends each request to the endpoint with the fewest requests under way; safe for several threads."""

    def __init__(self, clients: Sequence[ChatClient], budget: JudgeBudget) -> None:
        self.endpoints, self.usage = [Endpoint(client) for client in clients], Usage(budget)
        self._lock = threading.Lock()

    def request(self, body: bytes, abandoned: threading.Event) -> dict[str, Any]:
        """The response to a chat completion. After a temporary error another endpoint is asked, or the same later.

        Raises AbandonedRequest once `abandoned` is set.
        """
        stop, attempts, last_retry = BatchStop(abandoned), 0, None
        while True:
            endpoint = self._acquire(stop)
            client, answered = endpoint.client, False
            delay: float | None = None
            try:
                response = client.attempt("/chat/completions", stop, body)
                answered = True
            except TemporaryError as error:
                attempts, now = attempts + 1, time.monotonic()
                last_retry = now + client.retry_budget if last_retry is None else last_retry
                delay = client.choose_delay(max(attempts, endpoint.failures + 1), error.retry_after)
                delay = min(delay, max(0.0, last_retry - now))
                if attempts > client.max_retries or now >= last_retry:
                    raise RewardServiceError(
                        f"no usable answer from the judge at {client.url} after {attempts} attempts ({error}); check "
                        "the server, or raise 'max_retries', 'retry_budget' and 'timeout' [TM2014]"
                    ) from error
            finally:
                self._release(endpoint, answered, delay)
            if answered:
                with self._lock:
                    self.usage.add(response)
                return response

    def _acquire(self, stop: StopRequest) -> Endpoint:
        """The least loaded endpoint that is not paused; waits until there is one."""
        extra = _jitter.uniform(0, self.endpoints[0].client.retry_delay)  # so that not all threads return at once
        while True:
            with self._lock:
                now = time.monotonic()
                ready = [endpoint for endpoint in self.endpoints if endpoint.resume_at <= now]
                if ready:
                    self.usage.start_request()
                    chosen = min(ready, key=lambda endpoint: (endpoint.in_flight, endpoint.served))
                    chosen.in_flight, chosen.served = chosen.in_flight + 1, chosen.served + 1
                    return chosen
                pause = min(endpoint.resume_at for endpoint in self.endpoints) - now
            stop.wait(pause + extra)

    def _release(self, endpoint: Endpoint, answered: bool, delay: float | None) -> None:
        with self._lock:
            endpoint.in_flight -= 1
            endpoint.failures = 0 if answered else endpoint.failures + 1
            if delay is not None:
                self.usage.retries += 1
                endpoint.resume_at = max(endpoint.resume_at, time.monotonic() + delay)


def list_models(client: ChatClient) -> list[str] | None:
    """The names of the models that an endpoint serves; None if it does not tell."""
    attempts = 0
    while True:
        try:
            entries = client.attempt("/models", current_stop(), field="data")["data"]
            return [str(entry["id"]) for entry in entries if isinstance(entry, dict) and "id" in entry]
        except TemporaryError as error:
            attempts += 1
            if attempts > client.max_retries:
                raise RewardServiceError(
                    f"no judge answers at {client.url} after {attempts} attempts ({error}); start the server, or "
                    "correct 'urls' [TM2015]"
                ) from error
            current_stop().wait(client.choose_delay(attempts, error.retry_after))
        except RefusedRequest as error:
            if error.status in (404, 405):
                return None
            raise
