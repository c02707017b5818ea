"""The package in a handful of names, for scripts: a configuration, the model of it, and a trainer of autoencoders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from rich.console import Console
from torch import Tensor, nn

from .config.build import build_autoencoder, build_judge_model, build_policy
from .config.check import torchrun_world_size
from .config.dump import to_plain
from .config.load import SUFFIXES, list_recipes, load_any_config
from .config.registries import MODELS
from .config.schema import AnyConfig, AutoencoderRunConfig, EngineConfig, JudgeRunConfig, ValidationConfig
from .config.validate import build_component
from .core.autoencoder import AUTOENCODERS, AutoencoderSpec
from .core.policy import ModelSpec
from .core.registry import ConfigError
from .core.types import ImageBatch, Placement, PromptBatch
from .models.custom_autoencoder import NETWORKS, has_from_config
from .training import resume
from .training.events import StepCompleted
from .training.precision import select_device
from .training.session import logged_events

C = TypeVar("C", bound=type)
KEPT = 512  # pictures that are looked at again


def load_config(recipe: str | Path, overrides: Sequence[str] = ()) -> AnyConfig:
    """What a recipe or a file says; a name that no recipe has may be that of a file in configs, as in nanoVLA-RL."""
    name = str(recipe)
    beside = [Path("configs", name + suffix) for suffix in SUFFIXES if name not in list_recipes() and name]
    return load_any_config(next((path for path in beside if path.is_file()), recipe), overrides)


def list_models() -> list[str]:
    """What `type` may be, of generators and of autoencoders, those of one's own among them."""
    return sorted({*MODELS, *AUTOENCODERS, *NETWORKS})


def register_model(name: str) -> Callable[[C], C]:
    """A decorator that names a generator's or an autoencoder's spec, or a network with a `from_config`."""

    def give(cls: C) -> C:
        if has_from_config(cls):
            return NETWORKS.register(name)(cls)
        if not {"load", "tiny"} <= {*dir(cls)}:
            raise ConfigError(
                f"model '{name:.60}': {cls.__name__} has no load and tiny, as a spec has, and is no nn.Module with a "
                "classmethod from_config; add one or the other"
            )
        return (MODELS if "suits" in dir(cls) else AUTOENCODERS).register(name)(cls)

    return give


def build_model(config: AnyConfig | Mapping[str, Any], device: str = "auto") -> Any:
    """What a configuration trains: an autoencoder's network, a generator's policy, a judge; or what a `type` names."""
    engine: EngineConfig = build_component(EngineConfig, {"device": device}, "engine")
    placement = Placement(select_device(engine.device, 0))
    if isinstance(config, Mapping):
        kind = AutoencoderSpec if str(config.get("type")) in AUTOENCODERS else ModelSpec
        return build_component(kind, dict(config), "model").load(placement)
    if isinstance(config, AutoencoderRunConfig):
        return config.autoencoder.load(placement)
    return (
        build_judge_model(config.judge, placement)
        if isinstance(config, JudgeRunConfig)
        else build_policy(config, placement)
    )


class VAETrainer:
    """Trains an autoencoder on batches of one's own, with all that `tastemaker train` does beside."""

    def __init__(self, model: nn.Module, config: AnyConfig, device: str = "auto") -> None:
        if not isinstance(config, AutoencoderRunConfig):
            raise ConfigError(
                f"VAETrainer trains autoencoders, found a {type(config).__name__}; use `tastemaker train`"
            )
        chosen = build_component(EngineConfig, {**to_plain(config.engine, EngineConfig), "device": device}, "engine")
        self.model, self.config = model, replace(config, engine=chosen)
        self.directory = config.output / (config.name or "run")

    def train(self, loader: Iterable[Any], console: Console | None = None) -> dict[str, float]:
        """All steps, or those that are left, of batches that come again when there are no more; the last's numbers.

        A batch is pixels [B, C, H, W] of one or three channels in [0, 1], or a tuple that begins with them.
        """
        batches = LoaderDataset(loader)
        held = self.config.validation
        # Rows that come as they please cannot be held out.
        config = replace(
            self.config,
            rows=len(batches.last) * torchrun_world_size(),
            validation=held if held.data is not None else ValidationConfig(),
        )
        config = resume.keep_precision(config, self.directory)
        found = resume.claim_run_directory(config, self.directory, ())
        run = build_autoencoder(
            replace(config, autoencoder=PrebuiltAutoencoder(self.model), data=batches), self.directory
        )
        config = replace(config, engine=run.engine.config)
        last: dict[str, float] = {}
        try:
            if found is not None:
                run.resume(found)
            for event in logged_events(run, config, self.directory, console or Console(stderr=True)):
                last = dict(event.metrics) if isinstance(event, StepCompleted) else last
        finally:
            run.engine.close()
        return last


@dataclass(frozen=True)
class PrebuiltAutoencoder:
    """A network that is there already."""

    net: nn.Module

    def load(self, placement: Placement) -> nn.Module:
        return self.net.to(placement.device)

    def tiny(self) -> PrebuiltAutoencoder:
        return self


@dataclass
class LoaderDataset:
    """Batches of a loader in its order, one a step; of earlier steps, the first pictures that came."""

    loader: Iterable[Any]
    kept: list[Tensor] = field(default_factory=list)
    coming: int = 0  # the step whose batch is next
    yields: ClassVar[type] = ImageBatch

    def __post_init__(self) -> None:
        self.stream = self._endless()
        self.last = next(self.stream)  # which the first step takes

    def load(self, seed: int) -> LoaderDataset:
        return self

    def __len__(self) -> int:
        return KEPT  # of a loader, all that is known

    def batch(self, step: int, size: int, rank: int, world: int) -> ImageBatch:
        if step < self.coming:
            return as_images(torch.cat(self.kept)[:size])
        for number in range(self.coming, step + 1):
            self.last = next(self.stream) if number else self.last
            if sum(map(len, self.kept)) < KEPT:
                self.kept.append(self.last)
        self.coming = step + 1
        return as_images(self.last)

    def first(self, count: int) -> PromptBatch:
        return PromptBatch(("",) * count, ({},) * count)

    def _endless(self) -> Iterator[Tensor]:
        seen = 0
        while True:
            before = seen
            for batch in self.loader:
                seen += 1
                yield as_rgb(batch)
            if seen == before:
                found = f"ended after {seen} batches" if seen else "has no batches"
                raise ConfigError(f"the loader {found}; give one that has some, and can be gone through again")


def as_images(pixels: Tensor) -> ImageBatch:
    return ImageBatch(("",) * len(pixels), pixels[:, None])


def as_rgb(batch: Any) -> Tensor:
    """Pixels of a loader's batch: [B, 3, H, W] in [0, 1]."""
    pixels = batch.pixels[:, 0] if isinstance(batch, ImageBatch) else batch
    pixels = pixels[0] if isinstance(pixels, tuple | list) else pixels
    if not isinstance(pixels, Tensor) or pixels.ndim != 4 or pixels.shape[1] not in (1, 3) or not len(pixels):
        found = f"of shape {list(pixels.shape)}" if isinstance(pixels, Tensor) else f"a {type(pixels).__name__}"
        raise ConfigError(f"the loader's batch is {found}; expected pixels [B, C, H, W] of one or three channels")
    pixels = pixels.detach().float().cpu()
    low, high = float(pixels.min()), float(pixels.max())
    if low < 0 or high > 1:
        raise ConfigError(
            f"the loader's pixels lie between {low:.3g} and {high:.3g}; expected 0 to 1 (of -1 to 1, take x / 2 + 0.5)"
        )
    return pixels.expand(-1, 3, -1, -1)
