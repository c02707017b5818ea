"""Killed and interrupted runs lose no completed checkpoint and resume exactly."""

import random
import signal
import sys
import time
from pathlib import Path

import pytest
from launch_ranks import Process, environments, finish, launch, start
from safetensors.torch import load_file
from waiting import handles_signal, wait_until

from tastemaker.training import checkpoint


def final_tensors(directory: Path, step: int) -> dict:
    files = sorted((directory / f"checkpoints/step-{step:06d}").rglob("*.safetensors"))
    assert files
    return {f"{file.name}/{key}": x for file in files for key, x in load_file(file).items()}


def all_equal(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(x.equal(other[key]) for key, x in one.items())


def kill_after(processes: list[Process], saved: int, delay: float) -> int:
    """Kill all ranks `delay` seconds after `saved` checkpoints were printed; return the last one printed."""
    last = 0
    for line in processes[0].stdout:
        last, saved = int(line), saved - 1  # the first line is the initial step
        if saved < 0:
            break
    time.sleep(delay)
    for process in processes:
        process.send_signal(signal.SIGKILL)
    for line in processes[0].stdout:  # printed during the delay
        last = int(line)
    for process in processes:
        process.wait()
        process.stdout.close()
    return last


KILLED_SLOW = ("ddpo-toy-causal", "grpo-toy-flow", "nft-toy-flow", "epg-toy-flow", "elbo-grpo-toy-masked")
KILLED = [
    "grpo-lora-toy-flow",
    *(pytest.param(recipe, marks=pytest.mark.slow) for recipe in KILLED_SLOW),
    *(pytest.param(recipe, marks=pytest.mark.slow) for recipe in ("ram-toy-flow", "dgpo-toy-flow", "crd-toy-flow")),
]


@pytest.mark.parametrize("recipe", KILLED)
def test_killed_run_resumes_bit_for_bit(recipe, tmp_path):
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    processes = launch(recipe, uninterrupted, "steps=6")
    killed_processes = launch(recipe, killed, "steps=6", "checkpoint.every=3")
    kill_after(killed_processes, saved=1, delay=0.0)
    finish(processes)
    assert checkpoint.latest_checkpoint(killed) is not None
    # One recipe resumes in a new interpreter with another hash seed: the order of a set must not matter.
    finish(launch(recipe, killed, "steps=6", "checkpoint.every=3", new_interpreter=recipe == KILLED[0]))
    assert all_equal(final_tensors(uninterrupted, 6), final_tensors(killed, 6))


def test_sigterm_saves_a_checkpoint_and_stops(tmp_path):
    (process,) = launch("grpo-toy-flow", tmp_path, "steps=100000", "checkpoint.every=100000")
    assert process.stdout.readline().strip() == "0"  # it has started
    wait_until(lambda: handles_signal(process.process.pid, signal.SIGTERM))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    latest = checkpoint.latest_checkpoint(tmp_path)
    assert latest is not None and latest.name == f"step-{int(output):06d}" and int(output) > 0


@pytest.mark.ranks
def test_rank_ends_with_a_message_if_another_one_never_joins(tmp_path):
    environment = {**environments(2)[0], "TASTEMAKER_RENDEZVOUS_SECONDS": "2"}
    command = [sys.executable, "-m", "tastemaker", "train", "grpo-toy-flow", f"output_dir={tmp_path}"]
    errors = start(command, environment).communicate(timeout=120)[1]
    assert "rank 0 of 2" in errors and "TM1640" in errors


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "strategy", "kills"), [(1, "replicated", 14), (2, "fsdp", 4)])
def test_random_kills_lose_no_complete_checkpoint(ranks, strategy, kills, tmp_path):
    """With a checkpoint at every step, kills often interrupt a save."""
    rng = random.Random(ranks)
    settings = (f"steps={5 * kills}", f"engine.strategy={strategy}", "checkpoint.format=consolidated", "ema_decay=0.9")
    killed = tmp_path / "killed"
    for i in range(kills):
        processes = launch("nft-toy-flow", killed, *settings, ranks=ranks)
        last_printed = kill_after(processes, saved=rng.randint(1, 3), delay=rng.random() * 0.05)
        latest = checkpoint.latest_checkpoint(killed)
        assert latest is not None and int(latest.name.split("-")[1]) >= last_printed, f"kill {i}"
    finish(launch("nft-toy-flow", killed, *settings, ranks=ranks))
    uninterrupted = tmp_path / "uninterrupted"
    finish(launch("nft-toy-flow", uninterrupted, *settings, ranks=ranks))
    assert all_equal(final_tensors(uninterrupted, 5 * kills), final_tensors(killed, 5 * kills))
