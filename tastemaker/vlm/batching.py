"""Rows of tokens and of pictures, as processors and networks take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ..data.image_io import to_uint8


def encode_with_image_tokens(tokenizer: Any, text: str, mark: str, number: int, count: int) -> list[int]:
    """The tokens of a text, its first `mark` as so many of that number."""
    before, _, after = text.partition(mark)
    ids: list[list[int]] = [tokenizer(part, add_special_tokens=False).input_ids for part in (before, after)]
    return [*ids[0], *[number] * count, *ids[1]]


def left_pad(rows: Sequence[list[int]], tokenizer: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of tokens, short ones filled up on the left, and which of them count: [B, L], [B, L]."""
    longest = max(map(len, rows))
    filler = tokenizer.pad_token_id or 0
    ids = torch.tensor([[filler] * (longest - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def to_uint8_images(pixels: Tensor) -> list[Image.Image]:
    return [Image.fromarray(picture) for picture in to_uint8(pixels)]
