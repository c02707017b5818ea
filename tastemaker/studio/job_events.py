"""Server-sent events of jobs: parts of pages that changed, logs as they grow, and samples as they are written."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from .job_queue import ENDED, JobQueue, read_tail

POLL_SECONDS = 0.6
KEEP_ALIVE_SECONDS = 15.0
MAX_STREAMS = 64
MAX_LOG_BYTES = 64 * 2**10  # of a log that a page shows
MEDIA_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".mp4")
MAX_FILES = 64
Events = list[tuple[str, Any]]  # names and data
_streams = 0


class FragmentFeed:
    """A part of a page, sent when it has changed."""

    def __init__(self, render: Callable[[], str]) -> None:
        self._render, self._sent = render, ""

    def collect(self) -> Events:
        text = self._render()
        if text == self._sent:
            return []
        self._sent = text
        return [("html", text)]


class JobFeed:
    """The log, the state and the samples of a job since the last look."""

    def __init__(self, queue: JobQueue, id: str, offset: int, find_run: Callable[[Path], str]) -> None:
        self.queue, self.id, self.offset, self._find_run = queue, id, offset, find_run
        self._state: dict[str, str] = {}
        self._files = [""]

    def collect(self) -> Events:
        job = self.queue.find(self.id)
        events: Events = []
        files = list_media(Path(job.directory)) if job.kind == "sample" else []
        text, self.offset = read_tail(self.queue.log_file(self.id), MAX_LOG_BYTES, self.offset)
        if text:
            events.append(("log", text))
        if files != self._files:
            self._files = files
            events.append(("files", [f"/jobs/{self.id}/files/{name}" for name in files]))
        state = {"state": job.state, "reason": job.reason, "run": self._find_run(Path(job.directory))}
        if state != self._state:
            self._state = state
            events.append(("state", state))
        if job.state in ENDED:
            events.append(("end", {}))
        return events


def list_media(folder: Path) -> list[str]:
    """List the images and videos that a job has written, in order."""
    try:
        names = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in MEDIA_SUFFIXES)
    except OSError:
        return []
    return [name for name in names if not name.startswith((".", "sheet"))][:MAX_FILES]


def stream(collect: Callable[[], Events]) -> Response:
    """Answer with what `collect` returns now and from time to time."""
    if _streams >= MAX_STREAMS:
        raise HTTPException(503, "too many pages follow the studio; close some of them [TM1452]")

    async def generate() -> AsyncIterator[str]:
        global _streams
        _streams += 1
        try:
            sent = time.monotonic()
            yield "retry: 2000\n\n"
            while True:
                events = await run_in_threadpool(collect)
                for name, data in events:
                    yield f"event: {name}\ndata: {json.dumps(data)}\n\n"
                if events:
                    sent = time.monotonic()
                if any(name == "end" for name, _ in events):
                    return
                if time.monotonic() - sent > KEEP_ALIVE_SECONDS:
                    sent = time.monotonic()
                    yield ": still here\n\n"
                await asyncio.sleep(POLL_SECONDS)
        finally:
            _streams -= 1

    return StreamingResponse(generate(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
