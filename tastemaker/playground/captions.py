"""Batches of captions, one number a row in each field; and which of them no training may see."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from ..core.randomness import Randomness, philox
from ..core.types import Metadata, concatenate, select_rows
from .art import CLASSES, COLORS
from .language import (
    ATTRIBUTION,
    COLOR,
    COUNTING,
    NUMBERS,
    POSITION,
    RELATIONS,
    SINGLE,
    TWO,
    CaptionRow,
    caption_metadata,
    caption_text,
    parse_sentence,
)
from .language import MOTIONS as MOTIONS
from .language import TASKS as TASKS
from .language import VOCABULARY as VOCABULARY
from .language import tokenize as tokenize

Split = Literal["train", "held_out"]
WEIGHTS = (0.10, 0.20, 0.20, 0.15, 0.20, 0.15)  # how often each task is drawn
SPLIT = (3, 0)  # the key of the hash that splits; another key is another split
CANDIDATES = 16  # drawn at once for each row, so that hardly ever a second round is needed


@dataclass(frozen=True)
class SceneCaptions:
    """What a task does not speak of is the same in all its captions: no second thing, no colour, a count of 1."""

    task: Tensor  # [N] place in TASKS
    first: Tensor  # [N] place in CLASSES
    second: Tensor  # [N] the same; as `first` where there is no second thing
    first_color: Tensor  # [N] 0 where none is asked for, else 1 + place in COLORS
    second_color: Tensor  # [N]
    count: Tensor  # [N] 2 to 4 in counting
    relation: Tensor  # [N] place in RELATIONS: where `first` is, seen from `second`

    def __len__(self) -> int:
        return len(self.task)

    def paired(self) -> Tensor:
        """Whether two things of different classes are asked for: [N]."""
        return (self.task == TWO) | (self.task == POSITION) | (self.task == ATTRIBUTION)

    def total(self) -> Tensor:
        """How many things are asked for altogether: [N]."""
        return torch.where(self.paired(), 2, self.count)

    def to(self, device: torch.device | str) -> SceneCaptions:
        return SceneCaptions(*(column.to(device) for column in self._columns()))

    def texts(self) -> tuple[str, ...]:
        """GenEval's sentences."""
        return tuple(map(caption_text, self._rows()))

    def facts(self) -> tuple[Metadata, ...]:
        """GenEval's metadata."""
        return tuple(map(caption_metadata, self._rows()))

    def held_out(self) -> Tensor:
        """Whether a caption is kept from all training: a fifth of every task but the first, [N]."""
        same = self._canonical()
        setting = same.task + 8 * same.count + 64 * same.relation
        colors = same.first_color + 16 * same.second_color
        return (philox((setting, same.first, same.second, colors), SPLIT)[0] % 5 == 0) & (self.task != SINGLE)

    def _canonical(self) -> SceneCaptions:
        """The same for 'a dog left of a cat' and 'a cat right of a dog'."""
        swap = self.first > self.second
        return replace(
            self,
            first=torch.where(swap, self.second, self.first),
            second=torch.where(swap, self.first, self.second),
            first_color=torch.where(swap, self.second_color, self.first_color),
            second_color=torch.where(swap, self.first_color, self.second_color),
            relation=torch.where(swap & (self.task == POSITION), self.relation ^ 1, self.relation),
        )

    def _columns(self) -> list[Tensor]:
        return [getattr(self, f.name) for f in fields(self)]

    def _rows(self) -> list[CaptionRow]:
        return [CaptionRow(*row) for row in torch.stack(self._columns(), 1).tolist()]


def parse_captions(texts: Sequence[str]) -> SceneCaptions:
    """What `texts` wrote, read back."""
    rows = torch.tensor([parse_sentence(text) for text in texts], dtype=torch.int64).view(
        len(texts), len(CaptionRow._fields)
    )
    return SceneCaptions(*rows.unbind(1))


def sample_captions(rng: Randomness, weights: Sequence[float] = WEIGHTS, purpose: str = "caption") -> SceneCaptions:
    """One caption a row, of either split."""
    return _candidates(rng, _tasks(rng, weights, purpose), 1, purpose, 0)


def sample_split_captions(
    rng: Randomness, split: Split, weights: Sequence[float] = WEIGHTS, purpose: str = "caption"
) -> SceneCaptions:
    """One caption a row, of one split; captions of single things are in both, for none of them is held out."""
    return _settled(rng, _tasks(rng, weights, purpose), split, purpose, 0)


def _settled(rng: Randomness, task: Tensor, split: Split, purpose: str, attempt: int) -> SceneCaptions:
    """The first of each row's candidates that belongs to the split, and another attempt where none does."""
    captions = _candidates(rng, task, CANDIDATES, purpose, attempt)
    belongs = (captions.held_out() == (split == "held_out")) | (captions.task == SINGLE)
    right = belongs.view(len(rng), CANDIDATES)
    places = torch.arange(len(rng), device=task.device)
    found = select_rows(captions, places * CANDIDATES + right.byte().argmax(1))
    missing = places[~right.any(1)]
    if not len(missing):
        return found
    again = _settled(select_rows(rng, missing), task[missing], split, purpose, attempt + 1)
    places[missing] = len(rng) + torch.arange(len(missing), device=task.device)
    return select_rows(concatenate([found, again]), places)


def _tasks(rng: Randomness, weights: Sequence[float], purpose: str) -> Tensor:
    """A task a row, as often as its weight says: [N]."""
    if len(weights) != len(TASKS) or min(weights) < 0 or not 0 < sum(weights) < math.inf:
        expected = f"{len(TASKS)} numbers of at least 0, one of them above, for {', '.join(TASKS)}"
        raise ValueError(f"the weights of the tasks are {list(weights)}; expected {expected}")
    return sample_weighted(rng.uniform(f"{purpose} task", 1)[:, 0], weights)


def sample_weighted(uniform: Tensor, weights: Sequence[float]) -> Tensor:
    """Places among weights, each as often as its weight says, of uniform numbers [N] below 1: [N]."""
    shares = torch.tensor(weights, dtype=torch.float64).cumsum(0)
    return torch.bucketize(uniform, (shares / shares[-1]).float().to(uniform.device), right=True)


def _candidates(rng: Randomness, task: Tensor, many: int, purpose: str, attempt: int) -> SceneCaptions:
    """`many` captions of each row's task, side by side."""
    words = rng.words(purpose, 8 * many, draw=attempt).view(-1, 8).unbind(1)
    task = task.repeat_interleave(many)
    first, tint = words[0] % len(CLASSES), words[2] % len(COLORS)
    # Further than nought and less than once around: never the same again.
    second = (first + 1 + words[1] % (len(CLASSES) - 1)) % len(CLASSES)
    other = (tint + 1 + words[3] % (len(COLORS) - 1)) % len(COLORS)
    pair = (task == TWO) | (task == POSITION) | (task == ATTRIBUTION)
    return SceneCaptions(
        task=task,
        first=first,
        second=torch.where(pair, second, first),
        first_color=torch.where((task == COLOR) | (task == ATTRIBUTION), 1 + tint, 0),
        second_color=torch.where(task == ATTRIBUTION, 1 + other, 0),
        count=torch.where(task == COUNTING, 2 + words[4] % len(NUMBERS), 1),
        relation=torch.where(task == POSITION, words[5] % len(RELATIONS), 0),
    )
