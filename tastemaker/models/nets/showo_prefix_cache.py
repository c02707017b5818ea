"""Show-o predictions with a KV cache of the prompts, computed once for all decoding steps."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from ...core.distributions import broadcast_to_shape
from ...core.guidance import apply_guidance, is_guided
from ...core.policy import Guidance
from ...core.types import MASK_TOKEN_ID
from .showo import ShowoKVCache, ShowoVocabulary, omni_attention_mask

TRIM_MULTIPLE = 32  # places by which filling is left out, so that few lengths occur and few graphs are compiled


def trim_left_padding(text: Tensor, filling: int) -> tuple[Tensor, Tensor, int]:
    """Texts [B, length] without most of the filling all begin with, what is left of it in each [B], and how much went.

    Nobody sees filling, so that nothing else changes.
    """
    padding = (text == filling).sum(1)
    gone = int(padding.min()) // TRIM_MULTIPLE * TRIM_MULTIPLE
    return text[:, gone:], padding - gone, gone


class PromptPrefixCache:
    """KV cache of the distinct prompts; text does not attend to the image, so it is valid for all steps."""

    def __init__(self, net: nn.Module, vocabulary: ShowoVocabulary, text: Tensor, guidance: Guidance | None) -> None:
        """Of `text` [B, length]; guided, of all rows and then of all without their prompts."""
        self.net, self.vocabulary, self.guidance, self.length = net, vocabulary, guidance, text.shape[1]
        alone, self.rows = torch.unique(text, dim=0, return_inverse=True)
        alone, padding, gone = trim_left_padding(alone, vocabulary.filling)
        self.shown = alone != vocabulary.filling  # [texts, places]
        allowed = omni_attention_mask(padding, alone.shape[1], alone.shape[1])
        found = net(alone, allowed, places=slice(0, 0), tokens=vocabulary.pictures, first=gone, keep=True)
        self.past: ShowoKVCache = found[1]

    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        """Logits [B, N, codes] of codes [B, N], -1 where hidden."""
        ids, guided = self.vocabulary.framed(x), self.guidance is not None and is_guided(self.guidance, t)
        rows = self.rows if guided else self.rows[: len(x)]
        if bool((x == MASK_TOKEN_ID).all()):  # nothing but the prompts tells rows apart yet
            texts = torch.arange(len(self.shown), device=x.device)
            logits = self._read(ids[:1].expand(len(texts), -1), texts)[rows]
        else:
            logits = self._read(ids.repeat(2 if guided else 1, 1), rows)
        if self.guidance is None or not guided:
            return logits
        given, without = logits.chunk(2)
        return apply_guidance(self.guidance, given, without, broadcast_to_shape(t, given))

    def _read(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Of pictures, each after the text of that number."""
        seen = torch.cat([self.shown[rows], torch.ones_like(ids, dtype=torch.bool)], 1)
        allowed = seen[:, None, None].expand(-1, 1, ids.shape[1], -1)
        places, tokens = slice(1, ids.shape[1] - 1), self.vocabulary.pictures
        logits: Tensor = self.net(
            ids, allowed, places=places, tokens=tokens, past=self.past, rows=rows, first=self.length
        )[0]
        return logits

    def select(self, rows: Tensor) -> Self:
        kept = rows.to(self.rows.device)
        halves = (self.rows,) if self.guidance is None else self.rows.chunk(2)
        self.rows = torch.cat([half[kept] for half in halves])
        return self
