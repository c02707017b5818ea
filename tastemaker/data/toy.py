"""Toy data: solid-color images of 8x8 pixels, as captioned images, preference pairs, likes, and yes/no questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.randomness import Purpose, Randomness
from ..core.toy_colors import TOY_COLORS
from ..core.types import ImageBatch, LikeBatch, PreferenceBatch, PromptBatch, QuestionAnswerBatch
from ..models.toy import IMAGE_SIZE
from .dataset import Dataset, batch_indices

COLORS = ("red", "green", "blue", "grey")


@dataclass(frozen=True)
class SolidColorImages:
    """Images of one color each, with a small random deviation from the color's exact shade."""

    colors: tuple[str, ...]
    num_frames: int
    color_std: float

    def __post_init__(self) -> None:
        unknown = [color for color in self.colors if color not in TOY_COLORS]
        if unknown or not self.colors:
            named = f"{unknown[0]!r:.60}" if unknown else "none"
            raise ValueError(
                f"'colors': expected names from {', '.join(TOY_COLORS)}, got {named}; correct 'colors' [TM247]"
            )
        if not 1 <= self.num_frames <= 1000 or not 0 <= self.color_std <= 1:
            settings = f"num_frames {self.num_frames}, color_std {self.color_std}"
            raise ValueError(
                f"expected 1 to 1000 frames and a standard deviation from 0 to 1, got {settings}; correct these "
                "settings [TM248]"
            )

    def color(self, index: int, offset: int = 0) -> str:
        return self.colors[(index + offset) % len(self.colors)]

    def prompt(self, index: int) -> str:
        return f"a {self.color(index)}"

    def images(self, indices: Sequence[int], colors: Sequence[str], purpose: str = Purpose.COLOR_DEVIATION) -> Tensor:
        """The images of some indices, the same at every call: [B, F, 3, 8, 8] in [0, 1]."""
        shades = Randomness(0, 0, torch.tensor(indices, dtype=torch.int64)).normal(purpose, 3) * self.color_std
        solid = (torch.tensor([TOY_COLORS[color] for color in colors]).view(-1, 3) + shades).clamp(0, 1)
        return solid[:, None, :, None, None].repeat(1, self.num_frames, 1, IMAGE_SIZE, IMAGE_SIZE)

    def first_prompts(self, count: int) -> PromptBatch:
        return PromptBatch(tuple(self.prompt(i) for i in range(count)), ({},) * count)


def check_num_samples(num_samples: int, start_index: int = 0, key: str = "num_samples") -> None:
    """Refuse numbers of samples that the data cannot have."""
    if not 1 <= num_samples <= 10**6 or not 0 <= start_index < 2**31:
        raise ValueError(
            f"expected {key} from 1 to 1000000 and start_index of at least 0, got {key} {num_samples} and "
            f"start_index {start_index}; correct these settings [TM249]"
        )


@dataclass(frozen=True)
class ToyImageDataset(Dataset):
    source: SolidColorImages
    start_index: int
    num_samples: int
    seed: int

    def __len__(self) -> int:
        return self.num_samples

    def indices(self, step: int, batch_size: int, rank: int, world_size: int) -> list[int]:
        chosen = batch_indices(len(self), self.seed, step, batch_size, rank, world_size)
        return [self.start_index + index for index in chosen]

    def batch(self, step: int, batch_size: int, rank: int, world_size: int) -> ImageBatch:
        indices = self.indices(step, batch_size, rank, world_size)
        pixels = self.source.images(indices, [self.source.color(index) for index in indices])
        return ImageBatch(tuple(self.source.prompt(index) for index in indices), pixels)

    def first_prompts(self, count: int) -> PromptBatch:
        return self.source.first_prompts(count)


@dataclass(frozen=True)
class ToyImages:
    """Solid-color images with their color as caption; another `start_index` gives a held-out set."""

    colors: tuple[str, ...] = COLORS
    num_frames: int = 1
    num_samples: int = 256
    start_index: int = 0
    color_std: float = 0.05
    batch_type: ClassVar[type] = ImageBatch

    def __post_init__(self) -> None:
        self.source()
        check_num_samples(self.num_samples, self.start_index)

    def source(self) -> SolidColorImages:
        return SolidColorImages(self.colors, self.num_frames, self.color_std)

    def load(self, seed: int) -> ToyImageDataset:
        return ToyImageDataset(self.source(), self.start_index, self.num_samples, seed)


@dataclass(frozen=True)
class ToyPairDataset(Dataset):
    images: ToyImageDataset

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, step: int, batch_size: int, rank: int, world_size: int) -> PreferenceBatch:
        indices, source = self.images.indices(step, batch_size, rank, world_size), self.images.source
        chosen = source.images(indices, [source.color(index) for index in indices])
        count = len(source.colors)  # every other color is rejected in turn
        wrong = [source.color(index, 1 + index // count % (count - 1)) for index in indices]
        rejected = source.images(indices, wrong, Purpose.REJECTED_COLOR_DEVIATION)
        return PreferenceBatch(tuple(source.prompt(index) for index in indices), chosen, rejected)

    def first_prompts(self, count: int) -> PromptBatch:
        return self.images.first_prompts(count)


@dataclass(frozen=True)
class ToyPairs:
    """Solid-color images of the right color, preferred to the wrong one; another `start_index` is held out."""

    colors: tuple[str, ...] = COLORS
    num_frames: int = 1
    num_samples: int = 256
    start_index: int = 0
    color_std: float = 0.05
    batch_type: ClassVar[type] = PreferenceBatch

    def __post_init__(self) -> None:
        self.images()
        if len(set(self.colors)) != len(self.colors) or len(self.colors) < 2:
            raise ValueError(
                f"'colors': expected at least two different colors, got {', '.join(self.colors)}; add or change a "
                "color [TM250]"
            )

    def images(self) -> ToyImages:
        return ToyImages(self.colors, self.num_frames, self.num_samples, self.start_index, self.color_std)

    def load(self, seed: int) -> ToyPairDataset:
        return ToyPairDataset(self.images().load(seed))


@dataclass(frozen=True)
class ToyLikeDataset(Dataset):
    pairs: ToyPairDataset

    def __len__(self) -> int:
        return 2 * len(self.pairs)

    def batch(self, step: int, batch_size: int, rank: int, world_size: int) -> LikeBatch:
        pairs = self.pairs.batch(step, -(-batch_size // 2), 0, 1)
        pixels = torch.stack([pairs.chosen, pairs.rejected], 1).flatten(0, 1)
        prompts = tuple(prompt for prompt in pairs.prompts for _ in range(2))
        liked = torch.arange(len(prompts)) % 2 == 0
        shard = slice(rank * batch_size // world_size, (rank + 1) * batch_size // world_size)
        return LikeBatch(prompts[shard], pixels[shard], liked[shard])

    def first_prompts(self, count: int) -> PromptBatch:
        return self.pairs.first_prompts(count)


@dataclass(frozen=True)
class ToyLikes:
    """Solid-color images of the right color, which are liked, each followed by one of a wrong color, which is not."""

    colors: tuple[str, ...] = COLORS
    num_frames: int = 1
    num_samples: int = 256  # of each label
    start_index: int = 0  # another one gives a held-out set
    color_std: float = 0.05
    batch_type: ClassVar[type] = LikeBatch

    def __post_init__(self) -> None:
        self.pairs()

    def pairs(self) -> ToyPairs:
        return ToyPairs(self.colors, self.num_frames, self.num_samples, self.start_index, self.color_std)

    def load(self, seed: int) -> ToyLikeDataset:
        return ToyLikeDataset(self.pairs().load(seed))


@dataclass(frozen=True)
class ToyVqaDataset(Dataset):
    pairs: ToyPairDataset
    question: str

    def __len__(self) -> int:
        return 2 * len(self.pairs)

    def batch(self, step: int, batch_size: int, rank: int, world_size: int) -> QuestionAnswerBatch:
        pairs = self.pairs.batch(step, -(-batch_size // 2), 0, 1)
        pixels = torch.stack([pairs.chosen[:, 0], pairs.rejected[:, 0]], 1).flatten(0, 1)
        examples = [
            {"turns": (self.question.replace("{prompt}", prompt),), "answer": answer}
            for prompt in pairs.prompts
            for answer in ("yes", "no")
        ]
        shard = slice(rank * batch_size // world_size, (rank + 1) * batch_size // world_size)
        return QuestionAnswerBatch(pixels[shard], tuple(examples[shard]))

    def first_prompts(self, count: int) -> PromptBatch:
        return self.pairs.first_prompts(count)


@dataclass(frozen=True)
class ToyVqa:
    """Whether solid-color images have the color of the prompt: each right one is followed by a wrong one."""

    question: str = "<image> Is this {prompt}? Please answer yes or no without explanation."
    colors: tuple[str, ...] = COLORS
    num_samples: int = 256
    start_index: int = 0  # another one gives a held-out set
    batch_type: ClassVar[type] = QuestionAnswerBatch

    def __post_init__(self) -> None:
        self.pairs()

    def pairs(self) -> ToyPairs:
        return ToyPairs(self.colors, 1, self.num_samples, self.start_index)

    def load(self, seed: int) -> ToyVqaDataset:
        return ToyVqaDataset(self.pairs().load(seed), self.question)
