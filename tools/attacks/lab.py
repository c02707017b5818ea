"""Where attacks take place: bounded processes, a trained run to damage, and the count of what survived."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

GIB = 2**30
SMALL_STEPS = ("batch.prompts=4", "objective.group_size=4", "sample.every=0", "guard.every=0")
REFERENCE_STEPS, KEPT_STEP = 10, 6  # the undisturbed run, and the newest checkpoint of a run that attacks damage
SHARED = threading.Lock()  # the reference run is trained once, by the first attack that needs it


class Lost(Exception):
    """A promise that did not hold."""


def expect(holds: object, otherwise: str) -> None:
    """Raise Lost with a sentence unless something holds."""
    if not holds:
        raise Lost(otherwise)


@dataclass
class Result:
    """What an ended process left behind."""

    code: int  # negative: the signal that ended it
    output: str
    seconds: float
    peak_bytes: int  # of resident memory

    def expect_success(self) -> Result:
        expect(self.code == 0, f"exit code {self.code}: {self.last_line}")
        return self

    def expect_message(self, text: str = "[TM") -> Result:
        """Expect exit code 1 or 2 and one message with a code, not a traceback."""
        expect("Traceback" not in self.output, f"a traceback: {self.last_line}")
        expect(self.code in (1, 2), f"exit code {self.code} without a message: {self.last_line}")
        expect(text in self.output, f"the message lacks {text!r}: {self.last_line}")
        return self

    def expect_memory(self, gib: float) -> Result:
        expect(self.peak_bytes <= gib * GIB, f"{self.peak_bytes / GIB:.1f} GiB of memory")
        return self

    @property
    def last_line(self) -> str:
        lines = [line for line in self.output.splitlines() if line.strip()]
        return lines[-1].strip()[:160] if lines else "no output"


class Process:
    """A command in a session of its own, with bounds on memory and file size; its output goes to a file."""

    def __init__(
        self, command: Sequence[str], folder: Path, environment: dict[str, str], memory: float, file_bytes: int | None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"output-{time.monotonic_ns()}.log"
        self.started = time.monotonic()
        self.result: Result | None = None
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        limits = {resource.RLIMIT_AS: int(memory * GIB), resource.RLIMIT_FSIZE: file_bytes, resource.RLIMIT_CORE: 0}
        for kind, bound in limits.items():
            if bound is not None:  # set from here, because a function between fork and exec is unsafe with threads
                resource.prlimit(self.pid, kind, (bound, bound))

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def poll(self) -> Result | None:
        """Return the result once the process has ended."""
        if self.result is None:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                code = self.popen.returncode = os.waitstatus_to_exitcode(status)
                seconds = time.monotonic() - self.started
                self.result = Result(code, self.output, seconds, usage.ru_maxrss * 1024)
        return self.result

    def wait(self, seconds: float = 120.0) -> Result:
        """Wait for the end; a process that takes longer is killed, and the promise is broken."""
        end = time.monotonic() + seconds
        while (result := self.poll()) is None:
            if time.monotonic() > end:
                self.kill()
                raise Lost(f"did not end within {seconds:.0f} s")
            time.sleep(0.01)
        return result

    def wait_until(self, happened: Callable[[], Any], seconds: float = 120.0, interval: float = 0.01) -> Any:
        """Wait until something holds while the process runs, and return it."""
        end = time.monotonic() + seconds
        while not (value := happened()):
            if (result := self.poll()) is not None:
                raise Lost(f"ended early with exit code {result.code}: {result.last_line}")
            if time.monotonic() > end:
                self.kill()
                raise Lost(f"what was awaited did not happen within {seconds:.0f} s")
            time.sleep(interval)
        return value

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process and everything it started, also in sessions of their own as torchrun's ranks are."""
        if self.poll() is None:
            for pid in [self.pid, *find_descendants(self.pid)]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            while self.poll() is None:
                time.sleep(0.005)

    def status(self, key: str) -> int:
        """Return a number of /proc/PID/status: VmRSS and VmHWM in bytes, Threads."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                value, *unit = line.split()[1:]
                return int(value) * (1024 if unit else 1)
        return 0

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


def find_descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, at any depth."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(entry.name))
    found = list(parents.get(pid, []))
    for each in found:  # grows while it is walked
        found += parents.get(each, [])
    return found


@dataclass
class Lab:
    """One attack's folder, random numbers and count."""

    folder: Path
    shared: Path  # folder of the reference run
    tree: Path  # of the package that is attacked
    quick: bool
    seed: int
    report: Callable[[str], None] = print
    tries: int = 0
    losses: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what was measured
    processes: list[Process] = field(default_factory=list)

    @cached_property
    def rng(self) -> random.Random:
        return random.Random(self.seed)

    def count(self, full: int, quick: int) -> int:
        """Return the number of tries of a complete run or of a quick one."""
        return quick if self.quick else full

    def skip(self, reason: str) -> None:
        """Say in the table that the rest of an attack cannot be carried out on this machine."""
        self.notes.append(f"rest skipped: {reason}")
        self.report(f"    skipped the rest: {reason}")

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Count one try, which is lost if a promise breaks within; processes that it started are ended."""
        self.tries += 1
        try:
            yield
        except Lost as loss:
            self.losses.append(f"{what}: {loss}")
            self.report(f"    lost: {what}: {loss}")
        except Exception as error:  # an attack that cannot be carried out must not pass unnoticed
            self.losses.append(f"{what}: the attack failed with {type(error).__name__}: {error!s:.160}")
            self.report(f"    lost: {self.losses[-1]}")
        finally:
            for process in self.processes:
                process.kill()
            self.processes.clear()

    def start(
        self,
        *arguments: str,
        folder: Path | None = None,
        memory: float = 4.0,
        file_bytes: int | None = None,
        launcher: Sequence[str] = (),
        safe_path: bool = True,
        env: dict[str, str] | None = None,
    ) -> Process:
        """Start `tastemaker ARGUMENTS` with at most `memory` GiB of address space.

        `launcher` replaces `-m tastemaker`. Without `safe_path` Python searches its default path, which may begin with
        the working directory.
        """
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.tree),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "400",
            **(env or {}),
        }
        command = [sys.executable, *(("-P",) if safe_path else ()), *(launcher or ("-m", "tastemaker")), *arguments]
        process = Process(command, folder or self.folder, environment, memory, file_bytes)
        self.processes.append(process)
        return process

    def run(self, *arguments: str, seconds: float = 120.0, **options: Any) -> Result:
        """Run a command to its end."""
        process = self.start(*arguments, **options)
        result = process.wait(seconds)
        self.processes.remove(process)
        return result

    def reference(self) -> Path:
        """Return an undisturbed run of ten steps with checkpoints at every second one; trained at the first call."""
        with SHARED:
            directory = self.shared / "reference"
            if not (directory / "report.html").exists():
                arguments = train_arguments(self.shared, "reference", REFERENCE_STEPS, every=2)
                result = self.run(*arguments, folder=self.shared)
                if result.code:
                    raise RuntimeError(f"the reference run failed: {result.output[-2000:]}")
            return directory

    def copy_run(self, name: str) -> Path:
        """Return a copy of the reference run as it was at step 6, with checkpoints at 2, 4 and 6."""
        directory = self.folder / name
        shutil.copytree(self.reference(), directory)
        for step in range(KEPT_STEP + 1, REFERENCE_STEPS + 1):
            shutil.rmtree(directory / f"checkpoints/step-{step:06d}", ignore_errors=True)
        return directory

    def expect_reference(self, directory: Path) -> None:
        """Expect that a run has ended with the weights and metrics of the undisturbed one."""
        expect_equal_runs(self.reference(), directory, REFERENCE_STEPS)


def train_arguments(folder: Path, name: str, steps: int, *more: str, every: int = 1) -> list[str]:
    """Return the arguments of a small run that keeps all its checkpoints."""
    where = (f"output_dir={folder}", f"name={name}", f"steps={steps}")
    return [
        "train",
        "grpo-toy-flow",
        *SMALL_STEPS,
        *where,
        f"checkpoint.every={every}",
        "checkpoint.keep_last=0",
        *more,
    ]


def list_steps(directory: Path) -> list[int]:
    """Return the steps of complete checkpoints."""
    names = [path.name for path in (directory / "checkpoints").glob("step-*")]
    return sorted(int(name[5:]) for name in names if name[5:].isdecimal())


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl without times."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{k: x for k, x in row.items() if not k.startswith("time/") and "per_second" not in k} for row in rows]


def count_logged_steps(directory: Path) -> int:
    """Return how many complete rows metrics.jsonl has."""
    path = directory / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def read_tensors(directory: Path, step: int) -> dict[str, bytes]:
    """Return the bytes of every tensor file of a checkpoint."""
    checkpoint = directory / f"checkpoints/step-{step:06d}"
    return {str(file.relative_to(checkpoint)): file.read_bytes() for file in checkpoint.rglob("*.safetensors")}


def expect_equal_runs(one: Path, other: Path, step: int) -> None:
    """Expect the same weights, optimizer state and metrics to the bit."""
    expected, found = read_tensors(one, step), read_tensors(other, step)
    expect(expected and found, f"there is no checkpoint of step {step}")
    expect(expected == found, "the final weights differ from those of the undisturbed run")
    expect(read_metrics(one) == read_metrics(other), "the metrics differ from those of the undisturbed run")


@dataclass(frozen=True)
class Attack:
    """A named attack: what it does, and what surviving it means."""

    name: str
    promise: str
    function: Callable[[Lab], None]
    quick: bool  # part of the quick set


ATTACKS: dict[str, Attack] = {}


def attack(name: str, promise: str, *, quick: bool = False) -> Callable[[Callable[[Lab], None]], Callable[[Lab], None]]:
    """Register an attack under its name."""

    def register(function: Callable[[Lab], None]) -> Callable[[Lab], None]:
        ATTACKS[name] = Attack(name, promise, function, quick)
        return function

    return register
