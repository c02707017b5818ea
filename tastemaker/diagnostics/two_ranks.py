"""Run the first training step on two ranks of this machine; started as a module, this is one of the ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..config.build import build
from ..config.dump import config_to_yaml
from ..config.load import load
from ..config.schema import RunConfig
from ..core.registry import IMPORTED_MODULES, import_modules, subprocess_path
from ..core.safe_files import read_json
from ..training.loop import train_step
from ..training.run import Run

TIMEOUT = 300  # seconds


def step_metrics(run: Run, step: int) -> tuple[float, float]:
    """Loss and gradient norm of a training step."""
    metrics = train_step(run, step).to_event().metrics
    return metrics["loss/policy"], metrics["grad_norm"]


def run_first_step(config: RunConfig) -> tuple[tuple[float, float] | None, str]:
    """Run the first step on two ranks. Returns loss and gradient norm, or None and the problem."""
    with tempfile.TemporaryDirectory() as folder:
        recipe, result = Path(folder) / "recipe.yaml", Path(folder) / "metrics.json"
        recipe.write_text(config_to_yaml(config), encoding="utf-8")
        problem = _launch(recipe, result)
        if problem:
            return None, problem
        loss, norm = read_json(result)
        return (loss, norm), ""


def _launch(recipe: Path, result: Path) -> str:
    """Start both ranks and wait for them; returns the problem, if any. Faster than torchrun."""
    command = [sys.executable, "-P", "-m", __name__, str(recipe), str(result), *IMPORTED_MODULES]
    with socket.socket() as holder:
        # Bound until the ranks have ended, so that no other process is given this port before the first rank, whose
        # store sets SO_REUSEADDR too, listens there.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        return _run_ranks(command, holder.getsockname()[1], result)


def _run_ranks(command: Sequence[str], port: int, result: Path) -> str:
    """Run a command as both ranks, which meet at a port; returns the problem, if any."""
    ranks = [
        subprocess.Popen(command, env=_rank_environment(rank, port), stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    try:
        errors = "".join(rank.communicate(timeout=TIMEOUT)[1] for rank in ranks)
    except subprocess.TimeoutExpired:
        return "the ranks waited for each other for five minutes; look for a call that only one of them makes"
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks) or not result.exists():
        messages = [line.strip() for line in errors.splitlines() if "Error" in line]
        return messages[0] if messages else "a rank ended early; run the recipe with torchrun to see why"
    return ""


def _rank_environment(rank: int, port: int) -> dict[str, str]:
    group = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    return {**os.environ, **group, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONPATH": subprocess_path()}


def main(arguments: Sequence[str]) -> None:
    recipe, result, *modules = arguments
    import_modules(modules)
    run = build(load(recipe, ["engine.device=cpu"]), Path(result).parent / "run")
    metrics = step_metrics(run, 0)
    if run.engine.comm.rank == 0:
        Path(result).write_text(json.dumps(metrics))
    run.engine.close()


if __name__ == "__main__":
    main(sys.argv[1:])
