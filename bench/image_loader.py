"""Images per second that one core reads, decodes and crops from folders and tar shards, and scaling with threads.

    python bench/image_loader.py --out loading.json           # 192 generated JPEGs of each size
    python bench/image_loader.py --count 40 --out tiny.json   # in a few seconds

"per core" is per second of CPU time of all threads together, which other jobs on the machine do not change; "per
second" is wall-clock time. The lower bound is Pillow's decoding of the whole file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tarfile
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from PIL import Image, features

from tastemaker.data.image_io import read_image
from tastemaker.data.image_transforms import center_crop, decode_square
from tastemaker.data.images import ImageCollection

CROP_SIZE = 256  # pixels
FILE_SIZES = (256, 512, 1024)  # pixels
BATCH_SIZE, STEPS = 64, 3
TARGET = 250  # images per second and core, for files of 256 pixels


def random_photograph(seed: int, side: int) -> Image.Image:
    """Return noise in octaves, whose JPEG is about as large as that of a photograph."""
    rng = np.random.default_rng(seed)
    image = np.zeros((side, side, 3), np.float32)
    for octave in range(2, 8):
        coarse = rng.normal(0, 90 / octave, (2**octave, 2**octave, 3)).astype(np.float32)
        channels = [
            np.asarray(Image.fromarray(coarse[..., c]).resize((side, side), Image.Resampling.BICUBIC)) for c in range(3)
        ]
        image += np.stack(channels, -1)
    return Image.fromarray((image + 128).clip(0, 255).astype(np.uint8))


def write_jpegs(folder: Path, side: int, num_files: int) -> list[Path]:
    folder.mkdir(parents=True)
    files = [folder / f"{number:05d}.jpg" for number in range(num_files)]
    for number, file in enumerate(files):
        random_photograph(number, side).save(file, quality=90)
    return files


def write_tar(files: list[Path], path: Path) -> Path:
    with tarfile.open(path, "w") as tar:
        for file in files:
            tar.add(file, file.name)
    return path


def measure(work: Callable[[], Any], num_images: int) -> dict[str, float]:
    """Return images per second of CPU time and of wall-clock time, the best of three runs after a warm-up."""
    work()
    rates = []
    for _ in range(3):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        rates.append((num_images / (time.process_time() - cpu), num_images / (time.perf_counter() - wall)))
    best_cpu, best_wall = max(cpu for cpu, _ in rates), max(wall for _, wall in rates)
    return {"per core": round(best_cpu, 1), "per second": round(best_wall, 1)}


def measure_two_workers(pool_class: type[Executor], files: list[Path]) -> dict[str, float]:
    """Return images per second of wall-clock time by two workers with half of the files each, the best of three."""
    halves = [files[::2], files[1::2]]
    with pool_class(2) as pool:  # type: ignore[call-arg]  # both pools take the number of workers
        rates = []
        for _ in range(4):  # the first run starts the workers
            start = time.perf_counter()
            list(pool.map(decode_crops, halves))
            rates.append(len(files) / (time.perf_counter() - start))
    return {"per second": round(max(rates[1:]), 1)}


def decode_crops(files: list[Path]) -> None:
    for file in files:
        decode_square(file, file.name, CROP_SIZE)


def decode_files(files: list[Path]) -> None:
    for file in files:
        with Image.open(file) as image:
            image.load()


def load_batches(path: Path, num_workers: int, batch_size: int) -> Callable[[], None]:
    """Return a function that loads the next batches of a data set whose prefetching is in a steady state."""
    data, steps = ImageCollection(path, CROP_SIZE, num_workers=num_workers).load(0), count()

    def work() -> None:
        for _ in range(STEPS):
            data.batch(next(steps), batch_size, 0, 1)

    work()
    return work


def measure_file_size(folder: Path, side: int, num_files: int) -> dict[str, Any]:
    files = write_jpegs(folder / "files", side, num_files)
    tar = write_tar(files, folder / "shard-000.tar")
    few, batch_size = files[: max(8, num_files // 8)], min(BATCH_SIZE, num_files)
    num_images = STEPS * batch_size
    return {
        "kilobytes": round(sum(file.stat().st_size for file in files) / num_files / 1000, 1),
        "lower bound: decoding": measure(lambda: decode_files(files), num_files),
        "read_image, then center_crop": measure(
            lambda: [center_crop(read_image(file)[0], CROP_SIZE) for file in few], len(few)
        ),
        "decode_square": measure(lambda: decode_crops(files), num_files),
        "collection, folder, no threads": measure(load_batches(folder / "files", 0, batch_size), num_images),
        "collection, folder, 2 threads": measure(load_batches(folder / "files", 2, batch_size), num_images),
        "decode_square, 2 threads": measure_two_workers(ThreadPoolExecutor, files),
        "decode_square, 2 processes": measure_two_workers(ProcessPoolExecutor, files),
        "collection, tar, 2 threads": measure(load_batches(tar, 2, batch_size), num_images),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=3 * BATCH_SIZE, help="files of each size")
    parser.add_argument("--out", type=Path, default=Path("loading.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = {side: measure_file_size(Path(folder) / str(side), side, options.count) for side in FILE_SIZES}
    rate = results[CROP_SIZE]["collection, folder, no threads"]["per core"]
    report = {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "pillow": PIL.__version__,
        "jpeg": features.version("libjpeg_turbo") or features.version("jpg"),
        "target": TARGET,
        "reached": rate >= TARGET,
        "files": results,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
