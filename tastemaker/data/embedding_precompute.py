"""`tastemaker embed`: precompute the prompt embeddings of a model's text encoders."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ..config.check import torchrun_world_size
from ..config.load import apply_overrides, read_recipe
from ..config.registries import DATA, MODELS
from ..config.validate import build_component
from ..console import ProgressBar, make_console
from ..core import output_paths
from ..core.model_spec import ModelSpec, PromptEncoder
from ..core.registry import ConfigError
from ..core.types import Placement, PromptBatch
from .dataset import DataSpec
from .embedding_store import CAPTIONS, EmbeddingStore, ShardedEmbeddingStore, SRPOEmbeddingStore, fill_embedding_store
from .prompts import open_prompt_file

BATCH_SIZE = 16  # prompts per call of the text encoders
SHARD_BYTES = 512 * 2**20
LAYOUTS = ("tastemaker", "srpo")


@dataclass(frozen=True)
class EmbedOptions:
    """What to embed and where to write it."""

    model: str  # a recipe, the path of one, or the name of a model
    overrides: Sequence[str]
    prompts: Path | None
    out: Path
    layout: str = "tastemaker"
    limit: int | None = None
    shard_bytes: int = SHARD_BYTES
    rank: int = field(default_factory=lambda: int(os.environ.get("RANK", "0")))
    world_size: int = field(default_factory=torchrun_world_size)


def embed_prompts(options: EmbedOptions, placement: Placement, *, tiny: bool, console: Console) -> None:
    """Embed the prompts that are missing; the same command resumes after an interruption."""
    if options.layout not in LAYOUTS:
        raise ConfigError(
            f"--format: expected {' or '.join(LAYOUTS)}, got '{options.layout:.60}'; choose one of these [TM136]"
        )
    if options.layout == "srpo" and options.world_size > 1:
        raise ConfigError(
            "--format: srpo embeddings are written by one process only; start the command without torchrun [TM137]"
        )
    output_paths.check_output_directory(options.out)
    if options.model in MODELS:
        settings = apply_overrides({"model": {"type": options.model}}, options.overrides)
    else:
        settings = read_recipe(options.model, options.overrides)
    spec = build_embedding_model(settings, tiny=tiny)
    batch = load_prompts(options, settings)
    encoder = spec.load_prompt_encoder(placement)
    encoder.max_cached_prompts = BATCH_SIZE  # no prompt is embedded twice
    prompts = encoder.keys(batch.prompts, batch.metadata)
    negatives = [key for key in extra_keys(encoder, settings, batch) if key not in set(prompts)]
    store: EmbeddingStore
    if options.layout == "tastemaker":
        store = ShardedEmbeddingStore(options.out, encoder.fingerprint, negatives, options.rank)
        prompts += negatives  # on which SRPO would train if they were in its list
    else:
        store = SRPOEmbeddingStore(options.out / CAPTIONS[0], encoder.fingerprint)
    prompts = prompts[options.rank :: options.world_size]
    missing = len({text for text in prompts if text not in store})
    with ProgressBar(console if options.rank == 0 else make_console(quiet=True)) as progress:
        progress.start("embedding", missing, unit="prompts")
        for added in fill_embedding_store(store, encoder, prompts, options.shard_bytes, BATCH_SIZE):
            progress.advance(added)
    if options.rank == 0:
        shared = (
            f", and as many on each of {options.world_size} ranks"
            if options.world_size > 1
            else f", {len(store)} in all"
        )
        sentence = f"{missing} prompts embedded{shared}; use them with model.embeddings={options.out}"
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)


def build_embedding_model(settings: dict[str, Any], *, tiny: bool) -> ModelSpec:
    """The model with its text encoders, without precomputed embeddings."""
    if "model" not in settings:
        raise ConfigError(
            "embed: the recipe does not have a model; give the recipe of a generator, or the name of a model "
            "such as flux [TM138]"
        )
    spec: Any = build_component(ModelSpec, settings["model"], "model")
    if "embeddings" not in {f.name for f in fields(spec)}:
        name = MODELS.name(type(spec))
        raise ConfigError(
            f"embed: the model {name} cannot use precomputed embeddings; give a published model such as flux [TM139]"
        )
    bare: Any = replace(spec, embeddings=None)
    return bare.tiny() if tiny else bare  # type: ignore[no-any-return]


def load_prompts(options: EmbedOptions, settings: dict[str, Any]) -> PromptBatch:
    """The prompts of the file, or of the data of the recipe, in their order, with their metadata."""
    if options.prompts is not None:
        data: Any = open_prompt_file(options.prompts)
    elif "data" in settings:
        data = build_component(DataSpec, settings["data"], "data")
    else:
        raise ConfigError(
            "--prompts: the recipe does not contain prompts; give a file with --prompts, or a recipe with "
            f"prompts as data ({', '.join(DATA)}) [TM140]"
        )
    dataset = data.load(0)
    batch: PromptBatch = dataset.first_prompts(min(len(dataset), options.limit or len(dataset)))
    return batch


def extra_keys(encoder: PromptEncoder, settings: dict[str, Any], batch: PromptBatch) -> list[str]:
    """Keys of the prompts beside the data; a negative prompt is embedded with what each prompt of the data has."""
    keys = encoder.keys(extra_prompts(settings))
    guidance = settings.get("guidance")
    if guidance:
        negative = [str(guidance.get("negative_prompt", ""))] * len(batch.prompts)
        keys += encoder.keys(negative, batch.metadata, negative=True)
    return list(dict.fromkeys(keys))


def extra_prompts(settings: dict[str, Any]) -> list[str]:
    """The prompts that a run embeds beside its data: negative prompts, and those of displayed samples."""
    guidance, samples = (settings.get(section) or {} for section in ("guidance", "sample"))
    return list(dict.fromkeys(["", str(guidance.get("negative_prompt", "")), *map(str, samples.get("prompts") or ())]))
