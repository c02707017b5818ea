"""`tastemaker generate`: sample prompts with any search, from a recipe, a run or an export, on all ranks."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from ..config.build import build, make_tiny, warn_ignored_overrides
from ..config.dump import config_to_dict
from ..config.load import apply_overrides, load
from ..config.schema import RunConfig, SampleConfig
from ..console import ProgressBar, make_console
from ..core import output_paths
from ..core.errors import pluralize
from ..core.lora import LoraWeights
from ..core.model_spec import PipelineLayout
from ..core.objective import Comm
from ..core.randomness import Randomness
from ..core.registry import ConfigError
from ..core.reward import Verifier
from ..core.safe_files import MAX_ROWS_BYTES, check_text, read_bytes, read_json_rows
from ..core.text_layout import slugify
from ..core.types import PromptBatch
from ..core.weights import FullFinetuning
from ..data.edits import EditFile, digest_sources, has_sources
from ..data.image_io import check_video_format, make_contact_sheet, read_image, save_image, video_suffix
from ..data.prompts import open_prompt_file
from ..data.text_files import require_file
from ..export.lora import (
    ADAPTER_FILE,
    DIFFUSERS_LORA_FILE,
    LORA_SUFFIXES,
    PUBLISHED_LORAS,
    LoraFromFile,
    only_lora_file,
    resolve_lora_path,
)
from ..models.pretrained import PIPELINE_INDEX
from ..models.weight_files import PLAYGROUND
from ..training.checkpoint import latest_checkpoint
from ..training.events import SamplesGenerated
from ..training.run import Run
from ..training.run_directory import CONFIG_FILE, RECIPE_FILE, find_named_weights, find_run_checkpoint
from ..training.samples import read_sources, sampling_policy
from .base import RubricVerifier, Search, SearchCost, observe_steps
from .diffusers_scheduler import DiffusersSchedulerSearch
from .flops import FlopCosts, format_cost, measure_flop_costs
from .settings import build_verifier, check_constant_cost

DEFAULT_BATCH_SIZE = 64  # prompts per search, unless the recipe sets rollout_batch_size
MAX_SHEET_SAMPLES = 64
VAE = "vae"  # diffusers' folder of an autoencoder
METADATA_FILE = "metadata.jsonl"
SOURCE_KEYS = ("target", "mask", "edit")  # metadata that says something about the sources of a prompt
PROCESS_FOLDER = "process"  # of the previews of all steps
DEMO_MODEL = "playground-flow16"
# What a setting of `sample` replaces, by its name there.
TRAINING_SETTINGS = {
    "height": ("model.height",),
    "width": ("model.width",),
    "num_steps": ("process.num_steps",),
    "guidance_scale": ("model.guidance_scale", "guidance.scale"),
}
# Recipes that pretrain a playground model, and the weights they led to, which are in the package.
PLAYGROUND_MODELS = {
    f"{PLAYGROUND}-{name}": f"{PLAYGROUND}/{name}"
    for name in ("causal", "edit", "epsilon", "flow", "flow16", "masked", "video", "words")
}


@dataclass(frozen=True)
class GenerationOptions:
    """What to generate and where to write it."""

    prompts: PromptBatch
    samples_per_prompt: int
    seed: int
    search: Search
    weights: str  # live, or a snapshot such as ema
    out: Path
    lora_scale: float = 1.0
    judge: str = "run"  # the verifier: the run's rewards, or a reward
    video_format: str = ""  # mp4, gif, png or frames; by default mp4 if PyAV is installed, else png
    fps: int = 8
    save_steps: bool = False  # write the previews of all candidates after every step

    def __len__(self) -> int:
        return len(self.prompts) * self.samples_per_prompt

    def sources(self, index: int) -> dict[str, Any]:
        """The source images of a sample as metadata to write, if they are files."""
        image = self.prompts.metadata[index // self.samples_per_prompt].get("image")
        images = list(image) if isinstance(image, (list, tuple)) else [image]
        paths = [str(Path(each).resolve()) for each in images if isinstance(each, (str, Path))]
        if not paths or len(paths) < len(images):
            return {}
        return {"image": paths if len(paths) > 1 else paths[0]}

    def prompt(self, index: int) -> str:
        """The prompt of a sample."""
        return self.prompts.prompts[index // self.samples_per_prompt]

    def fingerprint(self, config: RunConfig, checkpoint: Path | None) -> str:
        """Fingerprint of everything that a sample depends on but its prompt and index."""
        model = (config.model, config.process, config.guidance, config.tuning, config.rewards, checkpoint)
        others: tuple[object, ...] = (self.judge,) if self.judge != "run" else ()
        others += (self.video_format, self.fps) if self.video_format or self.fps != 8 else ()
        others += (sources,) if (sources := digest_sources(self.prompts)) else ()
        others += (inference,) if (inference := config.sample.inference_settings()) else ()
        settings = repr((model, self.seed, self.search, self.weights, self.lora_scale, *others))
        return hashlib.sha256(settings.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class StepImages:
    """Writes previews to process/SAMPLE/CANDIDATE_stepS.png, as Image-Generation-CoT does for each prompt."""

    folder: Path
    candidates: int  # of each sample

    def __call__(self, pixels: Tensor, rng: Randomness, step: int) -> None:
        name = f"round{rng.step}-" if rng.step else ""  # searches that refine repeat the candidates
        for image, row in zip(pixels.float().clamp(0, 1).cpu(), rng.rows.tolist(), strict=True):
            sample, candidate = divmod(row, self.candidates)
            file = f"{PROCESS_FOLDER}/{sample:05d}/{name}{candidate:05d}_step{step}.png"
            save_image(image, self.folder / file)


@dataclass(frozen=True)
class SampleDirectory:
    """A directory of samples with a metadata.jsonl; each rank appends to a file of its own, which are merged later."""

    folder: Path
    fingerprint: str  # samples with another fingerprint are ignored
    rank: int

    def _read(self) -> dict[int, Mapping[str, Any]]:
        """Records by index, of samples whose files exist."""
        records: dict[int, Mapping[str, Any]] = {}
        for path in [self.folder / METADATA_FILE, *sorted(self.folder.glob(f"{METADATA_FILE}.*"))]:
            for record in read_records(path):
                complete = {"file", "index", "prompt"} <= record.keys() and record.get("made") == self.fingerprint
                if complete and (self.folder / record["file"]).exists():
                    records[record["index"]] = record
        return records

    def existing_prompts(self) -> dict[int, str]:
        """The prompts of existing samples, by index."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return {index: record["prompt"] for index, record in self._read().items()}

    def repair(self) -> None:
        """Remove a partial last record; call it after all ranks have read."""
        truncate_partial_line(self.folder / f"{METADATA_FILE}.{self.rank}")

    def add(self, pixels: Tensor, file: str, metadata: Mapping[str, Any], fps: int = 8) -> None:
        """Write a sample, then its record, so that an interrupted sample is generated again."""
        save_image(pixels, self.folder / file, fps)
        with (self.folder / f"{METADATA_FILE}.{self.rank}").open("a", encoding="utf-8") as records:
            records.write(json.dumps({"file": file, **metadata, "made": self.fingerprint}) + "\n")

    def merge_records(self, count: int) -> list[str]:
        """Merge the records of all ranks into metadata.jsonl, ordered by index; returns the files."""
        records = [record for index, record in sorted(self._read().items()) if index < count]
        text = "".join(json.dumps(record) + "\n" for record in records)
        output_paths.write_text_atomically(self.folder / METADATA_FILE, text)
        for path in self.folder.glob(f"{METADATA_FILE}.*"):
            path.unlink()
        return [str(record["file"]) for record in records]


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file, without lines that an interruption left incomplete; empty if it does not exist."""
    return list(read_json_rows(path))


def truncate_partial_line(path: Path) -> None:
    """Remove a last line that was cut off, so that the next record starts on a line of its own."""
    if path.is_file() and (data := read_bytes(path, MAX_ROWS_BYTES)) and not data.endswith(b"\n"):
        path.write_bytes(data[: data.rfind(b"\n") + 1])


def resolve_source(
    recipe: str,
    overrides: Sequence[str],
    lora: Path | None = None,
    *,
    tiny: bool = False,
    console: Console | None = None,
) -> tuple[RunConfig, Path | None]:
    """Configuration and checkpoint of a recipe, with a LoRA file if given; of an export; or of a run.

    A recipe whose run has a checkpoint gets that, as `find_run_checkpoint` decides. The recipes that pretrain the
    playground models get the shipped weights, unless an override is about the model; "playground" is the demo's model.
    Settings of the section `sample` count, unless an override names the training setting of the same meaning, such as
    process.num_steps. Warn about overrides that tiny models ignore, and about random weights.
    """
    recipe = DEMO_MODEL if recipe == PLAYGROUND else recipe
    shipped, given = PLAYGROUND_MODELS.get(recipe), overrides
    if shipped and not tiny and not any(override.startswith("model") for override in overrides):
        # Compiling takes longer than the samples of such a small model.
        overrides = [f"model.weights={shipped}", "engine.compile=false", *overrides]
    config, checkpoint = _resolve_source(recipe, overrides, lora)
    if checkpoint is None and lora is None and not (Path(recipe) / RECIPE_FILE).is_file():
        checkpoint = find_run_checkpoint(make_tiny(config) if tiny else config, recipe, given, console, tiny=tiny)
    config = prefer_overrides(config, overrides)
    if tiny:
        warn_ignored_overrides(config, overrides)
        if checkpoint is not None and make_tiny(config).model != config.model:
            warnings.warn(
                f"--tiny: the weights of {checkpoint} are ignored; tiny models have random ones [TM844]", stacklevel=2
            )
            checkpoint = None
    elif checkpoint is None:
        warn_random_weights(config)
    return config, checkpoint


def prefer_overrides(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """The configuration without those settings of `sample` whose counterpart in training is overridden explicitly."""
    given = apply_overrides({}, overrides)

    def is_set(setting: str) -> bool:
        section, _, name = setting.partition(".")
        return isinstance(given.get(section), dict) and name in given[section]

    replaced: dict[str, Any] = {
        name: None
        for name, settings in TRAINING_SETTINGS.items()
        if any(map(is_set, settings)) and not is_set(f"sample.{name}")
    }
    return replace(config, sample=replace(config.sample, **replaced))


def describe_inference(sample: SampleConfig) -> str:
    """A line about the settings of `sample` that differ from training; empty if there are none."""
    settings = sample.inference_settings()
    parts = [f"{name.replace('_', ' ')} {value:g}" for name, value in settings.items()]
    return f"settings of `sample`: {', '.join(parts)}" if parts else ""


def warn_random_weights(config: RunConfig) -> None:
    """Warn if the model of a configuration has no trained weights."""
    settings = config_to_dict(config)["model"]
    if find_named_weights(config):
        return
    problem = "model.weights is not set" if "weights" in settings else f"'{settings['type']}' has no trained weights"
    advice = "set model.weights, or " if "weights" in settings else ""
    warnings.warn(
        f"{problem}, so the samples come from random weights; {advice}give the directory of a trained run [TM568]",
        stacklevel=3,
    )


def _resolve_source(recipe: str, overrides: Sequence[str], lora: Path | None) -> tuple[RunConfig, Path | None]:
    folder = Path(recipe)
    if not (folder / CONFIG_FILE).is_file():
        config = load_exported(folder, overrides) if (folder / RECIPE_FILE).is_file() else load(recipe, overrides)
        return (replace(config, tuning=find_lora(lora, config.model.layout)) if lora else config), None
    if lora is not None:
        raise ConfigError(
            f"--lora: {folder} is a run and has its own weights; give the recipe of its base model instead [TM569]"
        )
    latest = latest_checkpoint(folder)
    if latest is None:
        raise ConfigError(f"{folder} has no checkpoint yet; train this run first, or give the name of a recipe [TM570]")
    return load(folder / CONFIG_FILE, overrides), latest


def find_lora(path: Path, layout: PipelineLayout | None) -> LoraFromFile:
    """The LoRA of a file, of the only LoRA file in a folder, or of a downloaded hub id."""
    file = only_lora_file(path, f"--lora: {path}") if path.is_dir() else resolve_lora_path(path)
    if not file.is_file():
        known = f"a hub id that was downloaded with `tastemaker download`, or {' or '.join(PUBLISHED_LORAS)}"
        raise ConfigError(f"--lora: the file {file!s:.200} does not exist; give a LoRA file, {known} [TM571]")
    if file.suffix not in LORA_SUFFIXES:
        suffixes = f"{', '.join(LORA_SUFFIXES[:-1])} or {LORA_SUFFIXES[-1]}"
        raise ConfigError(f"--lora: {file!s:.200} ends in '{file.suffix}'; expected a directory, {suffixes} [TM572]")
    return LoraFromFile(file, layout)


def load_exported(folder: Path, overrides: Sequence[str]) -> RunConfig:
    """The configuration of an export in diffusers' layout: a complete pipeline, or a LoRA for its base model."""
    config = load(folder / RECIPE_FILE, overrides)
    if (folder / DIFFUSERS_LORA_FILE).is_file():
        return replace(config, tuning=LoraFromFile(folder / DIFFUSERS_LORA_FILE, config.model.layout))
    if config.model.layout is not None and config.model.layout.library == "transformers":
        if (folder / ADAPTER_FILE).is_file():
            return replace(config, tuning=LoraFromFile(folder / ADAPTER_FILE, config.model.layout))
        return replace(load(folder / RECIPE_FILE, [*overrides, f"model.weights={folder}"]), tuning=FullFinetuning())
    if config.model.converts_to_diffusers:
        parts = ("weights", *(["autoencoder"] if (folder / VAE).is_dir() else []))
        return load(folder / RECIPE_FILE, [*overrides, *(f"model.{part}={folder}" for part in parts)])
    if not (folder / PIPELINE_INDEX).is_file():
        raise ConfigError(
            f"{folder} does not contain a complete pipeline; export it without --network-only, with --layout "
            "diffusers [TM573]"
        )
    model: Any = config.model
    # Some models read the trained part from a file of its own; here it is part of the pipeline.
    separate = [f"model.{name}=null" for name in config_to_dict(config)["model"] if name == model.layout.component]
    pipeline = load(folder / RECIPE_FILE, [*overrides, f"model.weights={folder}", *separate])
    return replace(pipeline, tuning=FullFinetuning())


def choose_prompts(
    texts: Sequence[str], file: Path | None, config: RunConfig, images: Sequence[Path] = ()
) -> PromptBatch:
    """The prompts given, those of a file, or the first eight of the recipe's data; one if all of those are empty.

    `images` are the sources of every prompt. A file may name the sources of each prompt itself.
    """
    batch = _choose_prompts(texts, file, config)
    if not images:
        return batch
    for image in images:
        require_file(image, "--image")
    paths = [str(image.resolve()) for image in images]
    source = paths[0] if len(paths) == 1 else paths
    # The recipe's own target and mask belong to its own sources.
    kept = [{key: value for key, value in entry.items() if key not in SOURCE_KEYS} for entry in batch.metadata]
    return PromptBatch(batch.prompts, tuple({**entry, "image": source} for entry in kept))


def _choose_prompts(texts: Sequence[str], file: Path | None, config: RunConfig) -> PromptBatch:
    if texts:
        for text in texts:
            check_text(text, "--prompt")
        return PromptBatch(tuple(texts), tuple({} for _ in texts))
    if file:
        data = EditFile(file).load(config.seed) if has_sources(file) else open_prompt_file(file).load(config.seed)
        return data.first_prompts(len(data))
    try:
        batch = config.data.load(config.seed).first_prompts(8)
    except ConfigError as error:  # the data of a run may have been moved or changed since
        raise ConfigError(f"{error}; or give prompts with -p [TM574]") from error
    return batch if any(batch.prompts) or any(batch.metadata) else PromptBatch(batch.prompts[:1], batch.metadata[:1])


def generate_samples(
    config: RunConfig, checkpoint: Path | None, options: GenerationOptions, *, tiny: bool, console: Console
) -> Path:
    """Write the samples that are missing, their metadata and a contact sheet."""
    output_paths.check_output_directory(options.out)
    if options.save_steps and isinstance(options.search, DiffusersSchedulerSearch):
        raise ConfigError("--save-steps: schedulers of diffusers have no previews; remove --scheduler [TM901]")
    if config.model.frames > 1:
        check_video_format(options.video_format)
        if not options.video_format and video_suffix() == "png":
            console.print(
                "videos are written as animated PNG, since PyAV is missing; `pip install 'tastemaker[video]'` for MP4",
                markup=False,
            )
    config = make_tiny(config) if tiny else config
    config = replace(config, engine=replace(config.engine, context_parallel=1))  # every rank has samples of its own
    run = build(config, load_data=False)
    if checkpoint is not None:
        run.resume(checkpoint)
    check_weights_exist(run, options.weights)
    scale_lora(run, options.lora_scale)
    comm = run.engine.comm
    directory = SampleDirectory(options.out, options.fingerprint(config, checkpoint), comm.rank)
    existing = directory.existing_prompts()
    comm.barrier()  # all ranks have read before one writes
    directory.repair()
    missing = [i for i in range(len(options)) if existing.get(i) != options.prompt(i)]
    check_constant_cost(run, options.search)
    verifier = build_verifier(options.judge, run, tiny=tiny)
    rank_console = console if comm.rank == 0 else make_console(quiet=True)
    if inference := describe_inference(config.sample):
        rank_console.print(inference, markup=False, highlight=False)
    cost = generate_missing(run, options, directory, missing, verifier, rank_console)
    total = SearchCost(*comm.sum(torch.tensor(astuple(cost), dtype=torch.float64)).tolist())
    if comm.rank == 0:
        files = directory.merge_records(len(options))
        samples = torch.stack([read_image(options.out / file) for file in files[:MAX_SHEET_SAMPLES]])
        save_image(make_sheet(samples, options)[None], options.out / "sheet.png")
        count, word = len(options) - len(missing), "image" if samples.shape[1] == 1 else "video"
        before = f" ({count} existed before)" if count else ""
        console.print(f"{pluralize(len(options), word)} in {options.out}{before}, for {format_cost(total)}")
    comm.barrier()
    run.engine.close()
    return options.out


def make_sheet(samples: Tensor, options: GenerationOptions) -> Tensor:
    """The contact sheet [3, H, W] of the first samples [B, F, 3, H, W], with sources to the left of their samples."""
    count = options.samples_per_prompt
    captions = [options.prompt(i) for i in range(len(samples))]
    metadata = [options.prompts.metadata[i // count] for i in range(len(samples))]
    sources = read_sources(captions, metadata, *samples.shape[-2:])
    event = SamplesGenerated(0, tuple(captions), samples, {}, sources)
    return make_contact_sheet(event.pixels_with_sources(), captions)


def split_over_ranks(indices: Sequence[int], batch_size: int | None, comm: Comm) -> list[tuple[list[int], bool]]:
    """This rank's batches of indices, and whether each is a duplicate of another rank's.

    A rank without a batch of its own in the last round repeats another's, because all ranks take part in the network
    calls of a sharded model.
    """
    size = max(1, min(batch_size or DEFAULT_BATCH_SIZE, -(-len(indices) // comm.world_size)))
    batches = [list(indices[i : i + size]) for i in range(0, len(indices), size)]
    positions = [first + comm.rank for first in range(0, len(batches), comm.world_size)]
    return [(batches[min(position, len(batches) - 1)], position >= len(batches)) for position in positions]


def generate_missing(
    run: Run,
    options: GenerationOptions,
    directory: SampleDirectory,
    missing: Sequence[int],
    verifier: Verifier,
    console: Console,
) -> SearchCost:
    """Generate the missing samples, each rank its share; returns the cost of this rank."""
    comm, data_parallel, total, flops = run.engine.comm, run.engine.data_parallel, SearchCost(0), FlopCosts()
    # Of the ranks that hold parts of the same samples, the first one writes them.
    writes = comm.rank % (comm.world_size // data_parallel.world_size) == 0
    rounds = split_over_ranks(missing, run.batch.rollout_batch_size, data_parallel)
    with ProgressBar(console) as progress:
        progress.start("generating", sum(len(indices) for indices, _ in rounds), unit="samples")
        for number, (indices, is_duplicate) in enumerate(rounds):
            flops = flops if number else measure_flops(run, options, indices, verifier)
            pixels, records, cost = run_search(run, options, indices, verifier)
            cost = flops.add_flops(cost)
            if writes and not is_duplicate:
                total, sample_cost = total + cost, asdict(cost.per_sample(len(indices)))
                for sample, record in zip(pixels, records, strict=True):
                    suffix = "png" if len(sample) == 1 else options.video_format or video_suffix()
                    name = f"{record['index']:05d}-{slugify(record['prompt'])}.{suffix}"
                    directory.add(sample, name, {**record, **sample_cost}, options.fps)
            progress.advance(len(indices))
    return total


def check_weights_exist(run: Run, name: str) -> None:
    """Refuse a snapshot of weights that does not exist, before anything is generated."""
    try:
        with nullcontext() if name == "live" else run.policy.weights.use(name):
            return
    except ValueError as error:
        raise ConfigError(f"--weights: {error} [TM575]") from error


def scale_lora(run: Run, scale: float) -> None:
    """Scale the LoRA of a run."""
    if isinstance(run.policy.weights, LoraWeights):
        run.policy.weights.scale(scale)
    elif scale != 1:
        raise ConfigError(
            "--lora-scale: these weights do not contain LoRA; give a LoRA run, or a LoRA file with --lora [TM576]"
        )


def measure_flops(run: Run, options: GenerationOptions, indices: list[int], verifier: Verifier) -> FlopCosts:
    """Operations of a network call and of a verifier call, on the first of some samples."""
    batch, rng = prompt_batch(run, options, indices)
    with run.engine.autocast():
        policy = sampling_policy(run.policy, run.sample)
        return measure_flop_costs(policy, verifier if options.search.uses_verifier else None, batch, rng)


def prompt_batch(run: Run, options: GenerationOptions, indices: list[int]) -> tuple[PromptBatch, Randomness]:
    """The prompts of some samples, and their randomness, which depends on their indices only."""
    prompts = tuple(options.prompt(i) for i in indices)
    batch = PromptBatch(prompts, tuple(options.prompts.metadata[i // options.samples_per_prompt] for i in indices))
    return batch, Randomness(options.seed, 0, torch.tensor(indices, device=run.engine.device))


@torch.no_grad()
def run_search(
    run: Run, options: GenerationOptions, indices: list[int], verifier: Verifier | None = None
) -> tuple[Tensor, list[dict[str, Any]], SearchCost]:
    """Pixels [B, F, 3, H, W] of some samples, and the metadata of each."""
    batch, rng = prompt_batch(run, options, indices)
    weights = nullcontext() if options.weights == "live" else run.policy.weights.use(options.weights)
    with run.engine.autocast(), weights:
        policy = sampling_policy(run.policy, run.sample)
        observer = StepImages(options.out, options.search.candidates_per_sample) if options.save_steps else None
        with observe_steps(observer):
            result = options.search.run(policy, verifier or RubricVerifier(run.rubric), batch, rng)
        pixels = policy.decode(result.x).float().clamp(0, 1).cpu()
    scores = [None if score != score else score for score in result.score.tolist()]  # JSON has no NaN
    records = [
        {"index": i, "prompt": prompt, "seed": options.seed, "score": score, **options.sources(i)}
        for i, prompt, score in zip(indices, batch.prompts, scores, strict=True)
    ]
    return pixels, records, result.cost
