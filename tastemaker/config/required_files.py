"""The files and the rows of data that a run needs, looked for by `tastemaker check` before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from ..core.cards import WeightsSource
from ..core.registry import ConfigError
from ..core.types import PromptBatch
from ..data.dataset import MAX_FINITE_LENGTH
from ..models.pretrained import find_cached
from ..models.weight_files import PLAYGROUND, is_shipped, shipped_weights_path
from .check import settings_of
from .data_checks import BATCH_NAMES
from .schema import AnyConfig, AutoencoderRunConfig, JudgeRunConfig, PreferenceRunConfig, RunConfig
from .shared_tokenizers import share_clip_tokenizer
from .step_counts import compute_step_counts

# Settings that name weights: a path, a hub id, or a name in the package.
WEIGHT_SETTINGS = {"autoencoder", "init_weights", "text_encoder", "tokenizer", "vae", "weights"}
WEIGHT_SETTINGS |= {"transformer", "transformer_2", "color_model", "lpips_weights", "vgg_weights"}
CREATED_SETTINGS = {"cache", "directory"}  # folders of caches, which a run creates
WEIGHT_SUFFIXES = {".bin", ".ckpt", ".onnx", ".pt", ".pth", ".safetensors", ".tflite"}
PATH_STARTS = ("/", "./", "../", "~")


def find_missing_files(config: AnyConfig) -> list[str]:
    """Return a message for every local file or folder that a setting names and that does not exist.

    Hub ids are not paths; see `find_missing_downloads`. The paths of the training data are a rule of their own.
    """
    messages = []
    for section, component in _file_sections(config):
        for key, value in _iterate_paths(component, section):
            if isinstance(value, str) and value.startswith(f"{PLAYGROUND}/") and not is_shipped(value):
                messages.append(f"{key}: {_shipped_problem(value)} [TM809]")
            elif is_local_path(value) and not Path(value).expanduser().exists():
                messages.append(
                    f"{key}: the path {str(value)!r:.200} does not exist; correct {key} (paths are relative to "
                    "the current directory) [TM810]"
                )
    return messages


def _shipped_problem(name: str) -> str:
    try:
        return str(shipped_weights_path(name))
    except ConfigError as error:
        return str(error)


def _file_sections(config: AnyConfig) -> Iterator[tuple[str, Any]]:
    """Yield the sections that name files, apart from the training data."""
    if isinstance(config, RunConfig):
        yield "model", config.model
        yield from ((f"rewards.{name}", each.spec) for name, each in config.rewards.items() if not each.servers)
        return
    if isinstance(config, PreferenceRunConfig):
        yield "preference", config.preference
        return
    yield "validation", config.validation
    if isinstance(config, JudgeRunConfig):
        yield "judge", config.judge
        return
    yield "autoencoder", config.autoencoder
    yield "loss", config.loss
    if config.discriminator is not None:
        yield "discriminator", config.discriminator


def _iterate_paths(component: Any, key: str) -> Iterator[tuple[str, str | Path]]:
    """Yield every path and every name of weights in a component and its parts, with its key.

    A default is the name of published weights.
    """
    if isinstance(component, Mapping):
        for name, part in component.items():
            yield from _iterate_paths(part, f"{key}.{name}")
    if not is_dataclass(component):
        return
    for field in fields(component):
        value, name = getattr(component, field.name), f"{key}.{field.name}"
        is_weights = isinstance(value, str) and field.name in WEIGHT_SETTINGS
        if field.name in CREATED_SETTINGS:
            continue
        if isinstance(value, Path) or (is_weights and (value != field.default or value.startswith(f"{PLAYGROUND}/"))):
            yield name, value
        else:
            yield from _iterate_paths(value, name)


def is_local_path(name: str | Path) -> bool:
    """Whether a setting means a local path rather than the name of published weights.

    A relative folder such as weights/flux looks like a hub id, unless the folder before the slash exists.
    """
    if isinstance(name, Path):
        return True
    parent = Path(name).parent
    return (
        name.startswith(PATH_STARTS)
        or Path(name).suffix in WEIGHT_SUFFIXES
        or ("/" in name and parent != Path() and parent.is_dir())
    )


def published_sources(config: AnyConfig) -> tuple[WeightsSource, ...]:
    """Return the published weights that a run needs; of a judge, those of a generator that answers questions only."""
    if isinstance(config, JudgeRunConfig):
        return config.judge.model.sources if config.judge.model is not None else ()
    if isinstance(config, AutoencoderRunConfig):
        return config.autoencoder.sources
    if isinstance(config, PreferenceRunConfig):
        return config.preference.tower.sources
    rewards = [reward for reward in share_clip_tokenizer(config).rewards.values() if not reward.servers]
    sources = [*config.model.sources, *(source for reward in rewards for source in reward.spec.sources)]
    return tuple(dict.fromkeys(sources))


def find_missing_downloads(config: AnyConfig) -> list[str]:
    """Return a message for all published weights that are not on this machine."""
    return [
        (
            f"{source} is not on this machine ({source.size}, {source.license}); run `tastemaker download {source}` "
            "[TM811]"
        )
        for source in published_sources(config)
        if not is_local_path(source.hub) and find_cached(source) is None
    ]


@dataclass(frozen=True)
class DataSummary:
    """How much of the data a run sees."""

    name: str  # of the samples: prompts, captioned images, ...
    length: int
    used: int  # samples over all steps, with repetitions
    steps: int

    def __str__(self) -> str:
        if self.used < self.length:
            share = f"{self.used:,} of {self.length:,} {self.name}"
            return f"the run sees {share}: {self.steps:,} steps of {self.used // self.steps:,}"
        return f"{self.length:,} {self.name}, each seen about {self.used / self.length:.3g} times"


def summarize_data(config: AnyConfig) -> DataSummary | None:
    """Load the data, read its first and last samples, and return how much of it the run sees.

    Errors name the file and the line. Data that is generated, which has no end, is not loaded.
    """
    spec = config.data
    from_files = any(isinstance(value, Path) for value in settings_of(spec).values())
    if not from_files and spec.batch_type is not PromptBatch:
        return None
    try:
        data = spec.load(config.seed)
        if len(data) > MAX_FINITE_LENGTH:
            return None
        # With a batch size of 1, step k is the sample at position k of the first epoch.
        for step in {0, len(data) - 1} if from_files else ():
            data.batch(step, 1, 0, 1)
    except (ConfigError, OSError) as error:
        raise ConfigError(f"data: {error} [TM046]") from error
    per_step = compute_step_counts(config).prompts
    name = BATCH_NAMES.get(spec.batch_type, "samples")
    return DataSummary(name, len(data), per_step * config.steps, config.steps)
