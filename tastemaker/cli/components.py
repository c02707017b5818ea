"""Commands about what a configuration can name: list and download."""

from __future__ import annotations

import json
from textwrap import shorten
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .options import stderr_console

app = typer.Typer()

ComponentKind = Literal["models", "autoencoders", "rewards", "objectives", "recipes", "data", "searches", "prompts"]
MAX_DESCRIPTION = 110  # characters of a reward's description in the table


@app.command("list")
def list_(
    kind: Annotated[ComponentKind, typer.Argument(help="Kind of component.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List models, rewards, objectives, data, searches, prompts or recipes by the names that configs use."""
    from ..config import catalog

    rows = catalog.component_rows(kind)
    if as_json:
        Console().print_json(json.dumps(rows))
    else:
        Console().print(reward_table(rows) if kind == "rewards" else component_table(kind, rows))


def component_table(kind: str, rows: list[dict[str, Any]]) -> Table:
    """A table of names and descriptions; recipes with their family, prompt sets with their size."""
    extra = {"recipes": ["family"], "prompts": ["count"]}.get(kind, [])
    table = Table("name", *extra, "first prompt" if kind == "prompts" else "description", title=kind)
    for row in rows:
        table.add_row(escape(row["name"]), *(str(row[key]) for key in extra), escape(row["description"]))
    return table


def reward_table(rows: list[dict[str, Any]]) -> Table:
    """A table of rewards that fits into 100 columns."""
    table = Table(title="rewards", box=box.SIMPLE_HEAD, padding=(0, 1, 1, 0), pad_edge=False, expand=True)
    columns = (("reward", 18), ("description", 0), ("", 11), ("memory", 8), ("range", 10), ("failure modes", 0))
    for name, width in columns:
        table.add_column(name, width=width or None, ratio=None if width else 1, overflow="fold")
    for row in rows:
        names = "\n".join([row["name"], *(f"({alias})" for alias in row["aliases"])])
        gradient = {True: "gradient", False: "no gradient", None: ""}[row["differentiable"]]
        properties = [each for each in (gradient, row["modality"], row["runs_on"]) if each] or [row["range"]]
        description = shorten(row["description"], MAX_DESCRIPTION, placeholder=" ...")
        cells = (names, description, "\n".join(properties), row["memory"], row["range"], row["failure_modes"])
        table.add_row(*map(escape, cells))
    return table


@app.command()
def download(
    names: Annotated[list[str], typer.Argument(help="Recipes, rewards, models or hub ids (owner/name).")],
    only_list: Annotated[bool, typer.Option("--list", help="Print what is needed and download nothing.")] = False,
) -> None:
    """Download published weights; prints size and license first. Resumes if interrupted."""
    from ..models.downloads import download as run_download

    run_download(names, only_list=only_list, console=stderr_console())
