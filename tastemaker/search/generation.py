"""`tastemaker generate`: pictures of prompts, from a recipe, a run or an export, by any search, on all ranks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from ..config.build import build, make_tiny
from ..config.dump import config_to_dict
from ..config.load import load
from ..config.schema import RunConfig
from ..core import output_paths
from ..core.lora import LoraWeights
from ..core.plural import pluralize
from ..core.randomness import Randomness
from ..core.registry import ConfigError
from ..core.reward import Verifier
from ..core.types import PromptBatch
from ..core.weights import FullFinetuning
from ..data.image_io import make_contact_sheet, read_image, save_image, video_suffix
from ..data.prompts import check_prompt_file
from ..export.lora import DIFFUSERS_LORA_FILE, LoraFromFile
from ..export.published_loras import PUBLISHED_LORAS, resolve_lora_path
from ..models.pipeline_layout import ConvertibleToDiffusers, HasPipelineLayout, PipelineLayout
from ..models.pretrained import PICKLED, PIPELINE
from ..training import checkpoint
from ..training.resume import CONFIG_FILE, RECIPE_FILE
from ..training.run import Run
from ..training.sample_grid import sampling_policy
from .base import RubricVerifier, Search, SearchCost
from .flops import FlopCosts, format_cost, measure_flop_costs
from .sample_directory import SampleDirectory
from .settings import build_verifier, check_even_ranks
from .single import SingleSample

ROWS = 64  # prompts searched for at a time, unless the recipe says how many fit
SHOWN = 64  # pictures on the sheet
ADAPTERS = (".safetensors", *sorted(PICKLED))  # how the names of files of adapters end
VAE = "vae"  # what diffusers calls the folder of an autoencoder


@dataclass(frozen=True)
class GenerationOptions:
    """What to make."""

    prompts: PromptBatch
    count: int  # of each prompt
    seed: int
    search: Search
    weights: str
    out: Path
    lora_scale: float = 1.0
    judge: str = "run"  # whom the search asks
    clips: str = ""  # what clips are written as: mp4, gif, png or frames
    frames_per_second: int = 8

    def __len__(self) -> int:
        return len(self.prompts) * self.count

    def prompt(self, index: int) -> str:
        return self.prompts.prompts[index // self.count]

    def made(self, config: RunConfig, found: Path | None) -> str:
        """A name for all that a picture depends on but its prompt and index."""
        model = (config.model, config.process, config.guidance, config.tuning, config.rewards, found)
        asked: tuple[object, ...] = (self.judge,) if self.judge != "run" else ()
        asked += (self.clips, self.frames_per_second) if self.clips or self.frames_per_second != 8 else ()
        told = repr((model, self.seed, self.search, self.weights, self.lora_scale, *asked))
        return hashlib.sha256(told.encode()).hexdigest()[:12]


def resolve_source(
    recipe: str, overrides: Sequence[str], adapters: Path | None = None
) -> tuple[RunConfig, Path | None]:
    """A recipe, with adapters of a file if asked for; what was exported; or a run with its last checkpoint."""
    folder = Path(recipe)
    if not (folder / CONFIG_FILE).is_file():
        config = load_exported(folder, overrides) if (folder / RECIPE_FILE).is_file() else load(recipe, overrides)
        layout = config.model.layout if isinstance(config.model, HasPipelineLayout) else None
        return (replace(config, tuning=find_adapters(adapters, layout)) if adapters else config), None
    if adapters is not None:
        raise ConfigError(f"--lora: {folder} is a run, which has weights of its own; give the recipe of its base model")
    found = checkpoint.latest(folder)
    if found is None:
        raise ConfigError(f"{folder} has no checkpoint yet; train it first, or give a recipe's name")
    return load(folder / CONFIG_FILE, overrides), found


def find_adapters(path: Path, layout: PipelineLayout | None) -> LoraFromFile:
    """The adapters of a file here or alone in a folder, or of the hub if they were fetched."""
    file = only_adapter_file(path) if path.is_dir() else resolve_lora_path(path)
    if not file.is_file():
        known = f"an id on the hub that `tastemaker download` fetched, or {' or '.join(PUBLISHED_LORAS)}"
        raise ConfigError(f"--lora: there is no file {file!s:.200}; give a file of adapters, {known}")
    if file.suffix not in ADAPTERS:
        endings = f"{', '.join(ADAPTERS[:-1])} or {ADAPTERS[-1]}"
        raise ConfigError(f"--lora: {file!s:.200} ends in '{file.suffix}'; expected a directory, {endings}")
    return LoraFromFile(file, layout)


def only_adapter_file(folder: Path) -> Path:
    """The one file of adapters in a folder, as `tastemaker export` leaves it."""
    files = sorted(file for file in folder.iterdir() if file.suffix in ADAPTERS and file.is_file())
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "no file of adapters"
        raise ConfigError(f"--lora: {folder} holds {found:.200}; expected one file of adapters, so give its path")
    return files[0]


def load_exported(folder: Path, overrides: Sequence[str]) -> RunConfig:
    """What `tastemaker export --layout diffusers` left: a whole pipeline, or adapters for its base."""
    config = load(folder / RECIPE_FILE, overrides)
    if (folder / DIFFUSERS_LORA_FILE).is_file():
        layout = config.model.layout if isinstance(config.model, HasPipelineLayout) else None
        return replace(config, tuning=LoraFromFile(folder / DIFFUSERS_LORA_FILE, layout))
    if isinstance(config.model, ConvertibleToDiffusers):
        own = [f"model.{part}={folder}" for part in ("weights", *(["codec"] if (folder / VAE).is_dir() else []))]
        return load(folder / RECIPE_FILE, [*overrides, *own])
    if not (folder / PIPELINE).is_file():
        raise ConfigError(f"{folder} holds no whole pipeline; export it without --bare, with --layout diffusers")
    model: Any = config.model
    # Some can be told of another file for the part that trains, which is in the folder now.
    apart = [f"model.{name}=null" for name in config_to_dict(config)["model"] if name == model.layout.part]
    whole = load(folder / RECIPE_FILE, [*overrides, f"model.weights={folder}", *apart])
    return replace(whole, tuning=FullFinetuning())


def choose_prompts(texts: Sequence[str], file: Path | None, config: RunConfig) -> PromptBatch:
    """Those given, those of a file, or else the first of the recipe's data; of data that say nothing, one."""
    if texts:
        return PromptBatch(tuple(texts), tuple({} for _ in texts))
    if file:
        data = check_prompt_file(file).load(config.seed)
        return data.first(len(data))
    try:
        found = config.data.load(config.seed).first(8)
    except ConfigError as error:  # what a run learned from may be gone or changed by now
        raise ConfigError(f"{error}; or say what to make with -p, for prompts would be those of the data") from error
    return found if any(found.prompts) or any(found.facts) else PromptBatch(found.prompts[:1], found.facts[:1])


def generate_samples(
    config: RunConfig, found: Path | None, order: GenerationOptions, *, tiny: bool, console: Console
) -> Path:
    """Write the pictures, what is known of each, and one sheet to look at; pictures that are there stay."""
    output_paths.check_output_directory(order.out)
    config = make_tiny(config) if tiny else config
    config = replace(config, engine=replace(config.engine, context=1))  # every rank makes pictures of its own
    run = build(config, fed=False)
    if found is not None:
        run.resume(found)
    check_weights_exist(run, order.weights)
    scale_lora(run, order.lora_scale)
    comm, quiet = run.engine.comm, Console(quiet=True)
    ledger = SampleDirectory(order.out, order.made(config, found), comm.rank)
    known = ledger.known()
    comm.barrier()  # all have read before anyone writes
    ledger.mend()
    left = [i for i in range(len(order)) if known.get(i) != order.prompt(i)]
    check_even_ranks(run, order.search)
    verifier = build_verifier(order.judge, run, tiny=tiny)
    price = generate_missing(run, order, ledger, left, verifier, console if comm.rank == 0 else quiet)
    paid = SearchCost(*comm.total(torch.tensor(astuple(price), dtype=torch.float64)).tolist())
    if comm.rank == 0:
        files = ledger.close(len(order))
        shown = torch.stack([read_image(order.out / file) for file in files[:SHOWN]])
        captions = [order.prompt(i) for i in range(len(files))][:SHOWN]
        save_image(make_contact_sheet(shown, captions)[None], order.out / "sheet.png")
        there, word = len(order) - len(left), "picture" if shown.shape[1] == 1 else "clip"
        before = f" ({there} {'was' if there == 1 else 'were'} there)" if there else ""
        console.print(f"{pluralize(len(order), word)} in {order.out}{before}, for {format_cost(paid)}")
    comm.barrier()
    run.engine.close()
    return order.out


def generate_missing(
    run: Run,
    order: GenerationOptions,
    ledger: SampleDirectory,
    left: Sequence[int],
    verifier: Verifier,
    console: Console,
) -> SearchCost:
    """Make the pictures that are left, each rank its share, and say what this rank paid."""
    comm, rows, paid, known = run.engine.comm, run.engine.rows, SearchCost(0), FlopCosts()
    size = max(1, min(run.batch.rollout or ROWS, -(-len(left) // rows.world)))
    shares = [list(left[i : i + size]) for i in range(0, len(left), size)]
    first_of_its_rows = comm.rank % (comm.world // rows.world) == 0
    for first in track(range(0, len(shares), rows.world), "generating", console=console):
        mine = first + rows.rank
        # Without a share of its own a rank makes another's once more, for a sharded network takes all of them.
        share = shares[min(mine, len(shares) - 1)]
        known = known if first else measure_flops(run, order, share, verifier)
        pixels, facts, found = run_search(run, order, share, verifier)
        price = known.of(found)
        if mine < len(shares) and first_of_its_rows:
            paid, each = paid + price, asdict(price.each(len(share)))
            for picture, fact in zip(pixels, facts, strict=True):
                ending = "png" if len(picture) == 1 else order.clips or video_suffix()
                name = f"{fact['index']:05d}-{slugify(fact['prompt'])}.{ending}"
                ledger.add(picture, name, {**fact, **each}, order.frames_per_second)
    return paid


def check_weights_exist(run: Run, name: str) -> None:
    """Refuse weights that do not exist before anything is made."""
    try:
        with nullcontext() if name == "live" else run.policy.weights.use(name):
            return
    except ValueError as error:
        raise ConfigError(f"--weights: {error}") from error


def scale_lora(run: Run, scale: float) -> None:
    """Let adapters count more or less than they were trained to."""
    if isinstance(run.policy.weights, LoraWeights):
        run.policy.weights.scale(scale)
    elif scale != 1:
        raise ConfigError("--lora-scale: these weights have no adapters; give a LoRA run, or adapters by --lora")


def measure_flops(run: Run, order: GenerationOptions, rows: list[int], verifier: Verifier) -> FlopCosts:
    """What a network call and a judgement cost, on the first of some pictures."""
    batch, rng = prompt_batch(run, order, rows)
    with run.engine.computing():
        return measure_flop_costs(
            sampling_policy(run.policy), None if isinstance(order.search, SingleSample) else verifier, batch, rng
        )


def prompt_batch(run: Run, order: GenerationOptions, rows: list[int]) -> tuple[PromptBatch, Randomness]:
    """The prompts of some of the pictures; the seed of each is its index, whatever is made beside it."""
    chosen = tuple(order.prompt(i) for i in rows)
    batch = PromptBatch(chosen, tuple(order.prompts.facts[i // order.count] for i in rows))
    return batch, Randomness(order.seed, 0, torch.tensor(rows, device=run.engine.device))


@torch.no_grad()
def run_search(
    run: Run, order: GenerationOptions, rows: list[int], verifier: Verifier | None = None
) -> tuple[torch.Tensor, list[dict[str, Any]], SearchCost]:
    """Pixels [B, F, 3, H, W] of some of the pictures, and what is known of each."""
    batch, rng = prompt_batch(run, order, rows)
    borrowed = nullcontext() if order.weights == "live" else run.policy.weights.use(order.weights)
    with run.engine.computing(), borrowed:
        policy = sampling_policy(run.policy)
        found = order.search.find(policy, verifier or RubricVerifier(run.rubric), batch, rng)
        pixels = policy.decode(found.x).float().clamp(0, 1).cpu()
    scores = [None if score != score else score for score in found.score.tolist()]
    facts = [
        {"index": i, "prompt": prompt, "seed": order.seed, "score": score}
        for i, prompt, score in zip(rows, batch.prompts, scores, strict=True)
    ]
    return pixels, facts, found.price


def slugify(prompt: str) -> str:
    return re.sub(r"[\W_]+", "-", prompt.lower()).strip("-")[:40] or "empty"
