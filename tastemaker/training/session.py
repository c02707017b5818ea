"""`tastemaker train`: build, resume, run, and show what happens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from rich.console import Console

from ..autoencoders.training import AutoencoderRun
from ..autoencoders.training import train as train_autoencoder
from ..config.build import build, build_autoencoder, build_judge, make_tiny_any
from ..config.check import require_valid
from ..config.dump import config_to_dict
from ..config.load import list_recipes, load_any_config
from ..config.schema import AnyConfig, AutoencoderRunConfig, JudgeRunConfig, RunConfig
from ..core.lora import Lora
from ..core.registry import ConfigError
from ..export.llamagen import resume_from_llamagen
from ..export.lora import LoraContinued
from ..export.lora_reading import is_external_lora
from ..export.published_loras import resolve_lora_path
from ..models.llamagen import optimizer_state
from ..models.pipeline_layout import HasPipelineLayout
from ..vlm.finetuning import JudgeRun
from ..vlm.finetuning import train as train_judge
from . import resume as directory
from .events import Event, TrainingFinished
from .loggers.html_report import HtmlReportLogger
from .loggers.jsonl import JsonlLogger
from .loggers.logger import Logger, LoggerCollection
from .loggers.progress import ProgressLogger
from .loggers.sample_grids import SampleGridLogger
from .loop import train
from .run import Run


class TimeEstimator(Logger, Protocol):
    """An observer that can say how much time is left, for work of which the run is only a part."""

    def text(self) -> str: ...


def build_loggers(config: AnyConfig, console: Console, timer: TimeEstimator | None = None) -> LoggerCollection:
    """Those the configuration asks for, beside the record and the display that are always there."""
    frames = config.model.frames if isinstance(config, RunConfig) else 1
    progress = ProgressLogger(console, frames=frames, time_left=timer.text if timer else None)
    observers: list[Logger] = [JsonlLogger(), *([timer] if timer else []), progress, SampleGridLogger()]
    if config.watch.tensorboard:
        from .loggers.tensorboard import TensorBoardLogger

        observers.append(TensorBoardLogger())
    if config.watch.wandb:
        from .loggers.wandb import WandbLogger

        observers.append(WandbLogger(config.watch.wandb, config_to_dict(config)))
    return LoggerCollection([*observers, HtmlReportLogger(console)], console)


def load_run_config(recipe: str, overrides: Sequence[str]) -> AnyConfig:
    """Of a recipe or a file; of an earlier run's directory its own, wherever that lies by now."""
    place = Path(recipe)
    if recipe in list_recipes() or not (place / directory.CONFIG_FILE).is_file():
        return load_any_config(recipe, overrides)
    place = place if place.name not in ("", "..") else place.resolve()
    config, changed = (
        load_any_config(place / directory.CONFIG_FILE, overrides),
        {key.partition("=")[0] for key in overrides},
    )
    output = config.output if "output" in changed else place.parent
    return replace(config, output=output, name=config.name if "name" in changed else place.name)


def prepare_run(config: AnyConfig, place: Path, init_from: Path | None) -> Run | AutoencoderRun | JudgeRun:
    """A generator, an autoencoder or a judge, ready to train."""
    if isinstance(config, JudgeRunConfig):
        return build_judge(config, place, init_from=init_from)
    if isinstance(config, AutoencoderRunConfig):
        return build_autoencoder(config, place, init_from=init_from)
    init_from = init_from and resolve_lora_path(init_from)
    if init_from is not None and isinstance(config.tuning, Lora) and is_external_lora(init_from):
        layout = config.model.layout if isinstance(config.model, HasPipelineLayout) else None
        return build(replace(config, tuning=LoraContinued(config.tuning, init_from, layout)), place)
    return build(config, place, init_from=init_from)


def training_events(run: Run | AutoencoderRun | JudgeRun) -> Iterator[Event]:
    if isinstance(run, JudgeRun):
        return train_judge(run)
    return train_autoencoder(run) if isinstance(run, AutoencoderRun) else train(run)


def logged_events(
    run: Run | AutoencoderRun | JudgeRun,
    config: AnyConfig,
    place: Path,
    console: Console,
    timer: TimeEstimator | None = None,
) -> Iterator[Event]:
    """What happens, once it is written down and shown, which the first rank does."""
    first = run.engine.comm.rank == 0
    if first:
        directory.write_run_config(config, place)
        directory.write_environment(run.engine, place)
    watching = build_loggers(config, console, timer) if first else LoggerCollection([], console)
    try:
        for event in training_events(run):
            watching.see(event)
            yield event
    finally:
        watching.close()


def run_training(
    config: AnyConfig,
    *,
    tiny: bool = False,
    resume: Path | None = None,
    init_from: Path | None = None,
    allowed: Sequence[str] = (),
    console: Console,
    timer: TimeEstimator | None = None,
) -> bool:
    """Train to the end, or go on where the directory's last checkpoint is; whether all steps were done."""
    if resume is not None and init_from is not None:
        raise ConfigError(
            "--resume and --init-from were both given; --resume restores everything, --init-from weights only"
        )
    config = require_valid(make_tiny_any(config) if tiny else config)
    place = config.output / (config.name or "run")
    config = directory.keep_precision(config, place, resume)
    found = directory.claim_run_directory(config, place, allowed)
    if found is not None and (resume or init_from):
        raise ConfigError(
            f"{place} already has checkpoints; choose another name=... for a run that starts from elsewhere"
        )
    run = prepare_run(config, place, init_from)
    config = replace(config, engine=run.engine.config)
    try:
        if resume is not None and optimizer_state.is_llamagen_checkpoint(resume) and isinstance(run, Run):
            resume_from_llamagen(run, resume)
        elif resume is not None or found is not None:
            run.resume(resume or found or place)
        done = True
        for event in logged_events(run, config, place, console, timer):
            done = not isinstance(event, TrainingFinished) or event.step >= run.steps
        return done
    finally:
        run.engine.close()
