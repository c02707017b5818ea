"""Start training in subprocesses, on one rank or several."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from fork_server import ForkedProcess
from free_ports import reserve_port

HERE = Path(__file__).parent
SETTINGS = ["sample.every=0", "checkpoint.every=1"]
Process = subprocess.Popen | ForkedProcess


def launch(
    recipe: str, directory: Path, *overrides: str, ranks: int = 1, new_interpreter: bool = False
) -> list[Process]:
    """Train in forked processes, or in new interpreters with their own hash seeds and imports."""
    batch_size = (
        "batch_size=4" if "-v" in recipe or "vae" in recipe else "batch.prompts=4"
    )  # of an autoencoder, or of a generator
    command = [sys.executable, str(HERE / "endless_run.py"), recipe, str(directory), *SETTINGS, batch_size, *overrides]
    return [start(command, environment, new_interpreter=new_interpreter) for environment in environments(ranks)]


def start(command: Sequence[str], environment: dict[str, str], *, new_interpreter: bool = False) -> Process:
    if new_interpreter:
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    return ForkedProcess(command, env=environment)


def environments(ranks: int) -> list[dict[str, str]]:
    """Return the environment that torchrun would set for each rank; for one rank, only PYTHONPATH."""
    paths = os.pathsep.join([str(HERE.parent.parent), *sys.path])
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    if ranks == 1:
        return [shared]
    shared |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserve_port())}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def on_ranks(count: int, *arguments: str) -> None:
    """Run a command on several ranks, as torchrun does."""
    with ExitStack() as stack:
        processes = []
        for environment in environments(count):
            process = ForkedProcess([sys.executable, "-m", "tastemaker", *arguments], env=environment)
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)  # in case it waits for a rank that failed
        for process in processes:
            errors = process.communicate(timeout=600)[1]
            assert process.returncode == 0, errors


def finish(processes: Sequence[Process]) -> None:
    for process in processes:
        errors = process.communicate(timeout=600)[1]
        assert process.returncode == 0, errors


def report(script: str, directory: Path, world_size: int, *arguments: str) -> list[dict[str, str]]:
    """Run a script (DIRECTORY RANK WORLD_SIZE ...) on every rank; return the checks in report-WORLD_SIZE-RANK.json."""
    processes = []
    for rank in range(world_size):
        command = [sys.executable, str(HERE / script), str(directory), str(rank), str(world_size), *arguments]
        processes.append(ForkedProcess(command, env=environments(1)[0]))
    errors = [process.communicate(timeout=600)[1] for process in processes]
    reports = [directory / f"report-{world_size}-{rank}.json" for rank in range(world_size)]
    assert all(path.exists() for path in reports), "\n".join(errors)
    return [json.loads(path.read_text()) for path in reports]


def failures(reports: list[dict[str, str]], checks: Sequence[str]) -> list[str]:
    """Return every check that failed on a rank, with its message."""
    outcomes = [
        (rank, check, report.get(check, "not reached")) for rank, report in enumerate(reports) for check in checks
    ]
    return [f"{check} on rank {rank}: {outcome}" for rank, check, outcome in outcomes if outcome != "passed"]
