"""`tastemaker bench`: every cell and seed of a bench, side by side, resumed where they stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from ...core import output_paths
from ...core.registry import ConfigError
from ...training.errors import TrainingError
from . import results
from .job_queue import JobQueue
from .measurement import Bench
from .page import write_scoreboard as tell_all
from .plan import ScoreboardJob, list_jobs, select_cells
from .worker import run_job, serve_jobs

SETTINGS = "bench.json"
INTERRUPTED = "interrupted"
STOPPED = (130, -signal.SIGINT, -signal.SIGTERM)  # how a process ends that was asked to
RunJob = Callable[[ScoreboardJob], str | None]  # a sentence where it failed


@dataclass(frozen=True)
class BenchOptions:
    """What to run of a bench, and how."""

    bench: Bench
    name: str  # of the plan, or its file
    cells: tuple[str, ...] = ()  # all if none are named
    seeds: tuple[int, ...] = (0, 1, 2)
    control_seeds: tuple[int, ...] = (0,)
    jobs: int = 1  # side by side
    minutes: float | None = None  # after which nothing new is begun


def parse_seeds(text: str, option: str) -> tuple[int, ...]:
    """Whole numbers with commas between them."""
    try:
        found = tuple(dict.fromkeys(int(word) for word in text.split(",") if word.strip()))
    except ValueError as error:
        raise ConfigError(f"{option}: found '{text:.60}'; expected whole numbers, as in 0,1,2") from error
    if any(number < 0 for number in found):
        raise ConfigError(f"{option}: found '{text:.60}'; expected numbers from 0")
    return found


def plan_jobs(order: BenchOptions) -> list[ScoreboardJob]:
    """Everything to measure, what others are compared with first."""
    bench = order.bench
    cells = select_cells(bench.plan, order.cells)
    listed = [bench.based(job) for job in list_jobs(bench.plan, cells, order.seeds, order.control_seeds)]
    firsts = {job.base: job for job in reversed(listed)}
    bases = [
        ScoreboardJob(firsts[base].cell, "before", base=base) for base in dict.fromkeys(job.base for job in listed)
    ]
    return [*bases, *listed]


def run_jobs(order: BenchOptions, console: Console) -> bool:
    """Measure all that is not measured yet; whether nothing is left."""
    began, out, listed = time.monotonic(), order.bench.out, plan_jobs(order)
    claim_directory(order)
    results.split_results(out)
    done = {job.key for job in listed if is_finished(order.bench, job)}
    ends = began + 60 * order.minutes if order.minutes is not None else None
    queue = JobQueue([job for job in listed if job.key not in done], done, ends)
    told = f"measurements to make: {len(queue)}" + (f"; made before: {len(done)}" if done else "")
    console.print(f"{out}: {told}", highlight=False, markup=False, soft_wrap=True)
    try:
        if order.jobs == 1:
            run_queue(queue, lambda job: run_job(order.bench, job), order, console)
        else:
            run_in_parallel(queue, order, console)
    except KeyboardInterrupt:
        console.print("interrupted; the same command goes on from there", highlight=False)
        raise
    return summarize_queue(queue, console)


def run_bench(order: BenchOptions, write: Path | None, console: Console) -> None:
    """Measure, and tell of what there is; an error if something is left."""
    done = run_jobs(order, console)
    if any(result["kind"] == "after" for result in results.load_results(order.bench.out)):
        tell_all(order.bench.plan, order.bench.out, write, console)
    if not done:
        raise TrainingError("the bench is not complete; run the same command again to go on")


def run_worker(order: BenchOptions) -> None:
    """Be one of the processes of a bench."""
    serve_jobs(order.bench, plan_jobs(order))


def claim_directory(order: BenchOptions) -> None:
    """A folder holds the answers to one set of questions."""
    bench, file = order.bench, output_paths.check_output_directory(order.bench.out) / SETTINGS
    asked = {"bench": bench.plan.name, "prompts": bench.prompts, "count": bench.count, "tiny": bench.tiny}
    asked |= {"overrides": list(bench.overrides)}
    if file.is_file():
        found = json.loads(file.read_text(encoding="utf-8"))
        if found != asked:
            raise ConfigError(f"{bench.out} holds a bench of {found}, but {asked} was asked for; choose another --out")
        return
    bench.out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(asked) + "\n", encoding="utf-8")


def is_finished(bench: Bench, job: ScoreboardJob) -> bool:
    """Whether a job's result is there; one of another recipe or other weights is put aside."""
    found = results.read_result(bench.out, job.key)
    if found is None or found["fingerprint"] == bench.fingerprint(job):
        return found is not None
    aside = bench.out / "stale" / f"{job.key}-{found['fingerprint'][:6]}.json"
    aside.parent.mkdir(parents=True, exist_ok=True)
    (bench.out / results.CELLS / f"{job.key}.json").replace(aside)
    return False


def run_queue(queue: JobQueue, work: RunJob, order: BenchOptions, console: Console) -> None:
    """Take jobs until there are none."""
    while (job := queue.take()) is not None:
        began = time.monotonic()
        failure = work(job)
        if failure == INTERRUPTED:
            queue.give_back(job)
            return
        queue.finish(job, failure)
        report_job(order, queue, job, failure, time.monotonic() - began, console)


def report_job(
    order: BenchOptions, queue: JobQueue, job: ScoreboardJob, failure: str | None, seconds: float, console: Console
) -> None:
    """A line for each measurement made, and all results in one file again."""
    found = None if failure else results.read_result(order.bench.out, job.key)
    if found is None:
        words = f"failed: {failure}"
    else:
        with queue.lock:  # one writer at a time
            results.merge_results(order.bench.out)
        score, scores = next(iter(found["after"]["scores"].items()))
        change = found.get("difference", {}).get(score)
        words = f"{score} {scores['overall']['mean']:.3f}" + (f" ({change['mean']:+.3f})" if change else "")
    line = f"{job.key}: {words}, {seconds:.0f} s, {len(queue)} left"
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def summarize_queue(queue: JobQueue, console: Console) -> bool:
    """Say what failed and what is left; whether neither is so."""
    for key, failure in queue.failed.items():
        console.print(f"failed: {key}: {failure}", highlight=False, markup=False, soft_wrap=True, style="red")
    if len(queue):
        some = ", ".join(job.key for job in queue.waiting[:6]) + (", ..." if len(queue) > 6 else "")
        console.print(
            f"{len(queue)} are left ({some}); the same command goes on with them",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    return not queue.failed and not len(queue)


def run_in_parallel(queue: JobQueue, order: BenchOptions, console: Console) -> None:
    """Several processes, each with one job at a time; what they print goes to logs."""
    workers = [WorkerProcess(order, place) for place in range(min(order.jobs, max(1, len(queue))))]
    threads = [
        threading.Thread(target=run_queue, args=(queue, worker.work, order, console), daemon=True) for worker in workers
    ]
    for thread in threads:
        thread.start()
    try:
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(0.1)
        if queue.interrupted:
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        queue.close()
        for worker in workers:
            worker.stop()
        for thread in threads:
            thread.join(60)  # each saves the step it is at
        raise
    finally:
        for worker in workers:
            worker.close()


class WorkerProcess:
    """A process that is told keys of jobs and answers each with a line; a dead one is replaced at the next job."""

    def __init__(self, order: BenchOptions, place: int) -> None:
        self._order, self._place = order, place
        self._process: subprocess.Popen[str] | None = None
        self._log: IO[str] | None = None

    def work(self, job: ScoreboardJob) -> str | None:
        """Do a job over there; a sentence if it failed."""
        process = self._process = self._process or self._start()
        assert process.stdin and process.stdout  # both are pipes
        try:
            process.stdin.write(job.key + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:
            answer = ""
        if answer:
            told: dict[str, Any] = json.loads(answer)
            return None if told["failure"] is None else str(told["failure"])
        code = process.wait()
        self.close()
        if code in STOPPED:
            return INTERRUPTED
        return f"its process ended with {code}; see {self._path()}"

    def _path(self) -> Path:
        return self._order.bench.out / "logs" / f"worker-{self._place}.log"

    def _start(self) -> subprocess.Popen[str]:
        self._path().parent.mkdir(parents=True, exist_ok=True)
        self._log = self._path().open("a", encoding="utf-8")
        threads = str(max(1, (os.cpu_count() or 1) // self._order.jobs))
        settings = {"OMP_NUM_THREADS": threads, **os.environ}
        return subprocess.Popen(
            [sys.executable, "-m", "tastemaker", *worker_arguments(self._order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=settings,
        )

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        if self._log is not None:
            self._log.close()


def worker_arguments(order: BenchOptions) -> Sequence[str]:
    """The command line of a worker of the same bench."""
    bench = order.bench
    told = ["bench", order.name, *bench.overrides, "--worker", "--out", str(bench.out)]
    told += ["--prompts", str(bench.prompts), "--count", str(bench.count), *(["--tiny"] if bench.tiny else [])]
    told += ["--seeds", ",".join(map(str, order.seeds)), "--control-seeds", ",".join(map(str, order.control_seeds))]
    return [*told, *(["--cells", ",".join(order.cells)] if order.cells else [])]
