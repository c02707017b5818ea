"""Images of which some tokens are known beforehand: inpainting and outpainting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.policy import Backbone, Policy
from ...core.randomness import Randomness
from ...core.registry import ConfigError
from ...core.types import MASK_TOKEN_ID, Metadata
from ...data.image_io import read_image, resize_area

if TYPE_CHECKING:
    from .model import ShowoBackbone

Edge = Literal["left", "right", "up", "down"]
QUARTER_TURNS: dict[Edge, int] = {
    "right": 0,
    "down": 1,
    "left": 2,
    "up": 3,
}  # that move the edge to the right


def known_tokens(model: ShowoBackbone, metadata: Sequence[Metadata], codebook_size: int) -> Tensor | None:
    """Tokens [B, N] that the metadata of the prompts give, masked elsewhere; None if they give none.

    Metadata hold either `tokens` [N], or `image` and `mask` (paths or pixels [F, 3, H, W]), white where to inpaint.
    """
    if not any("tokens" in entry or "mask" in entry for entry in metadata):
        return None
    return torch.stack([_known_tokens_of(model, entry, codebook_size) for entry in metadata])


def _known_tokens_of(model: ShowoBackbone, metadata: Metadata, codebook_size: int) -> Tensor:
    if "tokens" in metadata:
        return _check_tokens(model, torch.as_tensor(metadata["tokens"]), codebook_size).to(model.device)
    if "mask" not in metadata:
        return torch.full(model.shape, MASK_TOKEN_ID, device=model.device)
    if "image" not in metadata:
        raise ConfigError("metadata: found 'mask' but no 'image'; give both, as paths or pixels [TM525]")
    image, mask = (_read_pixels(model, metadata[name]) for name in ("image", "mask"))
    side = int(model.shape[0] ** 0.5)
    masked = F.interpolate(mask[:, 0].mean(1, keepdim=True), (side, side), mode="bicubic") >= 0.5
    return torch.where(masked.flatten(), MASK_TOKEN_ID, model.encode(image)[0])


def _check_tokens(model: Backbone, tokens: Tensor, codebook_size: int) -> Tensor:
    if tokens.shape != model.shape:
        raise ConfigError(
            f"'tokens': expected the shape {list(model.shape)} with {MASK_TOKEN_ID} where masked, got "
            f"{list(tokens.shape)}; correct 'tokens' [TM526]"
        )
    if tokens.is_floating_point() or not bool(((tokens >= MASK_TOKEN_ID) & (tokens < codebook_size)).all()):
        raise ConfigError(
            f"'tokens': expected integers below {codebook_size}, with {MASK_TOKEN_ID} where masked, got "
            f"{tokens.min()} to {tokens.max()}; correct 'tokens' [TM527]"
        )
    return tokens


def _read_pixels(model: ShowoBackbone, image: Any) -> Tensor:
    """Pixels [1, 1, 3, H, W] of a path or of pixels, at the model's size."""
    pixels: Tensor = read_image(Path(image)) if isinstance(image, (str, Path)) else image
    return resize_area(pixels[None, :1].to(model.device), *model.pixels[2:])


@torch.no_grad()
def outpaint(policy: Policy[Any], tokens: Tensor, prompt: str, edge: Edge, count: int, rng: Randomness) -> Tensor:
    """Extend tokens [h, w] by `count` rows or columns beyond an edge, conditioned on the tokens beside it.

    A window of the model's size covers the new tokens; if the edge is longer, several windows are sampled along it.
    """
    side = int(policy.model.shape[0] ** 0.5)
    if not (0 < count < side and min(tokens.shape) >= side):
        raise ValueError(
            f"outpaint: found {list(tokens.shape)} tokens and {count} to add; expected at least {side} tokens in "
            f"each direction, and 1 to {side - 1} to add per call [TM528]"
        )
    canvas = F.pad(torch.rot90(tokens, QUARTER_TURNS[edge]), (0, count), value=MASK_TOKEN_ID)
    for number, top in enumerate(_window_starts(len(canvas), side)):
        window = torch.rot90(canvas[top : top + side, -side:], -QUARTER_TURNS[edge])
        cond = policy.embed([prompt], [{"tokens": window.flatten()}])
        window_rng = replace(rng, rows=rng.rows + number)
        sampled = policy.sample(cond, window_rng).final.view(side, side)
        canvas[top : top + side, -side:] = torch.rot90(sampled, QUARTER_TURNS[edge])
    return torch.rot90(canvas, -QUARTER_TURNS[edge])


def _window_starts(length: int, side: int) -> list[int]:
    """Starts of windows of `side` that together cover `length`."""
    return [*range(0, length - side, side), length - side]
