"""`tastemaker embed`: what a model's text encoders say of prompts, written down once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..config.check import torchrun_world_size
from ..config.load import apply_overrides, read_recipe
from ..config.registries import DATA, MODELS
from ..config.validate import build_component
from ..core import output_paths
from ..core.policy import ModelSpec
from ..core.registry import ConfigError
from ..core.types import Placement
from .embedding_store import (
    CAPTIONS,
    EmbeddingStore,
    PromptEncoder,
    ShardedEmbeddingStore,
    SRPOEmbeddingStore,
    SupportsPromptEmbeddings,
    fill_embedding_store,
)
from .prompts import check_prompt_file
from .spec import DataSpec

AT_ONCE = 16  # prompts read in one call
SHARD = 512 * 2**20  # bytes
LAYOUTS = ("tastemaker", "srpo")


@dataclass(frozen=True)
class EmbedOptions:
    """What to embed, and where to."""

    model: str  # a recipe, the path of one, or the name of a model
    overrides: Sequence[str]
    prompts: Path | None
    out: Path
    layout: str = "tastemaker"
    limit: int | None = None
    shard: int = SHARD
    rank: int = field(default_factory=lambda: int(os.environ.get("RANK", "0")))
    world: int = field(default_factory=torchrun_world_size)


def embed_prompts(order: EmbedOptions, placement: Placement, *, tiny: bool, console: Console) -> None:
    """Write what is not there yet; interrupted, the same command goes on."""
    if order.layout not in LAYOUTS:
        raise ConfigError(f"--layout: found '{order.layout:.60}'; expected {' or '.join(LAYOUTS)}")
    output_paths.check_output_directory(order.out)
    told = resolve_settings(order.model, order.overrides)
    spec = build_embedding_model(told, tiny=tiny)
    wanted = load_prompts(order, told)
    negatives = [text for text in extra_prompts(told) if text not in set(wanted)]
    texts = spec.texts(placement)
    texts.most = AT_ONCE  # none of them comes again
    target = open_layout(order, texts, negatives)
    # The original would take a negative prompt for one more to train on.
    wanted = [*wanted, *(negatives if order.layout == "tastemaker" else ())][order.rank :: order.world]
    left = len({text for text in wanted if text not in target})
    columns = (TextColumn("embedding"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=order.rank > 0) as progress:
        task = progress.add_task("", total=left)
        for added in fill_embedding_store(target, texts, wanted, order.shard, AT_ONCE):
            progress.advance(task, added)
    if order.rank == 0:
        shared = f", and as many on each of {order.world} ranks" if order.world > 1 else f", {len(target)} in all"
        sentence = f"{left} prompts embedded{shared}; use them with model.embeddings={order.out}"
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)


def resolve_settings(name: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The recipe as plain data; of a model's name, that model alone."""
    return apply_overrides({"model": {"type": name}}, overrides) if name in MODELS else read_recipe(name, overrides)


def build_embedding_model(told: dict[str, Any], *, tiny: bool) -> SupportsPromptEmbeddings:
    """The model, which need not have been embedded before."""
    if "model" not in told:
        raise ConfigError("the recipe has no model; give the recipe of a run, or the name of a model such as flux")
    spec: Any = build_component(ModelSpec, told["model"], "model")
    if not isinstance(spec, SupportsPromptEmbeddings):
        name = MODELS.name(type(spec))
        raise ConfigError(f"model: {name} has no text encoder that could be left out; embed is for published models")
    bare: Any = replace(spec, embeddings=None)  # type: ignore[type-var]  # every spec is a dataclass
    return bare.tiny() if tiny else bare  # type: ignore[no-any-return]


def load_prompts(order: EmbedOptions, told: dict[str, Any]) -> list[str]:
    """Those of the file, or of the recipe's own data, in their order."""
    if order.prompts is not None:
        data: Any = check_prompt_file(order.prompts)
    elif "data" in told:
        data = build_component(DataSpec, told["data"], "data")
    else:
        raise ConfigError(f"--prompts: the recipe names none; give a file, or a recipe with data ({', '.join(DATA)})")
    rows = data.load(0)
    return list(rows.first(min(len(rows), order.limit or len(rows))).prompts)


def extra_prompts(told: dict[str, Any]) -> list[str]:
    """What a run asks for beside the prompts it learns from: for guidance, and to look at."""
    guidance, looks = (told.get(section) or {} for section in ("guidance", "sample"))
    return list(dict.fromkeys(["", str(guidance.get("negative", "")), *map(str, looks.get("prompts") or ())]))


def open_layout(order: EmbedOptions, texts: PromptEncoder, negatives: Sequence[str]) -> EmbeddingStore:
    """Where to write, with what is there already."""
    if order.layout == "tastemaker":
        return ShardedEmbeddingStore(order.out, texts.made_by, negatives, order.rank)
    if order.world > 1:
        raise ConfigError("--layout: srpo's list is written by one process; start it without torchrun")
    return SRPOEmbeddingStore(order.out / CAPTIONS[0], texts.made_by)
