"""Preferences of the playground: scenes that show their caption, and scenes that contradict it, without end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from ..core.randomness import Purpose, Randomness
from ..core.types import LikeBatch, PreferenceBatch, PromptBatch
from ..playground.art import Style
from ..playground.captions import TASKS, WEIGHTS, SceneCaptions, Split, sample_split_captions
from ..playground.scenes import Painter, corrupt_captions, sample_scenes
from .dataset import Dataset
from .playground import ENDLESS, Device, Weights, check_probability, check_weights, choose_device, shard_randomness
from .playground import scene_prompts as prompts_of_scenes


@dataclass(frozen=True)
class SceneSource:
    """What pairs and likes share: which captions there are, and how scenes are painted."""

    split: Split = "train"
    style: Style = "noto"
    task_weights: Weights = WEIGHTS
    snap_probability: float = 1.0  # of scenes with few sizes and positions on a grid
    device: Device = "auto"  # where scenes are painted
    label_noise: float = 0.0  # probability that a label or the order of a pair is wrong; with 0.5 it says nothing

    def __post_init__(self) -> None:
        check_probability("snap_probability", self.snap_probability)
        check_probability("label_noise", self.label_noise)
        check_weights("task_weights", self.task_weights, TASKS)


@dataclass(frozen=True)
class PlaygroundPairs(SceneSource):
    """Endless pairs of scenes: one that shows the caption is preferred to one that contradicts it."""

    batch_type: ClassVar[type] = PreferenceBatch

    def load(self, seed: int) -> PreferenceDataset:
        return PreferenceDataset(self, seed, paint_pairs)


@dataclass(frozen=True)
class PlaygroundLikes(SceneSource):
    """Endless scenes that are liked if they show their caption, and disliked if they contradict it, half of each."""

    batch_type: ClassVar[type] = LikeBatch

    def load(self, seed: int) -> PreferenceDataset:
        return PreferenceDataset(self, seed, paint_likes)


@dataclass(frozen=True)
class PreferenceDataset(Dataset):
    """Pairs or likes, by the function that paints them."""

    spec: SceneSource
    seed: int
    paint: Callable[[PreferenceDataset, SceneCaptions, Randomness], PreferenceBatch | LikeBatch]

    def __len__(self) -> int:
        return ENDLESS

    @cached_property
    def painter(self) -> Painter:
        return Painter(self.spec.style, choose_device(self.spec.device))

    def batch(self, step: int, batch_size: int, rank: int, world_size: int) -> PreferenceBatch | LikeBatch:
        rng = shard_randomness(self.seed, step, batch_size, rank, world_size, self.painter.device)
        return self.paint(self, sample_split_captions(rng, self.spec.split, self.spec.task_weights), rng)

    def paint_scenes(self, captions: SceneCaptions, rng: Randomness) -> Tensor:
        """Images of what captions say: [B, 1, 3, 64, 64]."""
        return self.painter.paint(sample_scenes(captions, rng, self.spec.snap_probability), rng)

    def wrong_labels(self, rng: Randomness) -> Tensor:
        """Which labels are wrong: [B] bool."""
        return rng.uniform(Purpose.WRONG_LABEL, 1)[:, 0] < self.spec.label_noise

    def first_prompts(self, count: int) -> PromptBatch:
        return prompts_of_scenes(torch.arange(count), self.seed, self.spec.split, self.spec.task_weights, False)


def paint_pairs(data: PreferenceDataset, captions: SceneCaptions, rng: Randomness) -> PreferenceBatch:
    """Both scenes of a pair from the same random numbers, so that they differ in what contradicts the caption."""
    wrong = data.wrong_labels(rng)
    chosen, rejected = (data.paint_scenes(corrupt_captions(captions, bad.float(), rng), rng) for bad in (wrong, ~wrong))
    return PreferenceBatch(captions.texts(), chosen, rejected)


def paint_likes(data: PreferenceDataset, captions: SceneCaptions, rng: Randomness) -> LikeBatch:
    """Every second scene is liked."""
    liked = rng.rows % 2 == 0
    shows_caption = liked ^ data.wrong_labels(rng)
    pixels = data.paint_scenes(corrupt_captions(captions, 1 - shows_caption.float(), rng), rng)
    return LikeBatch(captions.texts(), pixels, liked)
