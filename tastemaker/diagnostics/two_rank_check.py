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
from ..config.dump import config_to_yaml
from ..config.load import load
from ..config.schema import RunConfig
from ..training.loop import train_step
from ..training.run import Run
from .check_result import CheckResult, fail_result, pass_result, skip_result

CHECK_NAME = "two ranks give the gradient of one"
MAX_PARAMETERS = 200_000_000  # parameters that two copies on the host are tried with


def first_step_metrics(run: Run) -> tuple[float, float]:
    """Loss and gradient norm of the first step."""
    metrics = train_step(run, 0).metrics
    return metrics["loss"], metrics["grad_norm"]


def check_two_ranks(config: RunConfig, alone: tuple[float, float], parameters: int) -> CheckResult:
    """Run the first step on two ranks and compare."""
    if parameters > MAX_PARAMETERS:
        return skip_result(
            CHECK_NAME, f"{parameters / 1e6:.0f} M parameters are too many for two copies on the host; use --tiny"
        )
    if config.batch.prompts % (2 * config.batch.updates):
        return skip_result(CHECK_NAME, f"{config.batch.prompts} prompts a step cannot be shared by two ranks")
    if config.batch.updates > 1 or config.batch.epochs > 1:
        return skip_result(
            CHECK_NAME, "with several updates a step ranks shuffle their own rows; set batch.updates to 1 to compare"
        )
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(config_to_yaml(config), encoding="utf-8")
        together, trouble = _launch(recipe, Path(folder))
    if together is None:
        return fail_result(CHECK_NAME, "two ranks did not run", trouble)
    # Losses of relative advantages are near zero, so they are compared on the scale of the gradient.
    off = max(abs(alone[0] - together[0]), abs(alone[1] - together[1])) / max(abs(alone[0]), alone[1], 1e-12)
    numbers = f"loss {alone[0]:.6g} and {together[0]:.6g}, gradient norm {alone[1]:.6g} and {together[1]:.6g}"
    if off < 1e-3:
        return pass_result(CHECK_NAME, numbers)
    advice = "something depends on the rank: rows of data, noise, or a mean taken on each rank by itself"
    return fail_result(CHECK_NAME, numbers, advice)


def _launch(recipe: Path, folder: Path) -> tuple[tuple[float, float] | None, str]:
    """Both ranks at once; torchrun itself would only add its own start-up time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answer = folder / "told.json"
    command = [sys.executable, "-m", "tastemaker.diagnostics.two_rank_check", str(recipe), str(answer)]
    ranks = [
        subprocess.Popen(command, env=_rank_environment(rank, port), stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
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


def _rank_environment(rank: int, port: int) -> dict[str, str]:
    paths = os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH", "")]))
    group = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    return {**os.environ, **group, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}


def main(arguments: Sequence[str]) -> None:
    run = build(load(arguments[0], ["engine.device=cpu"]), Path(arguments[1]).parent / "run")
    answer = first_step_metrics(run)
    if run.engine.comm.rank == 0:
        Path(arguments[1]).write_text(json.dumps(answer))
    run.engine.close()


if __name__ == "__main__":
    main(sys.argv[1:])
