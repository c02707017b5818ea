"""Load FLUX in parts and as a whole; each rank runs sharded_loading_ranks.py DIRECTORY RANK WORLD_SIZE."""

from __future__ import annotations

import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import toys
from diffusers import FluxTransformer2DModel
from engine_toys import assert_equal
from torch import Tensor

from tastemaker.config.schema import BatchConfig, EngineConfig, OptimConfig
from tastemaker.core.policy import Policy
from tastemaker.core.weights import FrozenCopyFinetuning, FullFinetuning, Tuning
from tastemaker.data.prompts import PromptDataset
from tastemaker.models import deferred_loading
from tastemaker.models.flux import FluxSpec
from tastemaker.objectives.reward_gradient import RewardGradient
from tastemaker.training import distributed
from tastemaker.training.engine import Engine, TrainingError
from tastemaker.training.loop import train_step
from tastemaker.training.run import Run

BF16 = {"precision": "bf16", "param_dtype": "bf16"}
CASES: dict[str, tuple[Tuning, dict[str, Any]]] = {
    "fsdp": (FullFinetuning(), {"strategy": "fsdp"}),
    "sdp, bf16, snapshots on the CPU": (FullFinetuning(snapshots_on_cpu=True), {"strategy": "sdp", **BF16}),
    "hsdp, bf16, frozen copies": (FrozenCopyFinetuning(), {"strategy": "hsdp", "hsdp_replicas": 2, **BF16}),
    "cpu_offload": (FullFinetuning(), {"strategy": "fsdp", "cpu_offload": True}),
}
CHECKS = [*CASES, "bytes", "different files"]


def build_run(folder: Path, tuning: Tuning, settings: dict[str, Any], *, in_parts: bool) -> Run:
    torch.manual_seed(0)
    engine = Engine(EngineConfig(device="cpu", **settings), OptimConfig(lr=1e-2), 2, seed=0)
    spec = FluxSpec(str(folder), height=32, width=32, max_text_tokens=16)
    model = spec.load(engine.placement(is_adapter=False, is_prepared=in_parts))
    assert all(p.is_meta == in_parts for p in model.net.parameters())
    policy = Policy(model, toys.GENERATORS["flux"].process, tuning.apply(model, ["reference", "ema"]))
    data, batch = PromptDataset(toys.PROMPTS, ({},) * len(toys.PROMPTS), 0), BatchConfig(prompts=4)
    objective = RewardGradient(last_steps=1)
    return Run(policy, objective, toys.rubric(), data, engine, Path(), steps=2, batch=batch)


def local_shards(run: Run) -> dict[str, Tensor]:
    """Return this rank's shards of the weights and of their snapshots."""
    weights = run.policy.weights
    groups = {"live": weights.trainable(), **weights.snapshot_tensors()}
    return {
        f"{group}/{name}": distributed.local_shard(x).detach().clone()
        for group, tensors in groups.items()
        for name, x in tensors.items()
    }


def compare(folder: Path, tuning: Tuning, settings: dict[str, Any]) -> None:
    """The shards that a rank reads, and two training steps, equal those of a network that is loaded as a whole."""
    runs = [build_run(folder, tuning, settings, in_parts=in_parts) for in_parts in (True, False)]
    shards = [local_shards(run) for run in runs]
    assert_equal(*shards)
    assert {name: x.dtype for name, x in shards[0].items()} == {name: x.dtype for name, x in shards[1].items()}
    assert_equal(*(dict(run.policy.weights.net.named_buffers()) for run in runs))
    assert [run.policy.weights.net.training for run in runs] == [False, False]
    losses = [[train_step(run, step).to_event().metrics["loss/policy"] for step in range(2)] for run in runs]
    assert losses[0] == losses[1]
    trained = [local_shards(run) for run in runs]
    assert_equal(*trained)
    assert not torch.equal(trained[0]["live/x_embedder.weight"], shards[0]["live/x_embedder.weight"])


def count_bytes(folder: Path) -> None:
    """Each of two ranks reads half of the file, and never the whole network."""
    read, loaded_bytes = deferred_loading.DeferredSafetensors.read, []

    def record(self: deferred_loading.DeferredSafetensors, name: str, start: int, count: int) -> Tensor:
        rows = read(self, name, start, count)
        loaded_bytes.append(rows.numel() * rows.itemsize)
        return rows

    load = FluxTransformer2DModel.from_pretrained
    deferred_loading.DeferredSafetensors.read = record
    FluxTransformer2DModel.from_pretrained = None
    try:
        run = build_run(folder, FullFinetuning(), {"strategy": "fsdp"}, in_parts=True)
    finally:
        deferred_loading.DeferredSafetensors.read, FluxTransformer2DModel.from_pretrained = read, load
    total = sum(p.numel() * p.itemsize for p in run.policy.weights.net.parameters())
    assert sum(run.engine.comm.gather_objects([sum(loaded_bytes)])) == total
    assert 0.49 * total < sum(loaded_bytes) < 0.51 * total, (sum(loaded_bytes), total)


def different_files(folder: Path) -> None:
    """Ranks that would read parts of different files refuse."""
    dtype = torch.float32 if dist.get_rank() else torch.bfloat16
    copy = folder.parent / f"other-{dist.get_rank()}"
    copy.mkdir()
    for component in folder.iterdir():
        if component.name != "transformer":
            (copy / component.name).symlink_to(component)
    FluxTransformer2DModel.from_pretrained(folder / "transformer").to(dtype).save_pretrained(copy / "transformer")
    try:
        build_run(copy, FullFinetuning(), {"strategy": "fsdp"}, in_parts=True)
    except TrainingError as error:
        assert "TM933" in str(error), error
    else:
        raise AssertionError("no error")


def main(directory: Path, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{directory}/rendezvous", timedelta(seconds=60), rank=rank, world_size=world_size
    )
    report: dict[str, str] = {}
    check = ""
    try:
        for check in CHECKS:
            if check in CASES:
                compare(directory / "flux", *CASES[check])
            else:
                {"bytes": count_bytes, "different files": different_files}[check](directory / "flux")
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
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
