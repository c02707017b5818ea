"""`tastemaker bench`: measure every cell and seed of a plan, in one or several processes. Resumes if interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from ...console import format_remaining
from ...core import output_paths
from ...core.errors import TrainingError
from ...core.registry import IMPORTED_MODULES, ConfigError, subprocess_path
from ...core.safe_files import read_json
from . import results
from .measurement import Bench, MeasurementInterrupted, run_measurement
from .page import write_scoreboard
from .plan import ScoreboardJob, list_jobs, select_cells

SETTINGS = "bench.json"
INTERRUPTED = "interrupted"
STOP_CODES = (130, -signal.SIGINT, -signal.SIGTERM)  # exit codes of a process that was asked to stop
POLL_SECONDS = 2.0  # between checks that the parent process is alive
RunJob = Callable[[ScoreboardJob], str | None]  # returns an error message if the job failed


@dataclass(frozen=True)
class BenchOptions:
    """What to run of a bench, and how."""

    bench: Bench
    name: str  # of the plan, or its file
    cells: tuple[str, ...] = ()  # all if empty
    seeds: tuple[int, ...] = (0, 1, 2)
    control_seeds: tuple[int, ...] = (0,)
    jobs: int = 1  # parallel processes
    minutes: float | None = None  # no measurement starts after this time


def parse_seeds(text: str, option: str) -> tuple[int, ...]:
    """Parse comma-separated integers."""
    try:
        seeds = tuple(dict.fromkeys(int(word) for word in text.split(",") if word.strip()))
    except ValueError as error:
        raise ConfigError(
            f"{option}: expected integers, got '{text:.60}'; give for example {option} 0,1,2 [TM655]"
        ) from error
    if any(seed < 0 for seed in seeds):
        raise ConfigError(
            f"{option}: expected integers of at least 0, got '{text:.60}'; give for example {option} 0,1,2 [TM656]"
        )
    return seeds


def plan_jobs(options: BenchOptions) -> list[ScoreboardJob]:
    """List all measurements, baselines first."""
    bench = options.bench
    cells = select_cells(bench.plan, options.cells)
    jobs = [bench.with_baseline(job) for job in list_jobs(bench.plan, cells, options.seeds, options.control_seeds)]
    first_job = {job.baseline: job for job in reversed(jobs)}
    baselines = [
        ScoreboardJob(first_job[key].cell, "before", baseline=key)
        for key in dict.fromkeys(job.baseline for job in jobs)
    ]
    return [*baselines, *jobs]


def run_bench(options: BenchOptions, page: Path | None, console: Console) -> None:
    """Run all measurements and write the scoreboard. Raises an error if measurements are left."""
    finished = run_jobs(options, console)
    if any(result["kind"] == "after" for result in results.load_results(options.bench.out)):
        write_scoreboard(options.bench.plan, options.bench.out, page, console)
    if not finished:
        raise TrainingError("bench: not all measurements are complete; run the same command again to resume [TM657]")


def run_jobs(options: BenchOptions, console: Console) -> bool:
    """Run all pending measurements. Returns whether none is left."""
    start, out, jobs = time.monotonic(), options.bench.out, plan_jobs(options)
    claim_directory(options)
    results.split_results(out)
    done = {job.key for job in jobs if is_finished(options.bench, job)}
    deadline = start + 60 * options.minutes if options.minutes is not None else None
    queue = JobQueue([job for job in jobs if job.key not in done], done, deadline)
    counts = f"measurements to make: {len(queue)}" + (f"; made before: {len(done)}" if done else "")
    _print(console, f"{out}: {counts}")
    try:
        if options.jobs == 1:
            run_queue(queue, lambda job: run_job(options.bench, job), options, console)
        else:
            run_in_parallel(queue, options, console)
    except KeyboardInterrupt:
        _print(console, "interrupted; run the same command again to resume")
        raise
    return summarize_queue(queue, console)


def _print(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True, style=style)


def claim_directory(options: BenchOptions) -> None:
    """Write the settings of the bench into its directory, and refuse a directory of another bench."""
    bench, file = options.bench, output_paths.check_output_directory(options.bench.out) / SETTINGS
    settings = {
        "bench": bench.plan.name,
        "prompts": bench.prompts,
        "count": bench.samples_per_prompt,
        "tiny": bench.tiny,
        "overrides": list(bench.overrides),
    }
    if file.is_file():
        existing = read_json(file)
        if existing != settings:
            raise ConfigError(
                f"--out: {bench.out} already contains a bench of {existing}, not of {settings}; choose another "
                "--out [TM658]"
            )
        return
    bench.out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings) + "\n", encoding="utf-8")


def is_finished(bench: Bench, job: ScoreboardJob) -> bool:
    """Whether a job has a result. A result of another recipe or other weights is moved to `stale`."""
    result = results.read_result(bench.out, job.key)
    if result is None or result["fingerprint"] == bench.fingerprint(job):
        return result is not None
    stale = bench.out / "stale" / f"{job.key}-{result['fingerprint'][:6]}.json"
    stale.parent.mkdir(parents=True, exist_ok=True)
    (bench.out / results.CELLS / f"{job.key}.json").replace(stale)
    return False


class JobQueue:
    """A queue of jobs for several threads. A job is handed out only after its baseline is measured."""

    def __init__(self, pending: Sequence[ScoreboardJob], done: set[str], deadline: float | None = None) -> None:
        self.pending, self.failed = list(pending), dict[str, str]()
        self.lock = threading.Condition()
        self.interrupted = False
        self.seconds: list[float] = []  # of each finished job
        self._done, self._running, self._deadline = set(done), set[str](), deadline

    def __len__(self) -> int:
        return len(self.pending)

    def take(self) -> ScoreboardJob | None:
        """Return the next job that can run, waiting for its baseline if necessary, or None if there is none."""
        with self.lock:
            while self.pending and (self._deadline is None or time.monotonic() < self._deadline):
                for job in self.pending:
                    if job.kind == "before" or job.baseline in self._done:
                        self.pending.remove(job)
                        self._running.add(job.key)
                        return job
                if not self._running:
                    break
                self.lock.wait()
            return None

    def finish(self, job: ScoreboardJob, failure: str | None) -> None:
        """Record the outcome of a job. If a baseline failed, the jobs compared with it fail too."""
        with self.lock:
            self._running.discard(job.key)
            if failure is None:
                self._done.add(job.key)
            else:
                self.failed[job.key] = failure
                dependents = [other for other in self.pending if other.baseline == job.key]
                self.failed |= {other.key: f"{job.key} failed" for other in dependents}
                self.pending = [other for other in self.pending if other not in dependents]
            self.lock.notify_all()

    def requeue(self, job: ScoreboardJob) -> None:
        """Put an interrupted job back and close the queue."""
        with self.lock:
            self._running.discard(job.key)
            self.pending.insert(0, job)
            self.interrupted = True
        self.close()

    def close(self) -> None:
        """Hand out no further jobs."""
        with self.lock:
            self._deadline = 0.0
            self.lock.notify_all()


def run_queue(queue: JobQueue, run: RunJob, options: BenchOptions, console: Console) -> None:
    """Run jobs until the queue is empty or closed."""
    while (job := queue.take()) is not None:
        start = time.monotonic()
        failure = run(job)
        if failure == INTERRUPTED:
            queue.requeue(job)
            return
        queue.finish(job, failure)
        report_job(options, queue, job, failure, time.monotonic() - start, console)


def report_job(
    options: BenchOptions, queue: JobQueue, job: ScoreboardJob, failure: str | None, seconds: float, console: Console
) -> None:
    """Print a line about a job and update the merged results."""
    result = None if failure else results.read_result(options.bench.out, job.key)
    if result is None:
        text = f"failed: {failure}"
    else:
        with queue.lock:  # one writer at a time
            results.merge_results(options.bench.out)
        score, scores = next(iter(result["after"]["scores"].items()))
        change = result.get("difference", {}).get(score)
        text = f"{score} {scores['overall']['mean']:.3f}" + (f" ({change['mean']:+.3f})" if change else "")
    queue.seconds.append(seconds)
    left = f", {format_remaining(queue.seconds, len(queue) / options.jobs)}" if len(queue) else ""
    _print(console, f"{job.key}: {text}, {seconds:.0f} s, {len(queue)} left{left}")


def summarize_queue(queue: JobQueue, console: Console) -> bool:
    """Print failed and remaining jobs. Returns whether there are none."""
    for key, failure in queue.failed.items():
        _print(console, f"failed: {key}: {failure}", style="red")
    if len(queue):
        some = ", ".join(job.key for job in queue.pending[:6]) + (", ..." if len(queue) > 6 else "")
        _print(console, f"{len(queue)} are left ({some}); run the same command again to resume")
    return not queue.failed and not len(queue)


# Parallel processes


def run_in_parallel(queue: JobQueue, options: BenchOptions, console: Console) -> None:
    """Run jobs in several processes, whose output goes to log files."""
    workers = [WorkerProcess(options, number) for number in range(min(options.jobs, max(1, len(queue))))]
    threads = [
        threading.Thread(target=run_queue, args=(queue, worker.run, options, console), daemon=True)
        for worker in workers
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
            thread.join(60)  # each worker saves a checkpoint of its current step
        raise
    finally:
        for worker in workers:
            worker.close()


class WorkerProcess:
    """A process that reads keys of jobs and answers each with a line. A dead one is replaced at the next job."""

    def __init__(self, options: BenchOptions, number: int) -> None:
        self._options, self._number = options, number
        self._process: subprocess.Popen[str] | None = None
        self._log: IO[str] | None = None

    def run(self, job: ScoreboardJob) -> str | None:
        """Run a job in the process. Returns an error message if it failed."""
        process = self._process = self._process or self._start()
        assert process.stdin and process.stdout  # both are pipes
        try:
            process.stdin.write(job.key + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        if line:
            answer: dict[str, Any] = json.loads(line)
            return None if answer["failure"] is None else str(answer["failure"])
        code = process.wait()
        self.close()
        if code in STOP_CODES:
            return INTERRUPTED
        return f"its process ended with code {code}; see {self._log_path()}"

    def _log_path(self) -> Path:
        return self._options.bench.out / "logs" / f"worker-{self._number}.log"

    def _start(self) -> subprocess.Popen[str]:
        self._log_path().parent.mkdir(parents=True, exist_ok=True)
        self._log = self._log_path().open("a", encoding="utf-8")
        threads = str(max(1, (os.cpu_count() or 1) // self._options.jobs))
        imports = [f"--import={name}" for name in IMPORTED_MODULES]
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "tastemaker", *imports, *worker_arguments(self._options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={"OMP_NUM_THREADS": threads, **os.environ, "PYTHONPATH": subprocess_path()},
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


def worker_arguments(options: BenchOptions) -> Sequence[str]:
    """Return the command-line arguments of a worker of the same bench."""
    bench = options.bench
    arguments = ["bench", options.name, *bench.overrides, "--worker", "--out", str(bench.out)]
    arguments += ["--num-prompts", str(bench.prompts), "--count", str(bench.samples_per_prompt)]
    arguments += ["--tiny"] if bench.tiny else []
    arguments += ["--seeds", ",".join(map(str, options.seeds))]
    arguments += ["--control-seeds", ",".join(map(str, options.control_seeds))]
    return [*arguments, *(["--cells", ",".join(options.cells)] if options.cells else [])]


def run_worker(options: BenchOptions) -> None:
    """Run as a worker process: read keys of jobs from stdin, and write a line of JSON about each to stdout."""
    jobs = {job.key: job for job in plan_jobs(options)}
    threading.Thread(target=exit_with_parent, args=(os.getppid(),), daemon=True).start()
    for line in sys.stdin:
        failure = run_job(options.bench, jobs[line.strip()])
        sys.stdout.write(json.dumps({"key": line.strip(), "failure": failure}) + "\n")
        sys.stdout.flush()


def run_job(bench: Bench, job: ScoreboardJob) -> str | None:
    """Run a job. Errors become a message, so that the other jobs continue; an interruption is raised."""
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


def exit_with_parent(parent: int) -> None:
    """Stop this process when its parent is gone, because two processes must not write the same run."""
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
