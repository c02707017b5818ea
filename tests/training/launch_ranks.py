"""Start training in subprocesses, on one rank or several."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from fork_server import ForkedProcess

HERE = Path(__file__).parent
QUIET = ["sample.every=0", "checkpoint.every=1"]
Process = subprocess.Popen | ForkedProcess


def launch(recipe: str, directory: Path, *overrides: str, ranks: int = 1, fresh: bool = False) -> list[Process]:
    """Train in forked processes, or in fresh interpreters, which hash and import anew."""
    rows = (
        "batch_size=4" if "-v" in recipe or "vae" in recipe else "batch.prompts=4"
    )  # an autoencoder's, or a generator's
    command = [sys.executable, str(HERE / "endless_run.py"), recipe, str(directory), *QUIET, rows, *overrides]
    return [start(command, each, fresh=fresh) for each in environments(ranks)]


def start(command: Sequence[str], settings: dict[str, str], *, fresh: bool = False) -> Process:
    if fresh:
        return subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, text=True)
    return ForkedProcess(command, env=settings)


def environments(ranks: int) -> list[dict[str, str]]:
    """Return the environment that torchrun would set for each rank; for one rank, only PYTHONPATH."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    paths = os.pathsep.join([str(HERE.parent.parent), *sys.path])
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    if ranks == 1:
        return [shared]
    shared |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def on_ranks(count: int, *arguments: str) -> None:
    """Run a command on several ranks, as torchrun does."""
    with ExitStack() as stack:
        started = []
        for settings in environments(count):
            process = ForkedProcess([sys.executable, "-m", "tastemaker", *arguments], env=settings)
            started.append(stack.enter_context(process))
            stack.callback(process.kill)  # one that waits for another that failed
        for process in started:
            reported = process.communicate(timeout=240)[1]
            assert process.returncode == 0, reported


def finish(processes: Sequence[Process]) -> None:
    for process in processes:
        reported = process.communicate(timeout=240)[1]
        assert process.returncode == 0, reported


def report(script: str, folder: Path, world: int, *arguments: str) -> list[dict[str, str]]:
    """Run a script (FOLDER RANK WORLD ...) on every rank; return the checks in report-WORLD-RANK.json."""
    finished = []
    for rank in range(world):
        command = [sys.executable, str(HERE / script), str(folder), str(rank), str(world), *arguments]
        finished.append(ForkedProcess(command, env=environments(1)[0]))
    errors = [process.communicate(timeout=180)[1] for process in finished]
    written = [folder / f"report-{world}-{rank}.json" for rank in range(world)]
    assert all(path.exists() for path in written), "\n".join(errors)
    return [json.loads(path.read_text()) for path in written]


def failures(reports: list[dict[str, str]], checks: Sequence[str]) -> list[str]:
    """Return every check that failed on a rank, with its message."""
    result = [(rank, check, each.get(check, "not reached")) for rank, each in enumerate(reports) for check in checks]
    return [f"{check} on rank {rank}: {reported}" for rank, check, reported in result if reported != "passed"]
