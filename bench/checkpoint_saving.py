"""Seconds that a run is blocked by saving a checkpoint, with and without `checkpoint.asynchronous`.

python bench/checkpoint_saving.py --gib 1                       # a CPU
python bench/checkpoint_saving.py --gib 44.7 --out saving.json  # bf16 weights and int8 moments of FLUX, one GPU

Floors of the same call: copying the tensors to host memory, and writing as many bytes to the same disk. The disk needs
room for one checkpoint: everything is deleted before the next is written. Host memory needs room for one copy.
"""

from __future__ import annotations

import argparse
import os
import shutil
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
BYTES_PER_WEIGHT = 2 + 1 + 1  # bf16 weights, int8 moments


def build_engine(gib: float) -> tuple[Engine, FullWeights]:
    """An engine that has taken one step, whose checkpoint takes about `gib` GiB."""
    layers = max(1, round(gib * 2**30 / (WIDTH * WIDTH * BYTES_PER_WEIGHT)))
    with torch.device(DEVICE):
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(layers)))
    engine = Engine(EngineConfig(param_dtype="bf16", precision="bf16"), OptimConfig(state_dtype="int8"), 10, seed=0)
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
    copies: list[Tensor] = []
    first = {
        "gib": sum(x.numel() * x.element_size() for x in tensors) / 2**30,
        "floor_copy_seconds": seconds(lambda: copies.extend(x.detach().to("cpu", copy=True) for x in tensors)),
        "floor_write_seconds": seconds(lambda: write_bytes(folder, copies)),
    }
    copies.clear()
    used = [empty_folder(folder)]
    first["blocked_seconds"] = seconds(lambda: checkpoint.write(stage(0), engine.comm))
    rows = [first, {"gib": first["gib"]}]
    for step, row in enumerate(rows, 1):  # the first asynchronous save allocates its copies
        used.append(empty_folder(folder))
        row["blocked_seconds_asynchronous"] = seconds(lambda step=step: writer.start(stage(step)))
        row["written_after_seconds"] = row["blocked_seconds_asynchronous"] + seconds(writer.finish)
    first["largest_folder_gib"] = max(*used, empty_folder(folder))
    return rows


def empty_folder(folder: Path) -> float:
    """Delete what a folder contains; return how many GiB that was."""
    gib = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**30
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return gib


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
