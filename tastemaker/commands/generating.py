"""`tastemaker generate`: pictures of prompts, from a recipe or a run, by any search."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from ..config.build import build, shrunk
from ..config.load import load
from ..config.run import RunConfig
from ..data.prompts import PromptFile
from ..pictures import clip_suffix, save_picture, sheet
from ..randomness import Randomness
from ..registry import ConfigError
from ..search.search import Outcome, Search
from ..train import checkpoint
from ..train.run import Run
from ..types import PromptBatch
from .directory import CONFIG

ROWS = 64  # prompts searched for at a time


@dataclass(frozen=True)
class Order:
    """What to make."""

    prompts: PromptBatch
    count: int  # of each prompt
    seed: int
    search: Search
    weights: str
    out: Path


def source(recipe: str, overrides: Sequence[str]) -> tuple[RunConfig, Path | None]:
    """A recipe, or a run's directory with its last checkpoint."""
    folder = Path(recipe)
    if not (folder / CONFIG).is_file():
        return load(recipe, overrides), None
    found = checkpoint.latest(folder)
    if found is None:
        raise ConfigError(f"{folder} has no checkpoint yet; train it first, or give a recipe's name")
    return load(folder / CONFIG, overrides), found


def prompts(texts: Sequence[str], file: Path | None, config: RunConfig) -> PromptBatch:
    """Those given, those of a file, or else the first of the recipe's data."""
    if texts:
        return PromptBatch(tuple(texts), tuple({} for _ in texts))
    data = PromptFile(file).load(config.seed) if file else config.data.load(config.seed)
    return data.first(len(data) if file else 8)


def make(config: RunConfig, found: Path | None, order: Order, *, tiny: bool, console: Console) -> Path:
    """Write the pictures, what is known of each, and one sheet of all to look at."""
    run = build(shrunk(config) if tiny else config)
    if found is not None:
        run.resume(found)
    try_on(run, order.weights)
    order.out.mkdir(parents=True, exist_ok=True)
    pictures, captions, paid = [], [], [0, 0]
    with (order.out / "metadata.jsonl").open("w", encoding="utf-8") as record:
        for rows in track(list(shares(order)), "generating", console=console):
            pixels, facts, price = search(run, order, rows)
            paid = [a + b for a, b in zip(paid, price, strict=True)]
            for picture, fact in zip(pixels, facts, strict=True):
                name = f"{fact['index']:05d}-{slug(fact['prompt'])}.{'png' if len(picture) == 1 else clip_suffix()}"
                save_picture(picture, order.out / name)
                record.write(json.dumps({"file": name, **fact}) + "\n")
                pictures.append(picture)
                captions.append(fact["prompt"])
    save_picture(sheet(torch.stack(pictures[:64]), captions[:64])[None], order.out / "sheet.png")
    console.print(f"{len(pictures)} pictures in {order.out}, for {paid[0]} network calls and {paid[1]} judgements")
    run.engine.close()
    return order.out


def try_on(run: Run, name: str) -> None:
    """Refuse weights that do not exist before anything is made."""
    try:
        with nullcontext() if name == "live" else run.policy.weights.use(name):
            return
    except ValueError as error:
        raise ConfigError(f"--weights: {error}") from error


def shares(order: Order) -> Iterator[list[int]]:
    total = len(order.prompts) * order.count
    return (list(range(i, min(i + ROWS, total))) for i in range(0, total, ROWS))


@torch.no_grad()
def search(run: Run, order: Order, rows: list[int]) -> tuple[torch.Tensor, list[dict[str, Any]], tuple[int, int]]:
    """Pixels [B, F, 3, H, W] of some of the pictures; the seed of each is its index, whatever is made beside it."""
    chosen = [order.prompts.prompts[i // order.count] for i in rows]
    batch = PromptBatch(tuple(chosen), tuple(order.prompts.facts[i // order.count] for i in rows))
    rng = Randomness(order.seed, 0, torch.tensor(rows, device=run.engine.device))
    borrowed = nullcontext() if order.weights == "live" else run.policy.weights.use(order.weights)
    with run.engine.computing(), borrowed:
        found = order.search.find(run.policy, Outcome(run.rubric), batch, rng)
        pixels = run.policy.decode(found.x).float().clamp(0, 1).cpu()
    scores = [None if score != score else score for score in found.score.tolist()]
    facts = [
        {"index": i, "prompt": p, "seed": order.seed, "score": s} for i, p, s in zip(rows, chosen, scores, strict=True)
    ]
    return pixels, facts, (found.price.calls, found.price.judged)


def slug(prompt: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:40] or "empty"
