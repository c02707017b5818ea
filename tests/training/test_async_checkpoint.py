"""Checkpoints written by a thread hold what a blocking save would, and their errors reach the loop."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import finish, launch
from safetensors.torch import load_file
from test_interruption import all_equal, kill_after

from tastemaker.config.build import build
from tastemaker.config.load import load
from tastemaker.core.checkpoint_files import checkpoint_step
from tastemaker.core.errors import CheckpointError
from tastemaker.core.objective import SingleProcess
from tastemaker.training import checkpoint
from tastemaker.training.events import CheckpointSaved
from tastemaker.training.loop import train

RECIPE = "grpo-toy-flow"
SETTINGS = ["sample.every=0", "guard.every=0", "checkpoint.every=1", "checkpoint.keep_last=0", "ema_decay=0.9"]


@dataclass(frozen=True)
class WaitingProcess(SingleProcess):
    """A process whose collectives wait until they are allowed, as those of a slow rank."""

    allowed: threading.Event = field(default_factory=threading.Event)

    def gather_objects(self, items: Sequence[Any]) -> list[Any]:
        assert self.allowed.wait(120)
        return list(items)


def all_files(directory: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {str(file.relative_to(directory)): load_file(file) for file in sorted(directory.rglob("*.safetensors"))}


def test_asynchronous_run_saves_the_same_checkpoints(tmp_path: Path) -> None:
    for name, asynchronous in (("blocking", "false"), ("asynchronous", "true")):
        config = load(RECIPE, [*SETTINGS, "steps=3", f"checkpoint.asynchronous={asynchronous}"])
        events = list(train(build(config, tmp_path / name)))
        assert sorted(event.step for event in events if isinstance(event, CheckpointSaved)) == [1, 2, 3]
    blocking, asynchronous = (all_files(tmp_path / name) for name in ("blocking", "asynchronous"))
    assert blocking.keys() == asynchronous.keys() and blocking
    for file, tensors in blocking.items():
        assert all_equal(tensors, asynchronous[file]), file
    run = build(load(RECIPE, SETTINGS), tmp_path / "resumed")
    run.resume(tmp_path / "asynchronous/checkpoints/step-000002")
    assert run.start_step == 2


def test_weights_may_change_while_they_are_written(tmp_path: Path) -> None:
    run = build(load(RECIPE, [*SETTINGS, "checkpoint.asynchronous=true"]), tmp_path)
    comm = WaitingProcess()
    run.checkpoint_writer.comm = comm
    before = {key: x.detach().clone() for key, x in run.policy.weights.trainable().items()}
    run.start_saving(1)
    with torch.no_grad():
        for x in run.policy.weights.trainable().values():
            x.add_(1.0)
    assert run.checkpoint_writer.poll() is None and checkpoint.latest_checkpoint(tmp_path) is None
    comm.allowed.set()
    path = run.finish_saving()
    assert path is not None and all_equal(load_file(path / "weights.safetensors"), before)


def test_error_of_the_thread_ends_the_run_at_the_next_save(tmp_path: Path) -> None:
    run = build(load(RECIPE, [*SETTINGS, "steps=3", "checkpoint.asynchronous=true"]), tmp_path)
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="TM828"):
        list(train(run))
    assert run.checkpoint_writer.finish() is None


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_save_shards_asynchronously(tmp_path: Path) -> None:
    settings = ("steps=3", "ema_decay=0.9", "engine.strategy=fsdp", "checkpoint.format=sharded")
    finish(launch(RECIPE, tmp_path / "blocking", *settings, ranks=2))
    finish(launch(RECIPE, tmp_path / "asynchronous", *settings, "checkpoint.asynchronous=true", ranks=2))
    blocking, asynchronous = (all_files(tmp_path / name) for name in ("blocking", "asynchronous"))
    assert blocking.keys() == asynchronous.keys()
    assert all(all_equal(tensors, asynchronous[file]) for file, tensors in blocking.items())


@pytest.mark.parametrize(
    ("ranks", "kills"),
    [
        pytest.param(1, 6, marks=pytest.mark.slow),
        pytest.param(1, 80, marks=pytest.mark.long),
        pytest.param(2, 20, marks=[pytest.mark.long, pytest.mark.ranks]),
    ],
)
def test_random_kills_lose_only_the_unfinished_checkpoint(ranks: int, kills: int, tmp_path: Path) -> None:
    rng = random.Random(kills)
    strategy = "fsdp" if ranks > 1 else "replicated"
    settings = (f"steps={5 * kills}", f"engine.strategy={strategy}", "checkpoint.format=sharded", "ema_decay=0.9")
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for i in range(kills):
        processes = launch("nft-toy-flow", killed, *settings, "checkpoint.asynchronous=true", ranks=ranks)
        last_printed = kill_after(processes, saved=rng.randint(1, 3), delay=rng.random() * 0.05)
        latest = checkpoint.latest_checkpoint(killed)
        assert latest is not None and (checkpoint_step(latest) or 0) >= last_printed, f"kill {i}"
    finish(launch("nft-toy-flow", killed, *settings, "checkpoint.asynchronous=true", ranks=ranks))
    finish(launch("nft-toy-flow", whole, *settings, ranks=ranks))
    last = f"checkpoints/step-{5 * kills:06d}"
    one, other = all_files(whole / last), all_files(killed / last)
    assert one.keys() == other.keys() and all(all_equal(tensors, other[file]) for file, tensors in one.items())
