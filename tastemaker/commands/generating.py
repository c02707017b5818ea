"""`tastemaker generate`: pictures of prompts, from a recipe, a run or an export, by any search, on all ranks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from ..config.build import build, shrunk
from ..config.load import load
from ..config.run import RunConfig
from ..data.prompts import PromptFile
from ..export.adapters import FILE, Attached
from ..lora import LoraWeights
from ..pictures import clip_suffix, read_picture, save_picture, sheet
from ..pretrained import PIPELINE
from ..randomness import Randomness
from ..registry import ConfigError
from ..search.search import Outcome, Search
from ..train import checkpoint
from ..train.looking import viewed
from ..train.run import Run
from ..types import PromptBatch
from ..weights import Full
from .directory import CONFIG
from .ledger import Ledger
from .publishing import RECIPE

ROWS = 64  # prompts searched for at a time, unless the recipe says how many fit
SHOWN = 64  # pictures on the sheet


@dataclass(frozen=True)
class Order:
    """What to make."""

    prompts: PromptBatch
    count: int  # of each prompt
    seed: int
    search: Search
    weights: str
    out: Path
    lora_scale: float = 1.0

    def __len__(self) -> int:
        return len(self.prompts) * self.count

    def prompt(self, index: int) -> str:
        return self.prompts.prompts[index // self.count]

    def made(self, config: RunConfig, found: Path | None) -> str:
        """A name for all that a picture depends on but its prompt and index."""
        model = (config.model, config.process, config.guidance, config.tuning, config.rewards, found)
        told = repr((model, self.seed, self.search, self.weights, self.lora_scale))
        return hashlib.sha256(told.encode()).hexdigest()[:12]


def source(recipe: str, overrides: Sequence[str], adapters: Path | None = None) -> tuple[RunConfig, Path | None]:
    """A recipe, with adapters of a file if asked for; what was exported; or a run with its last checkpoint."""
    folder = Path(recipe)
    if not (folder / CONFIG).is_file():
        config = exported(folder, overrides) if (folder / RECIPE).is_file() else load(recipe, overrides)
        return (replace(config, tuning=Attached(adapters)) if adapters else config), None
    if adapters is not None:
        raise ConfigError(f"--lora: {folder} is a run, which has weights of its own; give the recipe of its base model")
    found = checkpoint.latest(folder)
    if found is None:
        raise ConfigError(f"{folder} has no checkpoint yet; train it first, or give a recipe's name")
    return load(folder / CONFIG, overrides), found


def exported(folder: Path, overrides: Sequence[str]) -> RunConfig:
    """What `tastemaker export --layout diffusers` left: a whole pipeline, or adapters for its base."""
    config = load(folder / RECIPE, overrides)
    if (folder / FILE).is_file():
        return replace(config, tuning=Attached(folder / FILE))
    if not (folder / PIPELINE).is_file():
        raise ConfigError(f"{folder} holds no whole pipeline; export it without --bare, with --layout diffusers")
    model: Any = config.model
    whole = load(folder / RECIPE, [*overrides, f"model.weights={folder}", f"model.{model.layout.part}=null"])
    return replace(whole, tuning=Full())


def prompts(texts: Sequence[str], file: Path | None, config: RunConfig) -> PromptBatch:
    """Those given, those of a file, or else the first of the recipe's data."""
    if texts:
        return PromptBatch(tuple(texts), tuple({} for _ in texts))
    data = PromptFile(file).load(config.seed) if file else config.data.load(config.seed)
    return data.first(len(data) if file else 8)


def make(config: RunConfig, found: Path | None, order: Order, *, tiny: bool, console: Console) -> Path:
    """Write the pictures, what is known of each, and one sheet to look at; pictures that are there stay."""
    config = shrunk(config) if tiny else config
    run = build(replace(config, engine=replace(config.engine, context=1)))  # every rank makes pictures of its own
    if found is not None:
        run.resume(found)
    try_on(run, order.weights)
    rescale(run, order.lora_scale)
    comm, quiet = run.engine.comm, Console(quiet=True)
    ledger = Ledger(order.out, order.made(config, found), comm.rank)
    known = ledger.known()
    comm.barrier()  # all have read before anyone writes
    left = [i for i in range(len(order)) if known.get(i) != order.prompt(i)]
    calls, judged = fill(run, order, ledger, left, console if comm.rank == 0 else quiet)
    paid = comm.total(torch.tensor([calls, judged], dtype=torch.float64)).tolist()
    if comm.rank == 0:
        files = ledger.close(len(order))
        shown = torch.stack([read_picture(order.out / file) for file in files[:SHOWN]])
        captions = [order.prompt(i) for i in range(len(files))][:SHOWN]
        save_picture(sheet(shown, captions)[None], order.out / "sheet.png")
        before = f" ({len(order) - len(left)} were there)" if len(left) < len(order) else ""
        cost = f"for {paid[0]:.0f} network calls and {paid[1]:.0f} judgements"
        console.print(f"{len(order)} pictures in {order.out}{before}, {cost}")
    comm.barrier()
    run.engine.close()
    return order.out


def fill(run: Run, order: Order, ledger: Ledger, left: Sequence[int], console: Console) -> tuple[int, int]:
    """Make the pictures that are left, each rank its share, and say what this rank paid."""
    comm, rows, paid = run.engine.comm, run.engine.rows, (0, 0)
    size = max(1, min(run.batch.rollout or ROWS, -(-len(left) // rows.world)))
    shares = [list(left[i : i + size]) for i in range(0, len(left), size)]
    first_of_its_rows = comm.rank % (comm.world // rows.world) == 0
    for first in track(range(0, len(shares), rows.world), "generating", console=console):
        mine = first + rows.rank
        # Without a share of its own a rank makes another's once more, for a sharded network takes all of them.
        pixels, facts, price = search(run, order, shares[min(mine, len(shares) - 1)])
        if mine < len(shares) and first_of_its_rows:
            paid = (paid[0] + price[0], paid[1] + price[1])
            for picture, fact in zip(pixels, facts, strict=True):
                ending = "png" if len(picture) == 1 else clip_suffix()
                ledger.add(picture, f"{fact['index']:05d}-{slug(fact['prompt'])}.{ending}", fact)
    return paid


def try_on(run: Run, name: str) -> None:
    """Refuse weights that do not exist before anything is made."""
    try:
        with nullcontext() if name == "live" else run.policy.weights.use(name):
            return
    except ValueError as error:
        raise ConfigError(f"--weights: {error}") from error


def rescale(run: Run, scale: float) -> None:
    """Let adapters count more or less than they were trained to."""
    if isinstance(run.policy.weights, LoraWeights):
        run.policy.weights.scale(scale)
    elif scale != 1:
        raise ConfigError("--lora-scale: these weights have no adapters; give a LoRA run, or adapters by --lora")


@torch.no_grad()
def search(run: Run, order: Order, rows: list[int]) -> tuple[torch.Tensor, list[dict[str, Any]], tuple[int, int]]:
    """Pixels [B, F, 3, H, W] of some of the pictures; the seed of each is its index, whatever is made beside it."""
    chosen = [order.prompt(i) for i in rows]
    batch = PromptBatch(tuple(chosen), tuple(order.prompts.facts[i // order.count] for i in rows))
    rng = Randomness(order.seed, 0, torch.tensor(rows, device=run.engine.device))
    borrowed = nullcontext() if order.weights == "live" else run.policy.weights.use(order.weights)
    with run.engine.computing(), borrowed:
        policy = viewed(run.policy)
        found = order.search.find(policy, Outcome(run.rubric), batch, rng)
        pixels = policy.decode(found.x).float().clamp(0, 1).cpu()
    scores = [None if score != score else score for score in found.score.tolist()]
    facts = [
        {"index": i, "prompt": p, "seed": order.seed, "score": s} for i, p, s in zip(rows, chosen, scores, strict=True)
    ]
    return pixels, facts, (found.price.calls, found.price.judged)


def slug(prompt: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:40] or "empty"
