"""Show-o's transformer: one Phi over text tokens and image tokens, in its published layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.distributions import expand_dims_like
from ...core.guidance import apply_guidance, is_guided
from ...core.policy import Guidance
from ...core.types import MASK_TOKEN_ID

ShowoKVCache = tuple[tuple[Tensor, Tensor], ...]  # keys and values of each layer: [B, heads, positions, head]
NUM_SPECIAL_TOKENS = 10  # ids between text tokens and image tokens
TRIM_MULTIPLE = 32  # positions by which padding is trimmed, so that few lengths occur and few graphs are compiled
ALL = slice(None)


@dataclass(frozen=True)
class ShowoVocabulary:
    """The token ids: text tokens, ten special tokens, image tokens, and the mask token."""

    text_vocab_size: int = 50295
    eos_id: int = 50256  # <|endoftext|>, which also starts a text
    codebook_size: int = 8192

    @property
    def pad_id(self) -> int:
        """[PAD], on the left of short texts."""
        return self.text_vocab_size

    @property
    def soi_id(self) -> int:
        """<|soi|>, start of image."""
        return self.text_vocab_size + 1

    @property
    def eoi_id(self) -> int:
        """<|eoi|>, end of image."""
        return self.text_vocab_size + 2

    @property
    def t2i_id(self) -> int:
        """<|t2i|>: a text and its image follow."""
        return self.text_vocab_size + 5

    @property
    def mmu_id(self) -> int:
        """<|mmu|>: an image and a text about it follow."""
        return self.text_vocab_size + 6

    @property
    def image_ids(self) -> slice:
        """The ids of image tokens."""
        start = self.text_vocab_size + NUM_SPECIAL_TOKENS
        return slice(start, start + self.codebook_size)

    @property
    def mask_id(self) -> int:
        """The id of a masked image token."""
        return self.image_ids.stop  # type: ignore[no-any-return]

    @property
    def size(self) -> int:
        return self.mask_id + 1

    def wrap_image_tokens(self, x: Tensor) -> Tensor:
        """Ids [B, N + 2] of image tokens [B, N], which are -1 where masked, between <|soi|> and <|eoi|>."""
        inside = torch.where(x == MASK_TOKEN_ID, self.mask_id, x + self.image_ids.start)
        return F.pad(F.pad(inside, (1, 0), value=self.soi_id), (0, 1), value=self.eoi_id)


@dataclass(frozen=True)
class ShowoConfig:
    """Sizes of the network; the defaults are those of Phi-1.5."""

    width: int = 2048
    depth: int = 24
    heads: int = 32
    intermediate_size: int = 8192
    vocabulary: ShowoVocabulary = field(default_factory=ShowoVocabulary)
    vision_features: int = 0  # feature size of the vision encoder, if images are read by features; 0: by tokens

    def __post_init__(self) -> None:
        if self.width % self.heads or self.width // self.heads % 4:
            sizes = f"width {self.width}, heads {self.heads}"
            raise ValueError(f"found {sizes}; choose heads so that width / heads is a multiple of 4 [TM483]")


def omni_attention_mask(padding: Tensor, text_length: int, total: int) -> Tensor:
    """Show-o's attention mask [B, 1, total, total] for `padding` [B] tokens, then text, then an image.

    Text is causal, the image attends to the text and to all of itself. Padding is seen by padding only, because every
    position has to attend to something.
    """
    positions = torch.arange(total, device=padding.device)
    query, key = positions[None, :, None], positions[None, None, :]
    num_padding = padding[:, None, None]
    causal = (key <= query) & ((key >= num_padding) | (query < num_padding))
    return torch.where(query >= text_length, key >= num_padding, causal)[:, None]


class LayerKVCache:
    """KV cache of one layer with the interface of transformers' caches."""

    def __init__(self, past: tuple[Tensor, Tensor] | None, rows: Tensor | None) -> None:
        self.past, self.rows = past, rows
        self.new: tuple[Tensor, Tensor] | None = None

    def update(self, keys: Tensor, values: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        self.new = (keys, values)
        if self.past is None:
            return keys, values
        past_keys, past_values = (x if self.rows is None else x[self.rows] for x in self.past)
        return torch.cat([past_keys.to(keys.dtype), keys], 2), torch.cat([past_values.to(values.dtype), values], 2)


class ShowoTransformer(nn.Module):
    """A Phi with normalized queries and keys, under the name `showo` as published."""

    def __init__(self, config: ShowoConfig) -> None:
        super().__init__()
        self.config = config
        self.showo: Any = build_phi(config)
        self.showo.model.rotary_emb = nn.Identity()  # its table is in no file; `rotary_embedding` computes it
        for layer in self.showo.model.layers:
            layer.self_attn.layer_idx = 0  # each has its own cache; with equal indices layers share a compiled graph
        if config.vision_features:
            layers = (nn.Linear(config.vision_features, config.width), nn.GELU(), nn.Linear(config.width, config.width))
            self.mm_projector = nn.Sequential(*layers)

    def forward(
        self,
        ids: Tensor,
        attention_mask: Tensor,
        *,
        positions: slice = ALL,
        vocabulary: slice = ALL,
        past: ShowoKVCache = (),
        past_rows: Tensor | None = None,
        start_position: int = 0,
        use_cache: bool = False,
        image_features: Tensor | None = None,
        feature_mask: Tensor | None = None,
    ) -> tuple[Tensor, ShowoKVCache]:
        """Logits in float32 for ids [B, L], and the keys and values of these ids if `use_cache`.

        The logits are restricted to a slice of the positions and of the vocabulary. `attention_mask`
        [B, 1, L, past + L] is True where a query (dimension 2) sees a key. The first id stands at `start_position`,
        after the positions in `past`, of which row `past_rows[b]` belongs to row b. `image_features` [B, n, features]
        replace the embeddings of mask tokens, or of the tokens where `feature_mask` [B, L] is True.
        """
        h = self.showo.model.embed_tokens(ids)
        if image_features is not None:
            masked = (ids == self.config.vocabulary.mask_id if feature_mask is None else feature_mask)[..., None]
            h = h.masked_scatter(masked, self.mm_projector(image_features.to(h.dtype)).to(h.dtype))
        rotary, new_cache = self.rotary_embedding(h, start_position), []
        for i, layer in enumerate(self.showo.model.layers):
            cache = LayerKVCache(past[i] if past else None, past_rows) if past or use_cache else None
            h = layer(h, attention_mask=attention_mask, past_key_values=cache, position_embeddings=rotary)
            if use_cache and cache is not None and cache.new is not None:
                new_cache.append(cache.new)
        h = self.showo.model.final_layernorm(h[:, positions])
        return self.logits(h, vocabulary), tuple(new_cache)

    def rotary_embedding(self, h: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [1, L, head / 2] that rotate the first half of each head."""
        count = self.config.width // self.config.heads // 2
        powers = torch.arange(0, count, 2, dtype=torch.float, device=h.device) / count
        angles = torch.arange(start, start + h.shape[1], device=h.device).float()[:, None] / 10000.0**powers
        angles = torch.cat([angles, angles], 1)[None]
        return angles.cos().to(h.dtype), angles.sin().to(h.dtype)

    def logits(self, h: Tensor, vocabulary: slice) -> Tensor:
        """Logits of a slice of the vocabulary, in float32."""
        head: Any = self.showo.lm_head
        if type(head) is nn.Linear:  # a layer with adapters has to be called as a whole
            return F.linear(h, head.weight[vocabulary], head.bias[vocabulary]).float()
        out: Tensor = head(h)[..., vocabulary].float().contiguous()
        return out


def build_phi(config: ShowoConfig) -> Any:
    """The network of transformers, with random weights."""
    from transformers import PhiConfig, PhiForCausalLM

    config_class: Any = PhiConfig
    phi = config_class(
        vocab_size=config.vocabulary.size,
        hidden_size=config.width,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.depth,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        qk_layernorm=True,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    model_class: Any = PhiForCausalLM
    return model_class(phi)


def trim_left_padding(text: Tensor, pad_id: int) -> tuple[Tensor, Tensor, int]:
    """Remove padding that all texts [B, L] have: trimmed texts, the padding left in each [B], and the removed count.

    Text and image do not attend to padding, so that no logits change.
    """
    padding = (text == pad_id).sum(1)
    removed = int(padding.min()) // TRIM_MULTIPLE * TRIM_MULTIPLE
    return text[:, removed:], padding - removed, removed


class PromptPrefixCache:
    """Predicts image tokens with a KV cache of the distinct prompts.

    Text does not attend to the image, so that the cache is valid for all decoding steps.
    """

    def __init__(self, net: nn.Module, vocabulary: ShowoVocabulary, text: Tensor, guidance: Guidance | None) -> None:
        """Read the prompts `text` [B, L]; with guidance [2 B, L], the conditional rows first."""
        self.net, self.vocabulary, self.guidance, self.length = net, vocabulary, guidance, text.shape[1]
        distinct, self.rows = torch.unique(text, dim=0, return_inverse=True)
        distinct, padding, removed = trim_left_padding(distinct, vocabulary.pad_id)
        self.text_mask = distinct != vocabulary.pad_id  # [distinct prompts, positions]
        mask = omni_attention_mask(padding, distinct.shape[1], distinct.shape[1])
        self.past: ShowoKVCache = net(
            distinct,
            mask,
            positions=slice(0, 0),
            vocabulary=vocabulary.image_ids,
            start_position=removed,
            use_cache=True,
        )[1]

    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        """Logits [B, N, codes] of image tokens [B, N], which are -1 where masked."""
        ids, guided = self.vocabulary.wrap_image_tokens(x), self.guidance is not None and is_guided(self.guidance, t)
        rows = self.rows if guided else self.rows[: len(x)]
        if bool((x == MASK_TOKEN_ID).all()):  # rows differ by their prompts only: read each distinct prompt once
            distinct = torch.arange(len(self.text_mask), device=x.device)
            logits = self._forward(ids[:1].expand(len(distinct), -1), distinct)[rows]
        else:
            logits = self._forward(ids.repeat(2 if guided else 1, 1), rows)
        if self.guidance is None or not guided:
            return logits
        conditional, unconditional = logits.chunk(2)
        return apply_guidance(self.guidance, conditional, unconditional, expand_dims_like(t, conditional))

    def _forward(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Logits of the image tokens in `ids`, each row after the prompt of index `rows[b]`."""
        visible = torch.cat([self.text_mask[rows], torch.ones_like(ids, dtype=torch.bool)], 1)
        logits: Tensor = self.net(
            ids,
            visible[:, None, None].expand(-1, 1, ids.shape[1], -1),
            positions=slice(1, ids.shape[1] - 1),
            vocabulary=self.vocabulary.image_ids,
            past=self.past,
            past_rows=rows,
            start_position=self.length,
        )[0]
        return logits

    def select(self, rows: Tensor) -> Self:
        selected = rows.to(self.rows.device)
        halves = (self.rows,) if self.guidance is None else self.rows.chunk(2)
        self.rows = torch.cat([half[selected] for half in halves])
        return self
