"""Queue of bench jobs. A job is handed out only after the baseline that it is compared with."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from .plan import ScoreboardJob


class JobQueue:
    """The jobs of a bench, taken by several threads."""

    def __init__(self, waiting: Sequence[ScoreboardJob], done: set[str], ends: float | None = None) -> None:
        self.waiting, self.failed = list(waiting), dict[str, str]()
        self.lock = threading.Condition()
        self.interrupted = False
        self._done, self._running, self._ends = set(done), set[str](), ends

    def __len__(self) -> int:
        return len(self.waiting)

    def take(self) -> ScoreboardJob | None:
        """The next job that can be done, waiting for one if need be; None when there are no more, or no more time."""
        with self.lock:
            while self.waiting and not self._late():
                for job in self.waiting:
                    if job.kind == "before" or job.base in self._done:
                        self.waiting.remove(job)
                        self._running.add(job.key)
                        return job
                if not self._running:
                    break
                self.lock.wait()
            return None

    def finish(self, job: ScoreboardJob, failure: str | None) -> None:
        """Note how a job went; what is compared with one that failed fails with it."""
        with self.lock:
            self._running.discard(job.key)
            if failure is None:
                self._done.add(job.key)
            else:
                self.failed[job.key] = failure
                lost = [other for other in self.waiting if other.base == job.key]
                self.failed |= {other.key: f"{job.key} failed" for other in lost}
                self.waiting = [other for other in self.waiting if other not in lost]
            self.lock.notify_all()

    def give_back(self, job: ScoreboardJob) -> None:
        """A job that was stopped on the way: it goes on another time, and nothing else is begun."""
        with self.lock:
            self._running.discard(job.key)
            self.waiting.insert(0, job)
            self.interrupted = True
        self.close()

    def close(self) -> None:
        """Give out nothing more."""
        with self.lock:
            self._ends = 0.0
            self.lock.notify_all()

    def _late(self) -> bool:
        return self._ends is not None and time.monotonic() >= self._ends
