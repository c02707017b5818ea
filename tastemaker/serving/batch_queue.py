"""A queue of requests that one thread scores in batches."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from ..core.reward import RewardError, Rubric
from .protocol import ScoreRequest

ScoreList = list[float]


@dataclass(frozen=True, eq=False)
class PendingRequest:
    request: ScoreRequest
    release: Callable[[], None]  # called once the request is scored or skipped, before its future is done
    future: Future[ScoreList] = field(default_factory=Future)


class BatchQueue:
    """Scores requests in order of arrival in one thread, and batches requests whose samples have the same size.

    Requests that arrive while a batch is scored make the next one. With `max_wait` the thread also waits that many
    seconds for requests of other clients, unless the batch is full. A request whose future is cancelled before its turn
    is skipped.
    """

    def __init__(self, rubric: Rubric, device: torch.device, max_wait: float = 0.0) -> None:
        self.rubric, self.device, self.max_wait = rubric, device, max_wait
        self.num_batches = self.num_samples = 0  # scored so far, including those that failed
        self.busy_seconds = 0.0  # of scoring
        self.max_batch_size = max(reward.spec.batch_size for reward in rubric.rewards.values())
        self._pending: deque[PendingRequest] = deque()
        self._changed, self._closed = threading.Condition(), False
        self._worker = threading.Thread(target=self._run, name="reward-batches", daemon=True)
        self._worker.start()

    def submit(self, request: ScoreRequest, release: Callable[[], None] = lambda: None) -> Future[ScoreList]:
        """Append a request. `release` is called when the queue does not need its samples any more."""
        pending = PendingRequest(request, release)
        with self._changed:
            self._pending.append(pending)
            self._changed.notify()
        pending.future.add_done_callback(lambda future: self._discard(pending) if future.cancelled() else None)
        return pending.future

    def num_pending(self) -> int:
        return len(self._pending)

    def is_alive(self) -> bool:
        """Whether the thread that scores is running."""
        return self._worker.is_alive()

    def close(self, timeout: float | None = None) -> bool:
        """Score the pending requests, then stop the thread. Returns whether it stopped in `timeout` seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._worker.join(timeout)
        return not self._worker.is_alive()

    def _discard(self, pending: PendingRequest) -> None:
        """Remove a cancelled request, unless the thread has taken it already and skips it."""
        with self._changed:
            if pending not in self._pending:
                return
            self._pending.remove(pending)
        pending.release()

    def _run(self) -> None:
        while taken := self._next_batch():
            batch = []
            for pending in taken:
                if pending.future.set_running_or_notify_cancel():  # from now on it cannot be cancelled
                    batch.append(pending)
                else:
                    pending.release()
            if batch:
                start = time.monotonic()
                self.num_batches += 1
                self.num_samples += sum(len(pending.request) for pending in batch)
                self._score_batch(batch)
                self.busy_seconds += time.monotonic() - start

    def _score_batch(self, batch: list[PendingRequest]) -> None:
        try:
            scores = self._score([pending.request for pending in batch])
        except (Exception, SystemExit) as error:  # a reward that exits must not end this thread
            self._score_one_by_one(batch, error)
            return
        for pending, request_scores in zip(batch, scores, strict=True):
            pending.release()
            pending.future.set_result(request_scores)

    def _next_batch(self) -> list[PendingRequest]:
        """Take the oldest request and later ones of the same size. Returns an empty list when closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._closed)
            if self.max_wait:
                self._changed.wait_for(lambda: self._closed or self._is_full(), self.max_wait)
                self._changed.wait_for(lambda: self._pending or self._closed)  # all may have been cancelled
            batch: list[PendingRequest] = []
            num_samples = 0
            for pending in list(self._pending):
                same_size = not batch or pending.request.pixels.shape[1:] == batch[0].request.pixels.shape[1:]
                if same_size and (not batch or num_samples + len(pending.request) <= self.max_batch_size):
                    batch.append(pending)
                    num_samples += len(pending.request)
                    self._pending.remove(pending)
            return batch

    def _is_full(self) -> bool:
        return sum(len(pending.request) for pending in self._pending) >= self.max_batch_size

    @torch.no_grad()
    def _score(self, requests: list[ScoreRequest]) -> list[ScoreList]:
        parts = [request.pixels for request in requests]
        pixels = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(self.device)
        prompts = [prompt for request in requests for prompt in request.prompts]
        metadata = [each for request in requests for each in request.metadata]
        scores = self.rubric.score(pixels, prompts, metadata).total.cpu()
        return [part.tolist() for part in torch.split(scores, [len(request) for request in requests])]

    def _score_one_by_one(self, batch: list[PendingRequest], batch_error: BaseException) -> None:
        """Score each request of a failed batch by itself, so that only the invalid ones fail."""
        for pending in batch:
            try:
                if len(batch) == 1:
                    raise batch_error
                scores = self._score([pending.request])[0]
            except (Exception, SystemExit) as error:
                reward_error = error if isinstance(error, RewardError) else RewardError(describe_error(error))
                pending.release()
                pending.future.set_exception(reward_error)
            else:
                pending.release()
                pending.future.set_result(scores)


def describe_error(error: BaseException) -> str:
    """Describe an unexpected error to the client."""
    if isinstance(error, torch.OutOfMemoryError):
        return "the server is out of device memory; send fewer samples at a time, or serve with a smaller batch_size"
    return f"the server failed ({type(error).__name__}: {error!s:.300}); its console may say more"
