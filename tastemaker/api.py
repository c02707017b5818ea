"""The public API of the package: load, build, train, evaluate and generate, which call the same code as the commands.

`import tastemaker as tm` exports every name of this module that is listed in `tastemaker.__all__`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from rich.console import Console
from torch import Tensor, nn

from .config.build import adopt_class_names, build_autoencoder, build_judge_model, build_policy, make_tiny_any
from .config.check import torchrun_world_size
from .config.dump import to_plain
from .config.load import YAML_SUFFIXES, list_recipes
from .config.registries import MODELS
from .config.schema import (
    AnyConfig,
    AutoencoderRunConfig,
    EngineConfig,
    JudgeRunConfig,
    PreferenceRunConfig,
    RewardConfig,
    RunConfig,
    ValidationConfig,
)
from .config.validate import build_component
from .console import message_console
from .core.autoencoder import AUTOENCODERS, AutoencoderSpec
from .core.model_spec import ModelSpec
from .core.registry import ConfigError
from .core.safe_files import read_json_rows
from .core.types import ImageBatch, Placement, PromptBatch
from .data.dataset import Dataset
from .evaluation import benchmark_run
from .evaluation.geneval import parse_detector
from .models.vae import NETWORKS, has_from_config
from .rewards.function import FunctionReward, ScoringFunction, register_function
from .search.generation import METADATA_FILE, GenerationOptions, choose_prompts, generate_samples, resolve_source
from .search.settings import build_sampler, build_search, evaluate_curve, is_curve_requested, search_name
from .training import run_directory
from .training.events import Event, StepCompleted
from .training.precision import select_device
from .training.trainer import (
    AnyRun,
    build_run,
    load_run_config,
    open_loggers,
    own_directory,
    run_training,
    train_built_run,
    training_events,
)

C = TypeVar("C", bound=type)
MAX_CACHED_IMAGES = 512  # first images of a loader, kept for samples and latent statistics


def load(recipe: str | Path, overrides: Sequence[str] = ()) -> AnyConfig:
    """Load and validate the configuration of a recipe, a YAML file or the directory of an earlier run.

    `overrides` are "key=value" strings, as on the command line. For a name that is no recipe, configs/NAME.yaml is
    tried too.
    """
    name = str(recipe)
    candidates = [Path("configs", name + suffix) for suffix in YAML_SUFFIXES if name and name not in list_recipes()]
    file = next((path for path in candidates if path.is_file()), None)
    return load_run_config(str(file or recipe), overrides)


def build(
    config: AnyConfig,
    directory: Path | None = None,
    *,
    rewards: Mapping[str, ScoringFunction] | None = None,
    tiny: bool = False,
    init_from: Path | None = None,
) -> AnyRun:
    """Load the model, the rewards and the data of a configuration, and place them on this process's device.

    `rewards` are functions (images, prompts, **metadata) -> scores to add to those of the configuration, by name.
    `tiny` replaces every model by a small random one. `init_from` is a run, a checkpoint, a file or an exported
    folder whose weights to start from. Call `run.engine.close()` when done.
    """
    config = add_function_rewards(config, rewards or {})
    config = make_tiny_any(config) if tiny else config
    directory = directory or config.directory
    return build_run(run_directory.keep_resolved_engine(adopt_class_names(config), directory), directory, init_from)


def add_function_rewards(config: AnyConfig, functions: Mapping[str, ScoringFunction]) -> AnyConfig:
    """Add functions to the rewards of a configuration, each with weight 1 and a batch size of 64.

    A function with an attribute `differentiable = True` has scores with a gradient, as reward gradients need. One with
    `receives = "group"` gets all samples of a prompt per call.
    """
    if not functions:
        return config
    if not isinstance(config, RunConfig):
        raise ConfigError(
            f"rewards: a {type(config).__name__} does not train on rewards; pass the configuration of a generator "
            "(RunConfig) [TM771]"
        )
    added = {
        name: RewardConfig(
            FunctionReward(
                register_function(each),
                differentiable=getattr(each, "differentiable", False) is True,
                receives="group" if getattr(each, "receives", "") == "group" else "batch",
            )
        )
        for name, each in functions.items()
    }
    return replace(config, rewards={**config.rewards, **added})


def train(
    run_or_config: AnyRun | AnyConfig,
    *,
    rewards: Mapping[str, ScoringFunction] | None = None,
    resume: Path | None = None,
    init_from: Path | None = None,
    from_step: int | None = None,
    allow_change: Sequence[str] = (),
    tiny: bool = False,
    on_event: Callable[[Event], None] | None = None,
    console: Console | None = None,
) -> dict[str, float]:
    """Train to the last step, and return the metrics of that step.

    Both a configuration and a run from `build` are trained as by `tastemaker train`: from the last checkpoint in the
    directory if there is one, and with config.yaml, metrics, samples and a report. Only a `Run` that was put together
    by hand has no configuration, and so no loggers. `rewards`, `resume`, `init_from`, `from_step` and `tiny` need a
    configuration; with a run, pass them to `build`. `on_event` is called with every event. Another process that trains
    in the same directory is an error.
    """
    metrics: dict[str, float] = {}

    def observe(event: Event) -> None:
        if isinstance(event, StepCompleted):
            metrics.update(event.metrics)
        if on_event is not None:
            on_event(event)

    console = console or message_console()
    if isinstance(run_or_config, AnyRun):
        if resume or init_from or tiny or rewards or from_step is not None:
            raise ConfigError(
                "train() got a run together with rewards, resume, init_from, from_step or tiny; pass these arguments "
                "to build(), or pass a configuration to train() [TM772]"
            )
        train_built_run(run_or_config, allow_change, console, observe)
    else:
        run_training(
            add_function_rewards(run_or_config, rewards or {}),
            tiny=tiny,
            resume=resume,
            init_from=init_from,
            from_step=from_step,
            allow_change=allow_change,
            console=console,
            on_event=observe,
        )
    return metrics


def evaluate(
    benchmark: str,
    model: str | Path,
    overrides: Sequence[str] = (),
    *,
    num_prompts: int | None = None,
    count: int | None = None,
    metadata: Path | None = None,
    detector: str = "",
    self_test: bool = True,
    judge: str = "",
    search: str = "single",
    num_candidates: int | Sequence[int] = 4,
    verifier: str = "",
    weights: str = "",
    seed: int = 0,
    out: Path | None = None,
    save_steps: bool = False,
    tiny: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Evaluate a recipe or the directory of a run on a benchmark, and return the report.

    Args:
        benchmark: geneval, geneval2, dpg, wise, unigenbench, t2i-compbench, vbench-lite, ocr, playeval,
            playeval-motion or wordeval.
        num_prompts: how many of its prompts; count: how many samples of each. By default, the benchmark's own numbers.
        metadata: the benchmark's own prompt file or folder; GenEval and the playground's benchmarks need none.
        detector: GenEval: a Mask2Former, or settings such as "{threshold: 0.4}"; self_test: whether to test it first.
        judge: what answers a benchmark's questions: a folder, a hub id, the URL of an endpoint, or settings.
        search: how samples are searched for, of `num_candidates` that `verifier` scores. For several numbers of
            candidates, the points of a curve of score against cost are returned.
        weights: live, or a snapshot such as ema; by default the EMA if there is one.
        out: the directory to write samples, scores and the report to; an evaluation that is there is resumed.
        save_steps: whether to write the previews of all candidates after every step to its folder `process`.
    """
    loaded = benchmark_run.load_benchmark(benchmark, num_prompts, count, metadata)
    geneval, settings = parse_detector(detector, self_test=self_test), benchmark_run.parse_judge(judge, benchmark)
    verifier, console = verifier or benchmark_run.default_verifier(benchmark), console or message_console()
    config, checkpoint = resolve_source(str(model), overrides, tiny=tiny, console=console)
    directory = out or benchmark_run.evaluation_directory(benchmark, config, checkpoint, search_name(search))

    def evaluate_search(n: int, folder: Path) -> dict[str, Any]:
        options = benchmark_run.EvaluationOptions(
            loaded, build_search(search, n), verifier, weights,
            seed=seed, geneval=geneval, save_steps=save_steps, judge=settings,
        )  # fmt: skip
        return benchmark_run.evaluate_model(config, checkpoint, options, folder, tiny=tiny, console=console)

    counts = [num_candidates] if isinstance(num_candidates, int) else list(num_candidates)
    if is_curve_requested(search, counts):
        return evaluate_curve(search_name(search), counts, evaluate_search, directory, console)
    return evaluate_search(counts[0], directory)


def generate(
    model: str | Path,
    prompts: Sequence[str] = (),
    overrides: Sequence[str] = (),
    *,
    images: Sequence[str | Path] = (),
    prompt_file: Path | None = None,
    out: str | Path = "generated",
    count: int = 1,
    seed: int = 0,
    search: str = "single",
    num_candidates: int = 4,
    verifier: str = "run",
    scheduler: str = "",
    num_inference_steps: int | None = None,
    weights: str = "live",
    lora: Path | None = None,
    lora_scale: float = 1.0,
    video_format: str = "",
    fps: int = 8,
    save_steps: bool = False,
    tiny: bool = False,
    console: Console | None = None,
) -> list[Path]:
    """Generate images or videos, and return their files in order.

    Args:
        model: a recipe, the directory of a run, or what was exported from one.
        prompts: by default, those of `prompt_file`, or the first of the recipe's data.
        images: the images to edit or to start a video from, for every prompt; `prompt_file` may name them for each.
        out: the directory to write to; samples that are there are kept.
        count: samples of each prompt.
        search: how samples are searched for, of `num_candidates` that `verifier` scores.
        scheduler: a scheduler class of diffusers to sample with, in `num_inference_steps` steps.
        weights: live, or a snapshot such as ema or reference.
        lora: LoRA weights for the model, a file or an id on the hub.
        video_format: mp4, gif, png or frames; by default mp4 if PyAV is installed, else png.
        save_steps: whether to write the previews of all candidates after every step to the folder `process`.
    """
    console = console or message_console()
    config, checkpoint = resolve_source(str(model), overrides, lora, tiny=tiny, console=console)
    options = GenerationOptions(
        choose_prompts(prompts, prompt_file, config, [Path(image) for image in images]),
        count,
        seed,
        build_sampler(search, num_candidates, scheduler, num_inference_steps),
        weights,
        Path(out),
        lora_scale,
        verifier,
        video_format,
        fps,
        save_steps,
    )
    folder = generate_samples(config, checkpoint, options, tiny=tiny, console=console)
    return [folder / row["file"] for row in read_json_rows(folder / METADATA_FILE)]


def list_models() -> list[str]:
    """Return every name that `type` may have for generators and autoencoders, with your registered ones."""
    return sorted({*MODELS, *AUTOENCODERS, *NETWORKS})


def register_model(name: str) -> Callable[[C], C]:
    """Return a decorator that registers the spec of a generator or autoencoder, or an nn.Module with `from_config`."""

    def register(cls: C) -> C:
        if issubclass(cls, ModelSpec):
            return MODELS.register(name)(cls)
        if issubclass(cls, AutoencoderSpec):
            return AUTOENCODERS.register(name)(cls)
        if has_from_config(cls):
            return NETWORKS.register(name)(cls)
        raise ConfigError(
            f"model '{name:.60}': {cls.__name__} is not a ModelSpec, an AutoencoderSpec or an nn.Module with a "
            "classmethod from_config; derive the class from one of them [TM773]"
        )

    return register


def build_model(config: AnyConfig | Mapping[str, Any], device: str = "auto") -> Any:
    """Build the network of an autoencoder, the policy of a generator or the model of a judge.

    `config` is a configuration, or the section of a model as a mapping: {"type": "vae", "width": 8}.
    """
    engine: EngineConfig = build_component(EngineConfig, {"device": device}, "engine")
    placement = Placement(select_device(engine.device, 0))
    if isinstance(config, Mapping):
        spec_type = AutoencoderSpec if str(config.get("type")) in AUTOENCODERS else ModelSpec
        return build_component(spec_type, dict(config), "model").load(placement)
    if isinstance(config, AutoencoderRunConfig):
        return config.autoencoder.load(placement)
    if isinstance(config, JudgeRunConfig):
        return build_judge_model(config.judge, placement)
    if isinstance(config, PreferenceRunConfig):
        return config.preference.tower.load(placement)
    return build_policy(config, placement)


class VAETrainer:
    """Trains an autoencoder on batches of your own loader, with the loop and loggers of `tastemaker train`."""

    def __init__(self, model: nn.Module, config: AnyConfig, device: str = "auto") -> None:
        if not isinstance(config, AutoencoderRunConfig):
            raise ConfigError(
                f"VAETrainer: expected the configuration of an autoencoder, got a {type(config).__name__}; use "
                "`tastemaker train` or tm.train for this configuration [TM774]"
            )
        engine = build_component(EngineConfig, {**to_plain(config.engine, EngineConfig), "device": device}, "engine")
        self.model, self.config = model, replace(config, engine=engine)
        self.directory = config.directory

    def train(
        self,
        loader: Iterable[Any],
        console: Console | None = None,
        *,
        validation_loader: Iterable[Any] | None = None,
    ) -> dict[str, float]:
        """Train all steps, or those left since the last checkpoint, and return the metrics of the last step.

        A batch is pixels [B, C, H, W] with one or three channels in [0, 1], or a tuple that starts with them. The
        loader starts over when it ends. The images of `validation_loader`, up to `validation.num_samples` of them, are
        the held-out ones, and the same on every rank. Every `validation.every` steps, or with every checkpoint if that
        is 0, the loss on them is logged, and after the last step the metrics of their reconstructions.
        """
        batches, validation = LoaderDataset(loader), self.config.validation
        if validation_loader is not None:
            every = validation.every or self.config.checkpoint.every or self.config.steps
            validation = replace(validation, every=every, data=None)
        elif validation.data is None:  # nothing can be held out of a loader
            validation = ValidationConfig()
        config = replace(self.config, batch_size=len(batches.last) * torchrun_world_size(), validation=validation)
        metrics: dict[str, float] = {}
        with own_directory(config.engine, self.directory):
            config = run_directory.keep_resolved_engine(config, self.directory)
            latest = run_directory.claim_run_directory(config, self.directory, ())
            settings = replace(config, autoencoder=PrebuiltAutoencoder(self.model), data=batches)
            if validation_loader is not None:
                images = read_validation_images(validation_loader, validation.num_samples)
                settings = replace(settings, validation=replace(validation, data=images))
            run = build_autoencoder(settings, self.directory)
            config = replace(config, engine=run.engine.config)
            try:
                if latest is not None:
                    run.resume(latest)
                with open_loggers(run, config, console or message_console()) as loggers:
                    for event in training_events(run):
                        loggers.log(event)
                        metrics = dict(event.metrics) if isinstance(event, StepCompleted) else metrics
            finally:
                run.engine.close()
        return metrics


@dataclass(frozen=True)
class PrebuiltAutoencoder(AutoencoderSpec):
    """The spec of a network that is already built."""

    net: nn.Module

    def load(self, placement: Placement) -> nn.Module:
        return self.net.to(placement.device)

    def tiny(self) -> PrebuiltAutoencoder:
        return self


@dataclass
class LoaderDataset(Dataset):
    """The batches of a loader in order, one per step; for earlier steps, the first images of the loader."""

    loader: Iterable[Any]
    cached: list[Tensor] = field(default_factory=list)  # the first batches
    next_step: int = 0  # the step whose batch is read next
    batch_type: ClassVar[type] = ImageBatch

    def __post_init__(self) -> None:
        self.stream = self._endless()
        self.last = next(self.stream)  # the batch of the first step

    def load(self, seed: int) -> LoaderDataset:
        return self

    def __len__(self) -> int:
        return MAX_CACHED_IMAGES  # the length of a loader is unknown

    def batch(self, step: int, size: int, rank: int, world: int) -> ImageBatch:
        if step < self.next_step:
            return as_images(torch.cat(self.cached)[:size])
        for number in range(self.next_step, step + 1):
            self.last = next(self.stream) if number else self.last
            if sum(map(len, self.cached)) < MAX_CACHED_IMAGES:
                self.cached.append(self.last)
        self.next_step = step + 1
        return as_images(self.last)

    def first_prompts(self, count: int) -> PromptBatch:
        return PromptBatch(("",) * count, ({},) * count)

    def _endless(self) -> Iterator[Tensor]:
        """Yield the batches of the loader again and again."""
        count = 0
        while True:
            before = count
            for batch in self.loader:
                count += 1
                yield as_rgb(batch)
            if count == before:
                problem = f"ended after {count} batches" if count else "has no batches"
                raise ConfigError(
                    f"loader: the loader {problem}; pass a loader that can be iterated more than once, such as a "
                    "DataLoader [TM775]"
                )


@dataclass
class HeldOutImages(Dataset):
    """Images [N, 3, H, W] in memory, in order."""

    pixels: Tensor
    batch_type: ClassVar[type] = ImageBatch

    def load(self, seed: int) -> HeldOutImages:
        return self

    def __len__(self) -> int:
        return len(self.pixels)

    def batch(self, step: int, size: int, rank: int, world: int) -> ImageBatch:
        """A rank's share of the first `size` images, starting over if there are fewer."""
        indices = torch.arange(rank * (size // world), (rank + 1) * (size // world))
        return as_images(self.pixels[indices % len(self.pixels)])

    def first_prompts(self, count: int) -> PromptBatch:
        return PromptBatch(("",) * count, ({},) * count)


def read_validation_images(loader: Iterable[Any], count: int) -> HeldOutImages:
    """Read the first `count` images of a loader, once."""
    batches: list[Tensor] = []
    for batch in loader:
        batches.append(as_rgb(batch))
        if sum(map(len, batches)) >= count:
            break
    if not batches:
        raise ConfigError("validation_loader has no batches; pass one with images, or leave it out [TM846]")
    return HeldOutImages(torch.cat(batches)[:count])


def as_images(pixels: Tensor) -> ImageBatch:
    """Return images [B, 3, H, W] without prompts as a batch of one frame each."""
    return ImageBatch(("",) * len(pixels), pixels[:, None])


def as_rgb(batch: Any) -> Tensor:
    """Return the pixels [B, 3, H, W] in [0, 1] of a batch."""
    pixels = batch.pixels[:, 0] if isinstance(batch, ImageBatch) else batch
    pixels = pixels[0] if isinstance(pixels, tuple | list) else pixels
    if not isinstance(pixels, Tensor) or pixels.ndim != 4 or pixels.shape[1] not in (1, 3) or not len(pixels):
        kind = f"of shape {list(pixels.shape)}" if isinstance(pixels, Tensor) else f"a {type(pixels).__name__}"
        raise ConfigError(
            f"loader: expected pixels [B, C, H, W] with 1 or 3 channels, got a batch that is {kind}; change the "
            "batches that the loader yields [TM776]"
        )
    pixels = pixels.detach().float().cpu()
    low, high = float(pixels.min()), float(pixels.max())
    if low < 0 or high > 1:
        raise ConfigError(
            f"loader: expected pixels from 0 to 1, got values from {low:.3g} to {high:.3g}; rescale the pixels "
            "(from -1 to 1: x / 2 + 0.5) [TM777]"
        )
    return pixels.expand(-1, 3, -1, -1)
