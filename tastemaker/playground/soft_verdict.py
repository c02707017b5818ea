"""The verdict with its edges taken off, so that pictures can follow its gradient."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .captions import SceneCaptions
from .detector import CELLS, DetectorMaps, find_peaks
from .language import ATTRIBUTION, COLOR, COUNTING, POSITION, SINGLE, TWO
from .verdict import select_task

LEAST = -4.0  # log-probability below which nothing is worse
NOWHERE = -9.0  # logit of a cell that is no summit
SPARE = 6  # summits looked at for things not asked for


def soft_score(maps: DetectorMaps, captions: SceneCaptions, strict: bool = True) -> Tensor:
    """Mean log-probability of what the caption asks for, less what is there beside it: [N], at most 0."""
    rows = torch.arange(len(captions), device=maps.heat.device)
    with torch.no_grad():
        summit = find_peaks(maps.heat).flatten(1)  # [N, 256]
    first, second = maps.heat[rows, captions.first].flatten(1), maps.heat[rows, captions.second].flatten(1)
    colors = maps.color.log_softmax(1).flatten(2)  # [N, 10, 256]
    a, b = first.argmax(1), second.argmax(1)
    there, other = F.logsigmoid(first[rows, a]), F.logsigmoid(second[rows, b])
    dyed = colors[rows, (captions.first_color - 1).clamp(min=0), a]
    other_dyed = colors[rows, (captions.second_color - 1).clamp(min=0), b]
    by_task = {
        SINGLE: there,
        TWO: (there + other) / 2,
        COUNTING: _counted(first.masked_fill(~summit, NOWHERE), captions.count),
        COLOR: (there + dyed) / 2,
        POSITION: (there + other + _placed(first, second, captions.relation)) / 3,
        ATTRIBUTION: (there + other + dyed + other_dyed) / 4,
    }
    score = select_task(by_task, captions.task).clamp(min=LEAST)
    hottest = maps.heat.amax(1).flatten(1).masked_fill(~summit, NOWHERE)
    return score + _alone(hottest, captions.total()) if strict else score


def _counted(heat: Tensor, count: Tensor) -> Tensor:
    """The `count` hottest summits are things and the next ones are not: [N]."""
    top = heat.topk(5, 1).values
    wanted = torch.arange(5, device=heat.device) < count[:, None]
    return F.logsigmoid(torch.where(wanted, top, -top)).clamp(min=NOWHERE).mean(1)


def _placed(first: Tensor, second: Tensor, relation: Tensor) -> Tensor:
    """How surely the middle of the one heat stands in a relation to the middle of the other: [N]."""
    offset = _middle(first) - _middle(second)  # in cells
    level, sign = relation < 2, torch.where(relation % 2 == 0, -1.0, 1.0)
    along = torch.where(level, offset[:, 0], offset[:, 1]) * sign
    across = torch.where(level, offset[:, 1], offset[:, 0]).abs()
    return F.logsigmoid(along - 1.2 * across - 1)


def _middle(heat: Tensor) -> Tensor:
    """The mean cell under a heat sharpened fourfold: [N, 2], x and y."""
    share = torch.softmax(4 * heat.clamp(-6, 6), 1).view(-1, CELLS, CELLS)
    cells = torch.arange(CELLS, device=heat.device, dtype=heat.dtype)
    return torch.stack([share.sum(1) @ cells, share.sum(2) @ cells], 1)


def _alone(hottest: Tensor, total: Tensor) -> Tensor:
    """Nothing but what was asked for: [N]."""
    top = hottest.topk(SPARE, 1).values
    spare = torch.arange(SPARE, device=top.device) >= total[:, None]
    return torch.where(spare, F.logsigmoid(-top), 0.0).sum(1).clamp(min=LEAST) / 2
