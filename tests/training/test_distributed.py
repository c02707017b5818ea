"""Several ranks equal one: two processes (four for HSDP) run all checks of engine_ranks.py in one launch."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from engine_toys import Recorder, data, environment, equal, full_weights, learn, ready, whole
from launch_ranks import failures, report
from safetensors.torch import save_file

from tastemaker.config.schema import CheckpointConfig, OptimConfig
from tastemaker.training import checkpoint, optimizer
from tastemaker.training.distributed import mesh_shape
from tastemaker.training.engine import TrainingError

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("ranks")]
EACH = ("gradient", "norm", "held_back", "repeated", "borrowed", "twins", "lora", "low_precision", "reduced", "refused")
TWO = [
    *(f"{check}:{strategy}" for strategy in ("replicated", "sdp", "fsdp") for check in (*EACH, "checkpoints")),
    *("full_disk:fsdp", "team:replicated", "frozen_unused:replicated", "few_bits:fsdp", "few_bits:replicated"),
    "called_by_turns:fsdp",
]
FOUR = [f"{check}:hsdp" for check in ("gradient", "norm", "held_back", "borrowed", "lora", "refused", "checkpoints")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of one process, for the ranks to compare with."""
    torch.set_num_threads(1)
    result = tmp_path_factory.mktemp("ranks")
    weights = full_weights()
    engine = ready(weights, OptimConfig(max_grad_norm=0))
    recorder = Recorder(engine)
    loss = learn(engine, weights, 0)
    save_file({"loss": torch.tensor(loss), **recorder.gradients}, result / "gradient.safetensors")
    engine.backward((weights.net(weights.net(data())) + weights.net(2 * data())).sum(), last=True)
    engine.step(0)
    save_file(recorder.gradients, result / "repeated.safetensors")
    weights = full_weights("old")
    engine = ready(weights)
    for step in range(3):
        learn(engine, weights, step)
    for form in ("consolidated", "sharded"):
        extra = {"step": 3, "memory": {"a": [1, 2]}}
        checkpoint.save(result / f"one-{form}", 3, engine, weights, extra, CheckpointConfig(format=form))  # type: ignore[arg-type]
    save_file(whole(weights.trainable()), result / "trained.safetensors")
    save_file(whole(weights.snapshot_tensors()["old"]), result / "old.safetensors")
    learn(engine, weights, 3)
    save_file(whole(weights.trainable()), result / "fourth.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "MIN_BLOCK", 1)
        save_file(few_bits(), result / "few_bits.safetensors")
    return result


def few_bits() -> dict[str, torch.Tensor]:
    weights = full_weights()
    engine = ready(weights, OptimConfig(lr=1e-2, state_dtype="int8"), precision="bf16", param_dtype="bf16")
    for step in range(3):
        for p in engine.parameters.values():
            p.grad = torch.ones_like(p)
        engine.optimizer.update(1e-2 / (step + 1))
    return whole(weights.trainable()) | whole(engine.optimizer.state_dict())


def test_two_ranks_agree_with_one(folder: Path) -> None:
    assert failures(report("engine_ranks.py", folder, 2, *TWO), TWO) == []
    for strategy, form in product(("replicated", "fsdp"), ("consolidated", "sharded")):
        one_process_reads(folder / f"{strategy}-{form}" / "checkpoints" / "step-000004")


@pytest.mark.slow
def test_four_ranks_in_two_replicas_agree_with_one(folder: Path) -> None:
    assert failures(report("engine_ranks.py", folder, 4, *FOUR), FOUR) == []


def one_process_reads(path: Path) -> None:
    """Load what the ranks saved: everything, or the weights alone."""
    weights = full_weights("old", seed=9)
    engine = ready(weights)
    assert checkpoint.load(path, engine, weights) == {"step": 4}
    theirs = full_weights()
    checkpoint.initialize_weights(path, theirs)
    equal(whole(theirs.trainable()), whole(weights.trainable()))
    assert engine.optimizer.state_dict()["enter.weight.step"] == 4


def test_hsdp_replicas_must_divide_the_world_size() -> None:
    assert mesh_shape("hsdp", 2, 8) == (2, 4)
    assert mesh_shape("fsdp", 2, 8) == (8,)
    with pytest.raises(TrainingError, match=r"engine.hsdp_replicas"):
        mesh_shape("hsdp", 3, 8)


@pytest.mark.slow
def test_engine_joins_and_leaves_the_process_group_of_torchrun() -> None:
    program = """
from engine_toys import full_weights, learn, ready
weights = full_weights()
engine = ready(weights, strategy="fsdp")
assert engine.comm.world_size == 2
learn(engine, weights, 0)
engine.close()
"""
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
    ]
    command = [sys.executable, *launcher, "--no-python", sys.executable, "-c", program]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
