"""Several ranks do what one does: two processes (four for hsdp) run every check of engine_ranks.py in one launch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine_toys import Recorder, data, environment, equal, full_weights, learn, ready, whole
from safetensors.torch import save_file

from tastemaker.config.run import CheckpointConfig, Optim
from tastemaker.train import checkpoint, rounding
from tastemaker.train.engine import TrainingError
from tastemaker.train.ranks import grid

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("ranks")]
HERE = Path(__file__).parent
EACH = ("gradient", "norm", "held_back", "repeated", "borrowed", "twins", "lora", "low_precision", "reduced", "refused")
TWO = [
    *(f"{check}:{strategy}" for strategy in ("replicated", "sdp", "fsdp") for check in (*EACH, "checkpoints")),
    *("full_disk:fsdp", "team:replicated", "frozen_unused:replicated", "few_bits:fsdp", "few_bits:replicated"),
]
FOUR = [f"{check}:hsdp" for check in ("gradient", "norm", "held_back", "borrowed", "lora", "refused", "checkpoints")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process finds, for the ranks to compare with."""
    torch.set_num_threads(1)
    found = tmp_path_factory.mktemp("ranks")
    weights = full_weights()
    engine = ready(weights, Optim(clip=0))
    recorder = Recorder(engine)
    loss = learn(engine, weights, 0)
    save_file({"loss": torch.tensor(loss), **recorder.gradients}, found / "gradient.safetensors")
    engine.backward((weights.net(weights.net(data())) + weights.net(2 * data())).sum(), last=True)
    engine.step(0)
    save_file(recorder.gradients, found / "repeated.safetensors")
    weights = full_weights("old")
    engine = ready(weights)
    for step in range(3):
        learn(engine, weights, step)
    for form in ("consolidated", "sharded"):
        extra = {"step": 3, "memory": {"a": [1, 2]}}
        checkpoint.save(found / f"one-{form}", 3, engine, weights, extra, CheckpointConfig(form=form))  # type: ignore[arg-type]
    save_file(whole(weights.trainable()), found / "trained.safetensors")
    save_file(whole(weights.stored()["old"]), found / "old.safetensors")
    learn(engine, weights, 3)
    save_file(whole(weights.trainable()), found / "fourth.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounding, "FEWEST", 1)
        save_file(few_bits(), found / "few_bits.safetensors")
    return found


def few_bits() -> dict[str, torch.Tensor]:
    weights = full_weights()
    engine = ready(weights, Optim(lr=1e-2, moments="int8"), precision="bf16", trainable="bf16")
    for step in range(3):
        for p in engine.parameters.values():
            p.grad = torch.ones_like(p)
        engine.optimizer.update(1e-2 / (step + 1))
    return whole(weights.trainable()) | whole(engine.optimizer.state())


def launch(folder: Path, world: int, checks: list[str]) -> list[dict[str, str]]:
    command = [sys.executable, str(HERE / "engine_ranks.py"), str(folder)]
    processes = [
        subprocess.Popen([*command, str(rank), str(world), *checks], env=environment(), stderr=subprocess.PIPE)
        for rank in range(world)
    ]
    errors = [process.communicate(timeout=180)[1].decode() for process in processes]
    reports = [folder / f"report-{world}-{rank}.json" for rank in range(world)]
    assert all(report.exists() for report in reports), "\n".join(errors)
    return [json.loads(report.read_text()) for report in reports]


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, str]]:
    return launch(folder, 2, TWO)


@pytest.fixture(scope="module")
def four(folder: Path) -> list[dict[str, str]]:
    return launch(folder, 4, FOUR)


@pytest.mark.parametrize("check", TWO)
def test_two_ranks_agree_with_one(two: list[dict[str, str]], check: str) -> None:
    for rank, report in enumerate(two):
        assert report.get(check, "not reached") == "passed", f"rank {rank}: {report.get(check, 'not reached')}"


@pytest.mark.slow
@pytest.mark.parametrize("check", FOUR)
def test_four_ranks_in_two_replicas_agree_with_one(four: list[dict[str, str]], check: str) -> None:
    for rank, report in enumerate(four):
        assert report.get(check, "not reached") == "passed", f"rank {rank}: {report.get(check, 'not reached')}"


@pytest.mark.parametrize("form", ["consolidated", "sharded"])
@pytest.mark.parametrize("strategy", ["replicated", "fsdp"])
def test_one_process_reads_what_two_ranks_saved(
    folder: Path, two: list[dict[str, str]], strategy: str, form: str
) -> None:
    assert two[0].get(f"checkpoints:{strategy}") == "passed"
    weights = full_weights("old", seed=9)
    engine = ready(weights)
    path = folder / f"{strategy}-{form}" / "checkpoints" / "step-000004"
    assert checkpoint.load(path, engine, weights) == {"step": 4}
    theirs = full_weights()
    checkpoint.initialise(path, theirs)
    equal(whole(theirs.trainable()), whole(weights.trainable()))
    assert engine.optimizer.state()["enter.weight.step"] == 4


def test_replicas_must_divide_the_ranks() -> None:
    assert grid("hsdp", 2, 8) == (2, 4)
    assert grid("fsdp", 2, 8) == (8,)
    with pytest.raises(TrainingError, match=r"engine.replicas is 3, which does not divide the 8 ranks"):
        grid("hsdp", 3, 8)


def test_torchrun_starts_ranks_and_close_ends_them() -> None:
    started("""
from engine_toys import full_weights, learn, ready
weights = full_weights()
engine = ready(weights, strategy="fsdp")
assert engine.comm.world == 2
learn(engine, weights, 0)
engine.close()
""")


def test_a_network_whose_parts_are_called_by_turns_is_not_sharded() -> None:
    started("""
from engine_toys import full_weights, ready
from tastemaker.train.failures import TrainingError
weights = full_weights()
weights.net.partial = True
try:
    ready(weights, strategy="fsdp")
except TrainingError as error:
    assert "ranks would wait for ever; set it to replicated" in str(error)
else:
    raise AssertionError("it was sharded")
""")


def started(program: str) -> None:
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
