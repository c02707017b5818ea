"""Two ranks must give the gradient that one rank gives; started as a module, this is one of them."""

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
from ..config.dump import dump
from ..config.load import load
from ..config.run import RunConfig
from ..train.loop import learn
from ..train.run import Run
from .finding import Finding, failed, passed, skipped

CHECKED = "two ranks give the gradient of one"
LARGEST = 200_000_000  # parameters that two copies on the host are tried with


def told(run: Run) -> tuple[float, float]:
    """Loss and gradient norm of the first step."""
    metrics = learn(run, 0).metrics
    return metrics["loss"], metrics["grad_norm"]


def two_ranks(config: RunConfig, alone: tuple[float, float], parameters: int) -> Finding:
    """Run the first step on two ranks and compare."""
    if parameters > LARGEST:
        return skipped(
            CHECKED, f"{parameters / 1e6:.0f} M parameters are too many for two copies on the host; use --tiny"
        )
    if config.batch.prompts % (2 * config.batch.updates):
        return skipped(CHECKED, f"{config.batch.prompts} prompts a step cannot be shared by two ranks")
    if config.batch.updates > 1 or config.batch.epochs > 1:
        return skipped(
            CHECKED, "with several updates a step ranks shuffle their own rows; set batch.updates to 1 to compare"
        )
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(dump(config), encoding="utf-8")
        together, trouble = _launch(recipe, Path(folder))
    if together is None:
        return failed(CHECKED, "two ranks did not run", trouble)
    # Losses of relative advantages are near zero, so they are compared on the scale of the gradient.
    off = max(abs(alone[0] - together[0]), abs(alone[1] - together[1])) / max(abs(alone[0]), alone[1], 1e-12)
    numbers = f"loss {alone[0]:.6g} and {together[0]:.6g}, gradient norm {alone[1]:.6g} and {together[1]:.6g}"
    if off < 1e-3:
        return passed(CHECKED, numbers)
    advice = "something depends on the rank: rows of data, noise, or a mean taken on each rank by itself"
    return failed(CHECKED, numbers, advice)


def _launch(recipe: Path, folder: Path) -> tuple[tuple[float, float] | None, str]:
    """Both ranks at once; torchrun itself would only add its own start-up time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answer = folder / "told.json"
    command = [sys.executable, "-m", "tastemaker.doctor.ranks", str(recipe), str(answer)]
    ranks = [subprocess.Popen(command, env=_settings(rank, port), stderr=subprocess.PIPE, text=True) for rank in (0, 1)]
    try:
        errors = "".join(rank.communicate(timeout=300)[1] for rank in ranks)
    except subprocess.TimeoutExpired:
        return None, "the ranks waited for each other for five minutes; look for a call that only one of them makes"
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks) or not answer.exists():
        told = [line.strip() for line in errors.splitlines() if "Error" in line]
        return None, told[0] if told else "a rank ended early; run the recipe under torchrun to see why"
    loss, norm = json.loads(answer.read_text())
    return (loss, norm), ""


def _settings(rank: int, port: int) -> dict[str, str]:
    paths = os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH", "")]))
    group = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    return {**os.environ, **group, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}


def main(arguments: Sequence[str]) -> None:
    run = build(load(arguments[0], ["engine.device=cpu"]), Path(arguments[1]).parent / "run")
    answer = told(run)
    if run.engine.comm.rank == 0:
        Path(arguments[1]).write_text(json.dumps(answer))
    run.engine.close()


if __name__ == "__main__":
    main(sys.argv[1:])
