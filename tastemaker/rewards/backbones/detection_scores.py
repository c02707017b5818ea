"""What detectors find as numbers: VADER's confidence, GenEval's verdicts, and by which names to look."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...core.types import Metadata
from ...evaluation.geneval_rules import DetectedObject, GenEvalRules, evaluate_detections
from .detectors import GENEVAL, DetectorOutput, ObjectNames


def requested_objects(target: str, prompt: str, fact: Metadata, known: Sequence[str]) -> list[str]:
    """The names to look for: the target's or the fact's, those of GenEval's metadata, or those the prompt is of."""
    text = target or str(fact.get("object", ""))
    if text:
        return split_phrases(text)
    included = [str(wanted["class"]).lower() for wanted in fact.get("include", ())]
    if included:
        return list(dict.fromkeys(included))
    names = objects_in_prompt(prompt, known) if known else split_phrases(prompt)
    if not names:
        raise ValueError(f"'{prompt:.80}' names nothing the detector knows; give a `target`, or a fact 'object'")
    return names


def split_phrases(text: str) -> list[str]:
    """`Book. Cup.` as names."""
    return [name for part in text.lower().split(".") if (name := " ".join(part.split()))]


def objects_in_prompt(prompt: str, known: Sequence[str]) -> list[str]:
    """The known names in a prompt; of one within another (`dog`, `hot dog`) only the longer."""
    left, found = prompt.lower(), []
    for name in sorted(known, key=len, reverse=True):
        pattern = rf"\b{re.escape(name)}(?:e?s)?\b"
        if re.search(pattern, left):
            found.append(name)
            left = re.sub(pattern, " ", left)
    return found


def mean_confidence(found: DetectorOutput, names: ObjectNames, threshold: float | None) -> Tensor:
    """How sure it is on average of what lies above the threshold, nought if nothing does; without one, at the best
    place alone. The mean over each row's names: [N]."""
    if threshold is None:
        each = found.sure.amax(1)
    else:
        kept = found.first & (found.sure > threshold)
        each = (found.sure * kept).sum(1) / kept.sum(1).clamp(min=1)
    return each.sum(1) / torch.tensor([len(row) for row in names], device=each.device)


def required_objects(prompt: str, fact: Metadata, known: Sequence[str], strict: bool) -> list[str]:
    """All names that GenEval's rules need to know of; strictly, every one there is."""
    wanted = [*fact.get("include", ()), *fact.get("exclude", ())]
    if not wanted:
        raise ValueError(f"'{prompt:.80}' has no fact 'include' or 'exclude', as GenEval's metadata do; add one")
    if any(one.get("color") for one in wanted):
        raise ValueError(f"'{prompt:.80}' asks for a colour, which detectors do not tell; leave such prompts out")
    names = list(dict.fromkeys(str(one["class"]) for one in wanted))
    taken = {GENEVAL.get(name, name) for name in names}
    return names + [name for name in known if strict and name not in taken]


def with_threshold(rules: GenEvalRules, threshold: float | None, strict: bool) -> GenEvalRules:
    """A detector's rules, with one threshold for everything where that is given."""
    if threshold is not None:
        rules = replace(rules, threshold=threshold, counting_threshold=threshold)
    return replace(rules, strict=strict)


def geneval_shares(
    found: DetectorOutput, names: ObjectNames, facts: Sequence[Metadata], rules: GenEvalRules, size: tuple[int, int]
) -> Tensor:
    """The share of what each row's metadata ask for that holds: [N]; the size is a picture's, (H, W)."""
    height, width = size
    scale = found.boxes.new_tensor([width, height, width, height])
    columns = (found.boxes * scale).tolist(), found.sure.tolist(), found.first.tolist()
    shares = [_share(_seen(*row[:4]), row[4], rules) for row in zip(*columns, names, facts, strict=True)]
    clear = found.sure.isfinite().all(2).all(1)  # pictures of no numbers are no verdict's business
    return found.sure.new_tensor(shares).where(clear, float("nan"))


def _seen(
    boxes: list[list[float]], sure: list[list[float]], first: list[list[bool]], names: Sequence[str]
) -> list[DetectedObject]:
    return [
        DetectedObject(name, (box[0], box[1], box[2], box[3]), score)
        for box, scores, leads in zip(boxes, sure, first, strict=True)
        for name, score, leading in zip(names, scores, leads, strict=False)  # a row may have fewer names than others
        if leading
    ]


def _share(seen: Sequence[DetectedObject], fact: Metadata, rules: GenEvalRules) -> float:
    reasons = evaluate_detections(seen, {"tag": "", **fact}, rules)[1]
    demands = len(fact.get("include", ())) + len(fact.get("exclude", ())) + rules.strict
    return 1 - len(reasons) / demands
