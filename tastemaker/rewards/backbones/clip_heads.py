"""Small networks from a CLIP's embedding of a picture to one number, read from their published files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from ...core.registry import ConfigError
from ...core.types import Placement
from ...models.pretrained import WeightsSource, find_weights, load_state_dict, load_weights_into
from .clip_image_encoder import ClipFit, ClipImageEncoder, load_clip_image_encoder
from .loading import TINY

VADER = "https://github.com/mihirp1998/VADER"  # its heads lie in `assets/` beside the code, not on the hub


@dataclass(frozen=True)
class HeadLayout:
    """How the layers of a head are numbered in its file, and whether rectifiers are between them."""

    numbers: tuple[tuple[int, ...], ...]
    rectified: bool = False


LINEAR = HeadLayout(((0, 2, 4, 6, 7), (0,)))  # LAION's, of five layers or one; nothing but dropout between
RECTIFIED = HeadLayout(((0, 3, 6, 9), (0, 3, 6, 9, 12)), rectified=True)  # VADER's checkpoint, and its class


class Head(nn.Module):
    """Linear layers under the names they were published by."""

    def __init__(self, numbers: Sequence[int], widths: Sequence[int], rectified: bool) -> None:
        super().__init__()
        pairs = zip(numbers, pairwise(widths), strict=True)
        self.layers = nn.ModuleDict({str(number): nn.Linear(*sides) for number, sides in pairs})
        self.rectified = rectified

    def forward(self, x: Tensor) -> Tensor:
        """Embeddings [N, D] to [N]."""
        for place, layer in enumerate(self.layers.values(), 1):
            x = layer(x)
            if self.rectified and place < len(self.layers):
                x = x.relu()
        return x[:, 0]


@dataclass(frozen=True)
class ClipHeadScorer:
    """A tower, how pictures are fitted to it, and a head."""

    tower: ClipImageEncoder
    fit: ClipFit
    head: Head

    def __call__(self, pixels: Tensor) -> Tensor:
        """What the head says of the first frame of each row: [B]."""
        found: Tensor = self.head(self.tower.embed(pixels[:, 0], self.fit))
        return found


def load_clip_head(
    weights: str, head: str, source: WeightsSource | str, layout: HeadLayout, fit: ClipFit, placement: Placement
) -> ClipHeadScorer:
    """A head on the tower it shares with others; `source` says where the head is from, on the hub or elsewhere."""
    seeing = load_clip_image_encoder(weights, placement)
    made = _random(layout, seeing.width) if head == TINY else read_head(_found(head, source), layout)
    width = next(iter(made.layers.values())).in_features
    if width != seeing.width:
        raise ConfigError(
            f"the head '{head:.200}' reads embeddings of {width} numbers, and '{weights:.200}' makes {seeing.width}; "
            "name the CLIP that the head was trained on"
        )
    made = made.to(placement.device, torch.promote_types(placement.dtype, torch.float32))
    return ClipHeadScorer(seeing, fit, made.eval().requires_grad_(False))


def read_head(path: Path, layout: HeadLayout) -> Head:
    """A published head: several layers by number, or one alone without."""
    tensors = load_state_dict(path)
    if set(tensors) == {"weight", "bias"}:
        tensors = {f"layers.0.{key}": x for key, x in tensors.items()}
    numbers = tuple(sorted({int(key.split(".")[1]) for key in tensors if _named(key)}))
    if numbers not in layout.numbers or len(tensors) != 2 * len(numbers):
        found, expected = list(tensors)[:3], " or ".join(str(list(known)) for known in layout.numbers)
        raise ConfigError(f"{path} holds {found}; expected a head of the layers {expected}, each weight and bias")
    head = Head(numbers, _widths(tensors, numbers, path), layout.rectified)
    load_weights_into(head, tensors, path)
    return head


def _named(key: str) -> bool:
    parts = key.split(".")
    return len(parts) == 3 and parts[0] == "layers" and parts[1].isdigit() and parts[2] in ("weight", "bias")


def _widths(tensors: Mapping[str, Tensor], numbers: Sequence[int], path: Path) -> list[int]:
    shapes = [tensors[f"layers.{number}.weight"].shape for number in numbers if f"layers.{number}.weight" in tensors]
    widths = [shape[1] for shape in shapes if len(shape) == 2] + [1]
    if len(widths) != len(numbers) + 1:
        raise ConfigError(f"{path} has layers that are no matrices; name the published file")
    return widths


def _found(name: str, source: WeightsSource | str) -> Path:
    if isinstance(source, WeightsSource):
        return find_weights(name, source)
    path = Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(f"there is no head at '{name:.200}'; fetch it from {source} and give its path as `head`")
    return path


def _random(layout: HeadLayout, width: int) -> Head:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Head(layout.numbers[0], [width, *([8] * (len(layout.numbers[0]) - 1)), 1], layout.rectified)
