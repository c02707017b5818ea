"""Unreadable images: report and skip each, and stop when there are more than a limit."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from rich.console import Console

from ..core.registry import ConfigError


@dataclass
class SkippedFiles:
    """What could not be used, and how much of it is borne."""

    most: int
    told: list[str] = field(default_factory=list)

    def add(self, sentence: str, error: Exception, console: Console) -> None:
        """Say which it is and what is wrong with it; one too many is the end."""
        self.told.append(sentence)
        count = len(self.told)
        if count > self.most:
            others = f", and {count - 1} before it" if count > 1 else ""
            told = f"{sentence}{others}; or bear more of them with --skip {2 * count}"
            if os.environ.get("RANK", "0") != "0":  # whose errors nobody else shows
                console.print(f"error: {told}", markup=False, highlight=False, soft_wrap=True)
            raise ConfigError(told) from error
        console.print(f"skipped: {sentence}", markup=False, highlight=False, soft_wrap=True)

    def counted(self) -> str:
        """The end of a sentence that says how many pictures there are."""
        return f", {len(self.told)} could not be read" if self.told else ""
