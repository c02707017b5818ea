"""Several ranks equal one: two processes (four for HSDP) run all checks of engine_ranks.py in one launch."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from engine_toys import (
    Recorder,
    assert_equal,
    build_engine,
    full_tensors,
    full_weights,
    make_inputs,
    subprocess_environment,
    train_step,
)
from launch_ranks import failures, report
from safetensors.torch import save_file

from tastemaker.config.schema import CheckpointConfig, OptimConfig
from tastemaker.training import checkpoint, optimizer
from tastemaker.training.distributed import mesh_shape
from tastemaker.training.engine import TrainingError

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("ranks")]
CHECKS = (
    "gradient",
    "norm",
    "last_micro_batch_sync",
    "repeated_calls",
    "use_snapshots",
    "frozen_copies",
    "lora",
    "low_precision",
    "reduce_dtype",
    "non_finite_loss",
)
CHECKS_ON_TWO_RANKS = [
    *(f"{check}:{strategy}" for strategy in ("replicated", "sdp", "fsdp") for check in (*CHECKS, "checkpoints")),
    *(
        "full_disk:fsdp",
        "collectives:replicated",
        "unused_parameters:replicated",
        "low_bit_states:fsdp",
        "low_bit_states:replicated",
    ),
    "data_dependent_forward:fsdp",
    *(
        f"{check}:cpu_offload"
        for check in (
            "gradient",
            "norm",
            "repeated_calls",
            "use_snapshots",
            "frozen_copies",
            "lora",
            "low_precision",
            "low_bit_states",
            "non_finite_loss",
            "checkpoints",
            "offload_equals_fsdp",
        )
    ),
]
CHECKS_ON_FOUR_RANKS = [
    f"{check}:hsdp"
    for check in (
        "gradient",
        "norm",
        "last_micro_batch_sync",
        "use_snapshots",
        "lora",
        "non_finite_loss",
        "checkpoints",
    )
]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of one process, for the ranks to compare with."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("ranks")
    weights = full_weights()
    engine = build_engine(weights, OptimConfig(max_grad_norm=0))
    recorder = Recorder(engine)
    loss = train_step(engine, weights, 0)
    save_file({"loss": torch.tensor(loss), **recorder.gradients}, directory / "gradient.safetensors")
    engine.backward((weights.net(weights.net(make_inputs())) + weights.net(2 * make_inputs())).sum(), last=True)
    engine.step(0)
    save_file(recorder.gradients, directory / "repeated_calls.safetensors")
    weights = full_weights("old")
    engine = build_engine(weights)
    for step in range(3):
        train_step(engine, weights, step)
    for format in ("consolidated", "sharded"):
        extra = {"step": 3, "memory": {"a": [1, 2]}}
        checkpoint.save(directory / f"one-{format}", 3, engine, weights, extra, CheckpointConfig(format=format))  # type: ignore[arg-type]
    save_file(full_tensors(weights.trainable()), directory / "trained.safetensors")
    save_file(full_tensors(weights.snapshot_tensors()["old"]), directory / "old.safetensors")
    train_step(engine, weights, 3)
    save_file(full_tensors(weights.trainable()), directory / "fourth.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "MIN_BLOCK", 1)
        save_file(low_bit_states(), directory / "low_bit_states.safetensors")
    return directory


def low_bit_states() -> dict[str, torch.Tensor]:
    weights = full_weights()
    engine = build_engine(weights, OptimConfig(lr=1e-2, state_dtype="int8"), precision="bf16", param_dtype="bf16")
    for step in range(3):
        for p in engine.parameters.values():
            p.grad = torch.ones_like(p)
        engine.optimizer.update(1e-2 / (step + 1))
    return full_tensors(weights.trainable()) | full_tensors(engine.optimizer.state_dict())


def test_two_ranks_equal_one(one_process: Path) -> None:
    assert failures(report("engine_ranks.py", one_process, 2, *CHECKS_ON_TWO_RANKS), CHECKS_ON_TWO_RANKS) == []
    for strategy, format in product(("replicated", "fsdp"), ("consolidated", "sharded")):
        assert_loads_on_one_process(one_process / f"{strategy}-{format}" / "checkpoints" / "step-000004")


@pytest.mark.slow
def test_hsdp_on_four_ranks_equals_one(one_process: Path) -> None:
    assert failures(report("engine_ranks.py", one_process, 4, *CHECKS_ON_FOUR_RANKS), CHECKS_ON_FOUR_RANKS) == []


def assert_loads_on_one_process(path: Path) -> None:
    """Load a checkpoint of several ranks on one process: the full state, or only the weights."""
    weights = full_weights("old", seed=9)
    engine = build_engine(weights)
    assert checkpoint.load(path, engine, weights) == {"step": 4}
    initialized = full_weights()
    checkpoint.initialize_weights(path, initialized)
    assert_equal(full_tensors(initialized.trainable()), full_tensors(weights.trainable()))
    assert engine.optimizer.state_dict()["proj_in.weight.step"] == 4


def test_hsdp_replicas_must_divide_the_world_size() -> None:
    assert mesh_shape("hsdp", 2, 8) == (2, 4)
    assert mesh_shape("fsdp", 2, 8) == (8,)
    with pytest.raises(TrainingError, match=r"engine\.hsdp_replicas.*TM269"):
        mesh_shape("hsdp", 3, 8)


@pytest.mark.slow
def test_engine_joins_and_leaves_the_process_group_of_torchrun() -> None:
    program = """
from engine_toys import build_engine, full_weights, train_step
weights = full_weights()
engine = build_engine(weights, strategy="fsdp")
assert engine.comm.world_size == 2
train_step(engine, weights, 0)
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
    process = subprocess.run(command, env=subprocess_environment(), capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
