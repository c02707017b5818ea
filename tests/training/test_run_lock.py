"""One owner per run directory: others are refused at once, dead owners are replaced, readers need no lock."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import pytest
from fork_server import ForkedProcess
from launch_ranks import environments
from waiting import is_frozen, wait_until

import tastemaker as tm
from tastemaker.cli import main
from tastemaker.cli.options import EXIT_INTERRUPTED, EXIT_USAGE
from tastemaker.core.checkpoint_files import latest_checkpoint
from tastemaker.core.errors import CheckpointError, ConfigError
from tastemaker.core.interruption import handle_signals
from tastemaker.training import run_directory, run_lock
from tastemaker.training.engine import Engine
from tastemaker.training.run_lock import LOCK_FILE, STALE_SECONDS, own_run_directory, read_owner

SETTINGS = ("sample.every=0", "guard.every=0", "checkpoint.every=1", "checkpoint.keep_last=2", "batch.prompts=4")


def start_training(output: Path, *options: str, rank: dict[str, str] | None = None) -> ForkedProcess:
    command = [sys.executable, "-m", "tastemaker", "train", "grpo-toy-flow", "steps=100000", f"output_dir={output}"]
    return ForkedProcess([*command, "name=run", *SETTINGS, *options], env=rank or environments(1)[0])


def read_files(directory: Path) -> dict[str, tuple[int, bytes]]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_second_train_is_refused_and_a_killed_owner_is_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    with start_training(tmp_path) as owner, ExitStack() as stack:
        stack.callback(owner.kill)  # it is stopped, and would not end by itself
        wait_until(lambda: any(directory.glob("checkpoints/step-??????/weights.safetensors")))
        owner.send_signal(signal.SIGSTOP)
        wait_until(lambda: is_frozen(owner.process.pid))
        before = read_files(directory)
        with start_training(tmp_path) as second:
            errors = second.communicate(timeout=300)[1]
        assert second.returncode == EXIT_USAGE, errors
        assert "TM1100" in errors and f"process {owner.process.pid} on {socket.gethostname()} (since 2" in errors
        assert read_files(directory) == before
        found = read_owner(directory)
        assert found is not None and found.alive and found.pid == owner.process.pid
        main_without_exit("report", str(directory))  # a reader needs no lock
        owner.kill()
        owner.wait(120)
    assert (directory / LOCK_FILE).is_file()
    latest = latest_checkpoint(directory)
    dead = read_owner(directory)
    assert dead is not None and not dead.alive
    with start_training(tmp_path) as third:
        wait_until(lambda: (found := read_owner(directory)) and found.alive and found.pid == third.process.pid)
        wait_until(lambda: latest_checkpoint(directory) not in (latest, None))
        third.send_signal(signal.SIGTERM)
        third.communicate(timeout=300)
    assert third.returncode == EXIT_INTERRUPTED
    assert not (directory / LOCK_FILE).exists() and read_owner(directory) is None


def main_without_exit(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main([*arguments])
    return int(exit_info.value.code or 0)


@contextmanager
def locked_by_another_thread(*directories: Path) -> Iterator[None]:
    locked, done = threading.Event(), threading.Event()

    def hold(left: tuple[Path, ...]) -> None:
        if left:
            with own_run_directory(left[0]):
                return hold(left[1:])
        locked.set()
        done.wait()
        return None

    thread = threading.Thread(target=hold, args=(directories,))
    thread.start()
    assert locked.wait(60)
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_every_way_to_train_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, swept = tmp_path / "run", tmp_path / "swept"
    here = (f"output_dir={tmp_path}", "name=run")
    commands = {
        "generator": ("train", "grpo-toy-flow", *here),
        "autoencoder": ("train", "playground-vae", "--tiny", *here),
        "judge": ("train", "orm-onevision", "--tiny", *here),
        "demo": ("demo", "--out", str(run)),
        "sweep": ("sweep", "grpo-toy-flow", "seed=0,1", "--out", str(swept)),
    }
    with locked_by_another_thread(run, swept):
        before = read_files(tmp_path)
        for name, command in commands.items():
            assert main_without_exit(*command) == EXIT_USAGE, name
            assert "TM1100" in capsys.readouterr().err, name
        with pytest.raises(ConfigError, match="TM1100"):
            tm.train(tm.load("grpo-toy-flow", [*here]))
        built = tm.build(tm.load("grpo-toy-flow", [*here]))
        with pytest.raises(ConfigError, match="TM1100"):
            tm.train(built)
        assert read_files(tmp_path) == before
    assert not run.exists() and not swept.exists()  # the locks created them, and nothing else was written


def test_ranks_are_one_owner_and_are_refused_together(tmp_path: Path) -> None:
    with own_run_directory(tmp_path / "run"):
        ranks = [start_training(tmp_path, rank=environment) for environment in environments(2)]
        errors = [rank.communicate(timeout=300)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [EXIT_USAGE] * 2, errors
        assert "TM1100" in errors[0] and not errors[1]
    ranks = [start_training(tmp_path, "steps=2", rank=environment) for environment in environments(2)]
    errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    assert not (tmp_path / "run" / LOCK_FILE).exists()


def test_children_of_a_killed_owner_do_not_keep_the_lock(tmp_path: Path) -> None:
    program = """
        import os, subprocess, sys, time
        from pathlib import Path
        from tastemaker.training.run_lock import own_run_directory
        with own_run_directory(Path(sys.argv[1])):
            child = os.fork()
            if not child:
                time.sleep(600)
            detached = subprocess.Popen(["sleep", "600"], close_fds=False, start_new_session=True)
            print(child, detached.pid, flush=True)
            time.sleep(600)
    """
    children: list[int] = []
    try:
        with ForkedProcess([sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]) as owner:
            children = [int(pid) for pid in owner.stdout.readline().split()]
            with pytest.raises(ConfigError, match=f"process {owner.process.pid}.*TM1100"), own_run_directory(tmp_path):
                pass
            owner.kill()
            owner.wait(120)
        assert len(children) == 2 and all(Path(f"/proc/{pid}").exists() for pid in children)
        with own_run_directory(tmp_path):
            found = read_owner(tmp_path)
            assert found is not None and found.alive and found.pid == os.getpid()
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)


def test_lock_that_a_forked_child_closes_late_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with own_run_directory(tmp_path):
        record = json.loads((tmp_path / LOCK_FILE).read_text())
    file = tmp_path / LOCK_FILE
    file.write_text(json.dumps({**record, "process": record["process"] + "0"}))  # of a process that ended
    with file.open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        monkeypatch.setattr(run_lock, "FORK_SECONDS", 0.0)
        with pytest.raises(ConfigError, match="TM1100"), own_run_directory(tmp_path):
            pass
        monkeypatch.setattr(run_lock, "FORK_SECONDS", 60.0)
        threading.Timer(0.2, fcntl.flock, (held, fcntl.LOCK_UN)).start()
        with own_run_directory(tmp_path):
            found = read_owner(tmp_path)
            assert found is not None and found.alive and found.pid == os.getpid()


@pytest.mark.parametrize("flock", [True, False])
def test_owner_on_another_machine_counts_while_its_heartbeat_is_recent(
    tmp_path: Path, flock: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSYS, "no flock on this file system")

    monkeypatch.setattr(run_lock, "SETTLE_SECONDS", 0.0)
    if not flock:
        monkeypatch.setattr(run_lock.fcntl, "flock", fail)
    with own_run_directory(tmp_path):
        record = json.loads((tmp_path / LOCK_FILE).read_text())
    file = tmp_path / LOCK_FILE
    file.write_text(json.dumps({**record, "host": "gpu-7", "machine": "another"}))
    for age in (0.0, STALE_SECONDS - 60):
        os.utime(file, (time.time() - age,) * 2)
        content = file.stat().st_mtime_ns, file.read_bytes()
        with pytest.raises(ConfigError, match=rf"on gpu-7 .*{LOCK_FILE} \[TM1101\]"), own_run_directory(tmp_path):
            pass
        assert (file.stat().st_mtime_ns, file.read_bytes()) == content
        found = read_owner(tmp_path)
        assert found is not None and found.alive
    os.utime(file, (time.time() - STALE_SECONDS - 1,) * 2)
    found = read_owner(tmp_path)
    assert found is not None and not found.alive
    with own_run_directory(tmp_path):
        assert json.loads(file.read_text())["host"] == socket.gethostname()


@pytest.mark.parametrize(("launch", "beating"), [("job", True), ("job", False), ("other", False), ("none", False)])
def test_restart_under_torchrun_waits_for_a_dead_owner_on_another_machine(
    tmp_path: Path, launch: str, beating: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 of an elastic restart: what was cut off may still be alive for a while, but only that of the same job."""
    file, waits = write_owner_elsewhere(tmp_path, monkeypatch), []
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "launch": launch}))

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:  # its heartbeat becomes stale
            os.utime(file, (time.time() - STALE_SECONDS - 1,) * 2)
        elif beating:
            os.utime(file, (time.time() + len(waits),) * 2)

    monkeypatch.setenv(run_lock.LAUNCH_VARIABLE, "none" if launch == "none" else "job")
    monkeypatch.setattr(run_lock.time, "sleep", wait)
    with own_run_directory(tmp_path):
        owner = read_owner(tmp_path)
        assert owner is not None and owner.pid == os.getpid() and owner.host == socket.gethostname()
    assert len(waits) == 3


def test_restart_under_torchrun_is_refused_by_an_owner_that_is_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, waits = write_owner_elsewhere(tmp_path, monkeypatch), []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        os.utime(file, (time.time() + len(waits),) * 2)

    monkeypatch.setenv(run_lock.LAUNCH_VARIABLE, "job")
    monkeypatch.setattr(run_lock.time, "sleep", wait)
    before = file.read_bytes()
    with pytest.raises(ConfigError, match=r"on gpu-7 .*TM1101"), own_run_directory(tmp_path):
        pass
    assert waits and file.read_bytes() == before


def write_owner_elsewhere(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the lock of another job, on another machine and a moment ago."""
    monkeypatch.setattr(run_lock, "SETTLE_SECONDS", 0.0)
    with own_run_directory(directory):
        record = json.loads((directory / LOCK_FILE).read_text())
    file = directory / LOCK_FILE
    file.write_text(json.dumps({**record, "host": "gpu-7", "machine": "another", "launch": "another job"}))
    return file


@pytest.mark.parametrize("content", ["", "{}", "[" * 4000, '{"host": 3}', "\x00" * 9000])
def test_unreadable_record_is_no_owner(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK_FILE).write_text(content)
    assert read_owner(tmp_path) is None
    with own_run_directory(tmp_path), own_run_directory(tmp_path):  # a block within a block has the lock already
        assert read_owner(tmp_path) is not None
    assert not (tmp_path / LOCK_FILE).exists()


def test_heartbeat_renews_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.01)
    with own_run_directory(tmp_path):
        os.utime(tmp_path / LOCK_FILE, (1.0, 1.0))
        wait_until(lambda: (tmp_path / LOCK_FILE).stat().st_mtime > time.time() - 60)


MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
23 22 0:40 / {0}/shared rw,relatime shared:1 - {1} server:/home rw
24 23 0:41 / {0}/shared/my\\040disk rw - xfs /dev/vdb rw
"""


def test_file_systems_that_may_be_shared_are_recognized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mountinfo"
    monkeypatch.setattr(run_lock, "MOUNTS", mounts)
    assert not run_lock.is_local_file_system(tmp_path)  # nothing is known
    for kind in ("nfs4", "lustre", "beegfs", "gpfs", "ceph", "fuse.glusterfs", "fuse", "9p", "cifs"):
        mounts.write_text(MOUNTS.format(tmp_path, kind))
        found = [run_lock.is_local_file_system(tmp_path / each) for each in ("", "shared/run", "shared/my disk/run")]
        assert found == [True, False, True], kind


def test_of_two_owners_that_start_at_once_where_locks_are_local_one_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flock succeeds for both, as on two machines, and both find no record."""
    monkeypatch.setattr(run_lock, "is_local_file_system", lambda directory: False)
    monkeypatch.setattr(run_lock.fcntl, "flock", lambda *arguments: None)
    both, write, refused, owners = threading.Barrier(2), run_lock.RunLock._write, [], []
    done = threading.Barrier(2)

    def write_together(lock: run_lock.RunLock, file: IO[bytes]) -> run_lock.RunOwner:
        both.wait(60)
        return write(lock, file)

    def train() -> None:
        try:
            with own_run_directory(tmp_path):
                owners.append(read_owner(tmp_path))
                done.wait(60)
        except ConfigError as error:
            refused.append(str(error))
            done.wait(60)

    monkeypatch.setattr(run_lock.RunLock, "_write", write_together)
    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(owners) == 1 and len(refused) == 1 and "TM1101" in refused[0]


def take_over(directory: Path) -> str:
    """Write the record of another process, as one does that found the heartbeat too old; return the file's text."""
    record = json.loads((directory / LOCK_FILE).read_text())
    (directory / LOCK_FILE).write_text(json.dumps({**record, "host": "gpu-7", "machine": "another", "token": "other"}))
    return (directory / LOCK_FILE).read_text()


def test_replaced_owner_stops_and_leaves_the_lock_to_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.01)
    texts = []

    def be_replaced() -> None:
        with own_run_directory(tmp_path):
            run_lock.check_ownership(tmp_path)
            texts.append(take_over(tmp_path))
            wait_until(stop.is_set)

    with handle_signals(raising=False) as stop:
        with pytest.raises(CheckpointError, match=r"gpu-7.*TM1177"):
            be_replaced()
        with pytest.raises(CheckpointError, match=r"removed.*TM1177"), own_run_directory(tmp_path / "other"):
            (tmp_path / "other" / LOCK_FILE).unlink()
    assert (tmp_path / LOCK_FILE).read_text() == texts[0]


def test_replaced_owner_publishes_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new owner's unfinished checkpoint stays, and so does its record."""
    directory, texts = tmp_path / "run", []
    foreign = directory / "checkpoints/step-000009.partial/weights.safetensors"
    prepare = run_directory.write_environment

    def suspend(engine: Engine, folder: Path) -> None:
        prepare(engine, folder)
        foreign.parent.mkdir(parents=True)
        foreign.touch()
        texts.append(take_over(directory))

    monkeypatch.setattr(run_directory, "write_environment", suspend)
    with pytest.raises(CheckpointError, match=r"gpu-7.*TM1177"):
        tm.train(tm.load("grpo-toy-flow", [f"output_dir={tmp_path}", "name=run", "steps=1", *SETTINGS]))
    assert [path.name for path in (directory / "checkpoints").iterdir()] == ["step-000009.partial"]
    assert foreign.exists() and (directory / LOCK_FILE).read_text() == texts[0]


def test_age_of_a_heartbeat_is_measured_by_the_clock_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of this machine is ten minutes ahead of, or behind, that of the file server."""
    owner = {"host": "gpu-7", "pid": 7, "started": "2026-01-01T00:00:00+00:00", "machine": "another", "process": "x 1"}
    now, file = time.time(), tmp_path / LOCK_FILE
    for offset in (600, -600):
        monkeypatch.setattr(run_lock.time, "time", lambda offset=offset: now + offset)
        file.write_text(json.dumps(owner))
        os.utime(file, (now - STALE_SECONDS + 60,) * 2)
        with pytest.raises(ConfigError, match=r"sign of life is 6[0-9] s old.*TM1101"), own_run_directory(tmp_path):
            pass
        os.utime(file, (now - STALE_SECONDS - 60,) * 2)
        with own_run_directory(tmp_path):
            assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE]
