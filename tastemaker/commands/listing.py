"""`tastemaker list`: what a configuration may name."""

from __future__ import annotations

from rich.table import Table

from ..config import registries
from ..config.load import RECIPES, trainable
from ..registry import Registry

KINDS: dict[str, Registry] = {
    "models": registries.MODELS,
    "autoencoders": registries.CODECS,
    "rewards": registries.REWARDS,
    "objectives": registries.OBJECTIVES,
    "data": registries.DATA,
    "searches": registries.SEARCHES,
}


def table(kind: str) -> Table:
    """Names, and the sentence each says of itself."""
    shown = Table("name", "what it is", title=kind)
    names = recipes() if kind == "recipes" else components(KINDS[kind])
    for name, told in names.items():
        shown.add_row(name, told)
    return shown


def components(registry: Registry) -> dict[str, str]:
    return {name: first_sentence(registry.find(name, "list").__doc__ or "") for name in registry}


def recipes() -> dict[str, str]:
    """A recipe's first line of comment says what it is."""
    told = {}
    for name in trainable():
        lines = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
        told[name] = lines[0].removeprefix("#").strip() if lines and lines[0].startswith("#") else ""
    return told


def first_sentence(text: str) -> str:
    return text.strip().split("\n\n")[0].replace("\n", " ")
