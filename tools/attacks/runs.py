"""Attacks on running training: kills, signals, disks, a second owner, and leaks."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .lab import (
    Lab,
    Process,
    attack,
    count_logged_steps,
    expect,
    expect_equal_runs,
    list_steps,
    train_arguments,
)

MB = 2**20
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "tastemaker")
INTERRUPTED = 130  # exit code


def save_in_progress(directory: Path) -> bool:
    return any((directory / "checkpoints").glob("step-*.partial"))


def kill_repeatedly(
    lab: Lab, kills: int, *, during_save: bool, more: Sequence[str] = (), launcher: Sequence[str] = ()
) -> None:
    """Kill a run that saves at every step again and again, let it finish, and compare it with an undisturbed one."""
    steps = 4 * kills + 8
    options = {"launcher": launcher, "env": {"PYTHONSAFEPATH": "1"}}
    lab.run(*train_arguments(lab.folder, "undisturbed", steps, *more), **options).expect_success()
    directory, arguments = lab.folder / "killed", train_arguments(lab.folder, "killed", steps, *more)
    for i in range(kills):
        with lab.attempt(f"kill {i + 1}"):
            before = max(list_steps(directory), default=0)
            process = lab.start(*arguments, **options)
            goal = before + lab.rng.randint(1, 2)
            process.wait_until(lambda goal=goal: max(list_steps(directory), default=0) >= goal, interval=0.001)
            if during_save:
                process.wait_until(lambda: save_in_progress(directory), interval=0.0002)
            else:
                time.sleep(lab.rng.random() * 0.05)
            complete = max(list_steps(directory))
            process.kill()
            expect(max(list_steps(directory), default=0) >= complete, f"the checkpoint of step {complete} is lost")
    with lab.attempt("the run that was killed, finished"):
        lab.run(*arguments, **options).expect_success()
        expect_equal_runs(lab.folder / "undisturbed", directory, steps)


@attack("kill-one-process", "no complete checkpoint is lost; the finished run is equal to the bit", quick=True)
def kill_one_process(lab: Lab) -> None:
    kill_repeatedly(lab, lab.count(10, 1), during_save=False)


@attack("kill-during-save", "no complete checkpoint is lost; the finished run is equal to the bit")
def kill_during_save(lab: Lab) -> None:
    kill_repeatedly(lab, lab.count(12, 1), during_save=True)


@attack("kill-two-fsdp-ranks", "the same for two ranks with sharded checkpoints under torchrun")
def kill_two_ranks(lab: Lab) -> None:
    more = ("engine.strategy=fsdp", "checkpoint.format=sharded")
    kill_repeatedly(lab, lab.count(4, 1), during_save=True, more=more, launcher=TWO_RANKS)


def start_ranks(lab: Lab, arguments: Sequence[str]) -> list[Process]:
    """Start two ranks without torchrun, which would end the peer of a killed rank itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [lab.start(*arguments, env={**shared, "RANK": f"{i}", "LOCAL_RANK": f"{i}"}) for i in range(2)]


@attack("kill-one-of-two-ranks", "the other rank ends with an error within 60 s")
def kill_one_rank(lab: Lab) -> None:
    for killed in range(2):
        with lab.attempt(f"rank {killed} killed"):
            directory = lab.folder / f"rank-{killed}"
            ranks = start_ranks(lab, train_arguments(lab.folder, directory.name, 100000, every=100000))
            ranks[0].wait_until(lambda directory=directory: count_logged_steps(directory) >= 3)
            ranks[killed].kill()
            result = ranks[1 - killed].wait(60)
            expect(result.code != 0, "the other rank ended with exit code 0")


@attack("signals", "the run saves every completed step and ends with exit code 130", quick=True)
def send_signals(lab: Lab) -> None:
    numbers = [signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGINT][: lab.count(4, 1)]
    for number in numbers:
        with lab.attempt(number.name):
            directory = lab.folder / number.name
            process = lab.start(*train_arguments(lab.folder, number.name, 100000, every=100000))
            process.wait_until(lambda directory=directory: count_logged_steps(directory) >= 5)
            process.send(number)
            result = process.wait(60)
            expect(result.code == INTERRUPTED, f"exit code {result.code}, expected {INTERRUPTED}")
            saved, logged = max(list_steps(directory), default=0), count_logged_steps(directory)
            expect(saved == logged, f"step {saved} of {logged} was saved")


# A second owner


def stop_after_two_steps(lab: Lab, directory: Path, arguments: Sequence[str]) -> Process:
    """Start a run and freeze it, so that it owns its directory while something else is tried."""
    owner = lab.start(*arguments)
    owner.wait_until(lambda: count_logged_steps(directory) >= 2)
    owner.send(signal.SIGSTOP)
    return owner


@attack("two-processes-one-run", "the second is refused, and the first finishes as if alone", quick=True)
def share_a_directory(lab: Lab) -> None:
    steps = 60
    lab.run(*train_arguments(lab.folder, "alone", steps, every=40)).expect_success()
    variants: dict[str, tuple[str, ...]] = {
        "another seed": ("seed=1",),
        "the same command": (),
        "another objective": ("objective.kl_coef=0.5",),
        "another length": ("steps=90",),
    }
    for name, more in list(variants.items())[: lab.count(4, 1)]:
        with lab.attempt(f"a second process with {name}"):
            directory = lab.folder / name.replace(" ", "-")
            arguments = train_arguments(lab.folder, directory.name, steps, every=40)
            owner = stop_after_two_steps(lab, directory, arguments)
            second = lab.start(*arguments, *more).wait(90)
            owner.send(signal.SIGCONT)
            second.expect_message(str(owner.pid))
            owner.wait().expect_success()
            expect_equal_runs(lab.folder / "alone", directory, steps)
    for i in range(lab.count(3, 0)):
        with lab.attempt("two at the same moment"):
            directory = lab.folder / f"race-{i}"
            arguments = train_arguments(lab.folder, directory.name, steps, every=40)
            codes = [process.wait().code for process in [lab.start(*arguments), lab.start(*arguments)]]
            expect(0 in codes, f"exit codes {codes}: none finished")
            expect_equal_runs(lab.folder / "alone", directory, steps)


@attack("owner-killed", "a dead owner's run can be resumed at once, and readers never need to own it")
def take_over(lab: Lab) -> None:
    steps = 60
    lab.run(*train_arguments(lab.folder, "alone", steps)).expect_success()
    directory, arguments = lab.folder / "killed", train_arguments(lab.folder, "killed", steps)
    with lab.attempt("a report of a run that another process trains"):
        owner = stop_after_two_steps(lab, directory, arguments)
        lab.run("report", str(directory)).expect_success()
        owner.kill()
        expect(list_steps(directory), "no checkpoint was saved")
    with lab.attempt("the same command after a kill"):
        lab.run(*arguments).expect_success()
        expect_equal_runs(lab.folder / "alone", directory, steps)


# Disks


@contextmanager
def mount_small_disk(folder: Path, megabytes: float) -> Iterator[bool]:
    """Mount a file system in memory; yield False where that is not allowed."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={int(megabytes * MB)}", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(["mount", *options], capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)


def remount(folder: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", str(folder)], check=True, capture_output=True)


@attack("full-disk", "exit code 1 with a message; older checkpoints stay; with space it finishes equal to the bit")
def fill_the_disk(lab: Lab) -> None:
    with lab.attempt("a file may not grow"):
        directory = lab.copy_run("small-files")
        lab.run("train", str(directory), file_bytes=600_000).expect_message()
        expect(list_steps(directory) == [2, 4, 6], f"checkpoints {list_steps(directory)} are left of 2, 4, 6")
        lab.run("train", str(directory)).expect_success()
        lab.expect_reference(directory)
    for megabytes in (6.5, 7.5, 8.3)[: lab.count(3, 1)]:
        disk = lab.folder / f"disk-{megabytes}"
        with mount_small_disk(disk, megabytes) as mounted:
            if not mounted:
                lab.skip("no small disk can be mounted here")
                return
            with lab.attempt(f"a disk of {megabytes} MB"):
                directory = disk / "run"
                shutil.copytree(lab.copy_run(f"for-{megabytes}"), directory)
                lab.run("train", str(directory)).expect_message()
                expect(list_steps(directory)[:3] == [2, 4, 6], f"checkpoints {list_steps(directory)} are left")
                remount(disk, f"size={100 * MB}")
                lab.run("train", str(directory)).expect_success()
                lab.expect_reference(directory)


@attack("read-only-disk", "exit code 1 or 2 with a message; nothing is damaged")
def write_protect(lab: Lab) -> None:
    disk = lab.folder / "disk"
    with mount_small_disk(disk, 100) as mounted:
        if not mounted and os.geteuid() == 0:
            lab.skip("no disk can be mounted here, and root ignores permissions")
            return
        directory = disk / "run"
        shutil.copytree(lab.copy_run("writable"), directory)
        remount(disk, "ro") if mounted else disk.chmod(0o555) or directory.chmod(0o555)
        for command in (["train", str(directory)], train_arguments(disk, "new", 5), ["report", str(directory)]):
            with lab.attempt(command[0]):
                lab.run(*command).expect_message()
        with lab.attempt("writable again"):
            remount(disk, "rw") if mounted else disk.chmod(0o755) or directory.chmod(0o755)
            lab.run("train", str(directory)).expect_success()
            lab.expect_reference(directory)


# Leaks


@attack("leaks", "memory grows by less than 32 MiB after the first quarter of 2,400 steps")
def look_for_leaks(lab: Lab) -> None:
    steps, directory = lab.count(2400, 400), lab.folder / "long"
    with lab.attempt("a long run"):
        small = ("batch.prompts=1", "objective.group_size=2", "process.num_steps=4")
        process = lab.start(*train_arguments(lab.folder, "long", steps, *small, "checkpoint.keep_last=2", every=200))
        process.wait_until(lambda: count_logged_steps(directory) >= steps // 4, 600)
        early, files = process.status("VmRSS"), process.open_files()
        process.wait_until(lambda: count_logged_steps(directory) >= steps - 20, 600)
        late, more_files = process.status("VmRSS"), process.open_files()
        process.wait().expect_success()
        grown = (late - early) / MB
        lab.notes.append(f"grew by {grown:.0f} MiB")
        expect(grown < 32, f"grew by {grown:.0f} MiB")
        expect(more_files <= files + 2, f"{files} open files became {more_files}")
