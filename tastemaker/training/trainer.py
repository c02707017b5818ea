"""`tastemaker train`: build or resume a run, train it, and log its events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from rich.console import Console

from ..autoencoders.training import AutoencoderRun
from ..autoencoders.training import train as train_autoencoder
from ..config.build import (
    InitialWeights,
    adopt_class_names,
    build,
    build_autoencoder,
    build_judge,
    build_preference,
    make_tiny_any,
)
from ..config.check import require_valid
from ..config.dump import config_to_dict
from ..config.load import list_recipes, load_any_config
from ..config.schema import (
    AnyConfig,
    AutoencoderRunConfig,
    EngineConfig,
    JudgeRunConfig,
    LoggerConfig,
    PreferenceRunConfig,
    RunConfig,
)
from ..console import in_notebook
from ..core.errors import CheckpointError
from ..core.lora import Lora
from ..core.objective import Comm, SingleProcess
from ..core.registry import ConfigError
from ..diagnostics.activation_budget import choose_activation_memory
from ..export.llamagen import resume_from_llamagen
from ..export.lora import InitializedLora, is_external_lora
from ..models.llamagen import optimizer_state
from ..preferences.training import PreferenceRun
from ..preferences.training import train as train_preference
from ..vlm.finetuning import JudgeRun
from ..vlm.finetuning import train as train_judge
from . import checkpoint_folder, distributed, run_directory
from .events import Event, TrainingFinished
from .initialization import find_initial_weights, read_exports
from .loggers.html_report import HtmlReportLogger
from .loggers.jsonl import JsonlLogger
from .loggers.logger import Logger, LoggerCollection
from .loggers.notebook import NotebookProgressLogger
from .loggers.progress import ProgressLogger
from .loggers.sample_grids import SampleGridLogger
from .loggers.status import StatusLogger
from .loop import train
from .precision import select_device
from .run import Run
from .run_lock import own_run_directory

AnyRun = Run | AutoencoderRun | JudgeRun | PreferenceRun
DEFAULT_PROJECT = "tastemaker"  # of wandb and trackio


class TimeEstimator(Logger, Protocol):
    """A logger that estimates the remaining time of work of which the run is only a part, such as the demo."""

    def text(self) -> str:
        """Return the estimate as a phrase; empty if there is none yet."""


def build_loggers(config: AnyConfig, console: Console, timer: TimeEstimator | None = None) -> LoggerCollection:
    """Return the loggers of a run: metrics.jsonl, progress, sample grids and report, and those in `loggers`."""
    frames = config.model.frames if isinstance(config, RunConfig) else 1
    progress_type = NotebookProgressLogger if in_notebook() and not console.quiet else ProgressLogger
    progress = progress_type(console, frames=frames, remaining_time=timer.text if timer else None)
    loggers: list[Logger] = [JsonlLogger(), *([timer] if timer else []), progress, SampleGridLogger()]
    loggers += [build_logger(each, config) for each in config.loggers]
    return LoggerCollection([*loggers, HtmlReportLogger(console)], console)


def build_logger(settings: LoggerConfig, config: AnyConfig) -> Logger:
    """Return an optional logger; its package is imported here."""
    project = settings.project or DEFAULT_PROJECT
    if settings.type == "tensorboard":
        from .loggers.tensorboard import TensorBoardLogger

        return TensorBoardLogger()
    if settings.type == "wandb":
        from .loggers.wandb import WandbLogger

        return WandbLogger(project, config_to_dict(config))
    from .loggers.trackio import TrackioLogger

    return TrackioLogger(project, config_to_dict(config))


def load_run_config(recipe: str, overrides: Sequence[str]) -> AnyConfig:
    """Load a recipe, a YAML file, or the configuration in the directory of an earlier run.

    For a directory, output_dir and name are where it is now, which may not be where it was written.
    """
    directory = Path(recipe)
    if recipe in list_recipes() or not (directory / run_directory.CONFIG_FILE).is_file():
        return load_any_config(recipe, overrides)
    directory = directory if directory.name not in ("", "..") else directory.resolve()
    config = load_any_config(directory / run_directory.CONFIG_FILE, overrides)
    changed = {key.partition("=")[0] for key in overrides}
    output_dir = config.output_dir if "output_dir" in changed else directory.parent
    return replace(config, output_dir=output_dir, name=config.name if "name" in changed else directory.name)


def build_run(config: AnyConfig, directory: Path, init_from: Path | None) -> AnyRun:
    """Build the run of a generator, an autoencoder, a judge or a preference model, with given weights.

    `init_from` is a run, a checkpoint, a file or an exported folder. The run keeps its configuration in `run.config`,
    with the precision and the activation memory that were chosen for the device.
    """
    run: AnyRun
    if isinstance(config, PreferenceRunConfig):
        if init_from is not None:
            raise ConfigError("--init-from: a preference model always starts from its votes; omit the option [TM1305]")
        run = build_preference(config, directory)
        run.config = replace(config, engine=run.engine.config)
        return run
    initial = None if init_from is None else find_initial_weights(config, init_from)
    if isinstance(config, JudgeRunConfig):
        run = build_judge(config, directory, init_from=initial)
        run.config = replace(config, engine=run.engine.config)
    elif isinstance(config, AutoencoderRunConfig):
        choose = partial(choose_activation_memory, config)
        run = build_autoencoder(config, directory, init_from=initial, choose_memory=choose)
        run.config = replace(config, engine=run.engine.config)
    else:
        run = build_generator(config, directory, initial)
        run.config = replace(config, engine=run.engine.config)
    return run


def build_generator(config: RunConfig, directory: Path, init_from: InitialWeights | None) -> Run:
    """Build the run of a generator, from the weights of a checkpoint, a LoRA file or an export if given."""
    choose = partial(choose_activation_memory, config)
    if isinstance(init_from, Path) and isinstance(config.tuning, Lora) and is_external_lora(init_from):
        tuning = InitializedLora(config.tuning, init_from, config.model.layout)
        config = replace(config, tuning=tuning)
        return build(config, directory, exports=read_exports(config), choose_memory=choose)
    exports = read_exports(config)
    return build(config, directory, init_from=init_from, exports=exports, choose_memory=choose)


def training_events(run: AnyRun) -> Iterator[Event]:
    """Train a run of any kind: return the iterator over its events."""
    if isinstance(run, PreferenceRun):
        return train_preference(run)
    if isinstance(run, JudgeRun):
        return train_judge(run)
    return train_autoencoder(run) if isinstance(run, AutoencoderRun) else train(run)


@contextmanager
def open_loggers(
    run: AnyRun, config: AnyConfig | None, console: Console, timer: TimeEstimator | None = None
) -> Iterator[LoggerCollection]:
    """Write config.yaml and environment.json and yield the loggers of a run; only rank 0 writes and logs.

    Without a configuration there are no loggers. The reason of a failure is written to status.json.
    """
    status = StatusLogger()
    if run.engine.comm.rank == 0 and config is not None:
        run_directory.write_run_config(config, run.directory)
        run_directory.write_environment(run.engine, run.directory)
        loggers = build_loggers(config, console, timer)
        loggers.add(status)
    else:
        loggers = LoggerCollection([], console)
    try:
        yield loggers
    except BaseException as error:
        status.fail(error)
        raise
    finally:
        loggers.close()


@contextmanager
def own_directory(engine: EngineConfig, directory: Path) -> Iterator[None]:
    """Be the one owner of a run directory within the block, before anything is built; see `own_run_directory`.

    Under torchrun the ranks join here, so that all of them learn of a refusal; their engines use the same group.
    """
    comm: Comm = SingleProcess()
    started = False
    if distributed.is_launched():
        device = select_device(engine.device, distributed.get_local_rank())
        if device.type == "cuda":
            torch.cuda.set_device(device)
        comm, started = distributed.init_process_group(device)
    try:
        with own_run_directory(directory, comm):
            yield
    finally:
        if started:
            distributed.destroy_process_group()


def set_aside_newer(run: AnyRun, step: int, console: Console) -> None:
    """Keep what a run has after `step` under names that no command reads, and print them. Every rank calls this."""
    comm, problems = run.engine.comm, []
    best_step = run.guard_history.best_step if isinstance(run, Run) else None
    if comm.rank == 0:
        try:
            for path in checkpoint_folder.set_aside_newer(run.directory, step, best_step):
                console.print(f"kept aside: {path}", markup=False, highlight=False, soft_wrap=True)
        except OSError as error:
            problems.append(f"{error.filename} cannot be renamed ({error.strerror}); change its permissions [TM1123]")
    if problems := comm.gather_objects(problems):
        raise CheckpointError(problems[0])


def train_built_run(
    run: AnyRun, allow_change: Sequence[str], console: Console, on_event: Callable[[Event], None]
) -> None:
    """Train a run that is already built, as `tastemaker train` does.

    It resumes from the last checkpoint in its directory, unless the caller has resumed it. A run without a
    configuration, which was built by hand, trains without loggers and does not resume.
    """
    with own_run_directory(run.directory, run.engine.comm):
        if run.config is not None:
            latest = run_directory.claim_run_directory(run.config, run.directory, allow_change)
            if latest is not None and not run.start_step:
                run.resume(latest)
        with open_loggers(run, run.config, console) as loggers:
            for event in training_events(run):
                loggers.log(event)
                on_event(event)


def check_starting_point(resume: Path | None, init_from: Path | None, from_step: int | None) -> None:
    """Refuse more than one of the options that say what a run starts from."""
    if resume is not None and init_from is not None:
        raise ConfigError(
            "--resume and --init-from cannot be combined; use --resume to restore everything, or --init-from to "
            "load only the weights [TM301]"
        )
    if from_step is not None and (resume or init_from):
        raise ConfigError(
            "--from-step continues a run from its own checkpoint, so it cannot be combined with --resume or "
            "--init-from; give one of them [TM1122]"
        )


def run_training(
    config: AnyConfig,
    *,
    tiny: bool = False,
    resume: Path | None = None,
    init_from: Path | None = None,
    from_step: int | None = None,
    allow_change: Sequence[str] = (),
    console: Console,
    timer: TimeEstimator | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> bool:
    """Train as `tastemaker train` does: from the directory's last checkpoint if it has one, with loggers.

    With `from_step` the run continues from its checkpoint of that step, and newer ones are kept aside. Returns whether
    all steps are done; they are not if the run was asked to stop.
    """
    check_starting_point(resume, init_from, from_step)
    config = require_valid(make_tiny_any(config) if tiny else config)
    directory = config.directory
    with own_directory(config.engine, directory):
        config = run_directory.keep_resolved_engine(adopt_class_names(config), directory, resume)
        start = run_directory.claim_run_directory(config, directory, allow_change)
        if start is not None and (resume or init_from):
            raise ConfigError(
                f"{directory} already contains checkpoints; choose another name=... for a run that starts from other "
                "weights, or continue this run with --from-step [TM302]"
            )
        if from_step is not None:
            start = checkpoint_folder.find_checkpoint(directory, from_step)
        run = build_run(config, directory, init_from)
        try:
            if resume is not None and optimizer_state.is_llamagen_checkpoint(resume) and isinstance(run, Run):
                resume_from_llamagen(run, resume)
            elif (start := resume or start) is not None:
                run.resume(start)
            if from_step is not None:
                set_aside_newer(run, from_step, console)
            completed = True
            with open_loggers(run, run.config, console, timer) as loggers:
                for event in training_events(run):
                    loggers.log(event)
                    if on_event is not None:
                        on_event(event)
                    completed = not isinstance(event, TrainingFinished) or event.step >= run.steps
            return completed
        finally:
            run.engine.close()
