"""Runs on two machines: equal to one rank, bounded or continued when one of them dies, is cut off or is far away."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from launch_ranks import finish, launch
from machines import Machine, VirtualLink, two_machines, why_unavailable
from test_run_ranks import assert_close, final_tensors, read_tensors

from tastemaker.core.checkpoint_files import checkpoint_step
from tastemaker.training.checkpoint import latest_checkpoint

RECIPE = "grpo-toy-causal"
SETTINGS = ("sample.every=0", "guard.every=0", "checkpoint.every=1", "batch.prompts=4")
SHARDED = ("engine.strategy=fsdp", "checkpoint.format=sharded", "checkpoint.keep_last=0", "ema_decay=0.9")
Machines = tuple[Machine, Machine, VirtualLink]
UNAVAILABLE = why_unavailable()
pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE)]


@pytest.fixture
def machines() -> Iterator[Machines]:
    with two_machines() as made:
        yield made


def train(directory: Path, steps: int, *settings: str) -> tuple[str, ...]:
    place = (f"output_dir={directory.parent}", f"name={directory.name}")
    return ("train", RECIPE, *place, f"steps={steps}", *SETTINGS, *settings)


def finish_both(processes: list[subprocess.Popen[str]], seconds: float = 600) -> list[str]:
    """Wait until both torchruns have ended well; return what they printed."""
    outputs = [process.communicate(timeout=seconds)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    return outputs


def wait_for_step(directory: Path, step: int, processes: list[subprocess.Popen[str]], seconds: float = 400) -> None:
    """Wait until a checkpoint of at least this step exists."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if last_step(directory) >= step:
            return
        ended = [process for process in processes if process.poll() is not None]
        assert not ended, ended[0].communicate()[0]
        time.sleep(0.1)
    raise AssertionError(f"no checkpoint of step {step} within {seconds} s")


def last_step(directory: Path) -> int:
    """Return the step of the newest checkpoint; 0 if there is none."""
    latest = latest_checkpoint(directory)
    return (latest and checkpoint_step(latest)) or 0


def wait_for_workers(machines: Sequence[Machine], directory: Path, processes: list[subprocess.Popen[str]]) -> None:
    """Wait until each of the machines runs two of four ranks and the run has saved three more steps since."""
    deadline = time.monotonic() + 120
    while sorted(rank for machine in machines for rank in machine.workers()) != [0, 1, 2, 3]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    wait_for_step(directory, last_step(directory) + 3, processes)


def identify_files(directory: Path) -> dict[str, tuple[int, int]]:
    files = (directory / "checkpoints").rglob("*.safetensors")
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


def tensors_of_step(directory: Path, step: int) -> dict[str, torch.Tensor]:
    checkpoint = directory / f"checkpoints/step-{step:06d}"
    parts = ("weights", "snapshots/ema")
    return {f"{part}/{key}": x for part in parts for key, x in read_tensors(checkpoint, part).items()}


def test_hsdp_on_two_machines_equals_one_rank(machines: Machines, tmp_path: Path) -> None:
    first, second, _ = machines
    settings = ("engine.strategy=hsdp", "engine.hsdp_replicas=2", "checkpoint.format=sharded", "ema_decay=0.9")
    command = train(tmp_path / "two", 4, *settings)
    both = [first.torchrun(*command), second.torchrun(*command)]
    finish(launch(RECIPE, tmp_path / "one", "steps=4", "ema_decay=0.9"))
    finish_both(both)
    assert_close(final_tensors(tmp_path / "one"), final_tensors(tmp_path / "two"))


@pytest.mark.parametrize(
    ("lost", "cause"),
    [
        ("second", "killed"),
        pytest.param("second", "cut off", marks=pytest.mark.long),
        ("first", "killed"),  # the endpoint of the rendezvous
    ],
)
def test_run_ends_with_a_message_when_the_other_machine_is_lost(
    lost: str, cause: str, machines: Machines, tmp_path: Path
) -> None:
    first, second, link = machines
    command = train(tmp_path / "run", 100_000)
    patience = "30" if cause == "killed" else "15"  # seconds; peers notice a kill without waiting for them
    both = [machine.torchrun(*command, TASTEMAKER_COLLECTIVE_SECONDS=patience) for machine in (first, second)]
    wait_for_step(tmp_path / "run", 3, both)
    survivor = both[0] if lost == "second" else both[1]
    (second if lost == "second" else first).kill() if cause == "killed" else link.cut.set()
    lost_at = time.monotonic()
    output = survivor.communicate(timeout=180)[0]
    assert survivor.returncode != 0
    assert time.monotonic() - lost_at < 120
    assert re.search(r"lost .* other rank.*TM2600", output, re.DOTALL), output
    assert latest_checkpoint(tmp_path / "run") is not None


@pytest.mark.long
def test_ranks_end_with_a_message_when_the_endpoint_is_cut_off(machines: Machines, tmp_path: Path) -> None:
    """torchrun itself stays, because it waits for an answer of the endpoint."""
    first, second, link = machines
    command = train(tmp_path / "run", 100_000)
    both = [machine.torchrun(*command, TASTEMAKER_COLLECTIVE_SECONDS="15") for machine in (first, second)]
    wait_for_workers((first, second), tmp_path / "run", both)
    link.cut.set()
    deadline = time.monotonic() + 120
    while second.workers():
        assert time.monotonic() < deadline
        time.sleep(0.5)
    second.kill()
    output = both[1].communicate(timeout=60)[0]
    assert re.search(r"rank [23] lost .* other rank.*TM2600", output, re.DOTALL), output


@pytest.mark.long
def test_killed_rank_restarts_from_the_last_checkpoint(machines: Machines, tmp_path: Path) -> None:
    first, second, _ = machines
    steps, directory = 20, tmp_path / "run"
    command = train(directory, steps, *SHARDED)
    both = [machine.torchrun(*command, restarts=1) for machine in (first, second)]
    wait_for_step(directory, 3, both)
    workers = second.workers()
    assert sorted(workers) == [2, 3]
    os.kill(workers[3], signal.SIGSTOP)  # the others wait for it
    assert last_step(directory) < steps
    time.sleep(1)  # for the step that is being saved
    saved = identify_files(directory)
    os.kill(workers[3], signal.SIGKILL)
    outputs = finish_both(both)
    assert re.search(r"-9|SIGKILL", outputs[1]), outputs[1]
    after = identify_files(directory)
    assert all(after[path] == identity for path, identity in saved.items())  # no step was trained again
    finish(launch(RECIPE, tmp_path / "whole", f"steps={steps}", "guard.every=0", *SHARDED, ranks=4))
    resumed, undisturbed = (tensors_of_step(tmp_path / name, steps) for name in ("run", "whole"))
    assert resumed.keys() == undisturbed.keys() and resumed
    for key, x in undisturbed.items():
        assert torch.equal(x, resumed[key]), key


@pytest.mark.long
@pytest.mark.parametrize("lost", ["second", "first"])
def test_run_goes_on_with_the_ranks_of_one_machine(lost: str, tmp_path: Path) -> None:
    """If the first machine is lost, rank 0 moves, and its lock stays until its heartbeat counts as stale."""
    steps, directory = 20, tmp_path / "run"
    with two_machines(host=0 if lost == "second" else 1) as (first, second, _):
        command = train(directory, steps, *SHARDED)
        both = [machine.torchrun(*command, nodes="1:2", restarts=1) for machine in (first, second)]
        wait_for_workers((first, second), directory, both)
        machine, survivor = (second, both[0]) if lost == "second" else (first, both[1])
        machine.stop()
        assert last_step(directory) < steps
        machine.kill()
        output = survivor.communicate(timeout=360)[0]
        assert survivor.returncode == 0, output
    finish(launch(RECIPE, tmp_path / "whole", f"steps={steps}", "guard.every=0", *SHARDED[1:]))
    assert len(list((directory / f"checkpoints/step-{steps:06d}/weights").glob("*.safetensors"))) == 2
    assert_close(tensors_of_step(tmp_path / "whole", steps), tensors_of_step(directory, steps))


@pytest.mark.long
def test_slow_link_changes_nothing_but_the_time(tmp_path: Path) -> None:
    with two_machines(delay=0.1) as (first, second, _):
        command = train(tmp_path / "two", 4, "ema_decay=0.9")
        both = [first.torchrun(*command), second.torchrun(*command)]
        finish(launch(RECIPE, tmp_path / "one", "steps=4", "ema_decay=0.9"))
        finish_both(both)
    assert_close(final_tensors(tmp_path / "one"), final_tensors(tmp_path / "two"))
