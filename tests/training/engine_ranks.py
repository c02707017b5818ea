"""Checks of the engine on several ranks; each rank runs engine_ranks.py DIRECTORY RANK WORLD_SIZE CHECK..."""

from __future__ import annotations

import errno
import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from engine_toys import (
    assert_close,
    assert_equal,
    build_engine,
    build_network,
    full_tensors,
    full_weights,
    local_loss,
    local_rows,
    make_inputs,
    train_step,
)
from gradient_checks import (
    gradient,
    last_micro_batch_sync,
    low_bit_states,
    low_precision,
    norm,
    offload_equals_fsdp,
    reduce_dtype,
    repeated_calls,
    unused_parameters,
)
from peft import LoraConfig
from safetensors.torch import load_file

from tastemaker.config.schema import CheckpointConfig, OptimConfig
from tastemaker.core.lora import LoraWeights
from tastemaker.core.weights import FrozenCopyFinetuning, FrozenCopyWeights, NetworkTraits, TrainableModel
from tastemaker.training import checkpoint, safetensors_io
from tastemaker.training.checkpoint import CheckpointError
from tastemaker.training.engine import TrainingError


def raises(error_type, call) -> str:
    try:
        call()
    except error_type as error:
        return str(error)
    raise AssertionError(f"no {error_type.__name__}")


def use_snapshots(directory: Path, strategy: str) -> None:
    """`weights.use` reaches the forward pass, also right after a live one, and restores the live weights exactly."""
    weights = full_weights("old", "ema")
    engine = build_engine(weights, strategy=strategy)
    x = make_inputs()
    with torch.no_grad():
        before = weights.net(x)
    for step in range(2):
        train_step(engine, weights, step)
    live = full_tensors(weights.trainable())
    with torch.no_grad():
        after = weights.net(x)
    assert not torch.equal(before, after)
    with weights.use("old"):
        torch.testing.assert_close(weights.net(x), before, rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(weights.net(x), after, rtol=0, atol=0)
    assert_equal(full_tensors(weights.trainable()), live)
    weights.update_snapshot("ema", 0.5)
    initial = dict(build_network().named_parameters())
    assert_close(
        full_tensors(weights.snapshot_tensors()["ema"]),
        {name: (initial[name] + live[name]).detach() / 2 for name in live},
    )
    train_step(engine, weights, 2)


def frozen_copies(directory: Path, strategy: str) -> None:
    """A frozen copy is sharded like the live network and replaces it in `weights.use`."""

    class Holder(TrainableModel):
        net = build_network()

    weights = FrozenCopyFinetuning().apply(Holder, ("reference", "ema"))
    assert isinstance(weights, FrozenCopyWeights)
    engine = build_engine(weights, strategy=strategy)
    with torch.no_grad():
        before = weights.net(make_inputs())
    train_step(engine, weights, 0)
    with weights.use("reference"):
        assert torch.equal(Holder.net(make_inputs()), before)
    weights.update_snapshot("ema")
    with weights.use("ema"):
        frozen_output = Holder.net(make_inputs())
    with torch.no_grad():
        assert torch.equal(weights.net(make_inputs()), frozen_output)


def lora(directory: Path, strategy: str) -> None:
    """Only the live adapter is trained and reduced; the bf16 base and other adapters do not change."""
    torch.manual_seed(dist.get_rank())
    net = build_network().to(torch.bfloat16)
    weights = LoraWeights(net, LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False), ("old",))
    engine = build_engine(weights, OptimConfig(lr=0.1), strategy=strategy, precision="bf16")
    with torch.no_grad(), engine.autocast():
        before = weights.net(make_inputs())
    start = full_tensors(dict(net.named_parameters()))
    for step in range(2):
        train_step(engine, weights, step)
    end = full_tensors(dict(net.named_parameters()))
    changed = {name for name in start if not torch.equal(start[name], end[name])}
    assert changed == {name for name in start if ".live." in name}, changed
    assert {p.dtype for p in weights.trainable().values()} == {torch.float32}
    with engine.autocast(), weights.use("old"):
        torch.testing.assert_close(weights.net(make_inputs()), before, rtol=0, atol=0)
    sums = engine.comm.gather_objects([{name: x.float().sum().item() for name, x in end.items()}])
    assert all(other == sums[0] for other in sums)


def non_finite_loss(directory: Path, strategy: str) -> None:
    """A non-finite loss on the last rank stops every rank before the update."""
    weights = full_weights()
    engine = build_engine(weights, strategy=strategy)
    before = full_tensors(weights.trainable())
    last = engine.comm.rank == engine.comm.world_size - 1
    engine.backward(local_loss(engine, weights, local_rows(engine)) * (float("nan") if last else 1.0), last=True)
    assert "TM270" in raises(TrainingError, lambda: engine.step(0))
    assert_equal(full_tensors(weights.trainable()), before)
    train_step(engine, weights, 0)


def data_dependent_forward(directory: Path, strategy: str) -> None:
    """A network with a data-dependent forward pass is not sharded, because its ranks would deadlock."""
    weights = full_weights()
    weights.traits = NetworkTraits(data_dependent_forward=True)
    message = raises(TrainingError, lambda: build_engine(weights, strategy=strategy))
    assert "deadlock" in message, message


def collectives(directory: Path, strategy: str) -> None:
    """Collectives: tensors of unequal length, objects, booleans and means."""
    engine = build_engine(full_weights(), strategy=strategy)
    comm, rank, world_size = engine.comm, engine.comm.rank, engine.comm.world_size
    rows = torch.full((rank + 1, 2), float(rank))
    assert comm.gather(rows)[:, 0].tolist() == [float(r) for r in range(world_size) for _ in range(r + 1)]
    assert comm.gather(torch.tensor([rank == 0])).tolist() == [True] + [False] * (world_size - 1)
    assert comm.gather_objects([rank, "x"]) == [item for r in range(world_size) for item in (r, "x")]
    assert comm.mean(torch.tensor(float(rank))).item() == (world_size - 1) / 2
    assert comm.any(rank == 1)
    assert not comm.any(False)
    comm.barrier()


def checkpoints(directory: Path, strategy: str) -> None:
    """Checkpoints of one process load on several ranks, and those of several ranks load again, in both formats."""
    trained, old = load_file(directory / "trained.safetensors"), load_file(directory / "old.safetensors")
    for format in ("consolidated", "sharded"):
        weights = full_weights("old", seed=5)
        engine = build_engine(weights, strategy=strategy)
        extra = checkpoint.load(directory / f"one-{format}" / "checkpoints" / "step-000003", engine, weights)
        assert extra == {"step": 3, "memory": {"a": [1, 2]}}
        assert_equal(full_tensors(weights.trainable()), trained)
        assert_equal(full_tensors(weights.snapshot_tensors()["old"]), old)
        train_step(engine, weights, 3)
        assert_close(full_tensors(weights.trainable()), load_file(directory / "fourth.safetensors"))
        path = checkpoint.save(
            directory / f"{strategy}-{format}", 4, engine, weights, {"step": 4}, CheckpointConfig(format=format)
        )
        saved = full_tensors(weights.trainable()) | {
            f"optimizer/{k}": v for k, v in full_tensors(engine.optimizer.state_dict()).items()
        }
        train_step(engine, weights, 4)
        checkpoint.load(path, engine, weights)
        loaded = full_tensors(weights.trainable()) | {
            f"optimizer/{k}": v for k, v in full_tensors(engine.optimizer.state_dict()).items()
        }
        assert_equal(loaded, saved)


def full_disk(directory: Path, strategy: str) -> None:
    """A full disk on one rank raises on all ranks and leaves no partial checkpoint."""
    weights = full_weights("old")
    engine = build_engine(weights, strategy=strategy)
    run = directory / f"full-{strategy}"
    first = checkpoint.save(run, 1, engine, weights, {}, CheckpointConfig())
    write = safetensors_io.SafetensorsWriter._write

    def fail_when_full(self: safetensors_io.SafetensorsWriter, data: bytes) -> None:
        if self.bytes > 400:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, data)

    safetensors_io.SafetensorsWriter._write = fail_when_full if engine.comm.rank == 0 else write
    for format in ("consolidated", "sharded"):
        config = CheckpointConfig(format=format)
        message = raises(CheckpointError, lambda: checkpoint.save(run, 2, engine, weights, {}, config))  # noqa: B023
        assert "the disk is full" in message, message
    safetensors_io.SafetensorsWriter._write = write
    engine.comm.barrier()
    assert [path.name for path in first.parent.iterdir()] == ["step-000001"]
    assert checkpoint.latest_checkpoint(run) == first


CHECKS = {
    check_function.__name__: check_function
    for check_function in (
        gradient,
        norm,
        last_micro_batch_sync,
        repeated_calls,
        use_snapshots,
        frozen_copies,
        lora,
        low_precision,
        low_bit_states,
        reduce_dtype,
        non_finite_loss,
        data_dependent_forward,
        collectives,
        checkpoints,
        full_disk,
        unused_parameters,
        offload_equals_fsdp,
    )
}


def main(directory: Path, rank: int, world_size: int, *checks: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{directory}/rendezvous-{world_size}", timedelta(seconds=60), rank=rank, world_size=world_size
    )
    report: dict[str, str] = {}
    try:
        for check in checks:
            name, _, strategy = check.partition(":")
            CHECKS[name](directory, strategy)
            report[check] = "passed"
    except BaseException:
        report[check] = traceback.format_exc()
        raise
    finally:
        (directory / f"report-{world_size}-{rank}.json").write_text(json.dumps(report))
        if sys.exc_info()[0]:
            os._exit(1)  # the others would wait for this rank
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
