"""mmdet's pipeline of tests about a Mask2Former: pictures in, things with boxes and masks out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # of ImageNet, in bytes
STRIDE = 32  # sides of what the network sees are multiples of it
GREY = 128.0  # what pads, before means are taken off
MOST = 100  # things of a picture
Size = tuple[int, int]  # height, width


@dataclass(frozen=True)
class ResizedFrame:
    """The sizes a picture goes through."""

    size: Size  # its own
    inner: Size  # resized
    padded: Size


@dataclass(frozen=True)
class Instances:
    """What was found in a picture."""

    label: Tensor  # [M]
    score: Tensor  # [M] of the class, times how sure the mask is of itself
    boxes: Tensor  # [M, 4] left, top, and just beyond right and bottom
    masks: Tensor  # [M, H, W] bool, at the picture's own size


@dataclass(frozen=True)
class DetectorPreprocessing:
    """The shorter side as long as `short`, the longer no longer than `long`, padded at the right and the bottom."""

    short: int = 800
    long: int = 1333

    def __call__(self, pixels: Tensor) -> tuple[Tensor, ResizedFrame]:
        """Pictures [N, 3, H, W] in [0, 1] for the network, and their sizes."""
        height, width = pixels.shape[-2:]
        scale = min(self.long / max(height, width), self.short / min(height, width))
        inner = max(1, int(height * scale + 0.5)), max(1, int(width * scale + 0.5))
        padded = -(-inner[0] // STRIDE) * STRIDE, -(-inner[1] // STRIDE) * STRIDE
        seen = resize_bilinear((pixels.float() * 255).round().clamp(0, 255).int(), inner).float()
        seen = F.pad(seen, (0, padded[1] - inner[1], 0, padded[0] - inner[0]), value=GREY)
        mean, std = (seen.new_tensor(x)[:, None, None] for x in (MEAN, STD))
        return (seen - mean) / std, ResizedFrame((height, width), inner, padded)


def resize_bilinear(values: Tensor, size: Size) -> Tensor:
    """Bytes [..., H, W] as integers at another size, as OpenCV's linear filter has it, to the bit."""
    height, width = values.shape[-2:]
    left, near, far = _taps(width, size[1], values.device)
    # Beyond the outermost pixels OpenCV takes these whole along a row; down a column it mixes them with themselves.
    inside = (left >= 0) & (left < width - 1)
    near, far = near.where(inside, 2048), far.where(inside, 0)
    first, second = left.clamp(0, width - 1), (left + 1).clamp(0, width - 1)
    rows = values[..., first] * near + values[..., second] * far
    top, upper, lower = _taps(height, size[0], values.device)
    above, below = (rows[..., k.clamp(0, height - 1), :] >> 4 for k in (top, top + 1))
    return ((upper[:, None] * above >> 16) + (lower[:, None] * below >> 16) + 2) >> 2


def _taps(source: int, target: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The pixel before each place, and the weights of it and of the next in 2048ths."""
    places = ((torch.arange(target, dtype=torch.float64) + 0.5) * (source / target) - 0.5).float()
    before = places.floor()
    share = places - before
    weights = [(x * 2048).round().int().to(device) for x in (1 - share, share)]
    return before.long().to(device), weights[0], weights[1]


def select_instances(
    classes: Tensor, masks: Tensor, frame: ResizedFrame, floor: float = 0.0, most: int = MOST
) -> Instances:
    """Things surer than the floor, of logits [Q, K + 1] and [Q, h, w]; one place may be of several classes."""
    likely = classes.softmax(-1)[:, :-1]
    score, place = likely.flatten().topk(min(most, likely.numel()))
    enough = score > floor  # a mask makes scores only smaller, so what is dropped here needs no mask
    score, place = score[enough], place[enough]
    label, (query, which) = place % likely.shape[1], torch.unique(place // likely.shape[1], return_inverse=True)
    drawn = upsample_masks(masks[query], frame)
    shown = drawn > 0
    sure = (drawn.sigmoid() * shown).sum((1, 2)) / (shown.sum((1, 2)) + 1e-6)
    return Instances(label, score * sure[which], boxes(shown)[which], shown[which])


def upsample_masks(masks: Tensor, frame: ResizedFrame) -> Tensor:
    """Logits [M, h, w] at the picture's own size, by way of the size that the network saw."""
    if not len(masks):
        return masks.new_zeros(0, *frame.size)
    seen = F.interpolate(masks[None], frame.padded, mode="bilinear", align_corners=False)
    seen = seen[..., : frame.inner[0], : frame.inner[1]]
    return F.interpolate(seen, frame.size, mode="bilinear", align_corners=False)[0]


def boxes(shown: Tensor) -> Tensor:
    """Tight boxes of masks [M, H, W], nought where nothing shows: [M, 4]."""
    columns, rows = shown.any(1), shown.any(2)
    ends = [_ends(columns), _ends(rows)]
    found = torch.stack([ends[0][0], ends[1][0], ends[0][1], ends[1][1]], 1)
    return (found * columns.any(1, keepdim=True)).float()


def _ends(shows: Tensor) -> tuple[Tensor, Tensor]:
    """The first that shows, and the one after the last: [M] each."""
    whole = shows.int()
    return whole.argmax(1), shows.shape[1] - whole.flip(1).argmax(1)
