"""Class labels by id or name, ImageNet's among them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from ..core.registry import ConfigError

IMAGENET_FILE = Path(__file__).parent / "imagenet.txt"  # by class: its WordNet id and its names, the usual one first
PREFIX = re.compile(r"(?:(?:an? )?(?:photo|picture|image) of )?(?:an? |the )?", re.IGNORECASE)


@dataclass(frozen=True)
class ClassLabels:
    """A number of classes, with names or without. A prompt is an id, a name, or "a photo of a" name."""

    count: int
    names: tuple[tuple[str, ...], ...] = ()  # by class id, the usual one first

    @cached_property
    def _ids_by_name(self) -> dict[str, tuple[int, ...]]:
        """Class ids by lower-case name; the usual name of a class refers to no class that has it as a synonym."""
        synonyms: dict[str, tuple[int, ...]] = {}
        primary: dict[str, tuple[int, ...]] = {}
        for class_id, names in enumerate(self.names):
            for name in dict.fromkeys(name.lower() for name in names):
                synonyms[name] = (*synonyms.get(name, ()), class_id)
            primary[names[0].lower()] = (*primary.get(names[0].lower(), ()), class_id)
        return synonyms | primary

    def find_class(self, prompt: str) -> int:
        """The class id that a prompt names; refuses a prompt that names none or several."""
        text = " ".join(prompt.split())
        if text.isdecimal():
            if int(text) < self.count:
                return int(text)
            expected = f"expected a number from 0 to {self.count - 1}; for more classes, set model.num_classes"
            raise ConfigError(f"prompt: class {text:.20} does not exist; {expected} [TM129]")
        bare = PREFIX.sub("", text, count=1).lower()
        class_ids = self._ids_by_name.get(text.lower()) or self._ids_by_name.get(bare, ())
        if len(class_ids) == 1:
            return class_ids[0]
        if class_ids:
            ids = ", ".join(map(str, class_ids))
            raise ConfigError(
                f"prompt: the name '{text:.60}' belongs to several classes, {ids}; use one of these class ids as the "
                "prompt [TM130]"
            )
        if not self.names:
            expected = f"expected a number from 0 to {self.count - 1}, or set model.class_names"
            advice = "for images in folders by class, set data.caption_source=class_id"
            raise ConfigError(f"prompt: '{text:.60}' is not a class; {expected}; {advice} [TM131]")
        near = difflib.get_close_matches(bare[:60], self._ids_by_name, 1)
        advice = f"did you mean '{near[0]}'?" if near else f"expected a name or a number below {self.count}"
        raise ConfigError(f"prompt: unknown class '{text:.60}'; {advice} [TM132]")

    def name(self, class_id: int) -> str:
        """The usual name of a class; its id if classes have no names."""
        return self.names[class_id][0] if self.names else str(class_id)


def make_class_labels(count: int, names: Sequence[str] = ()) -> ClassLabels:
    """Classes with these names; a thousand without names are ImageNet's."""
    if not names and count == 1000:
        return imagenet_labels()
    if names and len(names) != count:
        raise ValueError(
            f"'class_names' has {len(names)} names, but the model has {count} classes; give one name per class, "
            "or remove 'class_names' [TM133]"
        )
    return ClassLabels(count, tuple((name,) for name in names))


def names_from_data(labels: ClassLabels, names: Sequence[str]) -> tuple[str, ...]:
    """Names of all classes of a model whose first classes are those of a data set, with ids for the rest.

    Empty if the model knows all names already, or if the data set has none.
    """
    known = {name.lower() for synonyms in labels.names for name in synonyms}
    if all(PREFIX.sub("", name, count=1).lower() in known or name.lower() in known for name in names):
        return ()
    if len(names) > labels.count:
        raise ConfigError(
            f"model.num_classes: {labels.count}, but the data has {len(names)} classes; set it to {len(names)} [TM861]"
        )
    return (*names, *(str(class_id) for class_id in range(len(names), labels.count)))


def are_imagenet_names(names: Sequence[str]) -> bool:
    """Whether the names of a data set are those of ImageNet's classes, in order and possibly with synonyms.

    Editions differ in a few names, so that more than half must be equal.
    """
    labels = imagenet_labels()
    if len(names) != labels.count:
        return False
    first = [name.split(",")[0].replace("_", " ").strip().lower() for name in names]
    known = [{*(name.lower() for name in synonyms), str(i)} for i, synonyms in enumerate(labels.names)]
    return 2 * sum(name in known[i] for i, name in enumerate(first)) > len(names)


@lru_cache(maxsize=1)
def imagenet_labels() -> ClassLabels:
    """The 1000 classes of ImageNet in their usual order."""
    lines = IMAGENET_FILE.read_text(encoding="utf-8").splitlines()
    return ClassLabels(len(lines), tuple(tuple(line.split(" ", 1)[1].split(", ")) for line in lines))


@lru_cache(maxsize=1)
def wordnet_class_ids() -> dict[str, int]:
    """ImageNet's class ids by WordNet id, the names of its folders."""
    lines = IMAGENET_FILE.read_text(encoding="utf-8").splitlines()
    return {line.split(" ", 1)[0]: class_id for class_id, line in enumerate(lines)}
