"""What a detector finds of scenes whose truth is known."""

from __future__ import annotations

import torch
from torch import Tensor

from .captions import SceneCaptions
from .detector import THRESHOLD, Detections, SceneDetector, decode_detections
from .scenes import Scenes, shows_caption
from .verdict import verdict


def evaluate_detector(
    net: SceneDetector, pixels: Tensor, scenes: Scenes, captions: SceneCaptions, settled: Tensor
) -> dict[str, float]:
    """Shares and distances by name; verdicts only of pairs [N] whose truth is settled."""
    found = decode_detections(net(pixels))
    near, error = nearest_detections(found, scenes)  # [N, 4] each
    there, dyed = scenes.present, scenes.present & (scenes.color > 0)
    kind, color = (column.gather(1, near) for column in (found.kind, found.color))
    told = {
        "class": _mean(((kind == scenes.kind) & (error < 8))[there]),
        "colour": _mean((color == scenes.color)[dyed]),
        "centre error, px": _mean(error[there & (error < 8)]),
        "box overlap": _mean(overlaps(found, near, scenes)[there & (error < 8)]),
        "number of things": _mean((found.score > THRESHOLD).sum(1) == there.sum(1)),
    }
    for name, strict in (("verdict", True), ("lenient verdict", False)):
        agree = verdict(found, captions, strict).bool() == shows_caption(scenes, captions, strict)
        told[name] = _mean(agree[settled])
    return told


def nearest_detections(found: Detections, scenes: Scenes) -> tuple[Tensor, Tensor]:
    """Of each thing the sure detection next to it, and how many pixels it is away: [N, 4] each."""
    centres = torch.stack([scenes.x, scenes.y], 2)
    apart = torch.cdist(centres, found.centre).masked_fill((found.score <= THRESHOLD)[:, None], torch.inf)
    error, near = apart.min(2)
    return near, error


def overlaps(found: Detections, near: Tensor, scenes: Scenes) -> Tensor:
    """Intersection over union of each thing's box and that of the detection next to it: [N, 4]."""
    place = near[..., None].expand(-1, -1, 2)
    centre, span, spans = found.centre.gather(1, place), found.span.gather(1, place), scenes.spans()
    middle = torch.stack([scenes.x, scenes.y], 2)
    low = torch.maximum(centre - span / 2, middle - spans / 2)
    high = torch.minimum(centre + span / 2, middle + spans / 2)
    shared = (high - low).clamp(min=0).prod(2)
    return shared / (span.prod(2) + spans.prod(2) - shared)


def _mean(values: Tensor) -> float:
    return values.float().mean().item()
