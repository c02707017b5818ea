"""Checks of the engine on several ranks; each rank runs engine_ranks.py FOLDER RANK WORLD CHECK..."""

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
from engine_toys import data, equal, full_weights, learn, network, ready, rows_of, same, share, whole
from gradient_checks import few_bits, frozen_unused, gradient, held_back, low_precision, norm, reduced, repeated
from peft import LoraConfig
from safetensors.torch import load_file

from tastemaker.config.schema import CheckpointConfig, OptimConfig
from tastemaker.core.lora import LoraWeights
from tastemaker.core.weights import FrozenCopyFinetuning, FrozenCopyWeights, NetworkTraits, TrainableModel
from tastemaker.training import checkpoint, safetensors_io
from tastemaker.training.checkpoint import CheckpointError
from tastemaker.training.engine import TrainingError


def raises(kind, call) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def borrowed(folder: Path, strategy: str) -> None:
    """`weights.use` reaches the forward pass, also right after a live one, and restores the live weights exactly."""
    weights = full_weights("old", "ema")
    engine = ready(weights, strategy=strategy)
    x = data()
    with torch.no_grad():
        before = weights.net(x)
    for step in range(2):
        learn(engine, weights, step)
    live = whole(weights.trainable())
    with torch.no_grad():
        after = weights.net(x)
    assert not torch.equal(before, after)
    with weights.use("old"):
        torch.testing.assert_close(weights.net(x), before, rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(weights.net(x), after, rtol=0, atol=0)
    equal(whole(weights.trainable()), live)
    weights.update_snapshot("ema", 0.5)
    start = dict(network().named_parameters())
    same(whole(weights.snapshot_tensors()["ema"]), {name: (start[name] + live[name]).detach() / 2 for name in live})
    learn(engine, weights, 2)


def twins(folder: Path, strategy: str) -> None:
    """A frozen copy is sharded like the live network and replaces it in `weights.use`."""

    class Holder(TrainableModel):
        net = network()

    weights = FrozenCopyFinetuning().apply(Holder, ("reference", "ema"))
    assert isinstance(weights, FrozenCopyWeights)
    engine = ready(weights, strategy=strategy)
    with torch.no_grad():
        before = weights.net(data())
    learn(engine, weights, 0)
    with weights.use("reference"):
        assert torch.equal(Holder.net(data()), before)
    weights.update_snapshot("ema")
    with weights.use("ema"):
        theirs = Holder.net(data())
    with torch.no_grad():
        assert torch.equal(weights.net(data()), theirs)


def lora(folder: Path, strategy: str) -> None:
    """Only the live adapter is trained and reduced; the bf16 base and other adapters do not change."""
    torch.manual_seed(dist.get_rank())
    net = network().to(torch.bfloat16)
    weights = LoraWeights(net, LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False), ("old",))
    engine = ready(weights, OptimConfig(lr=0.1), strategy=strategy, precision="bf16")
    with torch.no_grad(), engine.autocast():
        before = weights.net(data())
    start = whole(dict(net.named_parameters()))
    for step in range(2):
        learn(engine, weights, step)
    end = whole(dict(net.named_parameters()))
    moved = {name for name in start if not torch.equal(start[name], end[name])}
    assert moved == {name for name in start if ".live." in name}, moved
    assert {p.dtype for p in weights.trainable().values()} == {torch.float32}
    with engine.autocast(), weights.use("old"):
        torch.testing.assert_close(weights.net(data()), before, rtol=0, atol=0)
    everywhere = engine.comm.gather_objects([{name: x.float().sum().item() for name, x in end.items()}])
    assert all(each == everywhere[0] for each in everywhere)


def refused(folder: Path, strategy: str) -> None:
    """A non-finite loss on the last rank stops every rank before the update."""
    weights = full_weights()
    engine = ready(weights, strategy=strategy)
    before = whole(weights.trainable())
    last = engine.comm.rank == engine.comm.world_size - 1
    engine.backward(share(engine, weights, rows_of(engine)) * (float("nan") if last else 1.0), last=True)
    assert "nan or infinite" in raises(TrainingError, lambda: engine.step(0))
    equal(whole(weights.trainable()), before)
    learn(engine, weights, 0)


def called_by_turns(folder: Path, strategy: str) -> None:
    """A network with a data-dependent forward pass is not sharded, because its ranks would deadlock."""
    weights = full_weights()
    weights.traits = NetworkTraits(data_dependent_forward=True)
    result = raises(TrainingError, lambda: ready(weights, strategy=strategy))
    assert "deadlock" in result, result


def team(folder: Path, strategy: str) -> None:
    """Collectives: tensors of unequal length, objects, booleans and means."""
    engine = ready(full_weights(), strategy=strategy)
    comm, rank, world = engine.comm, engine.comm.rank, engine.comm.world_size
    rows = torch.full((rank + 1, 2), float(rank))
    assert comm.gather(rows)[:, 0].tolist() == [float(r) for r in range(world) for _ in range(r + 1)]
    assert comm.gather(torch.tensor([rank == 0])).tolist() == [True] + [False] * (world - 1)
    assert comm.gather_objects([rank, "x"]) == [item for r in range(world) for item in (r, "x")]
    assert comm.mean(torch.tensor(float(rank))).item() == (world - 1) / 2
    assert comm.any(rank == 1)
    assert not comm.any(False)
    comm.barrier()


def checkpoints(folder: Path, strategy: str) -> None:
    """Checkpoints of one process load on several ranks, and those of several ranks load again, in both formats."""
    trained, old = load_file(folder / "trained.safetensors"), load_file(folder / "old.safetensors")
    for form in ("consolidated", "sharded"):
        weights = full_weights("old", seed=5)
        engine = ready(weights, strategy=strategy)
        extra = checkpoint.load(folder / f"one-{form}" / "checkpoints" / "step-000003", engine, weights)
        assert extra == {"step": 3, "memory": {"a": [1, 2]}}
        equal(whole(weights.trainable()), trained)
        equal(whole(weights.snapshot_tensors()["old"]), old)
        learn(engine, weights, 3)
        same(whole(weights.trainable()), load_file(folder / "fourth.safetensors"))
        path = checkpoint.save(
            folder / f"{strategy}-{form}", 4, engine, weights, {"step": 4}, CheckpointConfig(format=form)
        )
        written = whole(weights.trainable()) | {
            f"optimizer/{k}": v for k, v in whole(engine.optimizer.state_dict()).items()
        }
        learn(engine, weights, 4)
        checkpoint.load(path, engine, weights)
        again = whole(weights.trainable()) | {
            f"optimizer/{k}": v for k, v in whole(engine.optimizer.state_dict()).items()
        }
        equal(again, written)


def full_disk(folder: Path, strategy: str) -> None:
    """A full disk on one rank raises on all ranks and leaves no partial checkpoint."""
    weights = full_weights("old")
    engine = ready(weights, strategy=strategy)
    run = folder / f"full-{strategy}"
    first = checkpoint.save(run, 1, engine, weights, {}, CheckpointConfig())
    write = safetensors_io.SafetensorsWriter._write

    def full(self: safetensors_io.SafetensorsWriter, written: bytes) -> None:
        if self.bytes > 400:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, written)

    safetensors_io.SafetensorsWriter._write = full if engine.comm.rank == 0 else write
    for form in ("consolidated", "sharded"):
        config = CheckpointConfig(format=form)
        result = raises(CheckpointError, lambda: checkpoint.save(run, 2, engine, weights, {}, config))  # noqa: B023
        assert "the disk is full" in result, result
    safetensors_io.SafetensorsWriter._write = write
    engine.comm.barrier()
    assert [path.name for path in first.parent.iterdir()] == ["step-000001"]
    assert checkpoint.latest_checkpoint(run) == first


CHECKS = {
    each.__name__: each
    for each in (
        gradient,
        norm,
        held_back,
        repeated,
        borrowed,
        twins,
        lora,
        low_precision,
        few_bits,
        reduced,
        refused,
        called_by_turns,
        team,
        checkpoints,
        full_disk,
        frozen_unused,
    )
}


def main(folder: Path, rank: int, world: int, *wanted: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/meeting-{world}", timedelta(seconds=60), rank=rank, world_size=world
    )
    report: dict[str, str] = {}
    try:
        for each in wanted:
            name, _, strategy = each.partition(":")
            CHECKS[name](folder, strategy)
            report[each] = "passed"
    except BaseException:
        report[each] = traceback.format_exc()
        raise
    finally:
        (folder / f"report-{world}-{rank}.json").write_text(json.dumps(report))
        if sys.exc_info()[0]:
            os._exit(1)  # the others would wait for this rank
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
