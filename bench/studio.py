"""Time and memory of the studio with many long runs: how long the first page takes, and what the server needs.

    python bench/studio.py --runs 200 --steps 2000 --grids 100 --out build/studio.json

Writes the runs once, starts `tastemaker studio` in a process of its own, and asks for pages as a browser does. "Cold"
is the first request to a new server; the files may be in the page cache of the system. Seconds of the processor (`cpu`)
are those of the server alone, and do not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from PIL import Image

PROMPTS, SIDE = 16, 64
METRICS = [
    *("reward/mean", "reward/std", "kl", "grad_norm", "loss/policy", "loss", "lr", "ratio", "clip_fraction"),
    *("zero_std_groups", "ratio_deviation", "samples_per_second", "time/step", "time/rollout", "time/reward"),
    *("time/update", "rewards/a", "rewards/b", "rewards/c", "rewards/d"),
]


def write_runs(root: Path, runs: int, steps: int, grids: int) -> None:
    """Write runs with the files that training writes. All runs have the same content under other names."""
    rng = random.Random(0)
    rows = []
    for step in range(1, steps + 1):
        values = {name: rng.random() + step / steps for name in METRICS}
        rows.append(json.dumps({**values, "step": step, "samples": 64}) + "\n")
        if step % 50 == 0:
            guard = {f"guard/{name}": rng.random() for name in ("reward/mean", "rewards/a", "diversity", "variety")}
            rows.append(
                json.dumps({"step": step, **guard, **({"warning": "hacked"} if step % 500 == 0 else {})}) + "\n"
            )
    metrics = "".join(rows)
    side = 4 * (SIDE + 8)
    image = Image.frombytes("RGB", (side, side), rng.randbytes(3 * side * side)).quantize(64)
    path = root / "grid.png"
    root.mkdir(parents=True)
    image.save(path)
    content = path.read_bytes()
    path.unlink()
    boxes = [(x, y, x + SIDE, y + SIDE) for y in range(0, side, SIDE + 8) for x in range(0, side, SIDE + 8)]
    for number in range(runs):
        directory = root / f"sweep-{number // 50}" / f"run-{number:03d}"
        (directory / "samples").mkdir(parents=True)
        (directory / "metrics.jsonl").write_text(metrics)
        settings = "".join(f"setting_{i}: {i}\n" for i in range(150))
        (directory / "config.yaml").write_text(f"objective:\n  type: grpo\nsteps: {steps}\nseed: {number}\n{settings}")
        for grid in range(grids):
            step = (grid + 1) * steps // grids
            name = f"step-{step:06d}"
            data = {
                "step": step, "file": f"{name}.png", "prompts": [f"prompt {i}" for i in range(PROMPTS)],
                "scores": {"a": 0.5}, "frames": 1, "size": [SIDE, SIDE], "enlarged": 1, "boxes": boxes,
            }  # fmt: skip
            (directory / "samples" / f"{name}.png").write_bytes(content)
            (directory / "samples" / f"{name}.json").write_text(json.dumps(data))


@contextmanager
def start_studio(root: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "tastemaker", "studio", str(root), "--port", "0", "--no-browser"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = process.stderr.readline()
    match = re.search(r"http://\S+", line)
    assert match, line
    try:
        yield process, match[0]
    finally:
        process.terminate()
        process.wait(20)
        process.stderr.close()


def request(url: str, path: str) -> tuple[float, bytes]:
    """Return the seconds until the whole answer has arrived, and the answer."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    started = time.perf_counter()
    connection.request("GET", path)
    response = connection.getresponse()
    content = response.read()
    seconds = time.perf_counter() - started
    connection.close()
    assert response.status == 200, (path, response.status)
    return seconds, content


def read_memory(pid: int) -> float:
    """Return the largest resident memory of a process so far, in MB."""
    text = Path(f"/proc/{pid}/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+) kB", text)
    return int(match[1]) / 1024 if match else 0.0


def read_cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(root: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    started = time.perf_counter()
    with start_studio(root) as (process, url):
        results["start_seconds"] = time.perf_counter() - started
        before = read_cpu_seconds(process.pid)
        results["first_page_cold"], page = request(url, "/runs")
        results["first_page_cold_cpu"] = read_cpu_seconds(process.pid) - before
        results["first_page_warm"] = min(request(url, "/runs")[0] for _ in range(3))
        results["first_page_bytes"] = len(page)
        thumbnails = re.findall(r'src="(/samples/[^"]+)"', page.decode())
        started = time.perf_counter()
        for address in thumbnails[:200]:
            request(url, address.replace("&amp;", "&"))
        results["thumbnails"], results["thumbnails_seconds"] = len(thumbnails[:200]), time.perf_counter() - started
        results["memory_after_list"] = read_memory(process.pid)
        ids = re.findall(r'data-id="([^"]+)"', page.decode())
        results["run_page_cold"], run_page = request(url, f"/runs/{quote(ids[0])}")
        results["run_page_warm"], _ = request(url, f"/runs/{quote(ids[0])}")
        cells = re.findall(r'src="(/samples/[^"]+)"', run_page.decode())
        started = time.perf_counter()
        for address in cells[:400]:
            request(url, address.replace("&amp;", "&"))
        results["cells"], results["cells_seconds"] = len(cells[:400]), time.perf_counter() - started
        started = time.perf_counter()
        before = read_cpu_seconds(process.pid)
        for id in ids[:40]:
            request(url, f"/runs/{quote(id)}")
            read_first_curves(url, id)
        results["40_runs_cpu"] = read_cpu_seconds(process.pid) - before
        results["40_runs_seconds"] = time.perf_counter() - started
        results["memory_at_most"] = read_memory(process.pid)
    return results


def read_first_curves(url: str, id: str) -> None:
    """Read a stream of events until the curves have arrived."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    connection.request("GET", f"/events/runs?run={quote(id)}")
    response = connection.getresponse()
    while b"event: curves" not in response.fp.readline():
        pass
    connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--grids", type=int, default=100)
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = options.folder or Path(folder) / "runs"
        if not root.exists():
            write_runs(root, options.runs, options.steps, options.grids)
        results = {"runs": options.runs, "steps": options.steps, "grids": options.grids, **measure(root)}
    for name, value in results.items():
        print(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
