"""Three generators small enough to train in a test: plain colors by name, as a flow, autoregressive or masked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ..core.model_spec import ModelSpec
from ..core.policy import Backbone, Process
from ..core.toy_colors import TOY_COLORS
from ..core.types import MASK_TOKEN_ID, Condition, Metadata, Placement, Prompts, to_device
from ..processes.autoregressive import AutoregressiveProcess
from ..processes.gaussian import GaussianProcess
from ..processes.masked import MaskedProcess

Width = Annotated[int, Field(ge=2, le=4096, multiple_of=2)]
Depth = Annotated[int, Field(ge=1, le=64)]
WORDS = ("", *TOY_COLORS)  # the first stands for all other words
IMAGE_SIZE = 8  # pixels per side
GRID_SIZE = 4  # tokens per side, two pixels each
ToyKVCache = tuple[tuple[Tensor, Tensor], ...]


def embed_toy_prompts(prompts: Prompts, metadata: Sequence[Metadata], device: torch.device) -> Condition:
    """Return the id of each prompt's last word: word [B]."""
    last = [prompt.split()[-1] if prompt.split() else "" for prompt in prompts]
    words = [WORDS.index(word) if word in WORDS else 0 for word in last]
    return Condition(tuple(prompts), {"word": to_device(torch.tensor(words), device)}, tuple(metadata))


class ToyResidualBlock(nn.Module):
    """A residual MLP with pre-normalization on [..., width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = h + self.down(F.silu(self.up(self.norm(h))))
        return out


class ToyFlowNet(nn.Module):
    """An MLP denoiser: x [B, F, 3, 8, 8] at times t [B] for words [B] to [B, F * 3 * 8 * 8]."""

    def __init__(self, frames: int, width: int, depth: int) -> None:
        super().__init__()
        size = frames * 3 * IMAGE_SIZE * IMAGE_SIZE
        self.word, self.time, self.enter = nn.Embedding(len(WORDS), width), nn.Linear(8, width), nn.Linear(size, width)
        self.blocks = nn.ModuleList(ToyResidualBlock(width) for _ in range(depth))
        self.norm, self.leave = nn.LayerNorm(width), nn.Linear(width, size)
        self.skip = nn.Linear(8, 1)  # the input has more dimensions than the blocks, so its noise bypasses them

    def forward(self, x: Tensor, t: Tensor, word: Tensor) -> Tensor:
        angles = torch.stack([t, 2 * t, 4 * t, 8 * t], 1)
        time = torch.cat([angles.sin(), angles.cos()], 1)
        h = self.enter(x.flatten(1)) + self.word(word) + self.time(time)
        for block in self.blocks:
            h = block(h)
        out: Tensor = self.leave(self.norm(h)) + self.skip(time) * x.flatten(1)
        return out


class ToyFlowBackbone(Backbone):
    """Denoises latents [F, 3, 8, 8], which are logits of the pixels."""

    forward_passes = 1

    def __init__(self, spec: ToyFlowSpec, placement: Placement) -> None:
        self.device = placement.device
        self.shape = self.pixels = spec.shape
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.seed)
            self.net: nn.Module = ToyFlowNet(spec.frames, spec.width, spec.depth).to(placement.device)

    def embed(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        return embed_toy_prompts(prompts, metadata, self.device)

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        out: Tensor = self.net(x, t, cond.tensors["word"])
        return out.view_as(x)  # outside the network: FSDP hooks its output, which must not be a view

    def encode(self, pixels: Tensor) -> Tensor:
        return torch.logit(pixels.clamp(0.01, 0.99))

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        return (x if frames is None else x[:, list(frames)]).sigmoid()


class ToyAttention(nn.Module):
    def __init__(self, width: int, causal: bool, heads: int = 2) -> None:
        super().__init__()
        self.causal, self.heads = causal, heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.after = ToyResidualBlock(width)

    def forward(self, h: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        b, n, width = h.shape
        q, k, v = self.qkv(self.norm(h)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # [B, heads, n, d] each
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal and n > 1)
        h = self.after(h + self.out(mixed.transpose(1, 2).reshape(b, n, width)))
        return h, (k, v)


class ToyTokenNet(nn.Module):
    """A transformer over the prompt's word and tokens; with a KV cache, only new tokens are computed."""

    def __init__(self, causal: bool, width: int, depth: int) -> None:
        super().__init__()
        self.token = nn.Embedding(len(TOY_COLORS) + 1, width)  # the last embeds masked tokens
        self.place, self.word = nn.Embedding(GRID_SIZE * GRID_SIZE + 1, width), nn.Embedding(len(WORDS), width)
        self.blocks = nn.ModuleList(ToyAttention(width, causal) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(TOY_COLORS))

    def forward(self, ids: Tensor | None, word: Tensor | None, cache: ToyKVCache = ()) -> tuple[Tensor, ToyKVCache]:
        parts = [self.word(word)[:, None]] if word is not None else []
        if ids is not None:
            parts.append(self.token(ids.where(ids != MASK_TOKEN_ID, len(TOY_COLORS))))
        h = torch.cat(parts, 1)
        read = cache[0][0].shape[2] if cache else 0
        h = h + self.place(torch.arange(read, read + h.shape[1], device=h.device))
        now: ToyKVCache = ()
        for i, block in enumerate(self.blocks):
            h, kept = block(h, cache[i] if cache else None)
            now += (kept,)
        return self.head(self.norm(h)).float(), now


class ToyTokenBackbone(Backbone):
    """Sixteen tokens, each one of eight colors; causal, or bidirectional for masked decoding."""

    forward_passes = 1
    shape = (GRID_SIZE * GRID_SIZE,)
    pixels = (1, 3, IMAGE_SIZE, IMAGE_SIZE)

    def __init__(self, spec: ToyTokenSpec, placement: Placement) -> None:
        self.device, self.causal = placement.device, spec.causal
        self.palette = torch.tensor(list(TOY_COLORS.values()), device=placement.device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.seed)
            self.net: nn.Module = ToyTokenNet(spec.causal, spec.width, spec.depth).to(placement.device)

    def embed(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        return embed_toy_prompts(prompts, metadata, self.device)

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        logits: Tensor
        if self.causal:
            logits, _ = self.net(x[:, :-1], cond.tensors["word"])
            return logits
        logits, _ = self.net(x, cond.tensors["word"])
        return logits[:, 1:]

    def init_cache(self, cond: Condition) -> ToyKVCache:
        return ()

    def decode_step(self, ids: Tensor | None, cache: ToyKVCache, cond: Condition) -> tuple[Tensor, ToyKVCache]:
        fresh = None if ids is None else ids[:, None]
        logits, cache = self.net(fresh, cond.tensors["word"] if ids is None else None, cache)
        return logits[:, -1], cache

    def token_embeddings(self, ids: Tensor) -> Tensor:
        """Colors in [-1, 1]."""
        return 2 * self.palette[ids] - 1

    def encode(self, pixels: Tensor) -> Tensor:
        cells = F.avg_pool2d(pixels[:, 0], IMAGE_SIZE // GRID_SIZE).flatten(2).transpose(1, 2)  # [B, 16, 3]
        return (cells[:, :, None] - self.palette).abs().sum(-1).argmin(-1)

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        cells = self.palette[x.clamp(min=0)].transpose(1, 2).reshape(len(x), 3, GRID_SIZE, GRID_SIZE)
        return F.interpolate(cells, scale_factor=IMAGE_SIZE // GRID_SIZE)[:, None]


@dataclass(frozen=True)
class ToyFlowSpec(ModelSpec):
    """A denoiser of plain images or clips; flow or noise prediction, as the path says."""

    frames: Annotated[int, Field(ge=1, le=64)] = 1
    width: Width = 96
    depth: Depth = 2
    seed: int = 0
    process_type: ClassVar[type[Process]] = GaussianProcess

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.frames, 3, IMAGE_SIZE, IMAGE_SIZE

    def load(self, placement: Placement) -> ToyFlowBackbone:
        return ToyFlowBackbone(self, placement)

    def tiny(self) -> ToyFlowSpec:
        return ToyFlowSpec(self.frames, 32, 1, self.seed)


@dataclass(frozen=True)
class ToyTokenSpec(ModelSpec):
    """Settings of a generator of sixteen tokens."""

    width: Width = 32
    depth: Depth = 2
    seed: int = 0
    frames = 1
    shape = ToyTokenBackbone.shape
    causal: ClassVar[bool]

    def load(self, placement: Placement) -> ToyTokenBackbone:
        return ToyTokenBackbone(self, placement)

    def tiny(self) -> Self:
        return type(self)(16, 1, self.seed)


@dataclass(frozen=True)
class ToyCausalSpec(ToyTokenSpec):
    """Generates sixteen tokens one after the other."""

    causal = True
    process_type: ClassVar[type[Process]] = AutoregressiveProcess


@dataclass(frozen=True)
class ToyMaskedSpec(ToyTokenSpec):
    """Reveals sixteen tokens a few at a time."""

    causal = False
    process_type: ClassVar[type[Process]] = MaskedProcess
