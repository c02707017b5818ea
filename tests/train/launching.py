"""Starts training in processes of its own, on one rank or several."""

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

HERE = Path(__file__).parent
QUIET = ["sample.every=0", "checkpoint.every=1"]


def launch(recipe: str, directory: Path, *overrides: str, ranks: int = 1) -> list[subprocess.Popen]:
    rows = "rows=4" if "-v" in recipe or "vae" in recipe else "batch.prompts=4"  # an autoencoder's, or a generator's
    command = [sys.executable, str(HERE / "endless.py"), recipe, str(directory), *QUIET, rows, *overrides]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    paths = os.pathsep.join([str(HERE.parent.parent), *sys.path])
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    if ranks > 1:
        settings |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    own = [{"RANK": str(i), "LOCAL_RANK": str(i)} if ranks > 1 else {} for i in range(ranks)]
    return [subprocess.Popen(command, env={**settings, **e}, stdout=subprocess.PIPE, text=True) for e in own]


def on_ranks(count: int, *arguments: str) -> None:
    """A command in as many processes, as torchrun would start them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
    shared |= {**os.environ, **shared, "PYTHONPATH": str(HERE.parent.parent), "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        started = []
        for rank in range(count):
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, "-m", "tastemaker", *arguments]
            started.append(stack.enter_context(subprocess.Popen(command, env=own, stderr=subprocess.PIPE, text=True)))
            stack.callback(started[-1].kill)  # one that waits for another that failed
        for process in started:
            told = process.communicate(timeout=240)[1]
            assert process.returncode == 0, told


def finish(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        process.communicate(timeout=240)
        assert process.returncode == 0
