"""Scenes of 64x64 pixels: sampling objects of a caption, painting them, and checking captions by GenEval's rules."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.randomness import Randomness
from ..core.types import select_rows
from .art import CLASSES, COLORS, Style, build_atlas, sprite_extents
from .captions import ATTRIBUTION, COLOR, COUNTING, POSITION, SINGLE, TWO, SceneCaptions
from .purposes import PlaygroundPurpose

SIDE, SLOTS = 64, 4
TRIES = 40  # positions sampled for one or two objects; with 12, a tenth of the position scenes miss their caption
GRID = 4  # pixels, of the corners of snapped objects
CHUNK = 512  # images painted per call, to bound the memory

# Muted, and none near black or white, so that objects of every color stand out.
BACKGROUNDS = (
    *((0.74, 0.85, 0.95), (0.72, 0.84, 0.64), (0.88, 0.82, 0.66), (0.64, 0.66, 0.68)),
    *((0.80, 0.77, 0.88), (0.70, 0.86, 0.82), (0.92, 0.80, 0.78), (0.56, 0.62, 0.72)),
)


@dataclass(frozen=True)
class Scenes:
    """Up to four objects per image."""

    class_id: Tensor  # [N, 4] index into CLASSES
    color: Tensor  # [N, 4] 0 for the natural color, else 1 + index into COLORS
    x: Tensor  # [N, 4] center in pixels from the left
    y: Tensor  # [N, 4] center in pixels from the top
    size: Tensor  # [N, 4] side of its square in pixels
    present: Tensor  # [N, 4] bool

    def __len__(self) -> int:
        return len(self.class_id)

    def extents(self, style: Style = "noto") -> Tensor:
        """Width and height of the visible part of each object, in pixels: [N, 4, 2]."""
        return self.size[..., None] * sprite_extents(style).to(self.class_id.device)[self.class_id]


def sample_scenes(captions: SceneCaptions, rng: Randomness, snapped: float = 1.0) -> Scenes:
    """Sample a scene for each caption; a fraction is snapped to few sizes and a grid, which is easier to learn."""
    total = captions.total()[:, None]  # [N, 1]
    slots = torch.arange(SLOTS, device=total.device)
    other = (slots == 1) & captions.has_two_objects()[:, None]
    snap = rng.uniform(PlaygroundPurpose.SNAP, 1) < snapped  # [N, 1]
    size = _sizes(total, snap, rng)
    cells, pairs = _cells(size, rng), _best(captions, size, snap, rng)
    centres = torch.where(total[..., None] > 2, _placed(cells, size, snap), pairs)
    return Scenes(
        class_id=torch.where(other, captions.second[:, None], captions.first[:, None]),
        color=torch.where(other, captions.second_color[:, None], captions.first_color[:, None]),
        x=centres[..., 0],
        y=centres[..., 1],
        size=size,
        present=slots < total,
    )


def _sizes(total: Tensor, snap: Tensor, rng: Randomness) -> Tensor:
    """Sample sizes, smaller for more objects: [N, 4]."""
    draws = rng.uniform(PlaygroundPurpose.SIZE, 2 + SLOTS)
    one, two = total == 1, total == 2
    low = torch.where(one, 26.0, torch.where(two, 22.0, 20.0))
    high = torch.where(one, 36.0, torch.where(two, 28.0, 26.0))
    free = low + (high - low) * draws[:, :1] + 2 * draws[:, 2:] - 1
    larger = draws[:, 1:2] < 0.5
    steps = torch.where(one, torch.where(larger, 34.0, 28.0), torch.where(two & larger, 26.0, 22.0))
    return torch.where(snap, steps, free)


def _placed(centres: Tensor, size: Tensor, snap: Tensor) -> Tensor:
    """Move centers [N, ..., K, 2] so that objects are inside the image, with corners on the grid if snapped."""
    half, room = size[..., None] / 2, SIDE - size[..., None]
    corners = torch.where(snap[..., None], ((centres - half) / GRID).round() * GRID, centres - half)
    most = torch.where(snap[..., None], (room / GRID).floor() * GRID, room)
    return half + torch.minimum(corners.clamp(min=0), most)


def _cells(size: Tensor, rng: Randomness) -> Tensor:
    """Centers of three or four objects in the quarters of the image, in random order: [N, 4, 2]."""
    order = rng.uniform(PlaygroundPurpose.QUADRANT_ORDER, SLOTS).argsort(1)
    quarter = torch.stack([order % 2, order // 2], 2) * (SIDE / 2) + SIDE / 4
    return quarter + (rng.uniform(PlaygroundPurpose.JITTER, SLOTS, 2) - 0.5) * (SIDE / 2 - size[..., None])


def _best(captions: SceneCaptions, size: Tensor, snap: Tensor, rng: Randomness) -> Tensor:
    """Centers of one or two objects without overlap and in the relation, the best of many draws: [N, 4, 2]."""
    pair, relation = size[:, None, :2], captions.relation[:, None]  # [N, 1, 2], [N, 1]
    has_relation = captions.task[:, None] == POSITION
    thrown = pair[..., None] / 2 + rng.uniform(PlaygroundPurpose.POSITION, TRIES, 2, 2) * (SIDE - pair[..., None])
    thrown = torch.where(has_relation[..., None, None], _folded(thrown, relation), thrown)
    placed = _placed(thrown, pair, snap[:, None])  # [N, tries, 2, 2]
    offset = placed[:, :, 0] - placed[:, :, 1]
    along, across = _turned(offset, relation)
    stands = (along > 14) & (along > 1.2 * across.abs())
    gap = offset.abs().amax(2) - pair.mean(2)
    score = gap.clamp(max=1) + torch.where(
        has_relation, 20.0 * stands + 0.1 * (along - across.abs()).clamp(max=10), 0.0
    )
    chosen = placed[torch.arange(len(size), device=size.device), score.argmax(1)]
    return torch.cat([chosen, chosen], 1)


def _folded(thrown: Tensor, relation: Tensor) -> Tensor:
    """Mirror and swap positions [N, tries, 2, 2] so that the first object is in the relation to the second."""
    along, across = _turned(thrown[:, :, 0] - thrown[:, :, 1], relation)
    upright = torch.where((along.abs() < across.abs())[..., None, None], thrown.flip(3), thrown)
    along, _ = _turned(upright[:, :, 0] - upright[:, :, 1], relation)
    return torch.where((along < 0)[..., None, None], upright.flip(2), upright)


def _turned(offset: Tensor, relation: Tensor) -> tuple[Tensor, Tensor]:
    """The components of an offset [..., 2] along and across a relation's direction: [...] each."""
    level, sign = relation < 2, torch.where(relation % 2 == 0, -1.0, 1.0)
    along = torch.where(level, offset[..., 0], offset[..., 1]) * sign
    return along, torch.where(level, offset[..., 1], offset[..., 0])


def corrupt_captions(captions: SceneCaptions, probability: float | Tensor, rng: Randomness) -> SceneCaptions:
    """Corrupt captions with a probability, one or [N], so that scenes contradict them, as in web data."""
    words = rng.words(PlaygroundPurpose.WRONG_CAPTION, 8).unbind(1)
    bad = rng.uniform(PlaygroundPurpose.CORRUPT_CAPTION, 1)[:, 0] < probability
    luck = rng.uniform(PlaygroundPurpose.CORRUPTION_KIND, 1)[:, 0]
    task, things, tints = captions.task, len(CLASSES), len(COLORS)
    another = (captions.second + 1 + words[0] % (things - 1)) % things
    second = torch.where(luck < 0.5, captions.first, another)  # one object twice, or another class
    count = 1 + (captions.count + words[1] % 3) % SLOTS
    first_color = torch.where(luck < 0.4, 0, 1 + (captions.first_color + words[2] % (tints - 1)) % tints)
    other_color = torch.where(luck < 0.7, 0, 1 + (captions.second_color + words[2] % (tints - 1)) % tints)
    swap = bad & (task == ATTRIBUTION) & (luck < 0.4)
    recolor = bad & (task == ATTRIBUTION) & ~swap
    return replace(
        captions,
        first=torch.where(bad & (task == SINGLE), another, captions.first),
        second=torch.where(bad & (task == TWO), second, captions.second),
        count=torch.where(bad & (task == COUNTING), count, captions.count),
        first_color=torch.where(
            swap, captions.second_color, torch.where(bad & (task == COLOR), first_color, captions.first_color)
        ),
        second_color=torch.where(swap, captions.first_color, torch.where(recolor, other_color, captions.second_color)),
        relation=torch.where(bad & (task == POSITION), (captions.relation + 1 + words[3] % 3) % 4, captions.relation),
    )


def shows_caption(scenes: Scenes, captions: SceneCaptions, strict: bool) -> Tensor:
    """Whether each scene shows its caption by GenEval's rules; `strict` also requires nothing else: [N] bool."""
    first = _shown(scenes, captions.first, captions.first_color)
    second = _shown(scenes, captions.second, captions.second_color)
    right = first.any(1)
    right &= torch.where(captions.has_two_objects(), second.any(1), True)
    right &= torch.where(captions.task == COUNTING, first.sum(1) == captions.count, True)
    related = (_related(scenes, captions.relation) & first[:, :, None] & second[:, None, :]).flatten(1).any(1)
    right &= torch.where(captions.task == POSITION, related, True)
    return right & (scenes.present.sum(1) == captions.total()) if strict else right


def _shown(scenes: Scenes, kind: Tensor, color: Tensor) -> Tensor:
    """Which objects have the class and, if one is required, the color: [N, 4] bool."""
    dyed = (scenes.color == color[:, None]) | (color == 0)[:, None]
    return scenes.present & (scenes.class_id == kind[:, None]) & dyed


def _related(scenes: Scenes, relation: Tensor) -> Tensor:
    """Whether each object is in a relation to each other one, by GenEval's rule: [N, 4, 4] bool."""
    centres, spans = torch.stack([scenes.x, scenes.y], 2), scenes.extents()
    offset = centres[:, :, None] - centres[:, None, :]
    beyond = (offset.abs() - 0.1 * (spans[:, :, None] + spans[:, None, :])).clamp(min=0) * offset.sign()
    direction = beyond / offset.norm(dim=3, keepdim=True).clamp(min=1e-6)
    return _turned(direction, relation[:, None, None])[0] > 0.5


class Painter:
    """Paints scenes in one drawing style."""

    def __init__(self, style: Style = "noto", device: torch.device | str = "cpu") -> None:
        self.style, self.device = style, torch.device(device)
        self.atlas = build_atlas(style, self.device).flatten(0, 1)  # [48 * 11, 4, 32, 32]
        self.backgrounds = torch.tensor(BACKGROUNDS, device=self.device)

    def paint(self, scenes: Scenes, rng: Randomness) -> Tensor:
        """Paint scenes on random backgrounds: [N, 1, 3, 64, 64] in [0, 1]."""
        return self.over(self.background(rng), scenes)[:, None]

    def background(self, rng: Randomness) -> Tensor:
        """Random backgrounds: a color with random brightness and a vertical gradient: [N, 3, 64, 64]."""
        draws = rng.uniform(PlaygroundPurpose.BACKGROUND, 3).to(self.device)
        color = self.backgrounds[(draws[:, 0] * len(BACKGROUNDS)).long()]  # [N, 3]
        lighter, fading = 0.06 * (draws[:, 1] - 0.5), 0.16 * (draws[:, 2] - 0.5)
        height = torch.linspace(-1, 1, SIDE, device=self.device)
        shades = color[..., None] + lighter[:, None, None] + fading[:, None, None] * height  # [N, 3, 64]
        return shades[..., None].expand(-1, -1, -1, SIDE)

    def over(self, pixels: Tensor, scenes: Scenes, angle: Tensor | None = None) -> Tensor:
        """Paint the objects of scenes over pixels, rotated clockwise by [N, 4] radians: [N, 3, 64, 64]."""
        parts = torch.split(torch.arange(len(scenes), device=self.device), CHUNK)
        turns = torch.zeros_like(scenes.x) if angle is None else angle
        painted = [self._over(pixels[rows], select_rows(scenes, rows), turns[rows.to(turns.device)]) for rows in parts]
        return torch.cat(painted) if painted else pixels

    def _over(self, pixels: Tensor, scenes: Scenes, angle: Tensor) -> Tensor:
        places = torch.stack([scenes.x, scenes.y, scenes.size / 2, angle.cos(), angle.sin()]).to(self.device)
        drawn = (scenes.class_id * (1 + len(COLORS)) + scenes.color).to(self.device)
        line = torch.arange(SIDE, device=self.device) + 0.5
        for slot in range(SLOTS):
            x, y, half, cosine, sine = (place[:, slot, None, None] for place in places)  # [N, 1, 1]
            right, down = (line - x) / half, (line[:, None] - y) / half
            where = torch.stack([cosine * right + sine * down, cosine * down - sine * right], 3)  # [N, 64, 64, 2]
            thing = F.grid_sample(self.atlas[drawn[:, slot]], where, padding_mode="zeros", align_corners=False)
            thing = thing * scenes.present[:, slot, None, None, None].to(self.device)
            pixels = pixels * (1 - thing[:, 3:]) + thing[:, :3]
        return pixels.clamp(0, 1)
