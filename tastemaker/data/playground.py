"""The playground's endless data: scenes, clips and signs to learn from, and prompts about them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeInt
from torch import Tensor

from ..core.randomness import Randomness
from ..core.types import ImageBatch, PromptBatch
from ..playground import motion, signs
from ..playground.art import Style
from ..playground.captions import TASKS, WEIGHTS, Split, sample_split_captions, sample_weighted
from ..playground.scenes import Painter, corrupt_captions, sample_scenes
from .captioned_images import check_count
from .finite_pool import FinitePool
from .sampler import batch_indices

Device = Literal["auto", "cpu", "cuda"]
Weights = tuple[float, float, float, float, float, float]  # of the tasks, in their order
LENGTH = 2**31  # rows of a set without end


@dataclass(frozen=True)
class PlaygroundScenes:
    """Scenes with their captions, without end; a share of them contradicts its caption."""

    split: Split = "train"
    noise: float = 0.0  # how often a scene contradicts its caption; the knob of a base model's score
    style: Style = "noto"
    tasks: Weights = WEIGHTS  # how often each task is drawn
    snapped: float = 1.0  # how many scenes keep to few sizes and a grid of places
    motion: bool = False  # clips of 8 frames, with the motion in the caption
    motions: Weights = (1, 1, 1, 1, 1, 1)  # how often each motion is drawn
    device: Device = "auto"  # where scenes are painted
    pool: NonNegativeInt = 0  # after so many scenes the same come again, from memory; 0 paints new ones for ever
    yields: ClassVar[type] = ImageBatch

    def __post_init__(self) -> None:
        check_probability("noise", self.noise)
        check_probability("snapped", self.snapped)
        check_weights("tasks", self.tasks, TASKS)
        check_weights("motions", self.motions, motion.MOTIONS)

    def load(self, seed: int) -> SceneDataset | FinitePool:
        endless = SceneDataset(self, seed)
        return FinitePool(endless, self.pool, seed) if self.pool else endless


@dataclass(frozen=True)
class SceneDataset:
    spec: PlaygroundScenes
    seed: int

    def __len__(self) -> int:
        return LENGTH

    @cached_property
    def painter(self) -> Painter:
        return Painter(self.spec.style, choose_device(self.spec.device))

    def batch(self, step: int, size: int, rank: int, world: int) -> ImageBatch:
        rng = Randomness(self.seed, 0, shard_indices(step, size, rank, world).to(self.painter.device))
        captions = sample_split_captions(rng, self.spec.split, self.spec.tasks)
        scenes = sample_scenes(corrupt_captions(captions, self.spec.noise, rng), rng, self.spec.snapped)
        if not self.spec.motion:
            return ImageBatch(captions.texts(), self.painter.paint(scenes, rng))
        said = sample_weighted(rng.uniform("motion", 1)[:, 0], self.spec.motions)
        shown = motion.corrupt_motion(said, self.spec.noise, rng)
        return ImageBatch(
            motion.motion_captions(captions.texts(), said), motion.paint_clips(self.painter, scenes, shown, rng)
        )

    def first(self, count: int) -> PromptBatch:
        return scene_prompts(torch.arange(count), self.seed, self.spec.split, self.spec.tasks, self.spec.motion)


@dataclass(frozen=True)
class PlaygroundPrompts:
    """Prompts about scenes, with GenEval's metadata; the same ones whatever the seed, in an order of its own."""

    split: Split = "train"
    count: int = 20000
    tasks: Weights = WEIGHTS  # how often each task is drawn
    motion: bool = False  # prompts that say a motion too
    yields: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        check_count(self.count, 0)
        check_weights("tasks", self.tasks, TASKS)

    def load(self, seed: int) -> ScenePromptDataset:
        return ScenePromptDataset(self, seed)


@dataclass(frozen=True)
class ScenePromptDataset:
    spec: PlaygroundPrompts
    seed: int

    def __len__(self) -> int:
        return self.spec.count

    def batch(self, step: int, size: int, rank: int, world: int) -> PromptBatch:
        return self._of(torch.tensor(batch_indices(len(self), self.seed, step, size, rank, world), dtype=torch.int64))

    def first(self, count: int) -> PromptBatch:
        return self._of(torch.arange(count) % len(self))

    def _of(self, numbers: Tensor) -> PromptBatch:
        return scene_prompts(numbers, 0, self.spec.split, self.spec.tasks, self.spec.motion)


@dataclass(frozen=True)
class PlaygroundSigns:
    """Words on signs with their captions, without end."""

    split: Split = "train"
    noise: float = 0.0  # how often a sign says another word than its caption
    invented: float = 0.0  # how many show letters that are no word, for a generator to learn spelling from
    device: Device = "auto"  # where signs are painted
    pool: NonNegativeInt = 0  # after so many signs the same come again, from memory; 0 paints new ones for ever
    yields: ClassVar[type] = ImageBatch

    def __post_init__(self) -> None:
        check_probability("noise", self.noise)
        check_probability("invented", self.invented)

    def load(self, seed: int) -> SignDataset | FinitePool:
        endless = SignDataset(self, seed)
        return FinitePool(endless, self.pool, seed) if self.pool else endless


@dataclass(frozen=True)
class SignDataset:
    spec: PlaygroundSigns
    seed: int

    def __len__(self) -> int:
        return LENGTH

    @cached_property
    def painter(self) -> signs.SignPainter:
        return signs.SignPainter(choose_device(self.spec.device), self.spec.invented > 0)

    def batch(self, step: int, size: int, rank: int, world: int) -> ImageBatch:
        rng = Randomness(self.seed, 0, shard_indices(step, size, rank, world).to(self.painter.device))
        split, invented = self.spec.split, self.spec.invented
        said = signs.sample_words(rng, split, invented=invented)
        shown = signs.corrupt_words(said, self.spec.noise, rng, split, invented)
        return ImageBatch(signs.sign_captions(said), self.painter.paint(shown, rng))

    def first(self, count: int) -> PromptBatch:
        return sign_prompts(signs.sample_words(Randomness(self.seed, 0, torch.arange(count)), self.spec.split))


@dataclass(frozen=True)
class PlaygroundWords:
    """Prompts for signs, with the word to be read in their facts."""

    split: Split = "train"
    yields: ClassVar[type] = PromptBatch

    def load(self, seed: int) -> SignPromptDataset:
        return SignPromptDataset((signs.held_out() == (self.split == "held_out")).nonzero()[:, 0], seed)


@dataclass(frozen=True)
class SignPromptDataset:
    places: Tensor  # of the split's words among all
    seed: int

    def __len__(self) -> int:
        return len(self.places)

    def batch(self, step: int, size: int, rank: int, world: int) -> PromptBatch:
        return sign_prompts(self.places[batch_indices(len(self), self.seed, step, size, rank, world)])

    def first(self, count: int) -> PromptBatch:
        return sign_prompts(self.places[torch.arange(count) % len(self)])


def scene_prompts(numbers: Tensor, seed: int, split: Split, tasks: Weights, moving: bool) -> PromptBatch:
    """A prompt a number with GenEval's metadata, and the motion where there is one."""
    rng = Randomness(seed, 0, numbers)
    captions = sample_split_captions(rng, split, tasks)
    texts, facts = captions.texts(), captions.facts()
    if moving:
        places = motion.sample_motion(rng)
        texts = motion.motion_captions(texts, places)
        moves = [{"prompt": text, "motion": motion.MOTIONS[k]} for text, k in zip(texts, places.tolist(), strict=True)]
        facts = tuple({**fact, **move} for fact, move in zip(facts, moves, strict=True))
    return PromptBatch(texts, facts)


def sign_prompts(places: Tensor) -> PromptBatch:
    return PromptBatch(signs.sign_captions(places), signs.sign_metadata(places))


def shard_indices(step: int, size: int, rank: int, world: int) -> Tensor:
    """The numbers of a rank's rows of a step; no row comes twice."""
    return torch.arange(step * size + rank * size // world, step * size + (rank + 1) * size // world)


def choose_device(device: Device) -> torch.device:
    """Where to paint: on the GPU this process uses, if there is one."""
    return torch.device("cuda" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu"))


def check_probability(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"'{name}' is {value}; expected a share from 0 to 1")


def check_weights(key: str, weights: Weights, names: Sequence[str]) -> None:
    if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
        raise ValueError(f"'{key}' is {list(weights)}; expected a weight from 0 on for each of {', '.join(names)}")
