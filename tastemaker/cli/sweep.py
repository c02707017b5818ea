"""The command that trains with several values of settings: sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    TRAIN,
    RunDeviceOption,
    Tiny,
    merge_overrides,
    print_next_steps,
    stderr_console,
)

app = typer.Typer()


@app.command(
    rich_help_panel=TRAIN, epilog="Example: tastemaker sweep grpo-toy-flow optim.lr=1e-3,2e-3 seed=0,1,2 steps=50"
)
def sweep(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe (see `list recipes`) or path of a YAML file.")],
    overrides: Annotated[
        list[str], typer.Argument(help="Settings as key=value, or key=value,value,... to try several values.")
    ],
    out: Annotated[Path | None, typer.Option(help="Folder of all runs; default: runs/sweep-RECIPE.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command of each run and train nothing.")
    ] = False,
    tiny: Tiny = False,
    device: RunDeviceOption = None,
) -> None:
    """Train a recipe with every combination of some settings, and compare the results.

    Runs one after another, prints mean and standard deviation over seeds, and writes one report of all runs.
    Resumes if interrupted.
    """
    from ..core.registry import IMPORTED_MODULES
    from ..training import sweep as sweeps

    folder = out or Path("runs") / f"sweep-{Path(recipe).stem}"
    chosen = merge_overrides(overrides, device)
    runs = sweeps.plan_sweep(recipe, chosen, folder, tiny=tiny)
    if dry_run:
        for command in sweeps.list_train_commands(recipe, chosen, runs):
            typer.echo(
                command + (" --tiny" if tiny else "") + "".join(f" --import {name}" for name in IMPORTED_MODULES)
            )
        return
    results = sweeps.run_sweep(runs, folder, stderr_console())
    if results is None:
        stderr_console().print("Interrupted; run the same command again to continue.", soft_wrap=True)
        raise typer.Exit(EXIT_INTERRUPTED)
    typer.echo(sweeps.format_sweep_table(results))
    finished = [result for result in results if result.status != sweeps.FAILED]
    if finished:
        best = max(finished, key=lambda result: result.metrics.get("reward", float("-inf")))
        print_next_steps(f"tastemaker generate {folder / best.name}")
    if len(finished) < len(results):
        raise typer.Exit(EXIT_FAILURE)
