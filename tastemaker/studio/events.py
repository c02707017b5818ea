"""Server-sent events of runs: curves, samples and state, as they are written."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from .run_charts import list_charts
from .run_view import RunView
from .sample_pages import read_number

if TYPE_CHECKING:
    from .app import Studio

POLL_SECONDS = 0.8  # a sample appears within two seconds of being written
NUM_NAPS = 4  # between two looks at the files, to notice that the studio is being stopped
KEEP_ALIVE_SECONDS = 15.0
MAX_RUNS = 12  # in one stream
MAX_STREAMS = 64
Events = list[tuple[str, Any]]  # names and data


class RunFeed:
    """What one browser has seen of some runs, and what is new for it.

    Samples up to the version `newest_sample` are on its page already. Those that were written after the page was
    rendered are new, also if they were there before the stream began.
    """

    def __init__(self, studio: Studio, ids: Sequence[str], newest_sample: int = -1) -> None:
        self.studio, self.ids = studio, tuple(ids)
        self._sent: dict[str, tuple[int, int, int, float]] = {}  # by series: generation, stride, points, last value
        self._charts: tuple[str, ...] = ()
        self._states: dict[str, Any] = {}
        self._samples: dict[str, dict[int, int]] = {}  # versions of grids by run and step
        for id in self.ids:
            versions = _versions(studio, id)
            self._samples[id] = {step: version for step, version in versions.items() if version <= newest_sample}

    def collect(self) -> Events:
        """Return the events since the last call."""
        index = self.studio.index
        histories = [index.history(id) for id in self.ids]
        events: Events = []
        names = tuple(f"{run}:{name}" for run, history in enumerate(histories) for name in history.curves)
        if names != self._charts:
            configs = [RunView(self.studio, id).config for id in self.ids]
            charts = list_charts(histories, configs, self.ids)
            events.append(("charts", [chart.to_json() for chart in charts]))
            self._charts = names
        if curves := self._collect_curves(histories):
            events.append(("curves", curves))
        for run, id in enumerate(self.ids):
            events += self._collect_state(run, id, histories[run].warnings)
            events += self._collect_samples(run, id)
        return events

    def _collect_curves(self, histories: Sequence[Any]) -> dict[str, Any]:
        changes = {}
        for run, history in enumerate(histories):
            for name, curve in history.curves.items():
                key, sent = f"{run}:{name}", self._sent.get(f"{run}:{name}")
                same = sent is not None and sent[:2] == (history.generation, curve.stride)
                start = sent[2] if sent is not None and same else 0
                state = (history.generation, curve.stride, curve.num_complete, curve.last)
                if state != sent:
                    changes[key] = {"from": start, "points": [(x, _shorten(y)) for x, y in curve.points(start)]}
                    self._sent[key] = state
        return changes

    def _collect_state(self, run: int, id: str, warnings: list[tuple[int, str]]) -> Events:
        summary = self.studio.index.find(id)
        state = {
            "run": run,
            "state": summary.state,
            "reason": summary.reason,
            "step": summary.step,
            "steps": summary.steps,
            "warnings": warnings[-5:],
        }
        if self._states.get(id) == state:
            return []
        self._states[id] = state
        return [("state", state)]

    def _collect_samples(self, run: int, id: str) -> Events:
        versions, seen = _versions(self.studio, id), self._samples.get(id, {})
        fresh = sorted(step for step, version in versions.items() if seen.get(step) != version)
        self._samples[id] = versions
        return [("samples", {"run": run, "steps": fresh})] if fresh else []


def _versions(studio: Studio, id: str) -> dict[int, int]:
    return {step: file.version for step, file in studio.index.samples(id).grids.items()}


def _shorten(value: float) -> float:
    """Round to six significant digits, which is more than a chart shows."""
    return float(f"{value:.6g}")


def routes(studio: Studio) -> list[Route]:
    num_streams = 0

    async def stream_runs(request: Request) -> Response:
        ids = request.query_params.getlist("run")
        if not ids or len(ids) > MAX_RUNS:
            raise HTTPException(400, f"name 1 to {MAX_RUNS} runs as run=... [TM1375]")
        if num_streams >= MAX_STREAMS:
            raise HTTPException(503, "too many pages are open; close some of them [TM1376]")
        newest_sample = read_number(request, "samples") if "samples" in request.query_params else -1
        feed = await run_in_threadpool(RunFeed, studio, ids, newest_sample)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(send_events(feed), media_type="text/event-stream", headers=headers)

    async def send_events(feed: RunFeed) -> AsyncIterator[str]:
        nonlocal num_streams
        num_streams += 1
        try:
            last = time.monotonic()
            yield "retry: 2000\n\n"
            while True:
                try:
                    events = await run_in_threadpool(feed.collect)
                except HTTPException:  # the run was removed
                    yield format_event("gone", {})
                    return
                for name, data in events:
                    yield format_event(name, data)
                if events:
                    last = time.monotonic()
                elif time.monotonic() - last > KEEP_ALIVE_SECONDS:
                    last = time.monotonic()
                    yield ": still here\n\n"
                for _ in range(NUM_NAPS):
                    if studio.is_closing():
                        return
                    await asyncio.sleep(POLL_SECONDS / NUM_NAPS)
        finally:
            num_streams -= 1

    return [Route("/events/runs", stream_runs)]


def format_event(name: str, data: Any) -> str:
    """Format an event. JSON has no line breaks, so the data stay in one line."""
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"
