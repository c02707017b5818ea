"""Edits of the playground: instructions with a source scene, the wanted result and a mask, painted when needed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..core.randomness import Randomness
from ..core.types import ImageBatch, Metadata, PromptBatch
from ..playground.art import Style
from ..playground.captions import Split
from ..playground.edits import SceneEdits, sample_edits
from ..playground.scenes import Painter
from .dataset import ShuffledDataset
from .playground import Device, choose_device
from .toy import check_num_samples


@dataclass(frozen=True)
class PlaygroundEdits:
    """Edit instructions with `image`, `target` and `mask` as metadata; the set does not depend on the seed."""

    split: Split = "train"
    num_prompts: int = 20000
    supervised: bool = False  # yields the targets to train on, for the objective `likelihood`
    style: Style = "noto"
    device: Device = "auto"  # where scenes are painted

    def __post_init__(self) -> None:
        check_num_samples(self.num_prompts, key="num_prompts")

    @property
    def batch_type(self) -> type:
        return ImageBatch if self.supervised else PromptBatch

    def load(self, seed: int) -> EditDataset:
        return EditDataset(self, seed)


@dataclass(frozen=True)
class EditDataset(ShuffledDataset):
    spec: PlaygroundEdits
    seed: int

    def __len__(self) -> int:
        return self.spec.num_prompts

    @cached_property
    def painter(self) -> Painter:
        return Painter(self.spec.style, choose_device(self.spec.device))

    def collate(self, indices: list[int]) -> PromptBatch | ImageBatch:
        batch = self._paint(torch.tensor(indices, dtype=torch.int64))
        return batch if self.spec.supervised else PromptBatch(batch.prompts, batch.metadata)

    def _paint(self, rows: torch.Tensor) -> ImageBatch:
        """The targets of some edits; everything else is metadata."""
        edits, rng = self.sample(rows)
        sources, targets = (pixels.cpu() for pixels in edits.paint(self.painter, rng))
        masks, requests = edits.masks().cpu(), edits.requests().metadata()
        metadata: tuple[Metadata, ...] = tuple(
            {"image": source, "target": target, "mask": mask, "edit": request}
            for source, target, mask, request in zip(sources, targets, masks, requests, strict=True)
        )
        return ImageBatch(edits.texts(), targets, rows.cpu(), metadata)

    def sample(self, rows: torch.Tensor) -> tuple[SceneEdits, Randomness]:
        """The edits of some rows, and their randomness."""
        rng = Randomness(0, 0, rows.to(self.painter.device))
        return sample_edits(rng, self.spec.split), rng

    def first_prompts(self, count: int) -> PromptBatch:
        batch = self._paint(torch.arange(count) % len(self))
        return PromptBatch(batch.prompts, batch.metadata)


def held_out_edits(spec: PlaygroundEdits) -> PlaygroundEdits:
    """The same settings for held-out instructions."""
    return replace(spec, split="held_out", supervised=False)
