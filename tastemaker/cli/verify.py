"""The command that compares models and rewards with their libraries and authors: verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ..console import ProgressBar, make_console, print_line
from .options import DIAGNOSE, EXIT_FAILURE, Device, print_next_steps, stderr_console

app = typer.Typer()


@app.command(rich_help_panel=DIAGNOSE, epilog="Example: tastemaker verify flux hps grpo-judge-sd35 --out verify.json")
def verify(
    names: Annotated[list[str] | None, typer.Argument(help="Models, rewards or recipes, by name.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All models and rewards.")] = False,
    weights: Annotated[str, typer.Option(help="Folder with weights as OWNER/NAME; default: the hub's cache.")] = "",
    tiny: Annotated[bool, typer.Option("--tiny", help="Use tiny models with random weights.")] = False,
    out: Annotated[Path, typer.Option(help="Results; a second call keeps what passed.")] = Path("verify.json"),
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 2,
    sampling_steps: Annotated[int, typer.Option(min=1, help="Sampling steps.")] = 4,
    full: Annotated[bool, typer.Option("--full", help="Train all weights instead of LoRA adapters.")] = False,
    references: Annotated[str, typer.Option(help="Folder with the images of published scores.")] = "",
    device: Annotated[Device, typer.Option(help="Device.")] = "auto",
    precision: Annotated[Literal["fp32", "bf16"], typer.Option(help="Precision of the comparison.")] = "fp32",
    isolate: Annotated[
        bool | None, typer.Option("--isolate/--no-isolate", help="A process for each; default: yes, unless --tiny.")
    ] = None,
) -> None:
    """Compare models and rewards with their libraries' pipelines and with published scores, and train a few steps.

    For a machine that has published weights: what is missing is not tried. Writes JSON and prints a table.
    """
    from ..core.output_paths import check_output_file
    from ..verification.report import Settings, count_statuses, result_table
    from ..verification.runner import find_tasks, run_verification

    settings = Settings(tiny, steps, sampling_steps, device, precision, full, weights, references)
    tasks, console, entries = find_tasks(names or (), everything=everything), make_console(), []
    check_output_file(out)
    with ProgressBar(stderr_console()) as progress:
        progress.start("verifying", len(tasks), unit="entries")
        for entry, _ in run_verification(tasks, settings, out, isolate=not tiny if isolate is None else isolate):
            entries.append(entry)
            progress.advance()
    console.print(result_table(entries))
    print_line(console, f"{out}: {count_statuses(entries)}")
    if any(entry.status == "failed" for entry in entries):
        raise typer.Exit(EXIT_FAILURE)
    if not tiny:
        print_next_steps(f"add {out} to docs/verification and open a pull request, so that others know")
