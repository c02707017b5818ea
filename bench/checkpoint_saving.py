"""Seconds that a run is blocked by saving a checkpoint, with and without `checkpoint.asynchronous`.

python bench/checkpoint_saving.py --gib 1                       # a CPU
python bench/checkpoint_saving.py --gib 36 --out saving.json    # weights and int8 moments of FLUX, one GPU

Floors of the same call: copying the tensors to host memory, and writing as many bytes to the same disk.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from device import DEVICE, synchronize  # beside this file, in no package
from sections import write_results
from torch import Tensor, nn

from tastemaker.config.schema import CheckpointConfig, EngineConfig, OptimConfig
from tastemaker.core.weights import FullWeights
from tastemaker.training import checkpoint
from tastemaker.training.async_checkpoint import AsyncCheckpointWriter
from tastemaker.training.engine import Engine

WIDTH = 4096
BYTES_PER_WEIGHT = 2 + 4 + 4  # bf16 weights, fp32 moments


def build_engine(gib: float) -> tuple[Engine, FullWeights]:
    """An engine that has taken one step, whose checkpoint takes about `gib` GiB."""
    layers = max(1, round(gib * 2**30 / (WIDTH * WIDTH * BYTES_PER_WEIGHT)))
    with torch.device(DEVICE):
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(layers)))
    engine = Engine(EngineConfig(param_dtype="bf16", precision="bf16"), OptimConfig(), steps=10, seed=0)
    weights = FullWeights(net)
    engine.prepare(weights)
    engine.backward(net(torch.randn(1, WIDTH, device=DEVICE, dtype=torch.bfloat16)).float().sum(), last=True)
    engine.launch_step(0)
    return engine, weights


def seconds(work: Any) -> float:
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start


def write_bytes(folder: Path, tensors: list[Tensor]) -> None:
    with (folder / "floor").open("wb") as file:
        for x in tensors:
            file.write(memoryview(x.reshape(-1).view(torch.uint8).numpy()))
        file.flush()
        os.fsync(file.fileno())


def measure(gib: float, folder: Path) -> list[dict[str, Any]]:
    engine, weights = build_engine(gib)
    config, writer = CheckpointConfig(keep_last=1), AsyncCheckpointWriter(engine.comm)

    def stage(step: int) -> checkpoint.StagedCheckpoint:
        return checkpoint.stage(folder, step, engine, weights, {}, config, best=False)

    tensors = [*weights.trainable().values(), *engine.optimizer.state_dict().values()]
    rows = []
    for repeat in range(2):  # the first asynchronous save allocates its copies
        copies: list[Tensor] = []
        copying = seconds(lambda copies=copies: copies.extend(x.detach().to("cpu", copy=True) for x in tensors))
        writing = seconds(lambda copies=copies: write_bytes(folder, copies))
        del copies
        blocking = seconds(lambda repeat=repeat: checkpoint.write(stage(2 * repeat), engine.comm))
        started = seconds(lambda repeat=repeat: writer.start(stage(2 * repeat + 1)))
        finishing = seconds(writer.finish)
        rows.append(
            {
                "gib": sum(x.numel() * x.element_size() for x in tensors) / 2**30,
                "floor_copy_seconds": copying,
                "floor_write_seconds": writing,
                "blocked_seconds": blocking,
                "blocked_seconds_asynchronous": started,
                "written_after_seconds": started + finishing,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.5, help="size of the checkpoint; default: 0.5")
    parser.add_argument("--folder", type=Path, help="a folder on the disk that is measured; default: a temporary one")
    parser.add_argument("--out", default="", help="write the results as JSON to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = measure(options.gib, Path(folder))
    write_results(options.out, rows)
    for name, row in zip(("first save", "second save"), rows, strict=True):
        print(name, *(f"{key}={value:.2f}" for key, value in row.items()))


if __name__ == "__main__":
    main()
