"""Edits of playground scenes: an instruction, a source, a target and a mask, and a strict verdict by a detector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..core.randomness import Randomness, philox
from ..core.types import Metadata, select_rows
from .art import CLASSES, COLORS
from .captions import SPLIT_KEY, TWO, SceneCaptions, Split, article
from .detector import THRESHOLD, Detections
from .purposes import PlaygroundPurpose
from .scenes import SIDE, Painter, Scenes, sample_scenes

KINDS = ("recolor", "add", "remove", "replace")
RECOLOR, ADD, REMOVE, REPLACE = range(len(KINDS))
KEPT, EDITED = 0, 1  # slots of a scene
MARGIN = 2  # pixels around an object that an edit may change
NEAR = 6.0  # pixels between the center of an object and where it should be
TOLERANCE = 0.03  # mean absolute difference outside of the edited objects, up to which the rest counts as unchanged
TINTS = tuple(COLORS)
ANYWHERE = -1.0  # the place of an object that may be anywhere


@dataclass(frozen=True)
class SceneEdits:
    """Edits of scenes with a kept object in slot 0 and the edited one in slot 1."""

    kind: Tensor  # [N] index into KINDS
    source: Scenes
    target: Scenes

    def __len__(self) -> int:
        return len(self.kind)

    def texts(self) -> tuple[str, ...]:
        """The instructions, such as 'make the cup red' or 'add a second dog'."""
        columns = (
            self.kind,
            self.source.class_id[:, EDITED],
            self.target.class_id[:, EDITED],
            self.target.color[:, EDITED],
            self.target.class_id[:, KEPT],
        )
        return tuple(_instruction(*row) for row in torch.stack(columns, 1).tolist())

    def paint(self, painter: Painter, rng: Randomness) -> tuple[Tensor, Tensor]:
        """Sources and targets on the same backgrounds: [N, 1, 3, 64, 64] in [0, 1] each."""
        background = painter.background(rng)
        return painter.over(background, self.source)[:, None], painter.over(background, self.target)[:, None]

    def masks(self) -> Tensor:
        """1 where the edit may change the image: the edited object, or all but the kept one: [N, 1, 3, 64, 64]."""
        kept, edited = (inside_boxes(object_boxes(self.source, slot)) for slot in (KEPT, EDITED))
        mask = torch.where((self.kind == ADD).view(-1, 1, 1), ~kept, edited)
        return mask.float()[:, None, None].expand(-1, 1, 3, -1, -1)

    def requests(self) -> EditRequests:
        """What a verdict has to check."""
        old, new = self.source, self.target
        free = (self.kind == ADD)[:, None]
        centers = torch.stack([new.x, new.y], 2)
        return EditRequests(
            kind=self.kind,
            kept_class=new.class_id[:, KEPT],
            kept_color=new.color[:, KEPT],
            kept_center=centers[:, KEPT],
            old_class=old.class_id[:, EDITED],
            new_class=new.class_id[:, EDITED],
            new_color=new.color[:, EDITED],
            new_center=torch.where(free, ANYWHERE, centers[:, EDITED]),
            box=torch.where(free, 0.0, object_boxes(old, EDITED)),
        )


def _instruction(kind: int, old: int, new: int, color: int, kept: int) -> str:
    wanted = f"{TINTS[color - 1]} {CLASSES[new]}" if color else CLASSES[new]
    if kind == RECOLOR:
        return f"make the {CLASSES[old]} {TINTS[color - 1]}"
    if kind == ADD:
        return f"add a second {wanted}" if new == kept else f"add {article(wanted)}"
    return f"remove the {CLASSES[old]}" if kind == REMOVE else f"replace the {CLASSES[old]} with {article(wanted)}"


@dataclass(frozen=True)
class _Instruction:
    """The words of edits; without an object before or after the edit, `old` or `new` is the other one."""

    kind: Tensor  # [N] index into KINDS
    kept: Tensor  # [N] class of the object that stays as it is
    old: Tensor  # [N] class of the edited object before
    new: Tensor  # [N] class of the edited object after
    kept_color: Tensor  # [N] 0 for the natural color, else 1 + index into COLORS
    old_color: Tensor
    new_color: Tensor

    def is_wrong(self, split: Split) -> Tensor:
        """Whether it is of the other split, changes nothing, or ends in two objects of one class unasked: [N] bool."""
        same_color = (self.kind == RECOLOR) & (self.old_color == self.new_color)
        twins = (self.kind == REPLACE) & (self.new == self.kept)
        return (self._held_out() != (split == "held_out")) | same_color | twins

    def _held_out(self) -> Tensor:
        """Whether an instruction is held out, a fifth of them: [N] bool."""
        old = torch.where(self.kind == ADD, len(CLASSES), self.old)
        setting = self.kind + 8 * (self.new == self.kept)
        color = torch.where(self.kind == REMOVE, 0, self.new_color)
        return philox((setting, old, self.new, color), SPLIT_KEY)[0] % 5 == 0


def sample_edits(rng: Randomness, split: Split) -> SceneEdits:
    """Sample an edit of a split for each row. Scenes have up to two objects of different classes."""
    chosen, attempt = _sample_instructions(rng, 0), 0
    while len(rows := chosen.is_wrong(split).nonzero()[:, 0]):
        attempt += 1
        again = _sample_instructions(select_rows(rng, rows), attempt)
        columns = ((getattr(chosen, f.name), getattr(again, f.name)) for f in fields(chosen))
        chosen = _Instruction(*(before.index_copy(0, rows, new) for before, new in columns))
    return _lay_out(chosen, rng)


def _sample_instructions(rng: Randomness, attempt: int) -> _Instruction:
    words = rng.words(PlaygroundPurpose.EDIT, 8, draw=attempt).unbind(1)
    kind, things = words[0] % len(KINDS), len(CLASSES)
    kept = words[1] % things
    old = (kept + 1 + words[2] % (things - 1)) % things
    old = torch.where((kind == ADD) & (words[3] % 3 == 0), kept, old)  # a second one
    other = (old + 1 + words[3] % (things - 1)) % things
    kept_color, old_color, color = (torch.where(word % 2 == 0, 1 + word // 2 % len(TINTS), 0) for word in words[4:7])
    tint = torch.where(kind == RECOLOR, 1 + words[7] % len(TINTS), color)
    return _Instruction(
        kind=kind,
        kept=kept,
        old=old,
        new=torch.where(kind == REPLACE, other, old),
        kept_color=kept_color,
        old_color=old_color,
        new_color=torch.where((kind == RECOLOR) | (kind == REPLACE), tint, old_color),
    )


def _lay_out(chosen: _Instruction, rng: Randomness) -> SceneEdits:
    """The scenes before and after the edit, with objects at the same places."""
    kind, zero = chosen.kind, torch.zeros_like(chosen.kind)
    layout = SceneCaptions(
        task=zero + TWO,
        first=chosen.kept,
        second=chosen.old,
        first_color=chosen.kept_color,
        second_color=chosen.old_color,
        count=zero + 1,
        relation=zero,
    )
    scenes = sample_scenes(layout, rng)
    slot = torch.arange(scenes.present.shape[1], device=kind.device) == EDITED
    return SceneEdits(
        kind=kind,
        source=replace(scenes, present=scenes.present & ~(slot & (kind == ADD)[:, None])),
        target=replace(
            scenes,
            present=scenes.present & ~(slot & (kind == REMOVE)[:, None]),
            class_id=torch.where(slot, chosen.new[:, None], scenes.class_id),
            color=torch.where(slot, chosen.new_color[:, None], scenes.color),
        ),
    )


def object_boxes(scenes: Scenes, slot: int) -> Tensor:
    """Left, top, right and bottom of an object's square with a margin, in pixels: [N, 4]."""
    x, y, half = scenes.x[:, slot], scenes.y[:, slot], scenes.size[:, slot] / 2 + MARGIN
    return torch.stack([x - half, y - half, x + half, y + half], 1)


def inside_boxes(boxes: Tensor) -> Tensor:
    """Which pixels are inside of boxes [N, 4]: [N, 64, 64] bool."""
    line = torch.arange(SIDE, device=boxes.device) + 0.5
    left, top, right, bottom = boxes[..., None].unbind(1)  # [N, 1]
    return ((line > left) & (line < right))[:, None, :] & ((line > top) & (line < bottom))[:, :, None]


@dataclass(frozen=True)
class EditRequests:
    """What edited images should show, and which part of the source they may change."""

    kind: Tensor  # [N] index into KINDS
    kept_class: Tensor  # [N] index into CLASSES
    kept_color: Tensor  # [N] 0 for the natural color, else 1 + index into COLORS
    kept_center: Tensor  # [N, 2] in pixels
    old_class: Tensor  # [N] of the object to edit; without meaning if one is added
    new_class: Tensor  # [N] of the object after the edit; without meaning if one is removed
    new_color: Tensor  # [N]
    new_center: Tensor  # [N, 2], ANYWHERE for an added object
    box: Tensor  # [N, 4] left, top, right and bottom of the object to edit; 0 if one is added

    def metadata(self) -> tuple[dict[str, Any], ...]:
        """One entry of plain numbers for each row."""
        columns = {f.name: getattr(self, f.name).tolist() for f in fields(self)}
        return tuple(dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


def parse_requests(prompts: Sequence[str], metadata: Sequence[Metadata], device: torch.device) -> EditRequests:
    """The requests in the metadata `edit` of prompts."""
    entries = [known.get("edit") for known in metadata]
    for prompt, entry in zip(prompts, entries, strict=True):
        if not isinstance(entry, Mapping):
            raise ValueError(
                f"the prompt '{prompt:.80}' has no 'edit' in its metadata, which says what to check; use data of type "
                "playground_edits [TM2350]"
            )
    names = [f.name for f in fields(EditRequests)]
    return EditRequests(*(torch.tensor([entry[name] for entry in entries], device=device) for name in names))  # type: ignore[index]


@dataclass(frozen=True)
class EditChecks:
    """Which parts of an edit an image shows, [N] each."""

    shown: Tensor  # bool, the new object is there, or the old one is gone
    colored: Tensor  # bool, and it has the color
    placed: Tensor  # bool, and it is where the old one was
    kept: Tensor  # bool, the other object is as it was
    counted: Tensor  # bool, there is nothing else
    difference: Tensor  # mean absolute difference to the source, outside of the old and the new object

    def followed(self) -> Tensor:
        """Whether the instruction is fulfilled, whatever else changed: [N] bool."""
        return self.shown & self.colored

    def preserved(self) -> Tensor:
        """Whether all else is as it was: [N] bool."""
        return self.placed & self.kept & self.counted & (self.difference < TOLERANCE)

    def reasons(self) -> list[list[str]]:
        """Why each edit is wrong, in words."""
        parts = {
            "the instruction is not followed": self.shown,
            "the color is wrong": self.colored | ~self.shown,
            "the edited object moved": self.placed | ~self.shown,
            "the other object changed": self.kept,
            "there are more or fewer objects": self.counted,
            "the background changed": self.difference < TOLERANCE,
        }
        rows = torch.stack([*parts.values()], 1).tolist()
        return [[reason for reason, right in zip(parts, row, strict=True) if not right] for row in rows]

    def credit(self) -> Tensor:
        """Half for the instruction and half for all else, each with partial credit: [N] in [0, 1]."""
        instruction = (self.shown.float() + (self.shown & self.colored)) / 2
        unchanged = (1 - self.difference / (4 * TOLERANCE)).clamp(min=0)
        rest = ((self.shown & self.placed).float() + self.kept.float() + self.counted.float() + unchanged) / 4
        return (instruction + rest) / 2


def check_edits(detections: Detections, pixels: Tensor, sources: Tensor, requests: EditRequests) -> EditChecks:
    """Check edited images [N, 3, 64, 64] against their sources [N, 3, 64, 64]."""
    sure, rows = detections.score > THRESHOLD, torch.arange(len(detections), device=pixels.device)

    def distance(center: Tensor) -> Tensor:
        away: Tensor = (detections.center - center[:, None]).norm(dim=2)  # [N, K]
        return away

    def has_color(color: Tensor) -> Tensor:
        return (detections.color == color[:, None]) | (color == 0)[:, None]

    kept_class = sure & (detections.class_id == requests.kept_class[:, None])
    kept = kept_class & has_color(requests.kept_color) & (distance(requests.kept_center) < NEAR)
    which = torch.where(kept, distance(requests.kept_center), torch.inf).argmin(1)
    is_kept = (torch.arange(sure.shape[1], device=pixels.device) == which[:, None]) & kept.any(1)[:, None]
    others, removed = sure & ~is_kept, requests.kind == REMOVE
    shown = others & (detections.class_id == requests.new_class[:, None])
    near = (distance(requests.new_center) < NEAR) | (requests.kind == ADD)[:, None]
    best = shown.float() + (shown & has_color(requests.new_color)) + (shown & near)  # the detection with most right
    new = best.argmax(1)
    gone = ~(others & (detections.class_id == requests.old_class[:, None])).any(1)
    half = detections.size[rows, new] / 2 + MARGIN
    added = torch.cat([detections.center[rows, new] - half, detections.center[rows, new] + half], 1)
    allowed = inside_boxes(requests.box)
    allowed |= inside_boxes(added) & ((requests.kind == ADD) & shown.any(1)).view(-1, 1, 1)
    outside = (~allowed).float()
    difference = ((pixels - sources).abs().mean(1) * outside).sum((1, 2)) / outside.sum((1, 2)).clamp(min=1)
    return EditChecks(
        shown=torch.where(removed, gone, shown.any(1)),
        colored=removed | (shown & has_color(requests.new_color))[rows, new],
        placed=removed | (shown & near)[rows, new],
        kept=kept.any(1),
        counted=sure.sum(1) == torch.where(removed, 1, 2),
        difference=difference,
    )
