"""The prompts of named sets, made from the templates and words in prompt_sets.yaml beside this; without torch."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:  # it imports torch
    from ..core.types import Metadata

FILE = Path(__file__).with_name("prompt_sets.yaml")
SLOT = re.compile(r"\{(a )?(\w+)\}")


@dataclass(frozen=True)
class PromptTemplate:
    """One set: templates, how many prompts of them, what facts call the words, and facts all prompts share."""

    of: tuple[str, ...]
    count: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    facts: Metadata = field(default_factory=dict)


@cache
def _content() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return found


@cache
def sets() -> dict[str, PromptTemplate]:
    """All sets by name."""
    told = _content()["sets"]
    return {
        name: PromptTemplate(
            tuple(each["of"]) if isinstance(each["of"], list) else (each["of"],),
            each.get("count"),
            each.get("names", {}),
            each.get("facts", {}),
        )
        for name, each in told.items()
    }


def vader_names() -> dict[str, str]:
    """What VADER calls sets: by its names, ours."""
    found: dict[str, str] = _content()["vader"]
    return found


def word_list(name: str) -> list[tuple[str, str]]:
    """A list of words: what is said, and what it is called."""
    return [(word, word) if isinstance(word, str) else (word[0], word[1]) for word in _content()["words"][name]]


@cache
def set_prompts(name: str) -> tuple[tuple[str, Metadata], ...]:
    """The prompts of a set, always the same, none of them twice."""
    pattern = sets()[name]
    each = [combinations(template) for template in pattern.of]
    wanted = pattern.count or sum(each)
    found: dict[str, Metadata] = {}
    chance = random.Random(name)
    for template, total, share in zip(pattern.of, each, split_count(wanted, each), strict=True):
        places = range(total) if share == total else chance.sample(range(total), share)
        for place in places:
            prompt, said = fill_template(template, place)
            known = {pattern.names.get(key, key): value for key, value in said.items()}
            found[prompt] = {"set": name, **known, **pattern.facts}
    return tuple(found.items())


def split_count(wanted: int, each: Sequence[int]) -> list[int]:
    """How many prompts each template gives, alike as far as they reach."""
    found = [0] * len(each)
    for turn, place in enumerate(sorted(range(len(each)), key=lambda place: each[place])):
        found[place] = min(each[place], (wanted - sum(found)) // (len(each) - turn))
    return found


def combinations(template: str) -> int:
    return math.prod(len(word_list(slot)) for _, slot in SLOT.findall(template))


def fill_template(template: str, place: int) -> tuple[str, dict[str, str]]:
    """The template with the words of one of its combinations, and what these are called."""
    chosen: dict[str, tuple[str, str]] = {}
    for _, slot in SLOT.findall(template):
        place, number = divmod(place, len(word_list(slot)))
        chosen[slot] = word_list(slot)[number]
    prompt = SLOT.sub(lambda slot: f"{article(chosen[slot[2]][0]) if slot[1] else ''}{chosen[slot[2]][0]}", template)
    return prompt, {slot: called for slot, (_, called) in chosen.items()}


def article(word: str) -> str:
    """A or an, with a space."""
    return "an " if word[0] in "aeiou" and not word.startswith(("eu", "one", "uku", "uni", "use")) else "a "
