"""MaskGIT transformer: predicts all image tokens from a caption and the tokens that are not masked."""

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
    codebook_size: int = 1024
    grid_size: int = 8  # tokens per side
    prefix_length: int = 16  # number of caption words
    vocabulary: int = 128  # number of distinct words

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(
                f"expected heads that divide the width, got width {self.width} and heads {self.heads}; change "
                "'width' or 'heads' [TM482]"
            )


class MaskGITBlock(nn.Module):
    """Bidirectional attention with normalized queries and keys, then an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width, bias=False)
        self.scale = nn.Parameter(torch.ones(2, 1, width // heads))  # of queries and keys
        self.out, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(h)).unflatten(2, (3, self.heads, -1))  # [B, n, 3, heads, head]
        qk = F.rms_norm(qkv[:, :, :2].float(), qkv.shape[-1:], eps=1e-6) * self.scale
        q, k, v = (x.transpose(1, 2) for x in (*qk.to(qkv.dtype).unbind(2), qkv[:, :, 2]))
        h = h + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        out: Tensor = h + self.down(F.gelu(self.up(self.norm(h)), approximate="tanh"))
        return out


class MaskGIT(nn.Module):
    def __init__(self, config: MaskGITConfig) -> None:
        super().__init__()
        self.config = config
        self.words = nn.Embedding(config.vocabulary, config.width)
        self.tokens = nn.Embedding(config.codebook_size + 1, config.width)  # the last is the mask
        self.places = nn.Embedding(config.prefix_length + config.grid_size * config.grid_size, config.width)
        self.blocks = nn.ModuleList(MaskGITBlock(config.width, config.heads) for _ in range(config.depth))
        self.norm, self.head = nn.LayerNorm(config.width), nn.Linear(config.width, config.codebook_size)
        self.apply(_initialize)

    def forward(self, ids: Tensor, words: Tensor) -> Tensor:
        """Logits [B, N, codes] for tokens [B, N], which are -1 where masked, and words [B, prefix]."""
        inputs = torch.where(ids == MASK_TOKEN_ID, self.config.codebook_size, ids)
        h = torch.cat([self.words(words), self.tokens(inputs)], 1) + self.places.weight
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h[:, words.shape[1] :])).float()  # type: ignore[no-any-return]  # modules are untyped


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
