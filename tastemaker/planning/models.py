"""Published generators at full size without their weights: networks of tensors that hold nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..config.run import RunConfig
from ..embeddings import Shards
from ..models.published import RANDOM
from ..models.sizes import SIZES, Sizes
from ..registry import ConfigError
from ..types import Condition, Placement

CLIP_WORDS = 77


@dataclass(frozen=True)
class Model:
    """A backbone without numbers, and the size of what its network is told."""

    backbone: Any
    tensors: dict[str, tuple[int, ...]]  # of a condition, by name, without the rows
    dtype: torch.dtype

    def condition(self, rows: int) -> Condition:
        told = {name: torch.empty(rows, *shape, dtype=self.dtype) for name, shape in self.tensors.items()}
        return Condition(("",) * rows, told)


@contextmanager
def imagined(config: RunConfig) -> Iterator[Model]:
    """Within the block there is the model of a run, all but its numbers."""
    spec: Any = config.model
    names = {field.name for field in fields(spec)}
    if not {"weights", "embeddings"} <= names or type(spec).weights not in SIZES:
        raise ConfigError(
            f"plan knows published generators, found {type(spec).__name__}; small ones are best tried, with `train`"
        )
    hub = spec.weights if spec.weights in SIZES else type(spec).weights
    sizes = SIZES[hub]
    dtype = torch.bfloat16 if config.engine.precision in ("bf16", "fp16") else torch.float32
    alone = {name: None for name in ("transformer", "unet") if name in names}
    with TemporaryDirectory() as folder:
        Shards(Path(folder), {}).add([""], {"words": torch.zeros(1, 1)})  # so that no text encoder is loaded
        whole = replace(spec, weights=f"{RANDOM}:{hub}", embeddings=Path(folder), **alone)
        with FakeTensorMode(allow_non_fake_inputs=True), replaced():
            backbone = whole.load(Placement(torch.device("cpu"), dtype, config.engine.attention, dtype))
            yield Model(backbone, conditions(spec, sizes), dtype)


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


def conditions(spec: Any, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """What the text encoders of a generator say of a prompt."""
    if "unet" in sizes:
        words = {"words": (CLIP_WORDS, int(sizes["unet"]["cross_attention_dim"]))}
        return words | ({"summary": (1280,)} if "addition_embed_type" in sizes["unet"] else {})
    told = sizes["transformer"]
    if "pooled_projection_dim" not in told:
        raise ConfigError("plan does not know the prompts of Qwen-Image yet; measure a short run instead")
    before = CLIP_WORDS if "text_encoder_3" in sizes else 0
    return {
        "words": (before + spec.words, int(told["joint_attention_dim"])),
        "pooled": (int(told["pooled_projection_dim"]),),
    }
