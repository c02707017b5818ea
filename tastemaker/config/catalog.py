"""`tastemaker list`: what a configuration may name."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from rich import box
from rich.markup import escape
from rich.table import Table

from ..core.cards import RewardCard
from ..core.registry import ConfigError, Registry
from . import named_datasets, registries
from .recipes import RECIPES, list_trainable_recipes
from .static_source import NotStatic, StaticClass

if TYPE_CHECKING:  # it imports torch
    from ..core.reward import RewardSpec

KINDS: dict[str, Registry] = {
    "models": registries.MODELS,
    "autoencoders": registries.AUTOENCODERS,
    "rewards": registries.REWARDS,
    "objectives": registries.OBJECTIVES,
    "data": registries.DATA,
    "searches": registries.SEARCHES,
}
INNER = "as inside"  # of a reward around another, which depends on that
LONGEST = 110  # letters of what a reward is, in the table
Row = dict[str, Any]


def component_rows(kind: str) -> list[Row]:
    """All that is said of each, as plain data."""
    if kind == "rewards":
        return [reward_row(name) for name in registries.REWARDS]
    if kind == "prompts":
        return prompts()
    names = recipes() if kind == "recipes" else components(KINDS[kind])
    if kind == "data":
        names[named_datasets.NAMED] = first_sentence(named_datasets.__doc__ or "")
    return [{"name": name, "what": told} for name, told in names.items()]


def reward_row(name: str) -> Row:
    """What to know of a reward, as it is by default; of one around others only what it is."""
    what = first_sentence(docstring(registries.REWARDS, name))
    row = {"name": name, "aliases": registries.REWARDS.aliases(name), "what": what}
    try:
        return {**row, **static_properties(registries.REWARDS.place(name))}
    except NotStatic:
        return {**row, **reward_properties(default_spec(name))}


def static_properties(place: str) -> Row:
    """The properties of the reward "module:Class" without settings, read from its source."""
    if place.partition(":")[0] in sys.modules:
        raise NotStatic(f"{place} is imported, and what was imported counts")
    source = StaticClass(place)
    return reward_properties(None if source.has_required_fields else source.defaults())


def reward_properties(spec: RewardSpec | None) -> Row:
    """What a reward says of itself; nothing of its own if it is made around another."""
    if spec is None:
        return {"differentiable": None, "reads": None, "runs_on": None, **asdict(RewardCard(INNER, INNER, INNER))}
    kind = {"differentiable": spec.differentiable, "reads": spec.reads, "runs_on": spec.runs_on}
    return {**kind, **asdict(spec.about)}


def default_spec(name: str) -> RewardSpec | None:
    """A reward without any settings; nothing if it needs some, as those around others do."""
    from ..core.reward import RewardSpec
    from .validate import build_component

    try:
        spec: RewardSpec = build_component(RewardSpec, {"type": name})
    except ConfigError:
        return None
    return spec


def component_table(kind: str) -> Table:
    """Names, and the sentence each says of itself; of rewards all that is known."""
    if kind == "rewards":
        return rewards()
    counts = ["how many"] if kind == "prompts" else []
    shown = Table("name", *counts, "the first of them" if counts else "what it is", title=kind)
    for row in component_rows(kind):
        shown.add_row(escape(row["name"]), *([str(row["count"])] if counts else []), escape(row["what"]))
    return shown


def rewards() -> Table:
    """Narrow enough for a hundred columns."""
    shown = Table(title="rewards", box=box.SIMPLE_HEAD, padding=(0, 1, 1, 0), pad_edge=False, expand=True)
    for name, width in (("reward", 18), ("what it is", 0), ("", 11), ("memory", 8), ("range", 10), ("hacked by", 0)):
        shown.add_column(name, width=width or None, ratio=None if width else 1, overflow="fold")
    for row in component_rows("rewards"):
        names = "\n".join([row["name"], *(f"({alias})" for alias in row["aliases"])])
        what = shorten(row["what"], LONGEST, placeholder=" ...")
        told = (names, what, "\n".join(reward_summary(row)), row["memory"], row["range"], row["hacked_by"])
        shown.add_row(*map(escape, told))
    return shown


def reward_summary(row: Row) -> list[str]:
    """Whether it has a gradient, what it reads and where it runs, in few words."""
    gradient = {True: "gradient", False: "no gradient", None: ""}[row["differentiable"]]
    return [told for told in (gradient, row["reads"], row["runs_on"]) if told] or [INNER]


def components(registry: Registry) -> dict[str, str]:
    return {name: first_sentence(docstring(registry, name)) for name in registry}


def docstring(registry: Registry, name: str) -> str:
    """The docstring of the class behind a name, from its source where the class was not imported yet."""
    place = registry.place(name)
    try:
        if place.partition(":")[0] not in sys.modules:
            return StaticClass(place).docstring
    except NotStatic:
        pass
    return registry.find(name, "list").__doc__ or ""


def recipes() -> dict[str, str]:
    """A recipe's first line of comment says what it is."""
    told = {}
    for name in list_trainable_recipes():
        lines = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
        told[name] = lines[0].removeprefix("#").strip() if lines and lines[0].startswith("#") else ""
    return told


def prompts() -> list[Row]:
    """The sets of prompts, how many each has, and its first; what VADER calls them are aliases."""
    from ..data.prompt_templates import set_prompts, sets, vader_names

    called = {name: [other for other, own in vader_names().items() if own == name] for name in sets()}
    return [
        {"name": name, "aliases": others, "count": len(set_prompts(name)), "what": set_prompts(name)[0][0]}
        for name, others in called.items()
    ]


def first_sentence(text: str) -> str:
    plain = " ".join(text.split())
    return re.split(r"(?<=[.]) (?=[A-Z`])", plain, maxsplit=1)[0]
