"""How many pictures a second one core reads, decodes and cuts, from folders and tar shards, and how threads add up.

    python bench/image_loading.py --out loading.json           # 192 JPEGs of each size, made here
    python bench/image_loading.py --count 40 --out tiny.json   # the same lines in a few seconds

Per core means per second of processor time, that of all threads together, which another job on the machine does not
change; per second means by the clock. The floor is Pillow's decoding of the whole file and nothing else.
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

from tastemaker.data.crops import center_crop
from tastemaker.data.image_decoding import decode_square
from tastemaker.data.image_io import read_image
from tastemaker.data.images import Gallery

SIZE = 256  # pixels a side that are asked for
SIDES = (256, 512, 1024)  # of the files
BATCH, STEPS = 64, 3
AIM = 250  # pictures a second and core, of files of 256 pixels a side


def photograph(number: int, side: int) -> Image.Image:
    """Noise in octaves, whose JPEG is about as large as a photograph's."""
    chance = np.random.default_rng(number)
    whole = np.zeros((side, side, 3), np.float32)
    for octave in range(2, 8):
        coarse = chance.normal(0, 90 / octave, (2**octave, 2**octave, 3)).astype(np.float32)
        planes = [
            np.asarray(Image.fromarray(coarse[..., c]).resize((side, side), Image.Resampling.BICUBIC)) for c in range(3)
        ]
        whole += np.stack(planes, -1)
    return Image.fromarray((whole + 128).clip(0, 255).astype(np.uint8))


def written(folder: Path, side: int, count: int) -> list[Path]:
    folder.mkdir(parents=True)
    files = [folder / f"{number:05d}.jpg" for number in range(count)]
    for number, file in enumerate(files):
        photograph(number, side).save(file, quality=90)
    return files


def packed(files: list[Path], path: Path) -> Path:
    with tarfile.open(path, "w") as tar:
        for file in files:
            tar.add(file, file.name)
    return path


def measured(work: Callable[[], Any], count: int) -> dict[str, float]:
    """Pictures a second of processor time and by the clock; the best of three, for others use the machine too."""
    work()
    found = []
    for _ in range(3):
        clock, processor = time.perf_counter(), time.process_time()
        work()
        found.append((count / (time.process_time() - processor), count / (time.perf_counter() - clock)))
    core, wall = max(found)[0], max(wall for _, wall in found)
    return {"per core": round(core, 1), "per second": round(wall, 1)}


def squares(files: list[Path]) -> None:
    for file in files:
        decode_square(file, file.name, SIZE)


def together(pool: type[Executor], files: list[Path]) -> dict[str, float]:
    """Two workers that take half of the files each, by the clock; the best of three."""
    halves = [files[::2], files[1::2]]
    with pool(2) as workers:  # type: ignore[call-arg]  # both kinds take how many
        found = []
        for _ in range(4):  # the first starts them
            clock = time.perf_counter()
            list(workers.map(squares, halves))
            found.append(len(files) / (time.perf_counter() - clock))
    return {"per second": round(max(found[1:]), 1)}


def decoded(files: list[Path]) -> None:
    for file in files:
        with Image.open(file) as image:
            image.load()


def passed(path: Path, workers: int, size: int) -> Callable[[], None]:
    """The next steps of a run that has been going on: as many are made beforehand after them as were before."""
    rows, steps = Gallery(path, SIZE, workers=workers).load(0), count()

    def work() -> None:
        for _ in range(STEPS):
            rows.batch(next(steps), size, 0, 1)

    work()
    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=3 * BATCH, help="files of each size")
    parser.add_argument("--out", type=Path, default=Path("loading.json"))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = {side: one(Path(folder) / str(side), side, asked.count) for side in SIDES}
    machine = {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()}
    made = {"pillow": PIL.__version__, "jpeg": features.version("libjpeg_turbo") or features.version("jpg")}
    own = rows[SIZE]["gallery, folder, no threads"]["per core"]
    told = {**machine, **made, "aim": AIM, "reached": own >= AIM, "files": rows}
    asked.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(told, indent=1))


def one(folder: Path, side: int, number: int) -> dict[str, Any]:
    files = written(folder / "files", side, number)
    tar = packed(files, folder / "shard-000.tar")
    few, size = files[: max(8, number // 8)], min(BATCH, number)
    return {
        "kilobytes": round(sum(file.stat().st_size for file in files) / number / 1000, 1),
        "floor: decoding alone": measured(lambda: decoded(files), number),
        "read_picture, then crops.centre": measured(
            lambda: [center_crop(read_image(f)[0], SIZE) for f in few], len(few)
        ),
        "decoding.square": measured(lambda: squares(files), number),
        "gallery, folder, no threads": measured(passed(folder / "files", 0, size), STEPS * size),
        "gallery, folder, 2 threads": measured(passed(folder / "files", 2, size), STEPS * size),
        "square, 2 threads": together(ThreadPoolExecutor, files),
        "square, 2 processes": together(ProcessPoolExecutor, files),
        "gallery, tar, 2 threads": measured(passed(tar, 2, size), STEPS * size),
    }


if __name__ == "__main__":
    main()
