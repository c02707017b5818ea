"""How real pictures look to the critic that a tokenizer was trained against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from ..autoencoders.patchgan import PatchGANDiscriminator, load_discriminator
from ..core.reward import BatchSize, RewardCard
from ..core.types import Metadata, Placement, Prompts
from .backbones.loading import TINY

FILE = "critic.safetensors"
FORMS = (FILE, f"snapshots/{FILE}", "snapshots/critic/00000-of-*.safetensors")  # what a run keeps with checkpoints


@dataclass(frozen=True)
class DiscriminatorReward:
    """The mean logit of a PatchGAN: high for patches that it takes for pictures rather than a tokenizer's copies."""

    weights: str = FILE  # a run of a tokenizer, a file of its critic, or LlamaGen's checkpoint with a discriminator
    width: Annotated[int, Field(ge=1, le=1024)] = 64  # of the first layer
    layers: Annotated[int, Field(ge=1, le=8)] = 3  # that halve
    tail: bool = True  # one more that does not, as LlamaGen's has and explainingai's has not
    batch_size: BatchSize = 64
    about: ClassVar[RewardCard] = RewardCard(
        range="-3 to 3",
        hacked_by="grain that the critic takes for detail; it has only seen copies, never samples",
        memory="11 MB",
    )
    differentiable: ClassVar[bool] = True
    reads: ClassVar[Literal["frames"]] = "frames"
    runs_on: ClassVar[Literal["device"]] = "device"

    def load(self, placement: Placement) -> DiscriminatorScorer:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net = PatchGANDiscriminator(self.width, self.layers, tail=self.tail)
        if self.weights != TINY:
            load_discriminator(net, discriminator_file(Path(self.weights).expanduser()))
        return DiscriminatorScorer(net.to(placement.device, placement.dtype).eval().requires_grad_(False))

    def tiny(self) -> Self:
        return replace(self, weights=TINY, width=4, layers=1)


@dataclass(frozen=True)
class DiscriminatorScorer:
    net: PatchGANDiscriminator

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        logits: Tensor = self.net(pixels[:, 0].to(next(self.net.parameters()).dtype))
        return logits.flatten(1).mean(1).to(pixels.dtype)


def discriminator_file(path: Path) -> Path:
    """Of a run the critic of its last checkpoint, of a checkpoint its critic; all of it is in the first of shards."""
    steps = [step for step in path.glob("checkpoints/step-*") if step.name.removeprefix("step-").isdigit()]
    place = max(steps, key=lambda step: int(step.name.removeprefix("step-")), default=path)
    kept = [found for form in FORMS for found in sorted(place.glob(form))]
    return kept[0] if kept else path
