"""The words of this world: a caption's numbers as GenEval's sentence and metadata, and sentences back to numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from string import ascii_uppercase
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.registry import suggest_name
from ..core.types import Metadata
from .art import CLASSES, COLORS

TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")  # GenEval's tags
SINGLE, TWO, COUNTING, COLOR, POSITION, ATTRIBUTION = range(6)
RELATIONS = ("left of", "right of", "above", "below")  # the place of the opposite differs in the last bit
NUMBERS = ("two", "three", "four")
MOTIONS = ("moving left", "moving right", "moving up", "moving down", "turning", "growing")

OPENING, SIGN = "a photo of", "a sign that says"
TINTS = tuple(COLORS)
IRREGULAR = {"person": "people", "sheep": "sheep", "scissors": "scissors"}
PLURALS = tuple(IRREGULAR.get(name, name + ("es" if re.search("(s|x|ch|sh)$", name) else "s")) for name in CLASSES)

# A phrase of the language is one token, 'clock' and 'clocks' the same; new ones go to the end, for weights count on it.
VOCABULARY: tuple[str, ...] = (
    *("<pad>", "<null>", OPENING, SIGN, "a", "and", *NUMBERS, *RELATIONS),
    *(*TINTS, *CLASSES, *MOTIONS, *ascii_uppercase),
)


class CaptionRow(NamedTuple):
    """One caption, in the order of the fields of `Captions`."""

    task: int
    first: int
    second: int
    first_color: int = 0
    second_color: int = 0
    count: int = 1  # type: ignore[assignment]  # a tuple's own `count` is not missed
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
    """GenEval's metadata of a caption; of a position the thing seen from stands first."""
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
    """The caption a sentence is; a motion it ends with is left out."""
    found = CAPTION.fullmatch(text.strip().lower())
    row = _row(found) if found else None
    if row is None:
        known = f"'{OPENING} three clocks' or '{OPENING} a red cake and a blue book'"
        raise ValueError(f"'{text:.80}' is no caption of the playground; expected one such as {known}")
    return row


def _row(found: re.Match[str]) -> CaptionRow | None:
    """None where the words are known but say none of the six tasks."""
    if found["number"]:
        kind = PLURALS.index(found["many"])
        return CaptionRow(COUNTING, kind, kind, count=2 + NUMBERS.index(found["number"]))
    first, color = CLASSES.index(found["first"]), _tint(found["first_color"])
    if not found["link"]:
        return CaptionRow(COLOR if color else SINGLE, first, first, color)
    second, other = CLASSES.index(found["second"]), _tint(found["second_color"])
    if first == second or bool(color) != bool(other):
        return None
    if found["link"] == "and":
        return CaptionRow(ATTRIBUTION if color else TWO, first, second, color, other)
    return None if color else CaptionRow(POSITION, first, second, relation=RELATIONS.index(found["link"]))


def _tint(name: str | None) -> int:
    return 1 + TINTS.index(name) if name else 0


IDS = {phrase: place for place, phrase in enumerate(VOCABULARY) if len(phrase) > 1 or phrase == "a"}
IDS |= {"an": IDS["a"]} | {plural: IDS[name] for plural, name in zip(PLURALS, CLASSES, strict=True)}
PHRASE = re.compile(rf"\s*(?:\"(?P<spelled>[a-z]+)\"|(?P<known>{_any(list(IDS)[2:])})(?!\w)|(?P<other>\S+))")


@lru_cache(maxsize=2**18)
def _ids(text: str) -> tuple[int, ...]:
    """The tokens of one text; a word in quotes is spelled."""
    ids: list[int] = []
    for found in PHRASE.finditer(text.strip().lower()):
        if found["other"]:
            unknown = found["other"]
            raise ValueError(
                f"'{text:.80}': the playground has no word '{unknown:.40}'{suggest_name(unknown, list(IDS)[2:])}"
            )
        ids += [IDS[found["known"]]] if found["known"] else _spelled(found["spelled"])
    return tuple(ids) or (IDS["<null>"],)


def _spelled(word: str) -> list[int]:
    return [len(VOCABULARY) - 26 + ascii_uppercase.index(letter) for letter in word.upper()]


def tokenize(texts: Sequence[str], length: int = 16) -> Tensor:
    """Places in VOCABULARY, 0 after the end; no text at all is one <null>: [N, length] int64."""
    rows = [_ids(text) for text in texts]
    for text, row in zip(texts, rows, strict=True):
        if len(row) > length:
            raise ValueError(f"'{text:.80}' has {len(row)} tokens, at most {length} are taken; make it shorter")
    return torch.tensor([row + (0,) * (length - len(row)) for row in rows], dtype=torch.int64).view(-1, length)
