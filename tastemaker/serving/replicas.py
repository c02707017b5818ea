"""Client of several servers of the same rewards: the least loaded one gets a request, and others take over for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.interruption import StopRequest, current_stop
from .client import AnswerTimeoutError, RewardClient, RewardServiceError, TemporaryError, _jitter, no_answer

OVERLOADED = 429  # the status of a server that is there, unlike other failures, after which it may be another one

Check = Callable[[str, Mapping[str, Any]], None]  # gets the URL and the /version of a replica; raises to refuse it


@dataclass(eq=False)
class Replica:
    """A server, and what this process knows about it."""

    client: RewardClient
    in_flight: int = 0  # requests of this process
    failures: int = 0  # temporary errors since the last answer
    retry_at: float = 0.0  # until then it gets no request, on the monotonic clock
    checked: bool = False  # whether its /version was accepted since it last failed


class ReplicaClient:
    """Sends requests to the least loaded of several servers. Safe to use from several threads.

    After a temporary error the request goes to another replica at once; the one that failed is left alone for a while,
    longer after each further failure. An answer that does not come in time is asked for at each other replica once.
    A request has one answer: those of abandoned attempts are never read. Scores depend on the request alone, so that it
    may be scored twice without harm. A replica that comes back has to describe the same rewards as before.
    """

    def __init__(self, clients: Sequence[RewardClient]) -> None:
        self.replicas = [Replica(client) for client in clients]
        self.check: Check | None = None  # of the /version of a replica before its first request, and after failures
        self._lock = threading.Lock()
        self._next = _jitter.randrange(len(clients))  # replicas with equal load take turns

    @property
    def url(self) -> str:
        """All URLs, for messages."""
        return ", ".join(replica.client.url for replica in self.replicas)

    def request(self, path: str, content_type: str = "", body: bytes = b"") -> dict[str, Any]:
        """Return the JSON response of a path: POST if there is a body, otherwise GET.

        Raises Interrupted if the process was asked to stop and no server answers.
        """
        stop, attempts, last_retry = current_stop(), 0, None
        late: list[Replica] = []
        while True:
            replica = self._take(late)
            try:
                return self._request_from(replica, path, content_type, body, stop)
            except AnswerTimeoutError:
                late.append(replica)
                if len(late) == len(self.replicas):
                    raise
            except TemporaryError as error:
                attempts, now = attempts + 1, time.monotonic()
                first = self.replicas[0].client
                last_retry = now + first.retry_budget if last_retry is None else last_retry
                if attempts > first.max_retries * len(self.replicas) or now >= last_retry:
                    self._forget_failures()
                    raise no_answer(self.url, attempts, error) from error
                stop.wait(min(self._seconds_to_wait(late), last_retry - now))

    def check_all(self) -> None:
        """Check the replicas that answer now. The others are checked before they get their first request."""
        for replica in self.replicas:
            try:
                self._check(replica, current_stop())
            except (TemporaryError, AnswerTimeoutError):
                continue

    def _request_from(
        self, replica: Replica, path: str, content_type: str, body: bytes, stop: StopRequest
    ) -> dict[str, Any]:
        """One attempt at a replica that `_take` returned."""
        try:
            self._check(replica, stop)
            response = replica.client.request_once(path, content_type, body, stop)
        except BaseException as error:
            with self._lock:
                replica.in_flight -= 1
                if isinstance(error, TemporaryError):
                    replica.failures += 1
                    delay = replica.client.choose_delay(replica.failures, error.retry_after)
                    replica.retry_at = max(replica.retry_at, time.monotonic() + delay)
                    replica.checked = replica.checked and error.status == OVERLOADED
            raise
        with self._lock:
            replica.in_flight -= 1
            replica.failures = 0
        return response

    def _check(self, replica: Replica, stop: StopRequest) -> None:
        if self.check is not None and not replica.checked:
            self.check(replica.client.url, replica.client.request_once("/version", "", b"", stop))
            replica.checked = True

    def _take(self, late: Sequence[Replica]) -> Replica:
        """The replica with the fewest requests in flight, of those that need not be left alone and were not late."""
        with self._lock:
            now, count = time.monotonic(), len(self.replicas)
            turns = [self.replicas[(self._next + k) % count] for k in range(count)]
            candidates = [each for each in turns if each not in late]
            chosen = min(candidates, key=lambda each: (max(0.0, each.retry_at - now), each.in_flight))
            self._next = (self.replicas.index(chosen) + 1) % count
            chosen.in_flight += 1
            return chosen

    def _forget_failures(self) -> None:
        """Start anew with short delays after a request was given up: the next one has a budget of its own."""
        with self._lock:
            for replica in self.replicas:
                replica.failures = 0

    def _seconds_to_wait(self, late: Sequence[Replica]) -> float:
        """Seconds until some replica may be asked again."""
        now = time.monotonic()
        return max(0.0, min(each.retry_at for each in self.replicas if each not in late) - now)


def describe_rewards(info: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Rewards of a server by name, from its /version. A server of a single reward may describe that one only."""
    rewards = info.get("rewards")
    if isinstance(rewards, dict) and all(isinstance(each, dict) for each in rewards.values()):
        return rewards
    return {str(info.get("name", "")): info}


def refuse_other_version(url: str, found: object, expected: object) -> RewardServiceError:
    return RewardServiceError(
        f"the reward at {url} has version '{found!s:.80}', but that of the other servers is '{expected!s:.80}'; start "
        "every server with the same reward and settings, so that scores do not depend on who computes them [TM2053]"
    )
