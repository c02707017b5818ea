"""Show-o's transformer: one Phi that reads words and the codes of pictures, under the published names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.types import MASK_TOKEN_ID

ShowoKVCache = tuple[tuple[Tensor, Tensor], ...]  # keys and values of each layer, [rows, heads, places, head]
NUM_SPECIAL_TOKENS = 10  # ids between words and codes
ALL = slice(None)


@dataclass(frozen=True)
class ShowoVocabulary:
    """Which ids mean what: words, ten marks, the codes of pictures, and one for a hidden code."""

    words: int = 50295  # of the tokenizer
    end: int = 50256  # of a text, and its beginning
    codes: int = 8192

    @property
    def filling(self) -> int:
        """Before texts that are short, [PAD]."""
        return self.words

    @property
    def opens(self) -> int:
        """A picture, <|soi|>."""
        return self.words + 1

    @property
    def closes(self) -> int:
        """A picture, <|eoi|>."""
        return self.words + 2

    @property
    def painting(self) -> int:
        """What follows is a text and its picture, <|t2i|>."""
        return self.words + 5

    @property
    def telling(self) -> int:
        """What follows is a picture and a text about it, <|mmu|>."""
        return self.words + 6

    @property
    def pictures(self) -> slice:
        """The codes."""
        return slice(self.words + NUM_SPECIAL_TOKENS, self.words + NUM_SPECIAL_TOKENS + self.codes)

    @property
    def hidden(self) -> int:
        return self.words + NUM_SPECIAL_TOKENS + self.codes

    @property
    def size(self) -> int:
        return self.hidden + 1

    def framed(self, x: Tensor) -> Tensor:
        """Ids [B, N + 2] of codes [B, N], -1 where hidden, between the marks of a picture."""
        inside = torch.where(x == MASK_TOKEN_ID, self.hidden, x + self.pictures.start)
        return F.pad(F.pad(inside, (1, 0), value=self.opens), (0, 1), value=self.closes)


@dataclass(frozen=True)
class ShowoConfig:
    """Sizes of the network; as given, those of Phi-1.5."""

    width: int = 2048
    depth: int = 24
    heads: int = 32
    inner: int = 8192
    vocabulary: ShowoVocabulary = field(default_factory=ShowoVocabulary)
    vision: int = 0  # features of an encoder of pictures, where one is read instead of codes

    def __post_init__(self) -> None:
        if self.width % self.heads or self.width // self.heads % 4:
            found = f"width {self.width}, heads {self.heads}"
            raise ValueError(f"found {found}; heads must divide the width into multiples of 4")


def omni_attention_mask(padding: Tensor, text: int, total: int) -> Tensor:
    """Who sees whom: [B, 1, total, total] bool, of rows with so much filling [B] before a text of `text` places.

    The picture behind it sees all of itself and the text; the text sees what came before in it; nobody sees filling but
    filling, which has to see something.
    """
    places = torch.arange(total, device=padding.device)
    asks, seen = places[None, :, None], places[None, None, :]
    filled = padding[:, None, None]
    written = (seen <= asks) & ((seen >= filled) | (asks < filled))
    return torch.where(asks >= text, seen >= filled, written)[:, None]


class LayerKVCache:
    """KV cache of one layer with the interface of transformers' caches."""

    def __init__(self, past: tuple[Tensor, Tensor] | None, rows: Tensor | None) -> None:
        self.past, self.rows = past, rows
        self.fresh: tuple[Tensor, Tensor] | None = None

    def update(self, keys: Tensor, values: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        self.fresh = (keys, values)
        if self.past is None:
            return keys, values
        before, held = (x if self.rows is None else x[self.rows] for x in self.past)
        return torch.cat([before.to(keys.dtype), keys], 2), torch.cat([held.to(values.dtype), values], 2)


class ShowoTransformer(nn.Module):
    """A Phi with normalised queries and keys, under the name `showo` as published."""

    def __init__(self, shape: ShowoConfig) -> None:
        super().__init__()
        self.shape = shape
        self.showo: Any = build_phi(shape)
        self.showo.model.rotary_emb = nn.Identity()  # of a table that is in no file; turns are computed here
        for layer in self.showo.model.layers:
            layer.self_attn.layer_idx = 0  # has a memory of its own; told apart, no two would share a compiled graph
        if shape.vision:
            layers = (nn.Linear(shape.vision, shape.width), nn.GELU(), nn.Linear(shape.width, shape.width))
            self.mm_projector = nn.Sequential(*layers)

    def forward(
        self,
        ids: Tensor,
        allowed: Tensor,
        *,
        places: slice = ALL,
        tokens: slice = ALL,
        past: ShowoKVCache = (),
        rows: Tensor | None = None,
        first: int = 0,
        keep: bool = False,
        seen: Tensor | None = None,
    ) -> tuple[Tensor, ShowoKVCache]:
        """Logits of some `tokens` at some `places` of ids [B, L], float32; and keys and values, if to be kept.

        `allowed` [B, 1, L, places before and now] is True where a place (dimension 2) sees another. The first id stands
        at the place `first`, after what `past` holds, of which row `rows[b]` goes before row b. `seen` are features of
        pictures [B, n, vision], which stand where ids are those of hidden codes.
        """
        h = self.showo.model.embed_tokens(ids)
        if seen is not None:
            inside = (ids == self.shape.vocabulary.hidden)[..., None]
            h = h.masked_scatter(inside, self.mm_projector(seen.to(h.dtype)).to(h.dtype))
        turns, fresh = self.turns(h, first), []
        for i, layer in enumerate(self.showo.model.layers):
            memory = LayerKVCache(past[i] if past else None, rows) if past or keep else None
            h = layer(h, attention_mask=allowed, past_key_values=memory, position_embeddings=turns)
            if keep and memory is not None and memory.fresh is not None:
                fresh.append(memory.fresh)
        h = self.showo.model.final_layernorm(h[:, places])
        return self.logits(h, tokens), tuple(fresh)

    def turns(self, h: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [1, L, half a head] by which half of each head's numbers are turned."""
        count = self.shape.width // self.shape.heads // 2
        powers = torch.arange(0, count, 2, dtype=torch.float, device=h.device) / count
        angles = torch.arange(first, first + h.shape[1], device=h.device).float()[:, None] / 10000.0**powers
        both = torch.cat([angles, angles], 1)[None]
        return both.cos().to(h.dtype), both.sin().to(h.dtype)

    def logits(self, h: Tensor, tokens: slice) -> Tensor:
        head: Any = self.showo.lm_head
        if type(head) is nn.Linear:  # an adapted one has to be asked whole
            return F.linear(h, head.weight[tokens], head.bias[tokens]).float()
        out: Tensor = head(h)[..., tokens].float().contiguous()
        return out


def build_phi(shape: ShowoConfig) -> Any:
    """Transformers' network, as it is."""
    from transformers import PhiConfig, PhiForCausalLM

    settings: Any = PhiConfig
    config = settings(
        vocab_size=shape.vocabulary.size,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.depth,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        qk_layernorm=True,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    kind: Any = PhiForCausalLM
    return kind(config)
