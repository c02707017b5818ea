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

import pytest
from fork_server import ForkedProcess
from launch_ranks import environments
from waiting import is_frozen, wait_until

import tastemaker as tm
from tastemaker.cli import main
from tastemaker.cli.options import EXIT_INTERRUPTED, EXIT_USAGE
from tastemaker.core.checkpoint_files import latest_checkpoint
from tastemaker.core.errors import ConfigError
from tastemaker.training import run_lock
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
