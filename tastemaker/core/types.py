"""The data types of the package: trees of tensors whose first dimension is the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Prompts = Sequence[str]
Metadata = Mapping[str, Any]  # what else is known of a prompt: a label, a count, a reference picture

MASK_TOKEN_ID = -1  # the id of a masked token in every masked model; the backbone maps it to its own


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; from host to GPU without synchronizing."""
    return x.to(device, non_blocking=device.type == "cuda" and x.device.type == "cpu")


def select_rows(tree: T, rows: Tensor) -> T:
    """Select rows of every tensor in a tree; a tuple of strings or mappings holds one a row, a lone one stays."""
    picked: Any
    if isinstance(tree, Tensor):
        picked = tree[to_device(rows, tree.device)]
    elif tree is None or isinstance(tree, (str, int, float)):
        picked = tree
    elif isinstance(tree, dict):
        picked = {key: select_rows(value, rows) for key, value in tree.items()}
    elif isinstance(tree, tuple) and tree and isinstance(tree[0], (str, Mapping)):
        picked = tuple(tree[i] for i in torch.arange(len(tree))[rows.cpu()].tolist())
    elif isinstance(tree, tuple):
        picked = tuple(select_rows(value, rows) for value in tree)
    elif is_dataclass(tree) and not isinstance(tree, type):
        picked = replace(tree, **{f.name: select_rows(getattr(tree, f.name), rows) for f in fields(tree) if f.init})
    else:
        raise TypeError(f"cannot select rows of {type(tree).__name__}; expected tensors, dicts, tuples or dataclasses")
    return picked  # type: ignore[no-any-return]


def concatenate(trees: Sequence[T]) -> T:
    """The rows of all trees one after the other: what `index` took apart."""
    first: Any = trees[0]
    joined: Any
    if len(trees) == 1 or first is None or isinstance(first, (str, int, float)):
        joined = first
    elif isinstance(first, Tensor):
        joined = torch.cat([tree for tree in trees if isinstance(tree, Tensor)])
    elif isinstance(first, dict):
        joined = {key: concatenate([tree[key] for tree in trees]) for key in first}  # type: ignore[index]
    elif isinstance(first, tuple) and first and isinstance(first[0], (str, Mapping)):
        joined = tuple(item for tree in trees for item in tree)  # type: ignore[attr-defined]
    elif isinstance(first, tuple):
        joined = tuple(concatenate(items) for items in zip(*trees, strict=True))
    else:
        parts = {f.name: concatenate([getattr(tree, f.name) for tree in trees]) for f in fields(first) if f.init}
        joined = replace(first, **parts)
    return joined  # type: ignore[no-any-return]


@dataclass(frozen=True)
class PromptBatch:
    """Prompts to make samples of, and what is known of each."""

    prompts: tuple[str, ...]
    facts: tuple[Metadata, ...]
    pictures: Tensor | None = None  # [B, F, 3, H, W] in [0, 1], where the data shows what it asks for

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True)
class ImageBatch:
    """Captioned pixels to learn from."""

    prompts: tuple[str, ...]
    pixels: Tensor  # [B, F, 3, H, W] in [0, 1]
    numbers: Tensor | None = None  # [B] of rows that come again, on the host: the same number is the same picture

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True)
class TokenBatch:
    """Captioned pictures in model space, encoded beforehand."""

    prompts: tuple[str, ...]
    ids: Tensor  # [B, L]

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True)
class LatentBatch:
    """Captioned pictures as an autoencoder sees them, encoded beforehand."""

    prompts: tuple[str, ...]
    x: Tensor  # [B, C, h, w]
    codec: str  # the fingerprint of the autoencoder
    deviation: float  # of all latents that were encoded with these

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True)
class PreferenceBatch:
    """Two pictures of each prompt, the first preferred."""

    prompts: tuple[str, ...]
    chosen: Tensor  # [B, F, 3, H, W] in [0, 1]
    rejected: Tensor  # [B, F, 3, H, W] in [0, 1]

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True)
class QuestionAnswerBatch:
    """Pictures, what was said about each, and what is to be answered."""

    pixels: Tensor  # [B, 3, H, W] in [0, 1]
    asked: tuple[Metadata, ...]  # of each: `turns`, from the first question to the last, and the `answer` to that

    def __len__(self) -> int:
        return len(self.asked)


@dataclass(frozen=True)
class Condition:
    """What the network is conditioned on; only the backbone that wrote `tensors` reads them."""

    prompts: tuple[str, ...]
    tensors: dict[str, Tensor] = field(default_factory=dict)  # every one has B rows
    facts: tuple[Metadata, ...] = ()

    def __len__(self) -> int:
        return len(self.prompts)

    def repeat(self, times: int) -> Self:
        """Each row `times` times, copies side by side."""
        return select_rows(self, torch.arange(len(self)).repeat_interleave(times))


@dataclass(frozen=True)
class Segment:
    """The decisions one network call can score: one per sample in diffusion, one per token otherwise."""

    t: Tensor  # [B] noise level, 1 where nothing shows
    s: Tensor  # [B] the level the decision leads to
    state: Tensor  # [B, ...] what the network saw
    action: Tensor  # [B, ...] what was decided
    log_prob: Tensor  # [B, K] under the weights that decided
    mask: Tensor  # [B, K] which of the K decisions were taken here


@dataclass(frozen=True)
class Trajectory:
    """How a batch of clean samples came about."""

    cond: Condition
    start: Tensor  # [B, ...] pure noise, or the empty canvas
    final: Tensor  # [B, ...] clean latents or token ids
    segments: tuple[Segment, ...] = ()

    def __len__(self) -> int:
        return len(self.cond)


@dataclass(frozen=True)
class Corrupted:
    """Clean samples hidden in part, by noise or by masking."""

    x: Tensor  # [B, ...]
    t: Tensor  # [B] in [0, 1], at 1 nothing shows
    noise: Tensor  # [B, ...] the noise added, or which tokens are hidden


@dataclass(frozen=True)
class Loss:
    """One value a row, to be averaged over all rows of all ranks; the losses of an objective's parts add up."""

    rows: Tensor  # [B]
    metrics: dict[str, Tensor] = field(default_factory=dict)  # [B] or scalars, averaged over rows and parts


@dataclass(frozen=True)
class Placement:
    """Where a model goes and how it computes."""

    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32  # of frozen parts
    attention: str = "auto"
    trained: torch.dtype | None = None  # of the network that trains; as frozen parts, float32 under fp16, if not given
