"""Questions about images with their answers, to fine-tune judges: LLaVA's layout, plain rows, and mixtures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from ..core.registry import ConfigError
from ..core.types import PromptBatch, QuestionAnswerBatch
from .dataset import ShuffledDataset, repeat_prompts
from .image_io import read_image
from .image_transforms import center_square, check_image_size, stack_images, stretch_to_square
from .text_files import MixtureRow, read_mixture, require_file

SPEAKERS = ("human", "gpt")
ResizeMode = Literal["crop", "stretch"]


@dataclass(frozen=True)
class VqaExample:
    """One answer about an image, with the turns before it."""

    file: Path
    turns: tuple[str, ...]  # the last one is the question
    answer: str
    location: str  # where it is written, for messages


@dataclass(frozen=True)
class VqaDataset(ShuffledDataset):
    """Questions and answers in memory; images are decoded when they are needed."""

    examples: tuple[VqaExample, ...]
    image_size: int | None
    resize_mode: ResizeMode
    seed: int

    def __len__(self) -> int:
        return len(self.examples)

    def collate(self, indices: list[int]) -> QuestionAnswerBatch:
        examples = [self.examples[i] for i in indices]
        names = [f"{example.location}: {example.file.name}" for example in examples]
        resize = stretch_to_square if self.resize_mode == "stretch" else center_square
        images = [resize(read_image(example.file)[:1], self.image_size) for example in examples]
        metadata = tuple({"turns": example.turns, "answer": example.answer} for example in examples)
        return QuestionAnswerBatch(stack_images(images, names)[:, 0], metadata)

    def first_prompts(self, count: int) -> PromptBatch:
        return repeat_prompts([example.turns[-1] for example in self.examples], count)


@dataclass(frozen=True)
class VqaFile:
    """A .json or .jsonl of LLaVA's rows or of {image, question, answer}, or a .yaml that mixes such files.

    Every answer of a conversation is an example. Image paths are relative to the file that names them.
    """

    path: Path
    image_size: int | None = None  # pixels per side; by default images stay as they are
    resize_mode: ResizeMode = "crop"  # the center square; stretch resizes both sides, as PaliGemma does
    batch_type: ClassVar[type] = QuestionAnswerBatch

    def __post_init__(self) -> None:
        check_image_size(self.image_size)

    def load(self, seed: int) -> VqaDataset:
        examples = tuple(example for row in read_mixture(self.path, seed) for example in parse_examples(row))
        return VqaDataset(examples, self.image_size, self.resize_mode, seed)


def parse_examples(row: MixtureRow) -> list[VqaExample]:
    """One example per answer of a row, with all turns before it."""
    file = require_file(row.file.parent / row.get_text("image"), row.location)
    if "conversations" not in row.row:
        return [VqaExample(file, (row.get_text("question"),), row.get_text("answer"), row.location)]
    turns = _parse_turns(row.location, row.row["conversations"])
    return [VqaExample(file, turns[:k], turns[k], row.location) for k in range(1, len(turns), 2)]


def _parse_turns(location: str, conversation: Any) -> tuple[str, ...]:
    entries = conversation if isinstance(conversation, list) else []
    turns = [turn for turn in entries if isinstance(turn, dict) and isinstance(turn.get("value"), str)]
    speakers = [turn.get("from") for turn in turns]
    if not turns or len(turns) != len(entries) or speakers != list(SPEAKERS) * (len(turns) // 2):
        raise ConfigError(
            f"{location}: expected turns that alternate between human and gpt, each with a 'value', got turns of "
            f"{speakers}; correct the conversation [TM253]"
        )
    return tuple(turn["value"] for turn in turns)
