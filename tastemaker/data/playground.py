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

from ..playground import motion, words
from ..playground.art import Style
from ..playground.captions import TASKS, WEIGHTS, Split, drawn, weighed
from ..playground.scenes import Painter, arrange, spoil
from ..randomness import Randomness
from ..types import Pictures, PromptBatch
from .order import rows
from .pictures import counted
from .pool import Pool

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
    yields: ClassVar[type] = Pictures

    def __post_init__(self) -> None:
        likely("noise", self.noise)
        likely("snapped", self.snapped)
        weighted("tasks", self.tasks, TASKS)
        weighted("motions", self.motions, motion.MOTIONS)

    def load(self, seed: int) -> SceneRows | Pool:
        endless = SceneRows(self, seed)
        return Pool(endless, self.pool, seed) if self.pool else endless


@dataclass(frozen=True)
class SceneRows:
    spec: PlaygroundScenes
    seed: int

    def __len__(self) -> int:
        return LENGTH

    @cached_property
    def painter(self) -> Painter:
        return Painter(self.spec.style, placed(self.spec.device))

    def batch(self, step: int, size: int, rank: int, world: int) -> Pictures:
        rng = Randomness(self.seed, 0, share(step, size, rank, world).to(self.painter.device))
        captions = drawn(rng, self.spec.split, self.spec.tasks)
        scenes = arrange(spoil(captions, self.spec.noise, rng), rng, self.spec.snapped)
        if not self.spec.motion:
            return Pictures(captions.texts(), self.painter.paint(scenes, rng))
        said = weighed(rng.uniform("motion", 1)[:, 0], self.spec.motions)
        shown = motion.spoil(said, self.spec.noise, rng)
        return Pictures(motion.texts(captions.texts(), said), motion.film(self.painter, scenes, shown, rng))

    def first(self, count: int) -> PromptBatch:
        return prompted(torch.arange(count), self.seed, self.spec.split, self.spec.tasks, self.spec.motion)


@dataclass(frozen=True)
class PlaygroundPrompts:
    """Prompts about scenes, with GenEval's metadata; the same ones whatever the seed, in an order of its own."""

    split: Split = "train"
    count: int = 20000
    tasks: Weights = WEIGHTS  # how often each task is drawn
    motion: bool = False  # prompts that say a motion too
    yields: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        counted(self.count, 0)
        weighted("tasks", self.tasks, TASKS)

    def load(self, seed: int) -> ScenePrompts:
        return ScenePrompts(self, seed)


@dataclass(frozen=True)
class ScenePrompts:
    spec: PlaygroundPrompts
    seed: int

    def __len__(self) -> int:
        return self.spec.count

    def batch(self, step: int, size: int, rank: int, world: int) -> PromptBatch:
        return self._of(torch.tensor(rows(len(self), self.seed, step, size, rank, world), dtype=torch.int64))

    def first(self, count: int) -> PromptBatch:
        return self._of(torch.arange(count) % len(self))

    def _of(self, numbers: Tensor) -> PromptBatch:
        return prompted(numbers, 0, self.spec.split, self.spec.tasks, self.spec.motion)


@dataclass(frozen=True)
class PlaygroundSigns:
    """Words on signs with their captions, without end."""

    split: Split = "train"
    noise: float = 0.0  # how often a sign says another word than its caption
    invented: float = 0.0  # how many show letters that are no word, for a generator to learn spelling from
    device: Device = "auto"  # where signs are painted
    pool: NonNegativeInt = 0  # after so many signs the same come again, from memory; 0 paints new ones for ever
    yields: ClassVar[type] = Pictures

    def __post_init__(self) -> None:
        likely("noise", self.noise)
        likely("invented", self.invented)

    def load(self, seed: int) -> SignRows | Pool:
        endless = SignRows(self, seed)
        return Pool(endless, self.pool, seed) if self.pool else endless


@dataclass(frozen=True)
class SignRows:
    spec: PlaygroundSigns
    seed: int

    def __len__(self) -> int:
        return LENGTH

    @cached_property
    def painter(self) -> words.SignPainter:
        return words.SignPainter(placed(self.spec.device), self.spec.invented > 0)

    def batch(self, step: int, size: int, rank: int, world: int) -> Pictures:
        rng = Randomness(self.seed, 0, share(step, size, rank, world).to(self.painter.device))
        split, invented = self.spec.split, self.spec.invented
        said = words.draw(rng, split, invented=invented)
        shown = words.spoil(said, self.spec.noise, rng, split, invented)
        return Pictures(words.texts(said), self.painter.paint(shown, rng))

    def first(self, count: int) -> PromptBatch:
        return signed(words.draw(Randomness(self.seed, 0, torch.arange(count)), self.spec.split))


@dataclass(frozen=True)
class PlaygroundWords:
    """Prompts for signs, with the word to be read in their facts."""

    split: Split = "train"
    yields: ClassVar[type] = PromptBatch

    def load(self, seed: int) -> WordPrompts:
        return WordPrompts((words.held_out() == (self.split == "held_out")).nonzero()[:, 0], seed)


@dataclass(frozen=True)
class WordPrompts:
    places: Tensor  # of the split's words among all
    seed: int

    def __len__(self) -> int:
        return len(self.places)

    def batch(self, step: int, size: int, rank: int, world: int) -> PromptBatch:
        return signed(self.places[rows(len(self), self.seed, step, size, rank, world)])

    def first(self, count: int) -> PromptBatch:
        return signed(self.places[torch.arange(count) % len(self)])


def prompted(numbers: Tensor, seed: int, split: Split, tasks: Weights, moving: bool) -> PromptBatch:
    """A prompt a number with GenEval's metadata, and the motion where there is one."""
    rng = Randomness(seed, 0, numbers)
    captions = drawn(rng, split, tasks)
    texts, facts = captions.texts(), captions.facts()
    if moving:
        places = motion.draw(rng)
        texts = motion.texts(texts, places)
        moves = [{"prompt": text, "motion": motion.MOTIONS[k]} for text, k in zip(texts, places.tolist(), strict=True)]
        facts = tuple({**fact, **move} for fact, move in zip(facts, moves, strict=True))
    return PromptBatch(texts, facts)


def signed(places: Tensor) -> PromptBatch:
    return PromptBatch(words.texts(places), words.facts(places))


def share(step: int, size: int, rank: int, world: int) -> Tensor:
    """The numbers of a rank's rows of a step; no row comes twice."""
    return torch.arange(step * size + rank * size // world, step * size + (rank + 1) * size // world)


def placed(device: Device) -> torch.device:
    """Where to paint: on the GPU this process uses, if there is one."""
    return torch.device("cuda" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu"))


def likely(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"'{name}' is {value}; expected a share from 0 to 1")


def weighted(key: str, weights: Weights, names: Sequence[str]) -> None:
    if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
        raise ValueError(f"'{key}' is {list(weights)}; expected a weight from 0 on for each of {', '.join(names)}")
