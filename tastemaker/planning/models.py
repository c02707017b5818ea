"""Published generators at full size without their weights: networks of tensors that hold nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..config.run import RunConfig
from ..embeddings import Shards
from ..models.latent_dit import LatentDit
from ..models.llamagen import Llamagen
from ..models.opensora import OpenSora
from ..models.published import RANDOM
from ..models.showo import Showo
from ..models.sizes import SIZES
from ..registry import ConfigError
from ..types import Condition, Placement
from .chunks import Chunked
from .denoising import Stepwise
from .latents import Diffused
from .telling import SEEN, told
from .tokens import Revealed, Setting, Written


class Model(Protocol):
    """A generator without numbers, and what its network is asked in a run."""

    @property
    def backbone(self) -> Any: ...
    def frozen(self) -> Iterator[nn.Parameter]:
        """Of its autoencoder."""

    def read(self, rows: int) -> None:
        """What is made of so many rows of data before anything is learned from them."""

    def score(self, rows: int) -> Tensor:
        """What learning computes of so many rows."""

    def sample(self, rows: int) -> None:
        """What sampling does at its worst moment."""

    def call(self) -> None:
        """What one row costs in one call of sampling."""

    def again(self, calls: int) -> int:
        """How often a sample that took so many calls is scored beside them."""

    def held(self, rows: int, adapted: bool) -> list[Tensor]:
        """What sampling keeps while the network learns."""

    def moved(self, samples: float, at_once: int) -> float:
        """Bytes that sampling must read, where that is what it waits for."""


@dataclass(frozen=True)
class Denoised(Stepwise):
    """A backbone of latents, and the size of what its network is told."""

    backbone: Any
    tensors: dict[str, tuple[int, ...]]  # of a condition, by name, without the rows
    dtype: torch.dtype

    def condition(self, rows: int) -> Condition:
        kinds = {name: torch.bool if name == SEEN else self.dtype for name in self.tensors}
        given = {name: torch.empty(rows, *shape, dtype=kinds[name]) for name, shape in self.tensors.items()}
        return Condition(("",) * rows, given)

    def frozen(self) -> Iterator[nn.Parameter]:
        found: Iterator[nn.Parameter] = self.backbone.codec.net.parameters()
        return found

    def read(self, rows: int) -> None:
        """Of pictures that published generators learn from, how they are encoded is not counted."""


KNOWN: dict[type, Callable[[RunConfig, Placement, int], Model]] = {
    Llamagen: lambda config, placement, world: Written(
        cast(Llamagen, config.model), placement, Setting.of(config, placement.dtype, world)
    ),
    Showo: lambda config, placement, world: Revealed(
        cast(Showo, config.model), placement, Setting.of(config, placement.dtype, world)
    ),
    LatentDit: lambda config, placement, _: Diffused(config, placement),
    OpenSora: lambda config, placement, _: Chunked(cast(OpenSora, config.model), placement),
}  # by what the network is asked in a run, where that is not one denoising step


@contextmanager
def imagined(config: RunConfig, world: int = 1) -> Iterator[Model]:
    """Within the block there is the model of a run, all but its numbers."""
    dtype = torch.bfloat16 if config.engine.precision in ("bf16", "fp16") else torch.float32
    made = KNOWN.get(type(config.model))
    if made is None:
        with denoised(config, dtype) as found:
            yield found
        return
    trained = torch.bfloat16 if config.engine.trainable == "bf16" else torch.float32
    placement = Placement(torch.device("cpu"), dtype, config.engine.attention, trained)
    with FakeTensorMode(allow_non_fake_inputs=True), replaced():
        yield made(config, placement, world)


@contextmanager
def denoised(config: RunConfig, dtype: torch.dtype) -> Iterator[Denoised]:
    spec: Any = config.model
    names = {field.name for field in fields(spec)}
    if "weights" not in names or type(spec).weights not in SIZES:
        raise ConfigError(
            f"plan knows published generators, found {type(spec).__name__}; small ones are best tried, with `train`"
        )
    hub = spec.weights if spec.weights in SIZES else type(spec).weights
    alone = {name: None for name in ("transformer", "unet") if name in names}
    with TemporaryDirectory() as folder:
        Shards(Path(folder), {}).add([""], {"words": torch.zeros(1, 1)})  # so that no text encoder is loaded
        read = {"embeddings": Path(folder)} if "embeddings" in names else {}
        whole = replace(spec, weights=f"{RANDOM}:{hub}", **read, **alone)
        with FakeTensorMode(allow_non_fake_inputs=True), replaced():
            backbone = whole.load(Placement(torch.device("cpu"), dtype, config.engine.attention, dtype))
            yield Denoised(backbone, told(spec, SIZES[hub]), dtype)


@contextmanager
def replaced() -> Iterator[None]:
    """Within the block modules that are moved or cast get new parameters: those without numbers cannot be changed."""
    kind: Any = nn.Module
    before = kind._apply

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for module in self.modules() if recurse else [self]:
            for key, p in module._parameters.items():
                if p is not None:
                    module._parameters[key] = nn.Parameter(fn(p.detach()), p.requires_grad)
            for key, buffer in module._buffers.items():
                module._buffers[key] = None if buffer is None else fn(buffer)
        return self

    kind._apply = apply
    try:
        yield
    finally:
        kind._apply = before
