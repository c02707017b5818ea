"""Named sets of prompts, each with what is known of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..core.registry import suggest_name
from ..core.types import PromptBatch
from .prompt_templates import set_prompts, sets, vader_names
from .prompts import PromptDataset

HELD = 5  # every fifth prompt of a set is held out


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
        known = [*sets(), *vader_names()]
        if self.name not in known:
            raise ValueError(f"there is no prompt set '{self.name:.60}'{suggest_name(self.name, known)}")

    def load(self, seed: int) -> PromptDataset:
        every = set_prompts(vader_names().get(self.name, self.name))
        kept = [
            row for i, row in enumerate(every) if self.part == "all" or (i % HELD == 0) == (self.part == "held_out")
        ]
        return PromptDataset(tuple(prompt for prompt, _ in kept), tuple(facts for _, facts in kept), seed)
