"""Published generators at full size on fake tensors, without weights."""

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

from ..config.schema import RunConfig
from ..core.registry import ConfigError
from ..core.types import Condition, Placement
from ..data.embedding_store import ShardedEmbeddingStore
from ..models.component_configs import COMPONENT_CONFIGS
from ..models.latent_dit.model import LatentDit
from ..models.llamagen.model import Llamagen
from ..models.opensora.model import OpenSora
from ..models.pipeline_components import RANDOM
from ..models.showo.model import Showo
from .conditioning_shapes import TEXT_MASK, conditioning_shapes
from .fake_denoiser import FakeDenoiser
from .fake_latent_dit import FakeLatentDit
from .fake_opensora import FakeOpenSora
from .fake_token_models import FakeLlamagen, FakeShowo, TokenRunSettings


class FakeModel(Protocol):
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
class FakeDiffusersModel(FakeDenoiser):
    """A backbone of latents, and the size of what its network is told."""

    backbone: Any
    tensors: dict[str, tuple[int, ...]]  # of a condition, by name, without the rows
    dtype: torch.dtype

    def condition(self, rows: int) -> Condition:
        kinds = {name: torch.bool if name == TEXT_MASK else self.dtype for name in self.tensors}
        given = {name: torch.empty(rows, *shape, dtype=kinds[name]) for name, shape in self.tensors.items()}
        return Condition(("",) * rows, given)

    def frozen(self) -> Iterator[nn.Parameter]:
        found: Iterator[nn.Parameter] = self.backbone.codec.net.parameters()
        return found

    def read(self, rows: int) -> None:
        """Of pictures that published generators learn from, how they are encoded is not counted."""


FAKE_MODELS: dict[type, Callable[[RunConfig, Placement, int], FakeModel]] = {
    Llamagen: lambda config, placement, world: FakeLlamagen(
        cast(Llamagen, config.model), placement, TokenRunSettings.of(config, placement.dtype, world)
    ),
    Showo: lambda config, placement, world: FakeShowo(
        cast(Showo, config.model), placement, TokenRunSettings.of(config, placement.dtype, world)
    ),
    LatentDit: lambda config, placement, _: FakeLatentDit(config, placement),
    OpenSora: lambda config, placement, _: FakeOpenSora(cast(OpenSora, config.model), placement),
}  # by what the network is asked in a run, where that is not one denoising step


@contextmanager
def fake_model(config: RunConfig, world: int = 1) -> Iterator[FakeModel]:
    """Within the block there is the model of a run, all but its numbers."""
    dtype = torch.bfloat16 if config.engine.precision in ("bf16", "fp16") else torch.float32
    made = FAKE_MODELS.get(type(config.model))
    if made is None:
        with fake_diffusers_model(config, dtype) as found:
            yield found
        return
    trained = torch.bfloat16 if config.engine.trainable == "bf16" else torch.float32
    placement = Placement(torch.device("cpu"), dtype, config.engine.attention, trained)
    with FakeTensorMode(allow_non_fake_inputs=True), allow_fake_apply():
        yield made(config, placement, world)


@contextmanager
def fake_diffusers_model(config: RunConfig, dtype: torch.dtype) -> Iterator[FakeDiffusersModel]:
    spec: Any = config.model
    names = {field.name for field in fields(spec)}
    if "weights" not in names or type(spec).weights not in COMPONENT_CONFIGS:
        raise ConfigError(
            f"plan knows published generators, found {type(spec).__name__}; small ones are best tried, with `train`"
        )
    hub = spec.weights if spec.weights in COMPONENT_CONFIGS else type(spec).weights
    alone = {name: None for name in ("transformer", "unet") if name in names}
    with TemporaryDirectory() as folder:
        ShardedEmbeddingStore(Path(folder), {}).add(
            [""], {"words": torch.zeros(1, 1)}
        )  # so that no text encoder is loaded
        read = {"embeddings": Path(folder)} if "embeddings" in names else {}
        whole = replace(spec, weights=f"{RANDOM}:{hub}", **read, **alone)
        with FakeTensorMode(allow_non_fake_inputs=True), allow_fake_apply():
            backbone = whole.load(Placement(torch.device("cpu"), dtype, config.engine.attention, dtype))
            yield FakeDiffusersModel(backbone, conditioning_shapes(spec, COMPONENT_CONFIGS[hub]), dtype)


@contextmanager
def allow_fake_apply() -> Iterator[None]:
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
