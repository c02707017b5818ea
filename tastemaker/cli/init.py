"""The command that writes a recipe to start from: init."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from ..core.registry import ConfigError
from .options import TRAIN, print_next_steps, stderr_console

app = typer.Typer()


@app.command(
    rich_help_panel=TRAIN, epilog="Example: tastemaker init --hardware laptop --model playground --goal prompt"
)
def init(
    hardware: Annotated[str, typer.Option(help="What you have: laptop, gpu or cluster.")] = "",
    model: Annotated[str, typer.Option(help="Model to train: playground, sd15, sd35, flux, wan, ...")] = "",
    goal: Annotated[
        str, typer.Option(help="What should improve: prompt, preference, aesthetics, text, motion or own.")
    ] = "",
    out: Annotated[Path, typer.Option(help="Recipe file to write.")] = Path("my-recipe.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files without asking.")] = False,
) -> None:
    """Write a commented recipe to start from. Asks three questions; options answer them in advance."""
    from ..config import init as starter

    interactive = not (hardware and model and goal)
    hardware = hardware or ask_choice("What do you have?", starter.HARDWARE)
    model = model or ask_choice("Which model do you want to train?", starter.list_model_choices(hardware))
    goal = goal or ask_choice("What should improve?", starter.list_goal_choices(hardware, model))
    made = starter.make_starter_files(hardware, model, goal, out)
    existing = [str(path) for path in made.files if path.exists()]
    if existing and not force:
        if not interactive:
            raise ConfigError(
                f"--out: {', '.join(existing)} already exists; choose another --out, or overwrite with --force [TM072]"
            )
        typer.confirm(f"{', '.join(existing)} exists already. Overwrite?", abort=True)
    made.write()
    for path in made.files:
        stderr_console().print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    print_next_steps(*made.next_commands)


def ask_choice(question: str, choices: Mapping[str, str]) -> str:
    """Ask until the answer is the number or the name of a choice. A single choice is taken without asking."""
    names = list(choices)
    if len(names) == 1:
        typer.echo(f"{question} {names[0]}: {choices[names[0]]}")
        return names[0]
    typer.echo(question)
    for number, name in enumerate(names, 1):
        typer.echo(f"  {number}  {name:12}{choices[name]}")
    while True:
        answer = str(typer.prompt("Number or name", default="1")).strip().lower()
        if answer in names:
            return answer
        if answer.isdigit() and 1 <= int(answer) <= len(names):
            return names[int(answer) - 1]
        typer.echo(f"Expected a number from 1 to {len(names)} or one of {', '.join(names)}.")
