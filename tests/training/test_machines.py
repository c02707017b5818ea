"""Runs on two machines: equal to one rank, and bounded when one of them dies, is cut off or is far away."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_ranks import finish, launch
from machines import Machine, VirtualLink, two_machines, why_unavailable
from test_run_ranks import assert_close, final_tensors

from tastemaker.training.checkpoint import latest_checkpoint

RECIPE = "grpo-toy-causal"
SETTINGS = ("sample.every=0", "guard.every=0", "checkpoint.every=1", "batch.prompts=4")
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
        latest = latest_checkpoint(directory)
        if latest is not None and int(latest.name.split("-")[1]) >= step:
            return
        ended = [process for process in processes if process.poll() is not None]
        assert not ended, ended[0].communicate()[0]
        time.sleep(0.1)
    raise AssertionError(f"no checkpoint of step {step} within {seconds} s")


def test_hsdp_on_two_machines_equals_one_rank(machines: Machines, tmp_path: Path) -> None:
    first, second, _ = machines
    settings = ("engine.strategy=hsdp", "engine.hsdp_replicas=2", "checkpoint.format=sharded", "ema_decay=0.9")
    command = train(tmp_path / "two", 4, *settings)
    both = [first.torchrun(*command), second.torchrun(*command)]
    finish(launch(RECIPE, tmp_path / "one", "steps=4", "ema_decay=0.9"))
    finish_both(both)
    assert_close(final_tensors(tmp_path / "one"), final_tensors(tmp_path / "two"))


@pytest.mark.parametrize("cause", ["killed", pytest.param("cut off", marks=pytest.mark.long)])
def test_run_ends_with_a_message_when_the_other_machine_is_lost(cause: str, machines: Machines, tmp_path: Path) -> None:
    first, second, link = machines
    command = train(tmp_path / "run", 100_000)
    patience = "30" if cause == "killed" else "15"  # seconds; peers notice a kill without waiting for them
    both = [machine.torchrun(*command, TASTEMAKER_COLLECTIVE_SECONDS=patience) for machine in (first, second)]
    wait_for_step(tmp_path / "run", 3, both)
    second.kill() if cause == "killed" else link.cut.set()
    lost = time.monotonic()
    output = both[0].communicate(timeout=120)[0]
    assert both[0].returncode != 0
    assert time.monotonic() - lost < 60
    assert re.search(r"lost .* other rank.*TM2600", output, re.DOTALL), output
    assert latest_checkpoint(tmp_path / "run") is not None


@pytest.mark.long
def test_slow_link_changes_nothing_but_the_time(tmp_path: Path) -> None:
    with two_machines(delay=0.1) as (first, second, _):
        command = train(tmp_path / "two", 4, "ema_decay=0.9")
        both = [first.torchrun(*command), second.torchrun(*command)]
        finish(launch(RECIPE, tmp_path / "one", "steps=4", "ema_decay=0.9"))
        finish_both(both)
    assert_close(final_tensors(tmp_path / "one"), final_tensors(tmp_path / "two"))
