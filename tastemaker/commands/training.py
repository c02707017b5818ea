"""`tastemaker train`: build, resume, run, and show what happens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from rich.console import Console

from ..config.build import build, build_autoencoder, build_judge, shrunk_any
from ..config.check import require
from ..config.dump import resolve
from ..config.load import load_any, recipes
from ..config.run import AnyConfig, AutoencoderConfig, JudgeConfig, RunConfig
from ..export.adapters import Continued
from ..export.published import fetched
from ..export.reading import of_others
from ..lora import Lora
from ..models import moments
from ..models.layouts import Outside
from ..observe.grids import Grids
from ..observe.jsonl import JsonLines
from ..observe.pages import Pages
from ..observe.progress import Progress
from ..observe.watch import Observer, Watchers
from ..registry import ConfigError
from ..train.autoencoder import AutoencoderRun
from ..train.autoencoder import train as train_autoencoder
from ..train.events import Event, Finished
from ..train.judge import JudgeRun
from ..train.judge import train as train_judge
from ..train.loop import train
from ..train.run import Run
from . import directory
from .handing import take_over


class Timer(Observer, Protocol):
    """An observer that can say how much time is left, for work of which the run is only a part."""

    def text(self) -> str: ...


def watchers(config: AnyConfig, console: Console, timer: Timer | None = None) -> Watchers:
    """Those the configuration asks for, beside the record and the display that are always there."""
    frames = config.model.frames if isinstance(config, RunConfig) else 1
    progress = Progress(console, frames=frames, time_left=timer.text if timer else None)
    observers: list[Observer] = [JsonLines(), *([timer] if timer else []), progress, Grids()]
    if config.watch.tensorboard:
        from ..observe.tensorboard import TensorBoard

        observers.append(TensorBoard())
    if config.watch.wandb:
        from ..observe.wandb import Wandb

        observers.append(Wandb(config.watch.wandb, resolve(config)))
    return Watchers([*observers, Pages(console)], console)


def configuration(recipe: str, overrides: Sequence[str]) -> AnyConfig:
    """Of a recipe or a file; of an earlier run's directory its own, wherever that lies by now."""
    place = Path(recipe)
    if recipe in recipes() or not (place / directory.CONFIG).is_file():
        return load_any(recipe, overrides)
    place = place if place.name not in ("", "..") else place.resolve()
    config, changed = load_any(place / directory.CONFIG, overrides), {key.partition("=")[0] for key in overrides}
    output = config.output if "output" in changed else place.parent
    return replace(config, output=output, name=config.name if "name" in changed else place.name)


def prepared(config: AnyConfig, place: Path, init_from: Path | None) -> Run | AutoencoderRun | JudgeRun:
    """A generator, an autoencoder or a judge, ready to train."""
    if isinstance(config, JudgeConfig):
        return build_judge(config, place, init_from=init_from)
    if isinstance(config, AutoencoderConfig):
        return build_autoencoder(config, place, init_from=init_from)
    init_from = init_from and fetched(init_from)
    if init_from is not None and isinstance(config.tuning, Lora) and of_others(init_from):
        layout = config.model.layout if isinstance(config.model, Outside) else None
        return build(replace(config, tuning=Continued(config.tuning, init_from, layout)), place)
    return build(config, place, init_from=init_from)


def events(run: Run | AutoencoderRun | JudgeRun) -> Iterator[Event]:
    if isinstance(run, JudgeRun):
        return train_judge(run)
    return train_autoencoder(run) if isinstance(run, AutoencoderRun) else train(run)


def watched(
    run: Run | AutoencoderRun | JudgeRun, config: AnyConfig, place: Path, console: Console, timer: Timer | None = None
) -> Iterator[Event]:
    """What happens, once it is written down and shown, which the first rank does."""
    first = run.engine.comm.rank == 0
    if first:
        directory.record(config, place)
        directory.record_environment(run.engine, place)
    watching = watchers(config, console, timer) if first else Watchers([], console)
    try:
        for event in events(run):
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
    timer: Timer | None = None,
) -> bool:
    """Train to the end, or go on where the directory's last checkpoint is; whether all steps were done."""
    if resume is not None and init_from is not None:
        raise ConfigError(
            "--resume and --init-from were both given; --resume restores everything, --init-from weights only"
        )
    config = require(shrunk_any(config) if tiny else config)
    place = config.output / (config.name or "run")
    config = directory.keep_precision(config, place, resume)
    found = directory.settle(config, place, allowed)
    if found is not None and (resume or init_from):
        raise ConfigError(
            f"{place} already has checkpoints; choose another name=... for a run that starts from elsewhere"
        )
    run = prepared(config, place, init_from)
    config = replace(config, engine=run.engine.config)
    try:
        if resume is not None and moments.recognised(resume) and isinstance(run, Run):
            take_over(run, resume)
        elif resume is not None or found is not None:
            run.resume(resume or found or place)
        done = True
        for event in watched(run, config, place, console, timer):
            done = not isinstance(event, Finished) or event.step >= run.steps
        return done
    finally:
        run.engine.close()
