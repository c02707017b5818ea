"""The studio in a process of its own, and a Chromium that reaches it, for tests that need real ones."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tastemaker.studio.job_queue import JobQueue

BROWSER = next((path for name in ("chromium", "google-chrome") if (path := shutil.which(name))), None)
BROWSER_OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]


def start_studio(root: Path, port: int) -> subprocess.Popen[bytes]:
    """Start the studio, and return when it answers."""
    command = [sys.executable, "-m", "tastemaker", "studio", str(root), "--port", str(port), "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return process
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)


def end_all(root: Path, process: subprocess.Popen[bytes]) -> None:
    """End the studio and the jobs that it started."""
    process.kill()
    process.wait()
    for job in JobQueue(root).jobs():
        if job.state in ("running", "stopping") and job.pid:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)


@contextmanager
def open_browser(**settings: Any) -> Iterator[Any]:
    """Open Chromium and yield a context, which reaches this machine only; `refused` lists what else was asked for."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=BROWSER_OPTIONS)
        context: Any = browser.new_context(viewport={"width": 1200, "height": 900}, **settings)
        context.refused = []

        def refuse(route: Any) -> None:
            context.refused.append(route.request.url)
            route.abort()

        context.route(lambda url: "//127.0.0.1:" not in url and "//localhost:" not in url, refuse)
        try:
            yield context
        finally:
            browser.close()
