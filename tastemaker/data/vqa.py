"""Questions about pictures with their answers, for judges to learn: LLaVA's layout, plain rows, and mixtures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.registry import ConfigError
from ..core.types import PromptBatch, QuestionAnswerBatch
from .captioned_images import center_square, check_size, stack_images
from .image_io import read_image
from .mixture import FileRow, read_mixture
from .pairs import ToyPairDataset, ToyPairs
from .prompts import check_exists
from .sampler import batch_indices

SPEAKERS = ("human", "gpt")
Fit = Literal["middle", "whole"]


@dataclass(frozen=True)
class VqaExample:
    """One answer: everything said before it, about which picture, and where that is written."""

    file: Path
    turns: tuple[str, ...]
    answer: str
    place: str


@dataclass(frozen=True)
class VqaDataset:
    """Answers on disk; pictures are decoded when their turn comes."""

    asked: tuple[VqaExample, ...]
    size: int | None
    fit: Fit
    seed: int

    def __len__(self) -> int:
        return len(self.asked)

    def batch(self, step: int, size: int, rank: int, world: int) -> QuestionAnswerBatch:
        chosen = [self.asked[i] for i in batch_indices(len(self), self.seed, step, size, rank, world)]
        names = [f"{each.place}: {each.file.name}" for each in chosen]
        cut = stretch_to_square if self.fit == "whole" else center_square
        pixels = stack_images([cut(read_image(each.file)[:1], self.size) for each in chosen], names)
        return QuestionAnswerBatch(pixels[:, 0], tuple({"turns": each.turns, "answer": each.answer} for each in chosen))

    def first(self, count: int) -> PromptBatch:
        return PromptBatch(tuple(self.asked[i % len(self)].turns[-1] for i in range(count)), ({},) * count)


@dataclass(frozen=True)
class AnswerFile:
    """A .json or .jsonl of LLaVA's rows or of {image, question, answer}, or a .yaml that mixes several of them.

    Every answer of a conversation is a row of its own. Paths of pictures are relative to the file that names them.
    """

    path: Path
    size: int | None = None  # pixels a side; as they are if not given
    fit: Fit = "middle"  # the square that is cut out; or whole pictures, stretched to one as PaliGemma sees them
    yields: ClassVar[type] = QuestionAnswerBatch

    def __post_init__(self) -> None:
        check_size(self.size)

    def load(self, seed: int) -> VqaDataset:
        found = tuple(asked for line in read_mixture(self.path, seed) for asked in _answers(line))
        return VqaDataset(found, self.size, self.fit, seed)


def stretch_to_square(pixels: Tensor, size: int | None) -> Tensor:
    """All of [F, 3, H, W] in a square, `size` pixels a side, so that places in it stay where they are."""
    if size is None or pixels.shape[-2:] == (size, size):
        return pixels
    return F.interpolate(pixels, (size, size), mode="bicubic", antialias=True).clamp(0, 1)


def _answers(line: FileRow) -> list[VqaExample]:
    """Every answer of a row, with all that was said before it."""
    file = check_exists(line.file.parent / line.text("image"), line.place)
    if "conversations" not in line.row:
        return [VqaExample(file, (line.text("question"),), line.text("answer"), line.place)]
    turns = _turns(line.place, line.row["conversations"])
    return [VqaExample(file, turns[:k], turns[k], line.place) for k in range(1, len(turns), 2)]


def _turns(place: str, said: Any) -> tuple[str, ...]:
    told = said if isinstance(said, list) else []
    turns = [turn for turn in told if isinstance(turn, dict) and isinstance(turn.get("value"), str)]
    speakers = [turn.get("from") for turn in turns]
    if not turns or len(turns) != len(told) or speakers != list(SPEAKERS) * (len(turns) // 2):
        raise ConfigError(f"{place}: found turns of {speakers}; expected human and gpt in turn, each with a 'value'")
    return tuple(turn["value"] for turn in turns)


@dataclass(frozen=True)
class ToyVqaDataset:
    pairs: ToyPairDataset
    question: str

    def __len__(self) -> int:
        return 2 * len(self.pairs)

    def batch(self, step: int, size: int, rank: int, world: int) -> QuestionAnswerBatch:
        two = self.pairs.batch(step, -(-size // 2), 0, 1)
        pixels = torch.stack([two.chosen[:, 0], two.rejected[:, 0]], 1).flatten(0, 1)
        told = [
            {"turns": (self.question.replace("{prompt}", prompt),), "answer": answer}
            for prompt in two.prompts
            for answer in ("yes", "no")
        ]
        share = slice(rank * size // world, (rank + 1) * size // world)
        return QuestionAnswerBatch(pixels[share], tuple(told[share]))

    def first(self, count: int) -> PromptBatch:
        return self.pairs.first(count)


@dataclass(frozen=True)
class ToyAnswers:
    """Whether plain pictures are of the colour they should be: each right one beside a wrong one."""

    question: str = "<image> Is this {prompt}? Please answer yes or no without explanation."
    colors: tuple[str, ...] = ("red", "green", "blue", "grey")
    count: int = 256
    start: int = 0  # from another on, they are held out
    yields: ClassVar[type] = QuestionAnswerBatch

    def __post_init__(self) -> None:
        ToyPairs(self.colors, 1, self.count, self.start)

    def load(self, seed: int) -> ToyVqaDataset:
        return ToyVqaDataset(ToyPairs(self.colors, 1, self.count, self.start).load(seed), self.question)
