"""Metrics of a reward server in the text format of Prometheus."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "tastemaker_reward"
SECONDS_BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)  # of the histogram of request times

Labels = tuple[tuple[str, str], ...]
Sample = tuple[str, Labels, float]  # suffix of the name, labels, value


class RequestMetrics:
    """Counts of answered requests by reward and status, and a histogram of their seconds by reward."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._statuses: Counter[tuple[str, int]] = Counter()
        self._buckets: dict[str, list[int]] = {}
        self._seconds: Counter[str] = Counter()

    def add(self, reward: str, status: int, seconds: float) -> None:
        """Count an answer, `seconds` after its request began."""
        with self._lock:
            self._statuses[reward, status] += 1
            buckets = self._buckets.setdefault(reward, [0] * (len(SECONDS_BOUNDS) + 1))
            buckets[bisect_left(SECONDS_BOUNDS, seconds)] += 1
            self._seconds[reward] += seconds  # type: ignore[assignment]

    def render(self) -> str:
        with self._lock:
            statuses = [
                ("", (("reward", reward), ("status", str(status))), float(count))
                for (reward, status), count in sorted(self._statuses.items())
            ]
            times = [sample for reward in sorted(self._buckets) for sample in self._histogram(reward)]
        return render_metric("requests_total", "counter", "Answered requests.", statuses) + render_metric(
            "request_seconds", "histogram", "Seconds from a request's headers to its answer.", times
        )

    def _histogram(self, reward: str) -> Iterator[Sample]:
        """Cumulative counts by upper bound, then the sum and the number of all seconds."""
        total = 0
        for bound, count in zip([*map(str, SECONDS_BOUNDS), "+Inf"], self._buckets[reward], strict=True):
            total += count
            yield "_bucket", (("reward", reward), ("le", bound)), float(total)
        yield "_sum", (("reward", reward),), float(self._seconds[reward])
        yield "_count", (("reward", reward),), float(total)


def render_metric(
    name: str, kind: Literal["counter", "gauge", "histogram"], description: str, samples: Iterable[Sample]
) -> str:
    """One metric with its samples, a line each."""
    lines = [f"# HELP {PREFIX}_{name} {description}", f"# TYPE {PREFIX}_{name} {kind}"]
    for suffix, labels, value in samples:
        text = ",".join(f'{key}="{escape_label(each)}"' for key, each in labels)
        lines.append(f"{PREFIX}_{name}{suffix}{f'{{{text}}}' if text else ''} {value:.10g}")
    return "\n".join(lines) + "\n"


def render_by_reward(
    name: str, kind: Literal["counter", "gauge"], description: str, values: Mapping[str, float]
) -> str:
    """One metric with a value for each reward."""
    return render_metric(name, kind, description, [("", (("reward", key),), value) for key, value in values.items()])


def escape_label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
