"""The process behind a bench: it reads keys of jobs, does them one after the other, and answers with a line each."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence

from .measurement import Bench, MeasurementInterrupted, run_measurement
from .plan import ScoreboardJob

PATIENCE = 2.0  # seconds between looks at whether anybody still waits


def run_job(bench: Bench, job: ScoreboardJob) -> str | None:
    """Do a job; a sentence if it failed, for the others must go on. Being asked to stop is no failure."""
    try:
        run_measurement(bench, job)
    except MeasurementInterrupted:
        raise KeyboardInterrupt from None
    except Exception as error:
        log = bench.out / "logs" / f"{job.key}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(traceback.format_exc(), encoding="utf-8")
        return f"{str(error) or type(error).__name__} (see {log})"
    return None


def serve_jobs(bench: Bench, listed: Sequence[ScoreboardJob]) -> None:
    """Serve until nobody asks any more."""
    known = {job.key: job for job in listed}
    threading.Thread(target=exit_with_parent, args=(os.getppid(),), daemon=True).start()
    for line in sys.stdin:
        failure = run_job(bench, known[line.strip()])
        sys.stdout.write(json.dumps({"key": line.strip(), "failure": failure}) + "\n")
        sys.stdout.flush()


def exit_with_parent(parent: int) -> None:
    """Ask this process to stop once the one that started it is gone: two of them must not write the same run."""
    while os.getppid() == parent:
        time.sleep(PATIENCE)
    os.kill(os.getpid(), signal.SIGTERM)
