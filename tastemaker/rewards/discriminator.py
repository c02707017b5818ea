"""How real images look to the discriminator that an image tokenizer was trained against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor

from ..autoencoders.patchgan import PatchGANDiscriminator, load_discriminator
from ..core.checkpoint_files import explain_damage, is_checkpoint, latest_checkpoint, read_manifest, verify_files
from ..core.errors import CheckpointError, DamagedCheckpointError
from ..core.reward import BatchSize, Reward, RewardCard, RewardSpec
from ..core.types import Metadata, Placement, Prompts
from .backbones.frozen_models import TINY

FILE = "discriminator.safetensors"
GROUP = "snapshots/discriminator"  # of a checkpoint


@dataclass(frozen=True)
class DiscriminatorReward(RewardSpec):
    """The mean logit of a PatchGAN, high for patches that look real to it rather than reconstructed."""

    weights: str = FILE  # a tokenizer's run, a file of its discriminator, or LlamaGen's checkpoint with one
    width: Annotated[int, Field(ge=1, le=1024)] = 64  # of the first layer
    num_layers: Annotated[int, Field(ge=1, le=8)] = 3  # with stride 2
    extra_layer: bool = True  # one more with stride 1, as in LlamaGen and not in explainingai
    batch_size: BatchSize = 64
    card: ClassVar[RewardCard] = RewardCard(
        range="-3 to 3",
        failure_modes="grain that passes for detail; the discriminator was trained on reconstructions, not on samples",
        memory="11 MB",
    )
    differentiable: ClassVar[bool] = True

    def load(self, placement: Placement) -> DiscriminatorScorer:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net = PatchGANDiscriminator(self.width, self.num_layers, extra_layer=self.extra_layer)
        if self.weights != TINY:
            load_discriminator(net, discriminator_file(Path(self.weights).expanduser()))
        return DiscriminatorScorer(net.to(placement.device, placement.dtype).eval().requires_grad_(False))

    def tiny(self) -> Self:
        return replace(self, weights=TINY, width=4, num_layers=1)


@dataclass(frozen=True)
class DiscriminatorScorer(Reward):
    net: PatchGANDiscriminator

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        logits: Tensor = self.net(pixels[:, 0].to(next(self.net.parameters()).dtype))
        return logits.flatten(1).mean(1).to(pixels.dtype)


def discriminator_file(path: Path) -> Path:
    """The discriminator of a run's last checkpoint, of a checkpoint, or of a file. The first shard holds all of it."""
    checkpoint = latest_checkpoint(path) or path
    if not is_checkpoint(checkpoint):
        return path / FILE if (path / FILE).is_file() else path
    try:
        manifest = read_manifest(checkpoint)
        names = manifest.group_files(GROUP)[:1]
        verify_files(checkpoint, manifest, names)
    except DamagedCheckpointError as error:
        raise CheckpointError(explain_damage(error, checkpoint)) from error
    return checkpoint / names[0] if names else path
