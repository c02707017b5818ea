"""The queue of jobs: commands that run one after the other on each device, and outlive the studio.

A job is a record in RUNS/.studio/jobs: ID.json is its state, ID.log its output, ID.process names its processes and is
locked while they live, ID.exit holds the exit code. Whoever advances the queue next, after a restart or kill -9, goes
on from these files. The queue advances while the studio or `tastemaker jobs --advance` runs; jobs that have started go
on without it. A process that was not started by the queue does not occupy a device.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from ..core.errors import ConfigError
from ..core.output_paths import write_text_atomically
from ..core.registry import USER_CODE_VARIABLE, subprocess_path
from ..core.safe_files import read_json_object
from ..training.run_lock import describe_machine, describe_process, read_owner
from .devices import choose_device, list_devices, visible_devices

try:
    import fcntl
except ImportError:  # Windows: one process should advance the queue
    fcntl = None  # type: ignore[assignment]

JobState = Literal["queued", "running", "stopping", "done", "failed", "stopped"]
ACTIVE: tuple[JobState, ...] = ("running", "stopping")
ENDED: tuple[JobState, ...] = ("done", "failed", "stopped")
JOB_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")
ANSI_CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
POLL_SECONDS = 0.5  # between two looks at the processes
START_SECONDS = 60.0  # in which a process must have written its ids
KILL_SECONDS = 15.0  # after a stop request, from which on a job may be killed
MAX_RECORD_BYTES, MAX_REASON, REASON_BYTES = 2**20, 600, 16 * 2**10
MAX_RECORDS = 500  # of ended jobs; the oldest are deleted
EXIT_INTERRUPTED = 130  # of a command that saved and stopped
SAMPLE_NICENESS = 10  # samples beside training get the CPU time that it leaves
SUPERVISOR = Path(__file__).with_name("job_process.py")
COMMAND = (sys.executable, "-P", "-m", "tastemaker")


@dataclass(frozen=True)
class Job:
    """A command of the queue."""

    id: str
    kind: str  # train, sample, align, preference
    arguments: tuple[str, ...]  # after `python -m tastemaker`
    directory: str  # that it writes to
    device: str  # cpu, mps, cuda:0, ...
    created: float  # seconds since 1970, as all times
    order: float  # in the queue; lower starts first
    title: str = ""
    state: JobState = "queued"
    reason: str = ""  # why it failed or stopped
    cwd: str = ""  # where it is started: paths in configurations are relative to it
    beside: bool = False  # whether it may run while another job has the device
    allow_code: bool = True  # whether it may import modules of the user's
    pid: int = 0  # of the process beside the command, which leads its session
    process: str = ""  # its start time, which tells it from a later process of the same pid
    machine: str = ""
    started: float = 0.0
    ended: float = 0.0
    stop_requested: float = 0.0
    killed: bool = False
    exit_code: int | None = None

    @property
    def can_be_killed(self) -> bool:
        return self.state == "stopping" and time.time() - self.stop_requested >= KILL_SECONDS

    @property
    def seconds(self) -> float:
        """How long it has run."""
        return (self.ended or time.time()) - self.started if self.started else 0.0


RECORD = TypeAdapter(Job)


class JobQueue:
    """The jobs of a directory of runs. Methods may be called from any thread, and from several processes at once."""

    def __init__(self, root: Path | str, *, allow_code: bool = True) -> None:
        self.root = Path(root).resolve()
        self.folder = self.root / ".studio" / "jobs"
        self.sample_folder = self.root / ".studio" / "samples"  # with a folder for each job that samples
        self.allow_code = allow_code  # of the jobs that are submitted here
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    # Reading

    def jobs(self) -> list[Job]:
        """Return all jobs in the order of the queue. A damaged record is skipped."""
        names = [path for path in self.folder.glob("*.json") if JOB_ID.fullmatch(path.stem)]
        found = [job for path in names if (job := self._read(path)) is not None]
        return sorted(found, key=lambda job: (job.kind != "sample", job.order, job.id))

    def find(self, id: str) -> Job:
        job = self._read(self.folder / f"{id}.json") if JOB_ID.fullmatch(id) else None
        if job is None:
            raise ConfigError(f"there is no job '{id:.60}' in {self.folder}; see `tastemaker jobs` [TM1431]")
        return job

    def find_active(self, directory: Path) -> Job | None:
        """Return the job that waits, runs or stops and writes to a directory."""
        found = [job for job in self.jobs() if job.directory == str(directory.resolve())]
        return next((job for job in found if job.state not in ENDED and job.kind != "sample"), None)

    def log_file(self, id: str) -> Path:
        return self.folder / f"{id}.log"

    def _read(self, path: Path) -> Job | None:
        try:
            with path.open("rb") as file:
                job: Job = RECORD.validate_json(file.read(MAX_RECORD_BYTES))
        except (OSError, ValidationError, RecursionError):
            return None
        return job if job.id == path.stem else None

    def _write(self, job: Job) -> Job:
        write_text_atomically(self.folder / f"{job.id}.json", json.dumps(asdict(job), indent=1) + "\n")
        return job

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Keep other threads and processes from changing records within the block."""
        with self._lock:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / "queue.lock").open("a") as file:
                if fcntl is not None:
                    with suppress(OSError):  # a file system without locks
                        fcntl.flock(file, fcntl.LOCK_EX)
                yield

    # Changing

    def submit(
        self,
        kind: str,
        arguments: Sequence[str],
        directory: Path | str,
        device: str = "auto",
        *,
        title: str = "",
        beside: bool | None = None,
    ) -> str:
        """Add a command to the end of the queue and return its id; `arguments` follow `python -m tastemaker`.

        The device "auto" is the accelerator with the fewest jobs, or the CPU. Samples on the CPU start beside a run by
        default; on a GPU they would take memory from it, so they wait for it, before all other jobs.
        """
        place = Path(directory).resolve()
        if not arguments:
            raise ConfigError(
                "jobs: the command is empty; give for example `submit train grpo-toy-flow name=a` [TM1432]"
            )
        with self._exclusive():
            jobs = self.jobs()
            chosen = (
                choose_device([job.device for job in jobs if job.state not in ENDED]) if device == "auto" else device
            )
            if chosen not in list_devices():
                raise ConfigError(
                    f"device: there is no '{chosen:.20}' here; choose one of {', '.join(list_devices())} [TM1433]"
                )
            same = [job for job in jobs if job.directory == str(place) and job.state not in ENDED]
            if same and kind != "sample":
                raise ConfigError(
                    f"{place}: the job {same[0].id} ({same[0].state}) writes to this directory; stop it, wait for it, "
                    "or choose another name [TM1434]"
                )
            now = time.time()
            id = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{secrets.token_hex(3)}"
            is_beside = kind == "sample" and chosen == "cpu" if beside is None else beside
            job = Job(id, kind, tuple(arguments), str(place), chosen, now, now, title or " ".join(arguments)[:200])
            self._write(replace(job, cwd=os.getcwd(), beside=is_beside, allow_code=self.allow_code))
            self._delete_oldest(jobs)
        return id

    def resume(self, directory: Path, device: str = "auto", steps: int | None = None) -> str:
        """Queue a run to be continued from its last checkpoint, up to `steps` steps if given."""
        if not (directory / "config.yaml").is_file():
            raise ConfigError(f"{directory} is not the directory of a run; config.yaml is missing [TM1435]")
        owner = read_owner(directory)
        if owner is not None and owner.alive:
            raise ConfigError(f"{directory} is being trained by {owner}; stop it first [TM1436]")
        more = [] if steps is None else [f"steps={steps}"]
        title = f"resume {directory.name}" + (f" up to step {steps}" if steps else "")
        return self.submit("train", ["train", str(directory), *more], directory, device, title=title)

    def stop(self, id: str) -> Job:
        """Ask a job to save and stop; one that waits is stopped at once. A second request changes nothing."""
        with self._exclusive():
            job = self._refresh(self.find(id))
            if job.state == "queued":
                return self._write(
                    replace(job, state="stopped", reason="it was stopped before it started", ended=time.time())
                )
            if job.state != "running":
                return job
            if not self._read_processes(id)[0]:
                raise ConfigError(f"{id}: the job is just starting; try again in a moment [TM1443]")
            self._send(job, signal.SIGTERM)
            return self._write(replace(job, state="stopping", stop_requested=time.time()))

    def kill(self, id: str) -> Job:
        """End the processes of a job that was asked to stop and did not. What it did not save is lost."""
        with self._exclusive():
            job = self._refresh(self.find(id))
            if job.state not in ACTIVE:
                return job
            if not job.can_be_killed:
                raise ConfigError(
                    f"{id}: a job can be killed {KILL_SECONDS:.0f} s after it was asked to stop; stop it first, and "
                    "give it this time to save [TM1437]"
                )
            job = self._write(replace(job, killed=True))
            pid = job.pid or self._read_processes(id)[0]
            if pid and self._is_alive(job) and os.getpgid(pid) == pid:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
            elif (owner := read_owner(Path(job.directory))) is not None and owner.alive:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(owner.pid, signal.SIGKILL)
            return job

    def stop_run(self, directory: Path) -> None:
        """Ask the process that trains in a directory to save and stop, also one that the queue did not start."""
        job = self.find_active(directory)
        if job is not None:
            self.stop(job.id)
            return
        owner = read_owner(directory)
        if owner is None or not owner.alive:
            raise ConfigError(f"{directory}: no process trains in it; there is nothing to stop [TM1438]")
        if owner.machine != describe_machine() or describe_process(owner.pid) != owner.process:
            raise ConfigError(f"{directory} is being trained by {owner}; stop it on that machine [TM1439]")
        try:
            os.kill(owner.pid, signal.SIGTERM)
        except OSError as error:
            raise ConfigError(
                f"{directory}: {owner} cannot be stopped from here ({error.strerror}) [TM1440]"
            ) from error

    def remove(self, id: str) -> None:
        """Delete the record, the log and the samples of a job that does not run. Its run directory stays."""
        with self._exclusive():
            job = self._refresh(self.find(id))
            if job.state in ACTIVE:
                raise ConfigError(f"{id}: the job is {job.state}; stop it before you remove it [TM1441]")
            self._delete(id)

    def move(self, id: str, places: int) -> None:
        """Move a waiting job towards the start (negative) or the end of the queue of its device."""
        with self._exclusive():
            job = self.find(id)
            waiting = [each for each in self.jobs() if each.state == "queued" and each.device == job.device]
            if job not in waiting:
                raise ConfigError(f"{id}: the job is {job.state}; only a waiting job can be moved [TM1442]")
            position = waiting.index(job)
            target = min(max(position + places, 0), len(waiting) - 1)
            waiting.insert(target, waiting.pop(position))
            orders = sorted(each.order for each in waiting)
            for each, order in zip(waiting, orders, strict=True):
                self._write(replace(each, order=order))

    def _delete(self, id: str) -> None:
        job = self._read(self.folder / f"{id}.json")
        if job is not None and Path(job.directory).parent == self.sample_folder:
            shutil.rmtree(job.directory, ignore_errors=True)
        for suffix in ("json", "log", "process", "exit"):
            (self.folder / f"{id}.{suffix}").unlink(missing_ok=True)

    def _delete_oldest(self, jobs: list[Job]) -> None:
        ended = sorted((job for job in jobs if job.state in ENDED), key=lambda job: job.ended)
        for job in ended[: max(0, len(ended) - MAX_RECORDS)]:
            self._delete(job.id)

    # Advancing

    def advance(self) -> None:
        """Look at the processes once: note jobs that have ended, and start the next one on each free device."""
        if not self.folder.is_dir():
            return
        with self._exclusive():
            jobs = [self._refresh(job) for job in self.jobs()]
            busy = {lane_of(job) for job in jobs if job.state in ACTIVE}
            for job in jobs:
                if job.state == "queued" and lane_of(job) not in busy and not self._is_directory_busy(job):
                    self._start(job)
                    busy.add(lane_of(job))

    def _is_directory_busy(self, job: Job) -> bool:
        """Whether a process that the queue did not start trains in the directory of a job, which waits for it."""
        owner = read_owner(Path(job.directory)) if job.kind == "train" else None
        return owner is not None and owner.alive

    def start_thread(self) -> None:
        """Advance the queue from now on in a thread of this process."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="job queue", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop the thread. Jobs that run go on."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            with suppress(OSError):  # the directory was removed, or the disk is full: try again
                self.advance()

    def _start(self, job: Job) -> None:
        (self.folder / f"{job.id}.process").unlink(missing_ok=True)
        # Written first: if this process is killed now, the next one waits for the job instead of starting it twice.
        job = self._write(replace(job, state="running", started=time.time(), machine=describe_machine()))
        environment = {**os.environ, "PYTHONPATH": subprocess_path(), "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
        environment |= {"CUDA_VISIBLE_DEVICES": visible_devices(job.device)} if job.device != "mps" else {}
        if not job.allow_code:
            environment[USER_CODE_VARIABLE] = "refuse"
        files = [str(self.folder / f"{job.id}.{suffix}") for suffix in ("process", "exit")]
        niceness = SAMPLE_NICENESS if job.beside else 0
        command = [*COMMAND, *job.arguments]
        try:
            with self.log_file(job.id).open("ab") as log:
                subprocess.run(  # returns as soon as the detached process has written its ids
                    [sys.executable, "-I", str(SUPERVISOR), *files, str(niceness), *command],
                    cwd=job.cwd or None,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    timeout=START_SECONDS,
                    check=True,
                )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._write(replace(job, state="failed", reason=f"it could not be started: {error}", ended=time.time()))
            return
        self._refresh(job)

    def _refresh(self, job: Job) -> Job:
        """Return a job with the state that its processes have now, and write it if it has changed."""
        if job.state not in ACTIVE:
            return job
        is_alive = self._is_alive(job)  # asked first: the exit code is written before the process ends
        code, ended = self._read_exit(job.id)
        if code is not None:
            return self._write(self._conclude(job, code, ended))
        if is_alive:
            pid = job.pid or self._read_processes(job.id)[0]
            return job if job.pid else self._write(replace(job, pid=pid, process=describe_process(pid)))
        if not self._read_processes(job.id)[0]:  # the process that started it was killed before it could
            is_late = time.time() - job.started >= START_SECONDS
            return self._write(replace(job, state="queued", started=0.0)) if is_late else job
        return self._write(self._conclude(job, None, time.time()))

    def _conclude(self, job: Job, code: int | None, ended: float) -> Job:
        job = replace(job, exit_code=code, ended=ended or time.time())
        if job.killed and code != 0:
            return replace(job, state="stopped", reason="it was killed; steps after its last checkpoint are lost")
        if code == 0:
            return replace(job, state="done", reason="")
        if code == EXIT_INTERRUPTED or (code is not None and job.stop_requested):
            return replace(job, state="stopped", reason="it saved and stopped" if job.kind == "train" else "")
        reason = find_reason(self.log_file(job.id))
        if code is None:
            reason = "its process ended without an exit code: it was killed, or the machine was restarted"
        elif code < 0:
            name = signal.Signals(-code).name if -code in [*signal.Signals] else str(-code)
            reason = f"it was ended by {name}" + (f"; last line: {reason}" if reason else "")
        return replace(job, state="failed", reason=reason[:MAX_REASON])

    def _read_exit(self, id: str) -> tuple[int | None, float]:
        try:
            values = read_json_object(self.folder / f"{id}.exit")
            return int(values["exit_code"]), float(values["time"])
        except (OSError, ValueError, KeyError, TypeError):
            return None, 0.0

    def _read_processes(self, id: str) -> tuple[int, int]:
        """Return the process ids of the process beside a job and of its command; zeros before they are known."""
        try:
            values = read_json_object(self.folder / f"{id}.process")
            return int(values["pid"]), int(values["child"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0, 0

    def _is_alive(self, job: Job) -> bool:
        """Whether the process beside a job lives, or at least the run that it started."""
        if self._read_processes(job.id)[0]:
            try:
                with (self.folder / f"{job.id}.process").open("rb") as file:
                    if fcntl is None:
                        raise OSError
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            except OSError:  # no locks here
                if job.process and job.machine == describe_machine() and describe_process(job.pid) == job.process:
                    return True
        owner = read_owner(Path(job.directory)) if job.kind == "train" else None
        return owner is not None and owner.alive and owner.heartbeat >= job.started - 1

    def _send(self, job: Job, number: signal.Signals) -> None:
        """Send a signal to the process beside a job, which passes it on; to the run itself if that process is gone."""
        pid, child = self._read_processes(job.id)
        if pid and describe_process(pid):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        elif (owner := read_owner(Path(job.directory))) is not None and owner.alive and owner.pid == child:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(owner.pid, number)


def submit_command(queue: JobQueue, words: Sequence[str], device: str = "auto") -> str:
    """Queue a command as written on the command line, such as `train grpo-toy-flow name=a`; return the job's id.

    A run goes to the directory of the queue, unless the command sets another output_dir.
    """
    given = dict(word.split("=", 1) for word in words[2:] if "=" in word and not word.startswith("-"))
    kind = {"train": "train", "generate": "sample"}.get(words[0] if words else "", "command")
    directory = queue.root / ".studio" / "commands" / secrets.token_hex(8)
    if kind == "train" and len(words) > 1:
        source = Path(words[1])
        if (source / "config.yaml").is_file():
            directory = source
        else:
            words = [*words, *([] if "output_dir" in given else [f"output_dir={queue.root}"])]
            directory = Path(given.get("output_dir", queue.root)) / given.get("name", source.stem)
    return queue.submit(kind, words, directory, device)


def lane_of(job: Job) -> tuple[str, bool]:
    """What a job occupies: its device, or the place beside it. One job at a time runs in each."""
    return job.device, job.beside


def read_tail(path: Path, max_bytes: int, start: int | None = None) -> tuple[str, int]:
    """Return the end of a log as text, or what follows the offset `start`, and the offset after it."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - max_bytes) if start is None or start > size else max(start, size - max_bytes))
            data = file.read(max_bytes)
            offset = file.tell()
    except OSError:
        return "", start or 0
    return clean_text(data), offset


def clean_text(data: bytes) -> str:
    """Return output without colors; of a line that was written over itself, such as a progress bar, the last state."""
    text = ANSI_CODE.sub("", data.decode("utf-8", "replace")).replace("\r\n", "\n")
    return "\n".join(line.rpartition("\r")[2] for line in text.split("\n"))


def find_reason(log: Path) -> str:
    """Return the last error in a log, or its last line."""
    lines = [line.rstrip() for line in read_tail(log, REASON_BYTES)[0].splitlines() if line.strip()]
    starts = [index for index, line in enumerate(lines) if line.startswith("error:")]
    text = "\n".join(lines[starts[-1] :]) if starts else lines[-1] if lines else ""
    return text.removeprefix("error:").strip()[:MAX_REASON]
