"""A transformer that reads a caption and a picture some of whose tokens are hidden, and predicts them all (MaskGIT)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.types import MASK_TOKEN_ID


@dataclass(frozen=True)
class MaskGITConfig:
    """Sizes of the network."""

    width: int = 192
    depth: int = 6
    heads: int = 6
    codes: int = 1024
    side: int = 8  # tokens a side
    prefix: int = 16  # words
    vocabulary: int = 128  # of words

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"found width {self.width}, heads {self.heads}; heads must divide the width")


class MaskGITBlock(nn.Module):
    """Attention among all places with normalised queries and keys, then two layers at each place alone."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width, bias=False)
        self.scale = nn.Parameter(torch.ones(2, 1, width // heads))  # of queries and keys
        self.out, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(h)).unflatten(2, (3, self.heads, -1))  # [B, n, 3, heads, head]
        both = F.rms_norm(qkv[:, :, :2].float(), qkv.shape[-1:], eps=1e-6) * self.scale
        q, k, v = (x.transpose(1, 2) for x in (*both.to(qkv.dtype).unbind(2), qkv[:, :, 2]))
        h = h + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        out: Tensor = h + self.down(F.gelu(self.up(self.norm(h)), approximate="tanh"))
        return out


class MaskGIT(nn.Module):
    def __init__(self, shape: MaskGITConfig) -> None:
        super().__init__()
        self.shape = shape
        self.words = nn.Embedding(shape.vocabulary, shape.width)
        self.tokens = nn.Embedding(shape.codes + 1, shape.width)  # the last is the mask
        self.places = nn.Embedding(shape.prefix + shape.side * shape.side, shape.width)
        self.blocks = nn.ModuleList(MaskGITBlock(shape.width, shape.heads) for _ in range(shape.depth))
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.codes)
        self.apply(_initialize)

    def forward(self, ids: Tensor, words: Tensor) -> Tensor:
        """Logits [B, side * side, codes] of tokens [B, side * side], -1 where hidden, and words [B, prefix]."""
        shown = torch.where(ids == MASK_TOKEN_ID, self.shape.codes, ids)
        h = torch.cat([self.words(words), self.tokens(shown)], 1) + self.places.weight
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h[:, words.shape[1] :])).float()  # type: ignore[no-any-return]  # modules are untyped


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
