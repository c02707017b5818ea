"""PlayEval: GenEval's rules on the detections of a batch of images, with partial credit and a differentiable form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .captions import ATTRIBUTION, COLOR, COUNTING, POSITION, SINGLE, TASKS, TWO, SceneCaptions
from .detector import CELLS, THRESHOLD, Detections, DetectorMaps, find_peaks

APART = 0.1  # of both sizes: smallest distance of centers for a relation


@dataclass(frozen=True)
class CaptionChecks:
    """Which parts of a caption an image shows, [N] each."""

    first: Tensor  # bool, detected
    second: Tensor
    first_color: Tensor  # bool, of the detection with the highest score
    second_color: Tensor
    related: Tensor  # bool, between the detections with the highest scores
    count: Tensor  # detections of the first class
    total: Tensor  # of all detections


def check_captions(detections: Detections, captions: SceneCaptions, threshold: float = THRESHOLD) -> CaptionChecks:
    rows = torch.arange(len(detections), device=detections.class_id.device)
    sure = detections.score > threshold
    firsts = sure & (detections.class_id == captions.first[:, None])
    seconds = sure & (detections.class_id == captions.second[:, None])
    a, b = firsts.byte().argmax(1), seconds.byte().argmax(1)  # detections are sorted by score
    offset = detections.center[rows, a] - detections.center[rows, b]
    spans = detections.size[rows, a] + detections.size[rows, b]
    return CaptionChecks(
        first=firsts.any(1),
        second=seconds.any(1),
        first_color=detections.color[rows, a] == captions.first_color,
        second_color=detections.color[rows, b] == captions.second_color,
        related=check_relation(offset, spans, captions.relation),
        count=firsts.sum(1),
        total=sure.sum(1),
    )


def check_relation(offset: Tensor, spans: Tensor, relation: Tensor) -> Tensor:
    """Whether objects with center offsets [N, 2] and summed sizes [N, 2] are in a relation: [N] bool."""
    beyond = (offset.abs() - APART * spans).clamp(min=0) * offset.sign()
    direction = beyond / offset.norm(dim=1, keepdim=True).clamp(min=1e-6)
    along = torch.where(relation < 2, direction[:, 0], direction[:, 1])
    return torch.where(relation % 2 == 0, -along, along) > 0.5


def compute_verdict(
    detections: Detections, captions: SceneCaptions, strict: bool = True, threshold: float = THRESHOLD
) -> Tensor:
    """Whether each image shows its caption; `strict` also requires nothing else: [N] in {0, 1}."""
    seen = check_captions(detections, captions, threshold)
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
    detections: Detections, captions: SceneCaptions, strict: bool = True, threshold: float = THRESHOLD
) -> Tensor:
    """Credit for every correct part; `strict` gives half of it for the number of objects: [N] in [0, 1]."""
    seen = check_captions(detections, captions, threshold)
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
    """Select the value of each row's task: [N]."""
    columns = torch.stack([by_task[place] for place in range(len(TASKS))], 1)
    return columns.gather(1, task[:, None])[:, 0]


LEAST = -4.0  # smallest log-probability
NOWHERE = -9.0  # logit of a cell that is no peak
SPARE = 6  # peaks considered as extra objects


def soft_score(maps: DetectorMaps, captions: SceneCaptions, strict: bool = True) -> Tensor:
    """Mean log-probability of the caption's parts; `strict` penalizes extra objects: [N], at most 0."""
    rows = torch.arange(len(captions), device=maps.heatmap.device)
    with torch.no_grad():
        peak = find_peaks(maps.heatmap).flatten(1)  # [N, 256]
    first, second = maps.heatmap[rows, captions.first].flatten(1), maps.heatmap[rows, captions.second].flatten(1)
    colors = maps.color.log_softmax(1).flatten(2)  # [N, 10, 256]
    a, b = first.argmax(1), second.argmax(1)
    there, other = F.logsigmoid(first[rows, a]), F.logsigmoid(second[rows, b])
    dyed = colors[rows, (captions.first_color - 1).clamp(min=0), a]
    other_dyed = colors[rows, (captions.second_color - 1).clamp(min=0), b]
    by_task = {
        SINGLE: there,
        TWO: (there + other) / 2,
        COUNTING: _counted(first.masked_fill(~peak, NOWHERE), captions.count),
        COLOR: (there + dyed) / 2,
        POSITION: (there + other + _placed(first, second, captions.relation)) / 3,
        ATTRIBUTION: (there + other + dyed + other_dyed) / 4,
    }
    score = select_task(by_task, captions.task).clamp(min=LEAST)
    hottest = maps.heatmap.amax(1).flatten(1).masked_fill(~peak, NOWHERE)
    return score + _no_extra_objects(hottest, captions.total()) if strict else score


def _counted(heat: Tensor, count: Tensor) -> Tensor:
    """Log-probability that the `count` highest peaks are objects and the next ones are not: [N]."""
    top = heat.topk(5, 1).values
    wanted = torch.arange(5, device=heat.device) < count[:, None]
    return F.logsigmoid(torch.where(wanted, top, -top)).clamp(min=NOWHERE).mean(1)


def _placed(first: Tensor, second: Tensor, relation: Tensor) -> Tensor:
    """Log-probability that the centroid of one heatmap is in a relation to that of the other: [N]."""
    offset = _middle(first) - _middle(second)  # in cells
    level, sign = relation < 2, torch.where(relation % 2 == 0, -1.0, 1.0)
    along = torch.where(level, offset[:, 0], offset[:, 1]) * sign
    across = torch.where(level, offset[:, 1], offset[:, 0]).abs()
    return F.logsigmoid(along - 1.2 * across - 1)


def _middle(heat: Tensor) -> Tensor:
    """The centroid of a sharpened heatmap: [N, 2], x and y in cells."""
    share = torch.softmax(4 * heat.clamp(-6, 6), 1).view(-1, CELLS, CELLS)
    cells = torch.arange(CELLS, device=heat.device, dtype=heat.dtype)
    return torch.stack([share.sum(1) @ cells, share.sum(2) @ cells], 1)


def _no_extra_objects(hottest: Tensor, total: Tensor) -> Tensor:
    """Log-probability that there are no extra objects: [N]."""
    top = hottest.topk(SPARE, 1).values
    spare = torch.arange(SPARE, device=top.device) >= total[:, None]
    return torch.where(spare, F.logsigmoid(-top), 0.0).sum(1).clamp(min=LEAST) / 2
