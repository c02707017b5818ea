"""PlayEval: GenEval's rules on a detector's findings, all pictures at once, and partial credit by the same facts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .captions import SceneCaptions
from .detector import THRESHOLD, Detections
from .language import ATTRIBUTION, COLOR, COUNTING, POSITION, SINGLE, TASKS, TWO

APART = 0.1  # of both sizes: how far beyond each other centres must be to stand in a relation


@dataclass(frozen=True)
class CaptionChecks:
    """What a picture shows of what its caption asks for, [N] each."""

    first: Tensor  # bool, seen at all
    second: Tensor
    first_color: Tensor  # bool, of the surest one
    second_color: Tensor
    related: Tensor  # bool, the surest ones to each other
    count: Tensor  # of the first thing
    total: Tensor  # of all things


def check_captions(found: Detections, captions: SceneCaptions, threshold: float = THRESHOLD) -> CaptionChecks:
    rows = torch.arange(len(found), device=found.kind.device)
    sure = found.score > threshold
    firsts = sure & (found.kind == captions.first[:, None])
    seconds = sure & (found.kind == captions.second[:, None])
    a, b = firsts.byte().argmax(1), seconds.byte().argmax(1)  # the surest, for findings are sorted
    offset = found.centre[rows, a] - found.centre[rows, b]
    spans = found.span[rows, a] + found.span[rows, b]
    return CaptionChecks(
        first=firsts.any(1),
        second=seconds.any(1),
        first_color=found.color[rows, a] == captions.first_color,
        second_color=found.color[rows, b] == captions.second_color,
        related=related(offset, spans, captions.relation),
        count=firsts.sum(1),
        total=sure.sum(1),
    )


def related(offset: Tensor, spans: Tensor, relation: Tensor) -> Tensor:
    """Whether centres [N, 2] apart, of sizes that sum to spans [N, 2], stand in a relation: [N]."""
    beyond = (offset.abs() - APART * spans).clamp(min=0) * offset.sign()
    direction = beyond / offset.norm(dim=1, keepdim=True).clamp(min=1e-6)
    along = torch.where(relation < 2, direction[:, 0], direction[:, 1])
    return torch.where(relation % 2 == 0, -along, along) > 0.5


def verdict(found: Detections, captions: SceneCaptions, strict: bool = True, threshold: float = THRESHOLD) -> Tensor:
    """Whether each picture shows its caption; strictly, it shows nothing else: [N] in {0, 1}."""
    seen = check_captions(found, captions, threshold)
    both = seen.first & seen.second
    by_task = {
        SINGLE: seen.first,
        TWO: both,
        COUNTING: seen.count == captions.count,
        COLOR: seen.first & seen.first_color,
        POSITION: both & seen.related,
        ATTRIBUTION: both & seen.first_color & seen.second_color,
    }
    right = select_task(by_task, captions.task)
    return (right & (seen.total == captions.total())).float() if strict else right.float()


def partial_credit(
    found: Detections, captions: SceneCaptions, strict: bool = True, threshold: float = THRESHOLD
) -> Tensor:
    """Credit for every part that is right; strictly, half hangs on the number of things: [N] in [0, 1]."""
    seen = check_captions(found, captions, threshold)
    first, second, both = seen.first.float(), seen.second.float(), (seen.first & seen.second).float()
    first_color, second_color = first * seen.first_color, second * seen.second_color
    present, count = (first + second) / 2, captions.count.float()
    by_task = {
        SINGLE: first,
        TWO: present,
        COUNTING: (1 - (seen.count - count).abs() / count).clamp(min=0),
        COLOR: (first + first_color) / 2,
        POSITION: (present + both * seen.related) / 2,
        ATTRIBUTION: present / 2 + (first_color + second_color) / 4,
    }
    credit = select_task(by_task, captions.task)
    if not strict:
        return credit
    total = captions.total().float()
    return credit * (1 + (1 - (seen.total - total).abs() / total).clamp(min=0)) / 2


def select_task(by_task: dict[int, Tensor], task: Tensor) -> Tensor:
    """Of each row the value of its own task: [N]."""
    columns = torch.stack([by_task[place] for place in range(len(TASKS))], 1)
    return columns.gather(1, task[:, None])[:, 0]
