"""Commands about what a configuration can name: list and download."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from textwrap import shorten, wrap
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.markup import escape

from ..console import Table, is_plain, make_console
from ..core.registry import ConfigError, suggest_name
from .options import LOOK, MODELS, print_next_steps, stderr_console

app = typer.Typer()

KINDS = ("models", "autoencoders", "rewards", "objectives", "recipes", "data", "searches", "prompts")
MAX_DESCRIPTION = 110  # characters of a reward's description in the table
MIN_TABLE_COLUMNS = 90  # terminal width that the table of rewards needs
NEXT_STEPS = {  # after a list
    "recipes": ("tastemaker check RECIPE", "tastemaker train RECIPE"),
    "rewards": ("tastemaker score FOLDER --reward REWARD", "tastemaker train RECIPE 'rewards.NAME={type: REWARD}'"),
    "models": ("tastemaker list recipes --model MODEL",),
    "objectives": ("tastemaker list recipes --objective OBJECTIVE",),
    "autoencoders": ("tastemaker train vae-playground",),
    "data": ("tastemaker check RECIPE 'data={type: prompt_file, path: prompts.txt}'",),
    "searches": ("tastemaker generate RECIPE --search best_of_n",),
    "prompts": ("tastemaker check RECIPE 'data={type: prompt_set, name: NAME}'",),
}
MIN_ROOM = 30  # characters of a description beside a name; with less, it has a line of its own


@app.command("list", rich_help_panel=LOOK, epilog="Example: tastemaker list recipes --objective grpo --device cpu")
def list_(
    kind: Annotated[
        str, typer.Argument(help="models, autoencoders, rewards, objectives, recipes, data, searches or prompts.")
    ],
    objective: Annotated[str, typer.Option(help="Recipes of this objective, such as grpo.")] = "",
    model: Annotated[str, typer.Option(help="Recipes of this model, such as flux.")] = "",
    device: Annotated[Literal["cpu", "cuda"] | None, typer.Option(help="cpu: recipes that train on a CPU.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List models, rewards, objectives, data, searches, prompts or recipes by the names that configs use."""
    from ..config import catalog

    if kind not in KINDS:
        raise ConfigError(f"list: unknown kind '{kind:.60}'{suggest_name(kind, KINDS)} [TM067]")
    rows, filters = catalog.component_rows(kind), {"objective": objective, "model": model, "device": device or ""}
    if any(filters.values()):
        if kind != "recipes":
            raise ConfigError(
                f"list {kind}: --objective, --model and --device filter recipes only; use `tastemaker list "
                "recipes`, or remove these options [TM068]"
            )
        rows = catalog.select_recipes(rows, **filters)
    console = make_console()
    if as_json:
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    if kind == "rewards" and console.width >= MIN_TABLE_COLUMNS and not is_plain(console):
        console.print(reward_table(rows))
    else:
        groups = group_rows(kind, rows, catalog.RECIPE_FAMILIES)
        weights = {row["name"]: describe_weights(row["sources"]) for row in rows if kind == "models"}
        lines = format_groups(groups, console.width, fit_recipe if kind == "recipes" else fit_description, weights)
        console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    print_next_steps(*NEXT_STEPS[kind])


def group_rows(kind: str, rows: list[dict[str, Any]], families: Mapping[str, str]) -> dict[str, list[tuple[str, str]]]:
    """Names and descriptions under headings: recipes by family, and all other components under their kind."""
    if kind == "recipes":
        grouped = {heading: [row for row in rows if row["family"] == family] for family, heading in families.items()}
        return {
            heading: [(row["name"], row["description"]) for row in members]
            for heading, members in grouped.items()
            if members
        }
    if kind == "prompts":
        return {kind: [(row["name"], f"{row['count']} prompts, first: {row['description']}") for row in rows]}
    if kind == "rewards":
        return {kind: [(row["name"], describe_reward(row)) for row in rows]}
    return {kind: [(row["name"], row["description"]) for row in rows]}


def format_groups(
    groups: Mapping[str, list[tuple[str, str]]],
    width: int,
    fit: Callable[[str, int], str],
    details: Mapping[str, Sequence[str]],
) -> list[str]:
    """One line per component with as much of its description as fits; two lines if that would be little.

    `details` are further lines of a component, which are broken where they do not fit.
    """
    lines: list[str] = []
    for heading, rows in groups.items():
        lines += [*([""] if lines else []), *wrap(heading, width)]
        column = max(len(name) for name, _ in rows)
        indent = column + 4 if width - column - 4 >= MIN_ROOM else 4
        for name, text in rows:
            fitted = fit(text, width - indent)
            lines += [f"  {name:{column}}  {fitted}"] if indent > 4 else [f"  {name}", f"    {fitted}"]
            for detail in details.get(name, ()):
                lines += wrap(detail, width, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2))
    return lines


def describe_weights(sources: Sequence[dict[str, Any]]) -> list[str]:
    """One line for the releases of the same size and license."""
    from ..config.catalog import format_source

    groups: dict[str, list[str]] = {}
    for source in sources:
        groups.setdefault(format_source(source), []).append(source["hub"])
    return [
        f"{hubs[0]}{f' and {len(hubs) - 1} more' if len(hubs) > 1 else ''}: {text}" for text, hubs in groups.items()
    ]


def fit_description(text: str, width: int) -> str:
    """Shorten a description that is too long: to its first sentence if that fits and is not much shorter."""
    sentence = text.partition(". ")[0] + "."
    if len(text) > width >= len(sentence) >= width / 2:
        return sentence
    return shorten(text, width, placeholder=" ...", break_on_hyphens=False)


def fit_recipe(text: str, width: int) -> str:
    """Shorten the description of a recipe that is too long, at the end of a sentence or a clause if possible.

    Left out are first the model after "on", which the recipe's name says too, then the last sentences, and then the
    clauses of the first sentence.
    """
    if len(text) <= width:
        return text
    first, *others = text.removesuffix(".").split(". ")
    first = re.sub(r" on .*?(?=[,:] |$)", "", first, count=1)
    clauses = re.split(r": ", first, maxsplit=1)[0].split(", ")
    sentences = [[first, *others[:count]] for count in range(len(others), -1, -1)]
    shorter = [[", ".join(clauses[:count])] for count in range(len(clauses), 0, -1)]
    candidates = [f"{'. '.join(parts)}." for parts in (*sentences, *shorter)]
    return next((each for each in candidates if len(each) <= width), fit_description(text, width))


def describe_reward(row: dict[str, Any]) -> str:
    gradient = {True: "gradient", False: "no gradient", None: ""}[row["differentiable"]]
    properties = [each for each in (gradient, row["modality"], row["runs_on"]) if each]
    return f"{row['description']} ({', '.join(properties)})" if properties else str(row["description"])


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


@app.command(rich_help_panel=MODELS, epilog="Example: tastemaker download ddpo-sd15 --list")
def download(
    names: Annotated[list[str], typer.Argument(help="Recipes, rewards, models or hub ids (owner/name).")],
    only_list: Annotated[bool, typer.Option("--list", help="Print what is needed and download nothing.")] = False,
) -> None:
    """Download published weights; prints size and license first. Resumes if interrupted."""
    from ..models.downloads import download as run_download

    run_download(names, only_list=only_list, console=stderr_console())
    if only_list:
        print_next_steps(f"tastemaker download {shlex.join(names)}")
    else:
        print_next_steps(*suggest_after_download(names))


def suggest_after_download(names: Sequence[str]) -> list[str]:
    """Commands that use what was downloaded: the recipe itself, or recipes of a model, or a reward on a folder."""
    from ..config.recipes import list_trainable_recipes
    from ..config.registries import MODELS as MODEL_REGISTRY
    from ..config.registries import REWARDS

    steps = []
    for name in names:
        if name in list_trainable_recipes() or name.endswith((".yaml", ".yml")):
            steps += [f"tastemaker check {name}", f"tastemaker train {name}"]
        elif name == "geneval":
            steps.append("tastemaker evaluate geneval --model RUN")
        elif name in REWARDS:
            steps.append(f"tastemaker score FOLDER --reward {name}")
        elif name in MODEL_REGISTRY:
            steps.append(f"tastemaker list recipes --model {name}")
    return steps or ["tastemaker list recipes"]
