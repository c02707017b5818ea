"""How transformers read latents and prompts: patches as tokens, positions of tokens, and prompts without padding."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_latents(x: Tensor) -> Tensor:
    """Pack latents [B, C, h, w] into one token per 2x2 square: [B, h/2 * w/2, 4 C]."""
    b, c, h, w = x.shape
    return x.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w // 4, 4 * c)


def unpack_latents(tokens: Tensor, height: int, width: int) -> Tensor:
    """Undo `pack_latents` for latents of this size: [B, C, h, w]."""
    b, c = len(tokens), tokens.shape[2] // 4
    squares = tokens.reshape(b, height // 2, width // 2, c, 2, 2)
    return squares.permute(0, 3, 1, 4, 2, 5).reshape(b, c, height, width)


def patchify(x: Tensor) -> Tensor:
    """Stack each 2x2 square of latents [B, C, h, w] in channels: [B, 4 C, h/2, w/2], channel by channel."""
    b, _, h, w = x.shape
    return pack_latents(x).view(b, h // 2, w // 2, -1).permute(0, 3, 1, 2)


def unpatchify(x: Tensor) -> Tensor:
    """Undo `patchify`: [B, 4 C, h, w] to [B, C, 2 h, 2 w]."""
    return unpack_latents(x.flatten(2).transpose(1, 2), 2 * x.shape[2], 2 * x.shape[3])


def latent_image_ids(height: int, width: int) -> Tensor:
    """Return zero, row and column of every token, as rotary position ids: [h/2 * w/2, 3]."""
    rows, columns = torch.meshgrid(torch.arange(height // 2), torch.arange(width // 2), indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows, columns], -1).reshape(-1, 3).float()


def trim_padding(prompt_embeds: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Trim prompt_embeds [B, L, D] to the longest prompt; return them and a mask of real tokens, None if all are."""
    if lengths is None:
        return prompt_embeds, None
    longest = int(lengths.max())
    mask = torch.arange(longest) < lengths[:, None]
    return prompt_embeds[:, :longest], None if bool(mask.all()) else mask


def move_padding_last(prompt_embeds: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Reorder tokens [B, L, D] so that padding, which becomes zero, is last; return them and their numbers [B]."""
    order = (1 - mask).argsort(dim=1, stable=True)[..., None]
    return (prompt_embeds * mask[..., None]).take_along_dim(order, 1), mask.sum(1)
