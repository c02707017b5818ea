"""Data of the playground: endless scenes, videos and signs with captions, and prompts about them."""

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
from ..playground.purposes import PlaygroundPurpose
from ..playground.scenes import Painter, corrupt_captions, sample_scenes
from .dataset import Dataset, FinitePool, ShuffledDataset, rank_range
from .toy import check_num_samples

Device = Literal["auto", "cpu", "cuda"]
Weights = tuple[float, float, float, float, float, float]  # of the six tasks, or of the six motions
ENDLESS = 2**31  # length of a data set that is generated without end


@dataclass(frozen=True)
class PlaygroundScenes:
    """Endless scenes with captions; a fraction of them contradicts its caption."""

    split: Split = "train"
    caption_noise: float = 0.0  # probability that a scene contradicts its caption; it sets a base model's score
    style: Style = "noto"
    task_weights: Weights = WEIGHTS
    snap_probability: float = 1.0  # of scenes with few sizes and positions on a grid
    motion: bool = False  # videos of 8 frames, with the motion in the caption
    motion_weights: Weights = (1, 1, 1, 1, 1, 1)
    device: Device = "auto"  # where scenes are painted
    pool_size: NonNegativeInt = 0  # scenes that are kept in memory and repeated; 0 paints new ones without end
    batch_type: ClassVar[type] = ImageBatch

    def __post_init__(self) -> None:
        check_probability("caption_noise", self.caption_noise)
        check_probability("snap_probability", self.snap_probability)
        check_weights("task_weights", self.task_weights, TASKS)
        check_weights("motion_weights", self.motion_weights, motion.MOTIONS)

    def load(self, seed: int) -> SceneDataset | FinitePool:
        endless = SceneDataset(self, seed)
        return FinitePool(endless, self.pool_size, seed) if self.pool_size else endless


@dataclass(frozen=True)
class SceneDataset(Dataset):
    spec: PlaygroundScenes
    seed: int

    def __len__(self) -> int:
        return ENDLESS

    @cached_property
    def painter(self) -> Painter:
        return Painter(self.spec.style, choose_device(self.spec.device))

    def batch(self, step: int, batch_size: int, rank: int, world_size: int) -> ImageBatch:
        spec, rng = self.spec, shard_randomness(self.seed, step, batch_size, rank, world_size, self.painter.device)
        captions = sample_split_captions(rng, spec.split, spec.task_weights)
        scenes = sample_scenes(corrupt_captions(captions, spec.caption_noise, rng), rng, spec.snap_probability)
        if not spec.motion:
            return ImageBatch(captions.texts(), self.painter.paint(scenes, rng))
        motions = sample_weighted(rng.uniform(PlaygroundPurpose.MOTION, 1)[:, 0], spec.motion_weights)
        painted = motion.corrupt_motion(motions, spec.caption_noise, rng)
        videos = motion.paint_clips(self.painter, scenes, painted, rng)
        return ImageBatch(motion.motion_captions(captions.texts(), motions), videos)

    def first_prompts(self, count: int) -> PromptBatch:
        return scene_prompts(torch.arange(count), self.seed, self.spec.split, self.spec.task_weights, self.spec.motion)


@dataclass(frozen=True)
class PlaygroundPrompts:
    """Prompts about scenes with GenEval's metadata; the set does not depend on the seed, its order does."""

    split: Split = "train"
    num_prompts: int = 20000
    task_weights: Weights = WEIGHTS
    motion: bool = False  # prompts with a motion
    batch_type: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        check_num_samples(self.num_prompts, key="num_prompts")
        check_weights("task_weights", self.task_weights, TASKS)

    def load(self, seed: int) -> ScenePromptDataset:
        return ScenePromptDataset(self, seed)


@dataclass(frozen=True)
class ScenePromptDataset(ShuffledDataset):
    spec: PlaygroundPrompts
    seed: int

    def __len__(self) -> int:
        return self.spec.num_prompts

    def collate(self, indices: list[int]) -> PromptBatch:
        rows = torch.tensor(indices, dtype=torch.int64)
        return scene_prompts(rows, 0, self.spec.split, self.spec.task_weights, self.spec.motion)

    def first_prompts(self, count: int) -> PromptBatch:
        return self.collate([i % len(self) for i in range(count)])


@dataclass(frozen=True)
class PlaygroundSigns:
    """Endless signs with captions."""

    split: Split = "train"
    caption_noise: float = 0.0  # probability that a sign shows another word than its caption
    pseudoword_ratio: float = 0.0  # of signs with random letters, for a generator to learn spelling from
    device: Device = "auto"  # where signs are painted
    pool_size: NonNegativeInt = 0  # signs that are kept in memory and repeated; 0 paints new ones without end
    batch_type: ClassVar[type] = ImageBatch

    def __post_init__(self) -> None:
        check_probability("caption_noise", self.caption_noise)
        check_probability("pseudoword_ratio", self.pseudoword_ratio)

    def load(self, seed: int) -> SignDataset | FinitePool:
        endless = SignDataset(self, seed)
        return FinitePool(endless, self.pool_size, seed) if self.pool_size else endless


@dataclass(frozen=True)
class SignDataset(Dataset):
    spec: PlaygroundSigns
    seed: int

    def __len__(self) -> int:
        return ENDLESS

    @cached_property
    def painter(self) -> signs.SignPainter:
        return signs.SignPainter(choose_device(self.spec.device), self.spec.pseudoword_ratio > 0)

    def batch(self, step: int, batch_size: int, rank: int, world_size: int) -> ImageBatch:
        rng = shard_randomness(self.seed, step, batch_size, rank, world_size, self.painter.device)
        split, pseudoword_ratio = self.spec.split, self.spec.pseudoword_ratio
        words = signs.sample_words(rng, split, pseudoword_ratio=pseudoword_ratio)
        painted = signs.corrupt_words(words, self.spec.caption_noise, rng, split, pseudoword_ratio)
        return ImageBatch(signs.sign_captions(words), self.painter.paint(painted, rng))

    def first_prompts(self, count: int) -> PromptBatch:
        return sign_prompts(signs.sample_words(Randomness(self.seed, 0, torch.arange(count)), self.spec.split))


@dataclass(frozen=True)
class PlaygroundSignPrompts:
    """Prompts for signs, with the word to be read as metadata."""

    split: Split = "train"
    batch_type: ClassVar[type] = PromptBatch

    def load(self, seed: int) -> SignPromptDataset:
        return SignPromptDataset((signs.held_out_words() == (self.split == "held_out")).nonzero()[:, 0], seed)


@dataclass(frozen=True)
class SignPromptDataset(ShuffledDataset):
    words: Tensor  # [N] indices of the split's words
    seed: int

    def __len__(self) -> int:
        return len(self.words)

    def collate(self, indices: list[int]) -> PromptBatch:
        return sign_prompts(self.words[indices])

    def first_prompts(self, count: int) -> PromptBatch:
        return self.collate([i % len(self) for i in range(count)])


def scene_prompts(indices: Tensor, seed: int, split: Split, task_weights: Weights, with_motion: bool) -> PromptBatch:
    """The prompts of some indices with GenEval's metadata, and with a motion if asked for."""
    rng = Randomness(seed, 0, indices)
    captions = sample_split_captions(rng, split, task_weights)
    texts, metadata = captions.texts(), captions.metadata()
    if with_motion:
        motions = motion.sample_motion(rng)
        texts = motion.motion_captions(texts, motions)
        metadata = tuple(
            {**known, "prompt": text, "motion": motion.MOTIONS[k]}
            for known, text, k in zip(metadata, texts, motions.tolist(), strict=True)
        )
    return PromptBatch(texts, metadata)


def sign_prompts(words: Tensor) -> PromptBatch:
    return PromptBatch(signs.sign_captions(words), signs.sign_metadata(words))


def shard_randomness(
    seed: int, step: int, batch_size: int, rank: int, world_size: int, device: torch.device
) -> Randomness:
    """The randomness of a rank's samples of a step; no index occurs twice."""
    positions = rank_range(step, batch_size, rank, world_size)
    return Randomness(seed, 0, torch.arange(positions.start, positions.stop).to(device))


def choose_device(device: Device) -> torch.device:
    """The device to paint on; `auto` is the GPU of this process, if there is one."""
    return torch.device("cuda" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu"))


def check_probability(key: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"'{key}': expected a probability from 0 to 1, got {value}; correct '{key}' [TM206]")


def check_weights(key: str, weights: Weights, names: Sequence[str]) -> None:
    if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
        raise ValueError(
            f"'{key}': expected weights of at least 0 for {', '.join(names)}, not all 0, got {list(weights)}; correct "
            f"'{key}' [TM207]"
        )
