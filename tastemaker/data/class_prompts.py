"""Prompts that ask for a class each, by its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from ..core.registry import ConfigError
from ..core.types import PromptBatch
from .class_labels import ClassLabels, make_class_labels
from .prompts import PromptDataset


@dataclass(frozen=True)
class ClassPrompts:
    """A prompt for every class, with its number as the fact `label`; names that two classes share are left out."""

    classes: Annotated[int, Field(ge=1, le=10**6)] = 1000
    names: tuple[str, ...] = ()  # in order; a thousand without are ImageNet's
    template: str = "a photo of a {name}"
    yields: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        make_class_labels(self.classes, self.names)
        if "{" in self.template.replace("{name}", "") or "{name}" not in self.template:
            raise ValueError(f"'template' is {self.template!r:.60}; expected {{name}} and plain text")

    def load(self, seed: int) -> PromptDataset:
        known = make_class_labels(self.classes, self.names)
        texts = {number: self.template.replace("{name}", known.name(number)) for number in range(self.classes)}
        told = {number: text for number, text in texts.items() if means(known, text, number)}
        if not told:
            raise ConfigError(f"data.template: no class is understood from {self.template!r:.60}; name it alone")
        return PromptDataset(tuple(told.values()), tuple({"label": number} for number in told), seed)


def means(known: ClassLabels, text: str, number: int) -> bool:
    """Whether a class, and no other, is understood from a text."""
    try:
        return known.number(text) == number
    except ConfigError:
        return False
