"""Killed and interrupted runs lose no completed checkpoint and resume exactly."""

import random
import signal
import time
from pathlib import Path

import pytest
from launch_ranks import Process, finish, launch
from safetensors.torch import load_file

from tastemaker.training import checkpoint


def final(directory: Path, step: int) -> dict:
    files = sorted((directory / f"checkpoints/step-{step:06d}").rglob("*.safetensors"))
    assert files
    return {f"{file.name}/{key}": x for file in files for key, x in load_file(file).items()}


def equal(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(x.equal(other[key]) for key, x in one.items())


def kill_after(processes: list[Process], saved: int, delay: float) -> int:
    """Kill all ranks `delay` seconds after `saved` checkpoints were printed; return the last one printed."""
    last = 0
    for line in processes[0].stdout:
        last, saved = int(line), saved - 1  # the first line tells the start
        if saved < 0:
            break
    time.sleep(delay)
    for process in processes:
        process.send_signal(signal.SIGKILL)
    for line in processes[0].stdout:  # what was announced while we waited
        last = int(line)
    for process in processes:
        process.wait()
        process.stdout.close()
    return last


KILLED = [
    "grpo-lora-toy-flow",
    *(pytest.param(recipe, marks=pytest.mark.slow) for recipe in ("ddpo-toy-causal", "grpo-toy-flow", "nft-toy-flow")),
]


@pytest.mark.parametrize("recipe", KILLED)
def test_killed_run_resumes_bit_for_bit(recipe, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    straight = launch(recipe, whole, "steps=6")
    first = launch(recipe, broken, "steps=6", "checkpoint.every=3")
    kill_after(first, saved=1, delay=0.0)
    finish(straight)
    assert checkpoint.latest_checkpoint(broken) is not None
    # One of them in a fresh interpreter, which hashes anew: no order of a set may matter.
    finish(launch(recipe, broken, "steps=6", "checkpoint.every=3", fresh=recipe == KILLED[0]))
    assert equal(final(whole, 6), final(broken, 6))


def test_sigterm_saves_a_checkpoint_and_stops(tmp_path):
    (process,) = launch("grpo-toy-flow", tmp_path, "steps=100000", "checkpoint.every=100000")
    assert process.stdout.readline().strip() == "0"  # it has started
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    saved, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    result = checkpoint.latest_checkpoint(tmp_path)
    assert result is not None and result.name == f"step-{int(saved):06d}" and int(saved) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "strategy", "kills"), [(1, "replicated", 14), (2, "fsdp", 4)])
def test_random_kills_lose_no_complete_checkpoint(ranks, strategy, kills, tmp_path):
    """With a checkpoint at every step, kills often interrupt a save."""
    chance = random.Random(ranks)
    settings = (f"steps={5 * kills}", f"engine.strategy={strategy}", "checkpoint.format=consolidated", "ema_decay=0.9")
    broken = tmp_path / "broken"
    for i in range(kills):
        processes = launch("nft-toy-flow", broken, *settings, ranks=ranks)
        announced = kill_after(processes, saved=chance.randint(1, 3), delay=chance.random() * 0.05)
        result = checkpoint.latest_checkpoint(broken)
        assert result is not None and int(result.name.split("-")[1]) >= announced, f"kill {i}"
    finish(launch("nft-toy-flow", broken, *settings, ranks=ranks))
    whole = tmp_path / "whole"
    finish(launch("nft-toy-flow", whole, *settings, ranks=ranks))
    assert equal(final(whole, 5 * kills), final(broken, 5 * kills))
