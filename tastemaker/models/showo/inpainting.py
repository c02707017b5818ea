"""Pictures some of whose tokens are known beforehand: painted over in part, or continued beyond an edge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.policy import Backbone, Policy
from ...core.randomness import Randomness
from ...core.registry import ConfigError
from ...core.types import MASK_TOKEN_ID, Metadata
from ...data.image_io import read_image, resize_area

Edge = Literal["left", "right", "up", "down"]
QUARTER_TURNS: dict[Edge, int] = {
    "right": 0,
    "down": 1,
    "left": 2,
    "up": 3,
}  # quarter turns that bring an edge to the right


def known_tokens(model: Backbone, facts: Sequence[Metadata], codes: int) -> Tensor | None:
    """What facts tell of tokens: [B, N], hidden elsewhere.

    Either `tokens` [N] themselves, or `image` and `mask`, paths or pixels [F, 3, H, W], white where to paint anew.
    """
    if not any("tokens" in fact or "mask" in fact for fact in facts):
        return None
    return torch.stack([_row(model, fact, codes) for fact in facts])


def _row(model: Backbone, fact: Metadata, codes: int) -> Tensor:
    if "tokens" in fact:
        given: Tensor = torch.as_tensor(fact["tokens"])
        if given.shape != model.shape:
            raise ConfigError(
                f"'tokens' are {list(given.shape)}; expected {list(model.shape)}, {MASK_TOKEN_ID} where hidden"
            )
        if given.is_floating_point() or not bool(((given >= MASK_TOKEN_ID) & (given < codes)).all()):
            found = f"{given.min()} to {given.max()}"
            raise ConfigError(
                f"'tokens' are {found}; expected whole numbers below {codes}, {MASK_TOKEN_ID} where hidden"
            )
        return given.to(_device(model))
    if "mask" not in fact:
        return torch.full(model.shape, MASK_TOKEN_ID, device=_device(model))
    if "image" not in fact:
        raise ConfigError("there is a fact 'mask', but no 'image' to paint over; give both, paths or pixels")
    picture, mask = (_pixels(model, fact[name]) for name in ("image", "mask"))
    side = int(model.shape[0] ** 0.5)
    anew = F.interpolate(mask[:, 0].mean(1, keepdim=True), (side, side), mode="bicubic") >= 0.5
    return torch.where(anew.flatten(), MASK_TOKEN_ID, model.encode(picture)[0])


def _pixels(model: Backbone, given: Any) -> Tensor:
    """[1, 1, 3, H, W] at the model's size."""
    pixels: Tensor = read_image(Path(given)) if isinstance(given, (str, Path)) else given
    return resize_area(pixels[None, :1].to(_device(model)), *model.pixels[2:])


def _device(model: Backbone) -> torch.device:
    return next(model.net.parameters()).device


@torch.no_grad()
def outpaint(policy: Policy[Any], tokens: Tensor, prompt: str, edge: Edge, count: int, rng: Randomness) -> Tensor:
    """Tokens [h, w] with `count` rows or columns more beyond an edge, painted by what shows beside it.

    A window as large as the model's pictures slides over the edge; what is wider, it goes along piece by piece.
    """
    side = int(policy.model.shape[0] ** 0.5)
    if not (0 < count < side and min(tokens.shape) >= side):
        raise ValueError(
            f"found {list(tokens.shape)} tokens and {count} to add; expected at least {side} each way, and 1 to "
            f"{side - 1} to add at a time"
        )
    turned = torch.rot90(tokens, QUARTER_TURNS[edge])
    grown = F.pad(turned, (0, count), value=MASK_TOKEN_ID)
    for number, top in enumerate(_tops(len(grown), side)):
        window = torch.rot90(grown[top : top + side, -side:], -QUARTER_TURNS[edge])
        cond = policy.embed([prompt], [{"tokens": window.flatten()}])
        drawn = replace(rng, rows=rng.rows + number)
        painted = policy.sample(cond, drawn).final.view(side, side)
        grown[top : top + side, -side:] = torch.rot90(painted, QUARTER_TURNS[edge])
    return torch.rot90(grown, -QUARTER_TURNS[edge])


def _tops(rows: int, side: int) -> list[int]:
    """Where windows begin so that together they cover all rows."""
    tops = list(range(0, rows - side, side))
    return [*tops, rows - side]
