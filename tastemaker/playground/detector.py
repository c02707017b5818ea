"""The playground's object detector (after CenterNet): class, color, position and size on a grid of 16x16."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .art import CLASSES, COLORS
from .networks import GROUPS, ResidualBlock, Stem
from .scenes import SIDE, SLOTS, Scenes

CELLS = 16  # a side of the grid
CELL = SIDE // CELLS  # pixels
MAX_DETECTIONS = 16  # per image
THRESHOLD = 0.3  # score of a detection
MEAN_LOG_SIZE = 3.0  # of objects in pixels, so that the head starts near the truth


@dataclass(frozen=True)
class DetectorMaps:
    """The outputs of the detector for every cell."""

    heatmap: Tensor  # [N, 48, 16, 16] logits of an object's center
    color: Tensor  # [N, 10, 16, 16] logits
    offset: Tensor  # [N, 2, 16, 16] of the center from that of the cell, in cells
    size: Tensor  # [N, 2, 16, 16] log of width and height in pixels, less MEAN_LOG_SIZE


@dataclass(frozen=True)
class Detections:
    """The detections of each image, sorted by score; padded with a score of 0."""

    class_id: Tensor  # [N, K] index into CLASSES
    color: Tensor  # [N, K] 1 + index into COLORS
    score: Tensor  # [N, K] in [0, 1]
    center: Tensor  # [N, K, 2] x and y in pixels
    size: Tensor  # [N, K, 2] width and height in pixels

    def __len__(self) -> int:
        return len(self.class_id)


class SceneDetector(nn.Module):
    widths: tuple[int, int, int] = (32, 80, 144)
    tiny: tuple[int, int, int] = (8, 16, 16)

    def __init__(self, widths: tuple[int, int, int] = widths) -> None:
        super().__init__()
        self.stem, self.up = Stem(widths), nn.Conv2d(widths[2], widths[1], 1)
        self.merged, self.norm = ResidualBlock(widths[1]), nn.GroupNorm(GROUPS, widths[1])
        self.head = nn.Conv2d(widths[1], len(CLASSES) + len(COLORS) + 4, 3, padding=1)
        nn.init.normal_(self.head.weight, std=0.01)
        rare = torch.tensor([-5.0] * len(CLASSES) + [0.0] * (len(COLORS) + 4))  # few cells are centers
        self.head.bias = nn.Parameter(rare)

    def features(self, pixels: Tensor) -> Tensor:
        """Features for Fréchet distances, of images [N, 3, 64, 64]: [N, C]."""
        coarse: Tensor = self.stem(pixels)[1]
        return coarse.mean((2, 3))

    def forward(self, pixels: Tensor) -> DetectorMaps:
        fine, coarse = self.stem(pixels)
        h = self.merged(fine + F.interpolate(self.up(coarse), scale_factor=2.0))
        return DetectorMaps(*self.head(F.silu(self.norm(h))).split([len(CLASSES), len(COLORS), 2, 2], 1))


def find_peaks(heat: Tensor) -> Tensor:
    """Local maxima over the eight neighbors, of the largest class logit [N, 48, 16, 16]: [N, 16, 16] bool."""
    hottest = heat.amax(1)
    return hottest >= F.max_pool2d(hottest[:, None], 3, 1, 1)[:, 0]


def decode_detections(maps: DetectorMaps) -> Detections:
    """Decode the peaks of the heatmap into detections."""
    heat = maps.heatmap.float()
    hottest, kind = heat.max(1)  # [N, 16, 16]
    score = torch.where(find_peaks(heat), hottest.sigmoid(), 0.0).flatten(1)
    score, place = score.topk(MAX_DETECTIONS, 1)
    column, row = place % CELLS, place.div(CELLS, rounding_mode="floor")
    cell = torch.stack([column, row], 2) + 0.5
    return Detections(
        class_id=kind.flatten(1).gather(1, place),
        color=1 + _at(maps.color, place).argmax(2),
        score=score,
        center=CELL * (cell + _at(maps.offset, place)),
        size=(_at(maps.size, place) + MEAN_LOG_SIZE).exp(),
    )


def _at(plane: Tensor, place: Tensor) -> Tensor:
    """Values [N, K, C] of a map [N, C, 16, 16] at cells [N, K]."""
    flat = plane.flatten(2).float()
    return flat.gather(2, place[:, None].expand(-1, flat.shape[1], -1)).transpose(1, 2)


def detector_loss(maps: DetectorMaps, scenes: Scenes) -> Tensor:
    """Focal loss of the heatmap, cross-entropy of the color, and L1 losses of offset and size: [N]."""
    x, y = scenes.x / CELL, scenes.y / CELL  # [N, 4]
    column, row = (at.floor().clamp(0, CELLS - 1).long() for at in (x, y))
    place, present = row * CELLS + column, scenes.present.float()
    colors = F.cross_entropy(
        _at(maps.color, place).flatten(0, 1), (scenes.color - 1).clamp(min=0).flatten(), reduction="none"
    ).view_as(present)
    offset = torch.stack([x - column, y - row], 2) - 0.5
    astray = (_at(maps.offset, place) - offset).abs().sum(2)
    misfit = (_at(maps.size, place) + MEAN_LOG_SIZE - scenes.extents().log()).abs().sum(2)
    # An object in its natural color has no color label.
    object_loss = colors * (scenes.color > 0) + astray + misfit
    return _focal(maps.heatmap.float(), _targets(scenes, column, row)) + (object_loss * present).sum(1)


def _targets(scenes: Scenes, column: Tensor, row: Tensor) -> Tensor:
    """A Gaussian around the cell of each center: [N, 48, 16, 16]."""
    cells = torch.arange(CELLS, device=column.device)
    across, down = cells - column[..., None], cells - row[..., None]  # [N, 4, 16]
    squares = across[:, :, None, :].square() + down[:, :, :, None].square()
    bumps = torch.exp(-squares / (2 * 0.8**2)) * scenes.present[..., None, None]
    heat = bumps.new_zeros(len(column), len(CLASSES), CELLS, CELLS)
    for slot in range(SLOTS):
        kind = scenes.class_id[:, slot].view(-1, 1, 1, 1).expand(-1, 1, CELLS, CELLS)
        heat = heat.scatter_reduce(1, kind, bumps[:, slot, None], "amax")
    return heat


def _focal(logits: Tensor, heat: Tensor) -> Tensor:
    """The penalty-reduced focal loss of CornerNet: [N]."""
    hot = (1 - logits.sigmoid()).square() * F.logsigmoid(logits)
    cold = (1 - heat).pow(4) * logits.sigmoid().square() * F.logsigmoid(-logits)
    return -torch.where(heat > 0.999, hot, cold).sum((1, 2, 3))
