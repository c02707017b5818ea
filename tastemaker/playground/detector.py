"""A detector of the world's things (after CenterNet): where, what, which colour and how large, on a grid of 16x16."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .art import CLASSES, COLORS
from .blocks import GROUPS, ResidualBlock, Stem
from .scenes import SIDE, SLOTS, Scenes

CELLS = 16  # a side of the grid
CELL = SIDE // CELLS  # pixels
MOST = 16  # detections looked at in one picture
THRESHOLD = 0.3  # of a heat that is a thing
USUAL = 3.0  # log of a usual size in pixels, so that the head starts near the truth


@dataclass(frozen=True)
class DetectorMaps:
    """What the detector says of every cell."""

    heat: Tensor  # [N, 48, 16, 16] logits of a thing's centre
    color: Tensor  # [N, 10, 16, 16] logits
    offset: Tensor  # [N, 2, 16, 16] of the centre from the cell's, in cells
    size: Tensor  # [N, 2, 16, 16] log of width and height in pixels, less USUAL


@dataclass(frozen=True)
class Detections:
    """What was found in each picture, the surest first; a score of nought fills up."""

    kind: Tensor  # [N, K] place in CLASSES
    color: Tensor  # [N, K] 1 + place in COLORS
    score: Tensor  # [N, K] in [0, 1]
    centre: Tensor  # [N, K, 2] x and y in pixels
    span: Tensor  # [N, K, 2] width and height in pixels

    def __len__(self) -> int:
        return len(self.kind)


class SceneDetector(nn.Module):
    widths: tuple[int, int, int] = (32, 80, 144)
    tiny: tuple[int, int, int] = (8, 16, 16)

    def __init__(self, widths: tuple[int, int, int] = widths) -> None:
        super().__init__()
        self.stem, self.up = Stem(widths), nn.Conv2d(widths[2], widths[1], 1)
        self.merged, self.norm = ResidualBlock(widths[1]), nn.GroupNorm(GROUPS, widths[1])
        self.head = nn.Conv2d(widths[1], len(CLASSES) + len(COLORS) + 4, 3, padding=1)
        nn.init.normal_(self.head.weight, std=0.01)
        rare = torch.tensor([-5.0] * len(CLASSES) + [0.0] * (len(COLORS) + 4))  # hardly any cell is a centre
        self.head.bias = nn.Parameter(rare)

    def features(self, pixels: Tensor) -> Tensor:
        """What Frechet distances compare: [N, C] of pictures [N, 3, 64, 64]."""
        coarse: Tensor = self.stem(pixels)[1]
        return coarse.mean((2, 3))

    def forward(self, pixels: Tensor) -> DetectorMaps:
        fine, coarse = self.stem(pixels)
        h = self.merged(fine + F.interpolate(self.up(coarse), scale_factor=2.0))
        return DetectorMaps(*self.head(F.silu(self.norm(h))).split([len(CLASSES), len(COLORS), 2, 2], 1))


def find_peaks(heat: Tensor) -> Tensor:
    """Cells hotter than their eight neighbours in whichever class: [N, 16, 16] bool of logits [N, 48, 16, 16]."""
    hottest = heat.amax(1)
    return hottest >= F.max_pool2d(hottest[:, None], 3, 1, 1)[:, 0]


def decode_detections(maps: DetectorMaps) -> Detections:
    """The summits, with what the maps say there."""
    heat = maps.heat.float()
    hottest, kind = heat.max(1)  # [N, 16, 16]
    score = torch.where(find_peaks(heat), hottest.sigmoid(), 0.0).flatten(1)
    score, place = score.topk(MOST, 1)
    column, row = place % CELLS, place.div(CELLS, rounding_mode="floor")
    cell = torch.stack([column, row], 2) + 0.5
    return Detections(
        kind=kind.flatten(1).gather(1, place),
        color=1 + _at(maps.color, place).argmax(2),
        score=score,
        centre=CELL * (cell + _at(maps.offset, place)),
        span=(_at(maps.size, place) + USUAL).exp(),
    )


def _at(plane: Tensor, place: Tensor) -> Tensor:
    """Values [N, K, C] of a map [N, C, 16, 16] at cells [N, K]."""
    flat = plane.flatten(2).float()
    return flat.gather(2, place[:, None].expand(-1, flat.shape[1], -1)).transpose(1, 2)


def detector_loss(maps: DetectorMaps, scenes: Scenes) -> Tensor:
    """Focal heat, cross-entropy of colour, and distances of offset and size: one value a picture, [N]."""
    x, y = scenes.x / CELL, scenes.y / CELL  # [N, 4]
    column, row = (at.floor().clamp(0, CELLS - 1).long() for at in (x, y))
    place, present = row * CELLS + column, scenes.present.float()
    colors = F.cross_entropy(
        _at(maps.color, place).flatten(0, 1), (scenes.color - 1).clamp(min=0).flatten(), reduction="none"
    ).view_as(present)
    offset = torch.stack([x - column, y - row], 2) - 0.5
    astray = (_at(maps.offset, place) - offset).abs().sum(2)
    misfit = (_at(maps.size, place) + USUAL - scenes.spans().log()).abs().sum(2)
    # A thing in its own colour has none of the ten, so it teaches none.
    told = colors * (scenes.color > 0) + astray + misfit
    return _focal(maps.heat.float(), _targets(scenes, column, row)) + (told * present).sum(1)


def _targets(scenes: Scenes, column: Tensor, row: Tensor) -> Tensor:
    """A bump of one cell's width around the cell of each centre: [N, 48, 16, 16]."""
    cells = torch.arange(CELLS, device=column.device)
    across, down = cells - column[..., None], cells - row[..., None]  # [N, 4, 16]
    squares = across[:, :, None, :].square() + down[:, :, :, None].square()
    bumps = torch.exp(-squares / (2 * 0.8**2)) * scenes.present[..., None, None]
    heat = bumps.new_zeros(len(column), len(CLASSES), CELLS, CELLS)
    for slot in range(SLOTS):
        kind = scenes.kind[:, slot].view(-1, 1, 1, 1).expand(-1, 1, CELLS, CELLS)
        heat = heat.scatter_reduce(1, kind, bumps[:, slot, None], "amax")
    return heat


def _focal(logits: Tensor, heat: Tensor) -> Tensor:
    """The penalty-reduced focal loss of CornerNet: [N]."""
    hot = (1 - logits.sigmoid()).square() * F.logsigmoid(logits)
    cold = (1 - heat).pow(4) * logits.sigmoid().square() * F.logsigmoid(-logits)
    return -torch.where(heat > 0.999, hot, cold).sum((1, 2, 3))
