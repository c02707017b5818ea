"""Classes that a prompt may name by number or by name, ImageNet's among them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from ..core.registry import ConfigError

IMAGENET_FILE = Path(__file__).parent / "imagenet.txt"  # by class: its id in WordNet and its names, the usual one first
PREFIX = re.compile(r"(?:(?:an? )?(?:photo|picture|image) of )?(?:an? |the )?", re.IGNORECASE)


@dataclass(frozen=True)
class ClassLabels:
    """So many classes, with names or without; what a prompt says is a number, a name, or "a photo of a" name."""

    count: int
    names: tuple[tuple[str, ...], ...] = ()  # of each class, the usual one first

    @cached_property
    def _numbers(self) -> dict[str, tuple[int, ...]]:
        """Every name in small letters, and which classes have it; the usual name of one is no other's."""
        found: dict[str, tuple[int, ...]] = {}
        for number, names in enumerate(self.names):
            for name in dict.fromkeys(name.lower() for name in names):
                found[name] = (*found.get(name, ()), number)
        usual: dict[str, tuple[int, ...]] = {}
        for number, names in enumerate(self.names):
            usual[names[0].lower()] = (*usual.get(names[0].lower(), ()), number)
        return found | usual

    def number(self, prompt: str) -> int:
        """The class a prompt means; one sentence if it means none, or several."""
        said = " ".join(prompt.split())
        if said.isdecimal():
            if int(said) < self.count:
                return int(said)
            told = f"expected a number from 0 to {self.count - 1}; of more classes, set model.classes"
            raise ConfigError(f"prompt: there is no class {said:.20}; {told}")
        found = self._numbers.get(said.lower()) or self._numbers.get(PREFIX.sub("", said, count=1).lower(), ())
        if len(found) == 1:
            return found[0]
        raise ConfigError(self._complaint(said, found))

    def _complaint(self, said: str, found: Sequence[int]) -> str:
        if found:
            which = ", ".join(map(str, found))
            return f"prompt: '{said:.60}' is what the classes {which} are called; give the number of one"
        if not self.names:
            told = f"expected a number from 0 to {self.count - 1}, or set model.names"
            return f"prompt: '{said:.60}' is no class; {told}; of pictures in folders by class, set data.say=number"
        near = difflib.get_close_matches(PREFIX.sub("", said, count=1).lower()[:60], self._numbers, 1)
        advice = f"did you mean '{near[0]}'" if near else f"expected a name or a number below {self.count}"
        return f"prompt: there is no class '{said:.60}'; {advice}"

    def name(self, number: int) -> str:
        """What a class is usually called; its number, where it has no name."""
        return self.names[number][0] if self.names else str(number)


def make_class_labels(count: int, names: Sequence[str] = ()) -> ClassLabels:
    """Classes of these names; a thousand without names are ImageNet's."""
    if not names and count == 1000:
        return imagenet_labels()
    if names and len(names) != count:
        raise ValueError(f"'names' has {len(names)} and there are {count} classes; expected one name a class, or none")
    return ClassLabels(count, tuple((name,) for name in names))


@lru_cache(maxsize=1)
def imagenet_labels() -> ClassLabels:
    """The thousand classes of ImageNet in their usual order."""
    lines = IMAGENET_FILE.read_text(encoding="utf-8").splitlines()
    return ClassLabels(len(lines), tuple(tuple(line.split(" ", 1)[1].split(", ")) for line in lines))


@lru_cache(maxsize=1)
def wordnet_class_ids() -> dict[str, int]:
    """ImageNet's classes by their ids in WordNet, as its folders are called."""
    lines = IMAGENET_FILE.read_text(encoding="utf-8").splitlines()
    return {line.split(" ", 1)[0]: number for number, line in enumerate(lines)}
