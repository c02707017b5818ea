"""Named prompt sets, generated from the templates and word lists in prompt_sets.yaml; does not import torch."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.safe_files import read_yaml_mapping

if TYPE_CHECKING:  # it imports torch
    from ..core.types import Metadata

FILE = Path(__file__).with_name("prompt_sets.yaml")
SLOT = re.compile(r"\{(a )?(\w+)\}")


@dataclass(frozen=True)
class PromptTemplate:
    """The templates of a set; each `{word_list}` is a slot, `{a word_list}` one with an article."""

    templates: tuple[str, ...]
    count: int | None = None  # prompts of the set; by default all combinations
    metadata_names: Mapping[str, str] = field(default_factory=dict)  # by word list: its key in the metadata
    metadata: Metadata = field(default_factory=dict)  # of all prompts


@cache
def _load_file() -> dict[str, Any]:
    content: dict[str, Any] = read_yaml_mapping(FILE)
    return content


@cache
def load_prompt_templates() -> dict[str, PromptTemplate]:
    """The templates of all sets, by the set's name."""
    return {
        name: PromptTemplate(
            tuple(entry["template"]) if isinstance(entry["template"], list) else (entry["template"],),
            entry.get("count"),
            entry.get("metadata_names", {}),
            entry.get("metadata", {}),
        )
        for name, entry in _load_file()["sets"].items()
    }


def vader_set_names() -> dict[str, str]:
    """The names of our sets by VADER's names for them."""
    names: dict[str, str] = _load_file()["vader"]
    return names


def word_list(name: str) -> list[tuple[str, str]]:
    """A list of words: how a prompt says each, and how the metadata calls it."""
    return [(word, word) if isinstance(word, str) else (word[0], word[1]) for word in _load_file()["words"][name]]


@cache
def set_prompts(name: str) -> tuple[tuple[str, Metadata], ...]:
    """The distinct prompts of a set with their metadata, the same at every call."""
    template_set = load_prompt_templates()[name]
    slots = [SLOT.findall(template) for template in template_set.templates]
    totals = [math.prod(len(word_list(slot)) for _, slot in each) for each in slots]
    counts = split_count(template_set.count or sum(totals), totals)
    prompts: dict[str, Metadata] = {}
    rng = random.Random(name)
    for template, total, count in zip(template_set.templates, totals, counts, strict=True):
        for combination in range(total) if count == total else rng.sample(range(total), count):
            prompt, words = fill_template(template, combination)
            named = {template_set.metadata_names.get(key, key): value for key, value in words.items()}
            prompts[prompt] = {"set": name, **named, **template_set.metadata}
    return tuple(prompts.items())


def split_count(total: int, limits: Sequence[int]) -> list[int]:
    """Divide `total` as evenly as the limits allow."""
    counts = [0] * len(limits)
    for turn, position in enumerate(sorted(range(len(limits)), key=lambda position: limits[position])):
        counts[position] = min(limits[position], (total - sum(counts)) // (len(limits) - turn))
    return counts


def fill_template(template: str, combination: int) -> tuple[str, dict[str, str]]:
    """The prompt of one combination of words, and how the metadata calls the words, by slot."""
    chosen: dict[str, tuple[str, str]] = {}
    for _, slot in SLOT.findall(template):
        combination, position = divmod(combination, len(word_list(slot)))
        chosen[slot] = word_list(slot)[position]
    prompt = SLOT.sub(lambda slot: f"{article(chosen[slot[2]][0]) if slot[1] else ''}{chosen[slot[2]][0]}", template)
    return prompt, {slot: name for slot, (_, name) in chosen.items()}


def article(word: str) -> str:
    """The indefinite article of a word, followed by a space."""
    return "an " if word[0] in "aeiou" and not word.startswith(("eu", "one", "uku", "uni", "use")) else "a "
