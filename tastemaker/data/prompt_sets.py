"""Named sets of prompts, each with what is known of it; the words and the sets are in prompt_sets.yaml beside this."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml

from ..registry import suggest
from ..types import Facts, PromptBatch
from .prompts import PromptRows

FILE = Path(__file__).with_name("prompt_sets.yaml")
SLOT = re.compile(r"\{(a )?(\w+)\}")
HELD = 5  # every fifth prompt of a set is held out


@dataclass(frozen=True)
class Pattern:
    """One set: templates, how many prompts of them, what facts call the words, and facts all prompts share."""

    of: tuple[str, ...]
    count: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    facts: Facts = field(default_factory=dict)


@dataclass(frozen=True)
class PromptSet:
    """Prompts of a named set, such as animals or actions, with what is known of each: the words it is made of.

    `actions` and the `kinetics` sets know the `action` that actpred looks for, `rainy` and `snowy` the `weather`, and
    the `without` sets the `object` that detection is to find or to miss. VADER's names of its functions name sets too.
    """

    name: str
    part: Literal["all", "train", "held_out"] = "all"  # every fifth prompt is held out
    yields: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        known = [*sets(), *functions()]
        if self.name not in known:
            raise ValueError(f"there is no prompt set '{self.name:.60}'{suggest(self.name, known)}")

    def load(self, seed: int) -> PromptRows:
        every = made(functions().get(self.name, self.name))
        kept = [
            row for i, row in enumerate(every) if self.part == "all" or (i % HELD == 0) == (self.part == "held_out")
        ]
        return PromptRows(tuple(prompt for prompt, _ in kept), tuple(facts for _, facts in kept), seed)


@cache
def _content() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return found


@cache
def sets() -> dict[str, Pattern]:
    """All sets by name."""
    told = _content()["sets"]
    return {
        name: Pattern(
            tuple(each["of"]) if isinstance(each["of"], list) else (each["of"],),
            each.get("count"),
            each.get("names", {}),
            each.get("facts", {}),
        )
        for name, each in told.items()
    }


def functions() -> dict[str, str]:
    """What VADER calls sets: by its names, ours."""
    found: dict[str, str] = _content()["vader"]
    return found


def words(name: str) -> list[tuple[str, str]]:
    """A list of words: what is said, and what it is called."""
    return [(word, word) if isinstance(word, str) else (word[0], word[1]) for word in _content()["words"][name]]


@cache
def made(name: str) -> tuple[tuple[str, Facts], ...]:
    """The prompts of a set, always the same, none of them twice."""
    pattern = sets()[name]
    each = [combinations(template) for template in pattern.of]
    wanted = pattern.count or sum(each)
    found: dict[str, Facts] = {}
    chance = random.Random(name)
    for template, total, share in zip(pattern.of, each, shares(wanted, each), strict=True):
        places = range(total) if share == total else chance.sample(range(total), share)
        for place in places:
            prompt, said = filled(template, place)
            known = {pattern.names.get(key, key): value for key, value in said.items()}
            found[prompt] = {"set": name, **known, **pattern.facts}
    return tuple(found.items())


def shares(wanted: int, each: Sequence[int]) -> list[int]:
    """How many prompts each template gives, alike as far as they reach."""
    found = [0] * len(each)
    for turn, place in enumerate(sorted(range(len(each)), key=lambda place: each[place])):
        found[place] = min(each[place], (wanted - sum(found)) // (len(each) - turn))
    return found


def combinations(template: str) -> int:
    return math.prod(len(words(slot)) for _, slot in SLOT.findall(template))


def filled(template: str, place: int) -> tuple[str, dict[str, str]]:
    """The template with the words of one of its combinations, and what these are called."""
    chosen: dict[str, tuple[str, str]] = {}
    for _, slot in SLOT.findall(template):
        place, number = divmod(place, len(words(slot)))
        chosen[slot] = words(slot)[number]
    prompt = SLOT.sub(lambda slot: f"{article(chosen[slot[2]][0]) if slot[1] else ''}{chosen[slot[2]][0]}", template)
    return prompt, {slot: called for slot, (_, called) in chosen.items()}


def article(word: str) -> str:
    """A or an, with a space."""
    return "an " if word[0] in "aeiou" and not word.startswith(("eu", "one", "uku", "uni", "use")) else "a "
