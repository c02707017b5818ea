"""What ranked samples teach: pairs for generators, questions with yes or no for judges, without a benchmark's own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from ..core.registry import ConfigError
from ..core.types import Metadata, PromptBatch
from ..vlm.yes_no import CLARITY, POTENTIAL, QUESTIONS

PAIRS, ORM, PARM = "pairs.jsonl", "orm.json", "parm.json"
Row = Mapping[str, Any]  # a sample with its label


@dataclass(frozen=True)
class LabelRules:
    """From scores to lessons."""

    yes: float = 0.5  # a score from which a picture is right
    margin: float | None = None  # by which a chosen one must lead; right against wrong if not given
    pairs: int = 1  # of a prompt, at most
    unclear: float = 0.55  # progress up to which a preview cannot be judged yet; published, steps below 10 of 18
    clear: float = 0.62  # from which it can, published those above 11; between them nothing is said

    def __post_init__(self) -> None:
        if self.unclear > self.clear:
            found = f"--unclear {self.unclear} and --clear {self.clear}"
            raise ConfigError(f"found {found}; expected previews to be clear no earlier than they cease to be unclear")

    def right(self, row: Row) -> bool:
        return bool(row["score"] >= self.yes)

    def preferred(self, chosen: Row, rejected: Row) -> bool:
        if self.margin is None:
            return self.right(chosen) and not self.right(rejected)
        return bool(chosen["score"] - rejected["score"] >= max(self.margin, 1e-9))


def preference_pairs(rows: Sequence[Row], rules: LabelRules) -> list[dict[str, str]]:
    """Of each prompt the best with the worst, the next best with the next worst, while one is preferred."""
    found = []
    for _, group in groupby(rows, key=lambda row: row["group"]):
        ranked = sorted(group, key=lambda row: -row["score"])  # the first of equals stays first
        both = zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False)
        kept = [(best, worst) for best, worst in both if rules.preferred(best, worst)][: rules.pairs]
        found += [{"prompt": a["prompt"], "chosen": a["file"], "rejected": b["file"]} for a, b in kept]
    return found


def orm_examples(rows: Sequence[Row], rules: LabelRules) -> list[dict[str, Any]]:
    """Finished pictures for an ORM, in LLaVA's layout."""
    return [
        llava_example(row["file"], [QUESTIONS["orm"], _word(rules.right(row))], row["prompt"], f"orm-{row['index']}")
        for row in rows
    ]


def parm_examples(rows: Sequence[Row], rules: LabelRules) -> list[dict[str, Any]]:
    """Unfinished pictures for a PARM: whether they can be judged, and what became of those that can."""
    found = []
    for row in rows:
        for place, seen in enumerate(row["previews"]):
            if rules.unclear < seen["progress"] < rules.clear:
                continue
            clear = seen["progress"] >= rules.clear
            turns = [CLARITY, _word(clear), *([POTENTIAL, _word(rules.right(row))] if clear else [])]
            found.append(llava_example(seen["file"], turns, row["prompt"], f"parm-{row['index']}-{place}"))
    return found


def llava_example(file: str, turns: Sequence[str], prompt: str, name: str) -> dict[str, Any]:
    told = [
        {"from": "human" if k % 2 == 0 else "gpt", "value": turn.replace("{prompt}", prompt)}
        for k, turn in enumerate(turns)
    ]
    return {"id": name, "image": file, "conversations": told}


def _word(right: bool) -> str:
    return "yes" if right else "no"


def write_preference_sets(out: Path, rows: Sequence[Row], rules: LabelRules) -> dict[str, int]:
    """Every set in a file of its own, whole or not at all; how many lessons each holds."""
    two, right, unfinished = preference_pairs(rows, rules), orm_examples(rows, rules), parm_examples(rows, rules)
    texts = {PAIRS: "".join(json.dumps(row) + "\n" for row in two)}
    texts |= {ORM: json.dumps(right, indent=1) + "\n", PARM: json.dumps(unfinished, indent=1) + "\n"}
    for name, text in texts.items():
        partial = out / f".{name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(out / name)
    return {PAIRS: len(two), ORM: len(right), PARM: len(unfinished)}


def prompt_signatures(prompt: str, facts: Metadata) -> set[str]:
    """By what a question is known again: its words without case, marks and framing, and what it asks to be shown."""
    words = re.sub(r"[^\w ]+", " ", prompt.lower()).split()
    bare = " ".join(word for word in words if word not in ("a", "an", "the"))
    found = {re.sub(r"^(photo|picture|image) of ", "", bare)}
    if facts.get("include"):
        told = {"include": facts["include"], "exclude": facts.get("exclude", [])}
        found.add(json.dumps(told, sort_keys=True, default=str))
    return found


def exclude_benchmark_prompts(batch: PromptBatch, others: Iterable[PromptBatch]) -> tuple[PromptBatch, list[str]]:
    """The prompts that no benchmark asks and that did not come before, and those that were left out."""
    asked: set[str] = set()
    for other in others:
        for prompt, facts in zip(other.prompts, other.facts, strict=True):
            asked |= prompt_signatures(prompt, facts)
    kept, dropped, seen = [], [], set[str]()
    for place, (prompt, facts) in enumerate(zip(batch.prompts, batch.facts, strict=True)):
        if prompt_signatures(prompt, facts) & asked or prompt in seen:
            dropped.append(prompt)
        else:
            kept.append(place)
        seen.add(prompt)
    chosen = PromptBatch(tuple(batch.prompts[i] for i in kept), tuple(batch.facts[i] for i in kept))
    return chosen, dropped
