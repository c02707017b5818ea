"""The command that writes a first version of a model: new."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .options import MODELS, print_next_steps, stderr_console

app = typer.Typer()


@app.command(rich_help_panel=MODELS, epilog="Example: tastemaker new model my_model --from diffusers:ZImagePipeline")
def new(
    kind: Annotated[Literal["model"], typer.Argument(help="What to write: model.")],
    name: Annotated[str, typer.Argument(help="Name of the module: lower case, digits and _.")],
    source: Annotated[str, typer.Option("--from", help="Pipeline to start from: diffusers:PIPELINE.")],
    out: Annotated[Path, typer.Option(help="Folder for the files.")] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    """Write a model, its recipe and its parity test from a pipeline of diffusers; TODO marks what is left to do."""
    from ..models.skeleton import write_skeleton

    for path in write_skeleton(name, source, out, force=force):
        stderr_console().print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    place = "" if out == Path() else f"cd {out} && "
    print_next_steps(f"{place}python -m pytest test_{name}.py", f"{place}tastemaker doctor {name}.yaml --tiny")
