"""Batches of captioned images, texts and questions in fixed proportions, for joint training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..core.registry import ConfigError
from ..core.types import (
    ImageBatch,
    JointBatch,
    Metadata,
    PromptBatch,
    QuestionAnswerBatch,
    concatenate,
    select_rows,
)
from .dataset import Dataset, DataSpec, rank_range


@dataclass(frozen=True)
class JointDataset(Dataset):
    """Cycles of `counts` captioned images, texts and questions, in this order."""

    sources: tuple[Dataset, Dataset, Dataset]
    counts: tuple[int, int, int]

    def __len__(self) -> int:
        """The samples in which every captioned image occurs once."""
        return -(-len(self.sources[0]) // self.counts[0]) * sum(self.counts)

    def batch(self, step: int, batch_size: int, rank: int, world_size: int) -> JointBatch:
        positions, cycles = rank_range(step, batch_size, rank, world_size), batch_size // sum(self.counts)
        if batch_size % sum(self.counts):
            return concatenate([self._sample(position) for position in positions])
        if cycles % world_size:  # ranks cut through a cycle, so each loads all of them
            first = step * batch_size
            rows = torch.arange(positions.start - first, positions.stop - first)
            return select_rows(self.batch(step, batch_size, 0, 1), rows)
        parts: list[Any] = [
            source.batch(step, count * cycles, rank, world_size)
            for source, count in zip(self.sources, self.counts, strict=True)
        ]
        joined = self._join(*parts)
        # By kind to by cycle, so that the batch of a single process is that of all ranks in order.
        share, starts = cycles // world_size, [0, *torch.tensor(self.counts).cumsum(0).tolist()]
        order = [
            start * share + cycle * count + k
            for cycle in range(share)
            for start, count in zip(starts, self.counts, strict=False)
            for k in range(count)
        ]
        return select_rows(joined, torch.tensor(order))

    def _sample(self, position: int) -> JointBatch:
        """The sample at a position, counted over all steps, as a batch."""
        cycle, inside = divmod(position, sum(self.counts))
        kind = 0
        while inside >= self.counts[kind]:
            inside, kind = inside - self.counts[kind], kind + 1
        # With a batch size of 1, step k of any data set is the sample at position k.
        samples: list[Any] = [source.batch(0, 1, 0, 1) for source in self.sources]
        samples[kind] = self.sources[kind].batch(cycle * self.counts[kind] + inside, 1, 0, 1)
        return select_rows(self._join(*samples), torch.tensor([kind]))

    def _join(self, images: ImageBatch, texts: PromptBatch, questions: QuestionAnswerBatch) -> JointBatch:
        """All samples by kind, with zeros in place of what a kind does not have."""
        numbers = len(images), len(texts), len(questions)
        total = sum(numbers)
        pixels = images.pixels.new_zeros(total, *images.pixels.shape[1:])
        pixels[: numbers[0]] = images.pixels
        question_pixels = questions.pixels.new_zeros(total, *questions.pixels.shape[1:])
        question_pixels[total - numbers[2] :] = questions.pixels
        conversations: Sequence[Metadata] = [
            *({} for _ in range(numbers[0])),
            *({"text": text} for text in texts.prompts),
            *questions.conversations,
        ]
        shares = torch.tensor(self.counts) / sum(self.counts)
        return JointBatch(
            (*images.prompts, *[""] * (total - numbers[0])),
            pixels,
            question_pixels,
            tuple(conversations),
            shares.repeat_interleave(torch.tensor(numbers)),
        )

    def first_prompts(self, count: int) -> PromptBatch:
        return self.sources[0].first_prompts(count)


@dataclass(frozen=True)
class JointData:
    """Captioned images, texts and questions about images, each from a data set of its own, in fixed proportions.

    A text is a row of a data set of prompts. `batch.prompts` is the number of samples of all three kinds.
    """

    images: DataSpec  # captioned images
    text: DataSpec  # prompts, each of which is a text
    questions: DataSpec  # questions about images with their answers
    # Samples of each kind among their sum; Show-o's batch_size_t2i, batch_size_lm and batch_size_mmu.
    num_images: int = 10
    num_texts: int = 4
    num_questions: int = 10
    batch_type: ClassVar[type] = JointBatch

    def __post_init__(self) -> None:
        if min(self.counts) < 1:
            raise ValueError(
                f"found num_images {self.num_images}, num_texts {self.num_texts}, num_questions {self.num_questions}; "
                "expected at least one of each"
                " [TM903]"
            )
        expected = {"images": ImageBatch, "text": PromptBatch, "questions": QuestionAnswerBatch}
        for name, kind in expected.items():
            found = getattr(self, name).batch_type
            if found is not kind:
                raise ConfigError(
                    f"'{name}' yields batches of type {found.__name__}; expected {kind.__name__}: captioned images, "
                    "prompts, and questions with answers"
                    " [TM904]"
                )

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.num_images, self.num_texts, self.num_questions

    def load(self, seed: int) -> JointDataset:
        return JointDataset((self.images.load(seed), self.text.load(seed), self.questions.load(seed)), self.counts)
