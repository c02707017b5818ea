"""One owner per run directory: a second process that would train in it is refused. Readers need no lock.

The lock is `run.lock` in the directory, held by `flock`, which the kernel releases when the process ends, however it
ends. The file names the owner. Where `flock` is missing or does not reach other machines, as on some shared file
systems, the record counts as alive as long as its time of modification, the heartbeat, is recent. An owner that was
suspended for longer finds another record when it wakes up: it stops, and publishes no more checkpoints.

torchrun starts the ranks of a lost machine again at once, often with rank 0 on another machine. To be refused would use
up its restarts, so under torchrun a process waits until the heartbeat of an owner on another machine is stale.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from ..core.errors import CheckpointError, explain_error
from ..core.interruption import current_stop
from ..core.output_paths import check_output_directory
from ..core.registry import ConfigError

if TYPE_CHECKING:
    from ..core.objective import Comm

try:
    import fcntl
except ImportError:  # Windows: the record alone counts
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = "run.lock"
HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 120.0  # an owner on another machine without a heartbeat for so long is dead
SETTLE_SECONDS = 1.0
FORK_SECONDS = 5.0  # within which a forked process has closed the lock file of its killed parent
MAX_RECORD_BYTES, RECORD_BYTES = 4096, 1024  # read, and written: of two that write at once, the last is complete
# Of Linux, on which flock reaches every process that sees the file. Any other may be shared by machines, each with
# locks of its own, as with Lustre's `localflock` and NFS's `local_lock`.
LOCAL_FILE_SYSTEMS = (
    "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "tmpfs", "xfs", "zfs",
)  # fmt: skip
MOUNTS = Path("/proc/self/mountinfo")
WAIT_SECONDS = 1.0  # between two looks at an owner on another machine
MAX_WAIT_SECONDS = 1800.0  # for an owner of the same job: ranks that are cut off notice it after so long at most
LAUNCH_VARIABLE = "TORCHELASTIC_RUN_ID"  # set by torchrun: the id of the job, the same after a restart
UNNAMED_LAUNCH = "none"  # the id of all jobs that were given none
NO_FLOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)
_held: dict[tuple[Path, int], RunLock] = {}  # by directory and thread


@dataclass(frozen=True)
class RunOwner:
    """The process that trains in a run directory, or the one that did so last and was killed."""

    host: str
    pid: int
    started: str  # ISO 8601, UTC
    machine: str  # changes when the machine starts again
    process: str  # pid namespace and start time, which tell a new process of the same pid from the old one
    token: str = ""  # random, so that no two records are equal
    launch: str = ""  # id of the job that torchrun started; empty without torchrun
    heartbeat: float = field(default=0.0, compare=False)  # seconds since 1970 when it was last known to be alive
    alive: bool = field(default=True, compare=False)

    def __str__(self) -> str:
        since = self.started.replace("T", " ").replace("+00:00", " UTC")
        return f"process {self.pid} on {self.host} (since {since})"


def describe_process(pid: int) -> str:
    """Return the namespace and the start time of a process; empty if it does not exist or the system has no /proc."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return f"{namespace} {fields[18]}" if state not in "ZX" else ""  # a zombie holds nothing
    except (OSError, IndexError, ValueError):
        return ""


def describe_machine() -> str:
    """Return the id of this boot of this machine, or its name where the system has none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def read_owner(directory: Path) -> RunOwner | None:
    """Return who trains in a run directory, with `alive`; None if nobody does or the last owner ended normally.

    Reads one small file and takes no lock, so that any program may ask at any time. The heartbeat of an owner on
    another machine is compared with the clock of this one.
    """
    try:
        with (directory / LOCK_FILE).open("rb") as file:
            return _read_record(file)
    except OSError:
        return None


def _read_record(file: IO[bytes], clock: Callable[[], float] = time.time) -> RunOwner | None:
    """Return the owner in an open lock file; None if none is written, as in the moment before it is.

    `clock` returns the time that heartbeats are compared with.
    """
    try:
        file.seek(0)
        record = TypeAdapter(dict[str, str | int]).validate_json(file.read(MAX_RECORD_BYTES))
        heartbeat = os.fstat(file.fileno()).st_mtime
        values = {"heartbeat": heartbeat, "alive": True}
        owner: RunOwner = TypeAdapter(RunOwner).validate_python({**record, **values})
    except (OSError, ValidationError, RecursionError):
        return None
    return RunOwner(**{**asdict(owner), "alive": _is_alive(owner, clock)})


def _is_alive(owner: RunOwner, clock: Callable[[], float]) -> bool:
    """Whether a process exists, if it would be visible here; otherwise whether its heartbeat is recent."""
    here = describe_process(os.getpid()).partition(" ")[0]
    if owner.machine == describe_machine() and here and owner.process.partition(" ")[0] == here:
        return describe_process(owner.pid) == owner.process
    return clock() - owner.heartbeat < STALE_SECONDS


def is_local_file_system(directory: Path) -> bool:
    """Whether a directory is known to be on a file system that no other machine writes to."""
    directory, best, found = directory.resolve(), Path(), ""
    try:
        lines = MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return False
    for line in lines:  # 36 35 98:0 /root /mount/point rw,noatime shared:1 - ext4 /dev/sda1 rw
        mount, _, source = line.partition(" - ")
        point = Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), mount.split()[4]))  # a space is \040
        if directory.is_relative_to(point) and len(point.parts) >= len(best.parts):  # later mounts hide earlier ones
            best, found = point, source.split()[0]
    return found in LOCAL_FILE_SYSTEMS


class RunLock:
    """The lock of a run directory, from `acquire` to `release` or the end of the process."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.path = directory, directory / LOCK_FILE
        self.owner_pid = os.getpid()
        self._file: IO[bytes] | None = None
        self._created: list[Path] = []  # directories, to be removed if the run leaves them empty
        self._first_seen: tuple[RunOwner, float] | None = None  # an owner that is waited for, and since when
        self._released = threading.Event()
        self._record: RunOwner | None = None

    def acquire(self) -> None:
        """Take the lock, also from a dead process; raise ConfigError, and change nothing, if another process has it."""
        check_output_directory(self.directory, "output_dir")
        self._created = [each for each in (self.directory, *self.directory.parents) if not each.exists()]
        self.directory.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + FORK_SECONDS
        while self._file is None:
            file = os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b", buffering=0)
            try:
                if self._take(file, time.monotonic() < deadline):
                    self._file = file
            finally:
                if self._file is None:
                    file.close()
        threading.Thread(target=self._beat, name="run lock", daemon=True).start()

    def _take(self, file: IO[bytes], may_wait: bool) -> bool:
        """Lock an open file and write the owner into it; False if it is worth another try.

        That is so if its last owner has removed the file meanwhile, and, if `may_wait`, for a moment after the owner
        was killed: a process that it had just forked holds the file until it has closed it.
        """
        works = fcntl is not None
        try:
            if works:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _read_record(file)
            if may_wait and owner is not None and not owner.alive:
                time.sleep(0.05)
                return False
            if self._wait_for(owner):
                return False
            self._refuse(owner)
        except OSError as error:
            if error.errno not in NO_FLOCK:
                raise
            works = False
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), self.path.stat()):
                previous = _read_record(file, self._file_system_time)
                is_here = previous is not None and previous.machine == describe_machine()
                if previous is not None and previous.alive and not (works and is_here):
                    if works:
                        fcntl.flock(file, fcntl.LOCK_UN)  # while this process waits, it owns nothing
                    if self._wait_for(previous):
                        return False
                    self._refuse_elsewhere(previous)
                self._record = self._write(file)
                if not works or not is_local_file_system(self.directory):
                    time.sleep(SETTLE_SECONDS)  # of two that start at once, the one that wrote last is the owner
                    if (written := self._read_again()) is not None and written != self._record:
                        self._refuse_elsewhere(written)
                return True
        return False

    def _wait_for(self, owner: RunOwner | None) -> bool:
        """Wait a moment for an owner on another machine that may be dead; False if there is no reason to.

        An owner of the same job is dead or about to end, because torchrun ends all ranks before it starts them again.
        Any other one is alive if its heartbeat moves.
        """
        launch = os.environ.get(LAUNCH_VARIABLE, "")
        if not launch or owner is None or owner.machine == describe_machine():
            return False
        first, since = self._first_seen = self._first_seen or (owner, time.monotonic())
        waited = time.monotonic() - since
        if owner.launch == first.launch == launch != UNNAMED_LAUNCH:
            worth_it = waited < MAX_WAIT_SECONDS
        else:
            worth_it = owner == first and owner.heartbeat == first.heartbeat and waited < STALE_SECONDS + 1
        if worth_it:
            time.sleep(WAIT_SECONDS)
        return worth_it

    def _refuse(self, owner: RunOwner | None) -> None:
        raise ConfigError(
            f"{self.directory} is being trained by {owner or 'another process'}; wait until it ends, stop it, or set "
            "another name=... [TM1100]"
        )

    def _refuse_elsewhere(self, owner: RunOwner) -> None:
        age = max(0, round(self._file_system_time() - owner.heartbeat))
        raise ConfigError(
            f"{self.directory} is being trained by {owner}, whose last sign of life is {age} s old; wait until it "
            f"ends, stop it, or set another name=...; if it is dead, try again after {STALE_SECONDS:.0f} s without a "
            f"sign of life, or delete {self.path} [TM1101]"
        )

    def _write(self, file: IO[bytes]) -> RunOwner:
        started = datetime.now(UTC).isoformat(timespec="seconds")
        process, pid = describe_process(os.getpid()), os.getpid()
        launch, token = os.environ.get(LAUNCH_VARIABLE, ""), uuid.uuid4().hex
        record = RunOwner(socket.gethostname(), pid, started, describe_machine(), process, token, launch)
        keys = ("host", "pid", "started", "machine", "process", "token", "launch")
        content = TypeAdapter(dict[str, str | int]).dump_json({key: getattr(record, key) for key in keys}, indent=1)
        file.seek(0)
        file.truncate()
        file.write(content.ljust(RECORD_BYTES - 1) + b"\n")
        os.fsync(file.fileno())
        return record

    def _file_system_time(self) -> float:
        """The time by the clock that dates files in the directory, which on a shared file system is the server's."""
        with suppress(OSError), tempfile.NamedTemporaryFile(dir=self.directory, prefix=".run.lock-") as file:
            os.utime(file.fileno())
            return os.fstat(file.fileno()).st_mtime
        return time.time()

    def _read_again(self) -> RunOwner | None:
        """The record now, of a file opened anew: only opening it asks the server of a network file system."""
        with self.path.open("rb") as file:
            return _read_record(file)

    def find_other_owner(self) -> str:
        """Describe who has the lock instead of this process; empty if it still has it, or if that cannot be read."""
        if self._record is None or self._released.is_set():
            return ""
        try:
            for _ in range(5):
                if (found := self._read_again()) is not None:
                    return "" if found == self._record else str(found)
                time.sleep(0.1)  # another process may be writing
        except FileNotFoundError:
            return "nobody: the file was removed"
        except OSError:
            return ""
        return "another process"

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_SECONDS):
            with suppress(OSError, ValueError):
                if self.find_other_owner():
                    current_stop().request()  # the run ends with the message of `check`
                elif self._file is not None:
                    os.utime(self._file.fileno())

    def check(self) -> None:
        """Raise CheckpointError if another process has taken the lock, as while this one was suspended."""
        if other := self.find_other_owner():
            raise CheckpointError(
                f"this process no longer owns {self.directory}, and writes nothing more there: {self.path} names "
                f"{other}. A process that is suspended for more than {STALE_SECONDS:.0f} s is replaced; continue from "
                "the newest checkpoint once the other has ended [TM1177]"
            )

    def close(self) -> None:
        """Close the file in a forked process; the lock stays with the process that took it."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def release(self) -> None:
        """Remove the lock file, and the directories that were created for it if they are still empty."""
        self._released.set()
        file, self._file = self._file, None
        if file is None or self.owner_pid != os.getpid():
            return
        with suppress(OSError):
            if self._read_again() == self._record:  # not the file of one who took over
                self.path.unlink()
        file.close()
        for directory in self._created:
            with suppress(OSError):
                directory.rmdir()


@contextmanager
def own_run_directory(directory: Path, comm: Comm | None = None) -> Iterator[None]:
    """Be the one owner of a run directory within the block; raise ConfigError on all ranks if another process is.

    Rank 0 holds the lock for all ranks. A block within a block of the same thread has the lock already.
    """
    from ..core.objective import SingleProcess  # it imports torch, which readers of the lock do without

    comm, key = comm or SingleProcess(), (directory.resolve(), threading.get_ident())
    if key in _held:
        yield
        return
    lock, problem = RunLock(directory), None
    try:
        if comm.rank == 0:
            lock.acquire()
    except ConfigError as error:
        problem = str(error)
    except OSError as error:
        cause = explain_error(error) or f"{error.filename or directory} cannot be written ({error.strerror or error})"
        problem = f"the directory of the run cannot be locked: {cause}; choose another output_dir [TM1102]"
    problems = comm.gather_objects([problem] if problem else [])
    if problems:
        raise ConfigError(problems[0])
    _held[key] = lock
    try:
        yield
        lock.check()
    finally:
        _held.pop(key, None)
        lock.release()


def check_ownership(directory: Path) -> None:
    """Raise CheckpointError if this process had the lock of a run directory and has lost it."""
    for (locked, _), lock in [*_held.items()]:
        if locked == directory.resolve():
            lock.check()


def _close_after_fork() -> None:
    # A forked process, such as a data worker, would keep the lock after its parent was killed.
    for lock in _held.values():
        lock.close()
    _held.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_close_after_fork)
