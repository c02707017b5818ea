"""Captions of playground scenes in GenEval's language: sentences, metadata, tokens, and batches of captions."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from string import ascii_uppercase
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.randomness import Randomness, philox
from ..core.registry import suggest_name
from ..core.types import Metadata, concatenate, select_rows
from .art import CLASSES, COLORS
from .purposes import PlaygroundPurpose

TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")  # GenEval's tags
SINGLE, TWO, COUNTING, COLOR, POSITION, ATTRIBUTION = range(6)
RELATIONS = ("left of", "right of", "above", "below")  # the place of the opposite differs in the last bit
NUMBERS = ("two", "three", "four")
MOTIONS = ("moving left", "moving right", "moving up", "moving down", "turning", "growing")

OPENING, SIGN = "a photo of", "a sign that says"
TINTS = tuple(COLORS)
IRREGULAR = {"person": "people", "sheep": "sheep", "scissors": "scissors"}
PLURALS = tuple(IRREGULAR.get(name, name + ("es" if re.search("(s|x|ch|sh)$", name) else "s")) for name in CLASSES)

# A phrase is one token; 'clock' and 'clocks' are the same. New tokens go to the end: weights depend on the order.
VOCABULARY: tuple[str, ...] = (
    *("<pad>", "<null>", OPENING, SIGN, "a", "and", *NUMBERS, *RELATIONS),
    *(*TINTS, *CLASSES, *MOTIONS, *ascii_uppercase),
)
EDIT_WORDS = ("make", "add", "remove", "replace", "with", "the", "second")  # of instructions, after the other tokens
EDIT_VOCABULARY = (*VOCABULARY, *EDIT_WORDS)


class CaptionRow(NamedTuple):
    """One caption, in the order of the fields of SceneCaptions."""

    task: int
    first: int
    second: int
    first_color: int = 0
    second_color: int = 0
    count: int = 1  # type: ignore[assignment]  # shadows tuple.count
    relation: int = 0


def article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def caption_text(row: CaptionRow) -> str:
    """GenEval's sentence of a caption."""
    if row.task == COUNTING:
        return f"{OPENING} {NUMBERS[row.count - 2]} {PLURALS[row.first]}"
    first = _thing(row.first, row.first_color)
    if row.task in (SINGLE, COLOR):
        return f"{OPENING} {first}"
    link = RELATIONS[row.relation] if row.task == POSITION else "and"
    return f"{OPENING} {first} {link} {_thing(row.second, row.second_color)}"


def _thing(kind: int, color: int) -> str:
    return article(f"{TINTS[color - 1]} {CLASSES[kind]}" if color else CLASSES[kind])


def caption_metadata(row: CaptionRow) -> Metadata:
    """GenEval's metadata of a caption; for a position, the reference object comes first."""
    include = [_wanted(row.first, row.count, row.first_color)]
    if row.task in (TWO, ATTRIBUTION):
        include.append(_wanted(row.second, 1, row.second_color))
    if row.task == POSITION:
        placed = {**_wanted(row.first, 1, 0), "position": [RELATIONS[row.relation], 0]}
        include = [_wanted(row.second, 1, 0), placed]
    exclude = {"exclude": [{"class": CLASSES[row.first], "count": row.count + 1}]} if row.task == COUNTING else {}
    return {"tag": TASKS[row.task], "include": include, **exclude, "prompt": caption_text(row)}


def _wanted(kind: int, count: int, color: int) -> dict[str, Any]:
    colored = {"color": TINTS[color - 1]} if color else {}
    return {"class": CLASSES[kind], "count": count, **colored}


def _any(phrases: Sequence[str]) -> str:
    return "|".join(sorted(map(re.escape, phrases), key=len, reverse=True))


def _named(place: str) -> str:
    return rf"an? (?:(?P<{place}_color>{_any(TINTS)}) )?(?P<{place}>{_any(CLASSES)})"


CAPTION = re.compile(
    rf"(?:{OPENING} )?(?:(?P<number>{_any(NUMBERS)}) (?P<many>{_any(PLURALS)})"
    rf"|{_named('first')}(?: (?P<link>and|{_any(RELATIONS)}) {_named('second')})?)(?: (?:{_any(MOTIONS)}))?"
)


def parse_sentence(text: str) -> CaptionRow:
    """Parse a sentence into a caption; a motion at its end is ignored."""
    match = CAPTION.fullmatch(text.strip().lower())
    row = _parse_match(match) if match else None
    if row is None:
        known = f"'{OPENING} three clocks' or '{OPENING} a red cake and a blue book'"
        raise ValueError(f"'{text:.80}' is not a caption of the playground; write a caption such as {known} [TM752]")
    return row


def _parse_match(match: re.Match[str]) -> CaptionRow | None:
    """The caption of a match; None if its words belong to none of the six tasks."""
    if match["number"]:
        kind = PLURALS.index(match["many"])
        return CaptionRow(COUNTING, kind, kind, count=2 + NUMBERS.index(match["number"]))
    first, color = CLASSES.index(match["first"]), _tint(match["first_color"])
    if not match["link"]:
        return CaptionRow(COLOR if color else SINGLE, first, first, color)
    second, other = CLASSES.index(match["second"]), _tint(match["second_color"])
    if first == second or bool(color) != bool(other):
        return None
    if match["link"] == "and":
        return CaptionRow(ATTRIBUTION if color else TWO, first, second, color, other)
    return None if color else CaptionRow(POSITION, first, second, relation=RELATIONS.index(match["link"]))


def _tint(name: str | None) -> int:
    return 1 + TINTS.index(name) if name else 0


IDS = {phrase: place for place, phrase in enumerate(VOCABULARY) if len(phrase) > 1 or phrase == "a"}
IDS |= {"an": IDS["a"]} | {plural: IDS[name] for plural, name in zip(PLURALS, CLASSES, strict=True)}
EDIT_IDS = IDS | {word: len(VOCABULARY) + place for place, word in enumerate(EDIT_WORDS)}


def _phrase(ids: Mapping[str, int]) -> re.Pattern[str]:
    return re.compile(rf"\s*(?:\"(?P<spelled>[a-z]+)\"|(?P<known>{_any(list(ids)[2:])})(?!\w)|(?P<other>\S+))")


PHRASE, EDIT_PHRASE = _phrase(IDS), _phrase(EDIT_IDS)


@lru_cache(maxsize=2**18)
def _ids(text: str, edits: bool) -> tuple[int, ...]:
    """The token ids of a text; a word in quotes is spelled letter by letter."""
    ids: list[int] = []
    known = EDIT_IDS if edits else IDS
    for match in (EDIT_PHRASE if edits else PHRASE).finditer(text.strip().lower()):
        if match["other"]:
            unknown = match["other"]
            raise ValueError(
                f"'{text:.80}': the playground does not have the word "
                f"'{unknown:.40}'{suggest_name(unknown, list(known)[2:])} [TM753]"
            )
        ids += [known[match["known"]]] if match["known"] else _spell(match["spelled"])
    return tuple(ids) or (IDS["<null>"],)


def _spell(word: str) -> list[int]:
    return [len(VOCABULARY) - 26 + ascii_uppercase.index(letter) for letter in word.upper()]


def tokenize(texts: Sequence[str], length: int = 16, *, edits: bool = False) -> Tensor:
    """Token ids, padded with 0; an empty text is one <null>: [N, length] int64. `edits` allows EDIT_WORDS."""
    rows = [_ids(text, edits) for text in texts]
    for text, row in zip(texts, rows, strict=True):
        if len(row) > length:
            raise ValueError(
                f"'{text:.80}' has {len(row)} tokens, but at most {length} are allowed; shorten the caption [TM754]"
            )
    return torch.tensor([row + (0,) * (length - len(row)) for row in rows], dtype=torch.int64).view(-1, length)


Split = Literal["train", "held_out"]
WEIGHTS = (0.10, 0.20, 0.20, 0.15, 0.20, 0.15)  # of the tasks
SPLIT_KEY = (3, 0)  # of the hash that assigns captions to a split
CANDIDATES = 16  # drawn per caption, so that a second round is rarely needed


@dataclass(frozen=True)
class SceneCaptions:
    """A batch of captions. Fields that a task does not use are constant: no second object, no color, a count of 1."""

    task: Tensor  # [N] index into TASKS
    first: Tensor  # [N] index into CLASSES
    second: Tensor  # [N] index into CLASSES; equal to `first` if there is no second object
    first_color: Tensor  # [N] 0 for no color, else 1 + index into COLORS
    second_color: Tensor  # [N]
    count: Tensor  # [N] 2 to 4 in counting
    relation: Tensor  # [N] index into RELATIONS: where `first` is relative to `second`

    def __len__(self) -> int:
        return len(self.task)

    def has_two_objects(self) -> Tensor:
        """Whether a caption has two objects of different classes: [N] bool."""
        return (self.task == TWO) | (self.task == POSITION) | (self.task == ATTRIBUTION)

    def total(self) -> Tensor:
        """The number of objects: [N]."""
        return torch.where(self.has_two_objects(), 2, self.count)

    def to(self, device: torch.device | str) -> SceneCaptions:
        return SceneCaptions(*(column.to(device) for column in self._columns()))

    def texts(self) -> tuple[str, ...]:
        """GenEval's sentences."""
        return tuple(map(caption_text, self._rows()))

    def metadata(self) -> tuple[Metadata, ...]:
        """GenEval's metadata."""
        return tuple(map(caption_metadata, self._rows()))

    def held_out(self) -> Tensor:
        """Whether a caption is held out: a fifth of every task but single_object: [N] bool."""
        same = self._canonical()
        setting = same.task + 8 * same.count + 64 * same.relation
        colors = same.first_color + 16 * same.second_color
        return (philox((setting, same.first, same.second, colors), SPLIT_KEY)[0] % 5 == 0) & (self.task != SINGLE)

    def _canonical(self) -> SceneCaptions:
        """Order the two objects, so that 'a dog left of a cat' equals 'a cat right of a dog'."""
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
    """Parse the sentences of captions."""
    rows = torch.tensor([parse_sentence(text) for text in texts], dtype=torch.int64).view(
        len(texts), len(CaptionRow._fields)
    )
    return SceneCaptions(*rows.unbind(1))


def sample_captions(rng: Randomness, weights: Sequence[float] = WEIGHTS) -> SceneCaptions:
    """Sample one caption per row, of either split."""
    return _candidates(rng, _tasks(rng, weights), 1, 0)


def sample_split_captions(rng: Randomness, split: Split, weights: Sequence[float] = WEIGHTS) -> SceneCaptions:
    """Sample one caption per row, of one split; captions of single objects are in both splits."""
    return _sample_split(rng, _tasks(rng, weights), split, 0)


def _sample_split(rng: Randomness, task: Tensor, split: Split, attempt: int) -> SceneCaptions:
    """The first candidate of each row that belongs to the split, drawing again for rows without one."""
    captions = _candidates(rng, task, CANDIDATES, attempt)
    belongs = (captions.held_out() == (split == "held_out")) | (captions.task == SINGLE)
    right = belongs.view(len(rng), CANDIDATES)
    places = torch.arange(len(rng), device=task.device)
    selected = select_rows(captions, places * CANDIDATES + right.byte().argmax(1))
    missing = places[~right.any(1)]
    if not len(missing):
        return selected
    again = _sample_split(select_rows(rng, missing), task[missing], split, attempt + 1)
    places[missing] = len(rng) + torch.arange(len(missing), device=task.device)
    return select_rows(concatenate([selected, again]), places)


def _tasks(rng: Randomness, weights: Sequence[float]) -> Tensor:
    """Sample one task per row: [N]."""
    if len(weights) != len(TASKS) or min(weights) < 0 or not 0 < sum(weights) < math.inf:
        expected = f"{len(TASKS)} numbers of at least 0, not all 0, for {', '.join(TASKS)}"
        raise ValueError(f"the weights of the tasks are {list(weights)}; expected {expected} [TM755]")
    return sample_weighted(rng.uniform(PlaygroundPurpose.TASK, 1)[:, 0], weights)


def sample_weighted(uniform: Tensor, weights: Sequence[float]) -> Tensor:
    """Indices sampled in proportion to weights, from uniform numbers [N] in [0, 1): [N]."""
    shares = torch.tensor(weights, dtype=torch.float64).cumsum(0)
    return torch.bucketize(uniform, (shares / shares[-1]).float().to(uniform.device), right=True)


def _candidates(rng: Randomness, task: Tensor, many: int, attempt: int) -> SceneCaptions:
    """Sample `many` captions per row, of the row's task."""
    words = rng.words(PlaygroundPurpose.CAPTION, 8 * many, draw=attempt).view(-1, 8).unbind(1)
    task = task.repeat_interleave(many)
    first, tint = words[0] % len(CLASSES), words[2] % len(COLORS)
    # An offset between 1 and the number of classes less 1 never gives the same class.
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
