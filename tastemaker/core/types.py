"""The data types of the package: trees of tensors whose first dimension is the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Prompts = Sequence[str]
Metadata = Mapping[str, Any]  # of a prompt: labels, counts, reference images

MASK_TOKEN_ID = -1  # the id of a masked token in every masked model; the backbone maps it to its own


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; from host to GPU without synchronizing."""
    return x.to(device, non_blocking=device.type == "cuda" and x.device.type == "cpu")


def select_rows(tree: T, rows: Tensor) -> T:
    """Select rows of every tensor in a tree of dicts, tuples and dataclasses.

    Tuples of strings or mappings hold one item per row; single strings and numbers stay.
    """
    selected: Any
    if isinstance(tree, Tensor):
        selected = tree[to_device(rows, tree.device)]
    elif tree is None or isinstance(tree, (str, int, float)):
        selected = tree
    elif isinstance(tree, dict):
        selected = {key: select_rows(value, rows) for key, value in tree.items()}
    elif isinstance(tree, tuple) and tree and isinstance(tree[0], (str, Mapping)):
        selected = tuple(tree[i] for i in torch.arange(len(tree))[rows.cpu()].tolist())
    elif isinstance(tree, tuple):
        selected = tuple(select_rows(value, rows) for value in tree)
    elif is_dataclass(tree) and not isinstance(tree, type):
        selected = replace(tree, **{f.name: select_rows(getattr(tree, f.name), rows) for f in fields(tree) if f.init})
    else:
        raise TypeError(
            f"cannot select rows of a {type(tree).__name__}; pass tensors, dicts, tuples or dataclasses [TM119]"
        )
    return selected  # type: ignore[no-any-return]


def concatenate(trees: Sequence[T]) -> T:
    """Concatenate the rows of several trees, the inverse of `select_rows`."""
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
    """Prompts to generate samples for, with metadata."""

    prompts: tuple[str, ...]
    metadata: tuple[Metadata, ...]
    images: Tensor | None = None  # [B, F, 3, H, W] in [0, 1], if the data has images for its prompts

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True)
class ImageBatch:
    """Captioned images or videos to train on."""

    prompts: tuple[str, ...]
    pixels: Tensor  # [B, F, 3, H, W] in [0, 1]
    image_ids: Tensor | None = None  # [B] on the host, if images come again: the same id is the same image
    metadata: tuple[Metadata, ...] = ()  # of each prompt, such as the source of an edit; empty if the data has none

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True)
class TokenBatch:
    """Captioned images as precomputed tokens."""

    prompts: tuple[str, ...]
    ids: Tensor  # [B, L]

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True)
class LatentBatch:
    """Captioned images as precomputed latents of an autoencoder."""

    prompts: tuple[str, ...]
    x: Tensor  # [B, C, h, w]
    autoencoder: str  # fingerprint of the autoencoder
    std: float  # of all latents of the data set

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True)
class PreferenceBatch:
    """Pairs of images of the same prompt, one preferred to the other."""

    prompts: tuple[str, ...]
    chosen: Tensor  # [B, F, 3, H, W] in [0, 1]
    rejected: Tensor  # [B, F, 3, H, W] in [0, 1]

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True)
class LikeBatch:
    """Images that somebody liked or disliked, each by itself."""

    prompts: tuple[str, ...]
    pixels: Tensor  # [B, F, 3, H, W] in [0, 1]
    liked: Tensor  # [B] bool

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True)
class QuestionAnswerBatch:
    """Images with a conversation about each, to fine-tune a vision-language model."""

    pixels: Tensor  # [B, 3, H, W] in [0, 1]
    conversations: tuple[Metadata, ...]  # each has `turns`, which end with a question, and the `answer` to it

    def __len__(self) -> int:
        return len(self.conversations)


@dataclass(frozen=True)
class JointBatch:
    """Samples of three kinds: captioned images, texts, and questions about images with their answers."""

    prompts: tuple[str, ...]  # of captioned images; empty for the others
    pixels: Tensor  # [B, F, 3, H, W] of captioned images in [0, 1]; zero for the others
    question_pixels: Tensor  # [B, 3, h, w] of images that questions are about; zero for the others
    # Empty for captioned images, {"text": ...}, or {"turns": ..., "answer": ...} as in QuestionAnswerBatch.
    conversations: tuple[Metadata, ...]
    share: Tensor  # [B] the share of the sample's kind in the whole batch

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True)
class Condition:
    """What the network is conditioned on. Only the backbone that wrote `tensors` reads them."""

    prompts: tuple[str, ...]
    tensors: dict[str, Tensor] = field(default_factory=dict)  # each with B rows
    metadata: tuple[Metadata, ...] = ()

    def __len__(self) -> int:
        return len(self.prompts)

    def repeat(self, times: int) -> Self:
        """Repeat every row `times` times; copies are adjacent."""
        return select_rows(self, torch.arange(len(self)).repeat_interleave(times))


@dataclass(frozen=True)
class Segment:
    """Actions that one network call can score: K = 1 denoising step per sample, or K tokens."""

    t: Tensor  # [B] noise level before the action, 1 for pure noise
    s: Tensor  # [B] noise level after it
    state: Tensor  # [B, ...] input of the network
    action: Tensor  # [B, ...] the next noisy sample, or tokens
    log_prob: Tensor  # [B, K] under the policy that sampled
    mask: Tensor  # [B, K] which of the K actions were taken in this segment
    mean: Tensor | None = None  # [B, ...] mean of the distribution that the action was sampled from, if asked for
    # [B, K] log-prob of the sampler in the training precision minus that of its 8 bits; None without 8-bit rollouts
    precision_log_ratio: Tensor | None = None


@dataclass(frozen=True)
class Trajectory:
    """A batch of samples with the actions that generated them."""

    cond: Condition
    start: Tensor  # [B, ...] initial noise or tokens
    final: Tensor  # [B, ...] clean latents or token ids
    segments: tuple[Segment, ...] = ()

    def __len__(self) -> int:
        return len(self.cond)


@dataclass(frozen=True)
class Corrupted:
    """Clean samples after noise or masking."""

    x: Tensor  # [B, ...]
    t: Tensor  # [B] noise level in [0, 1], 1 for pure noise
    noise: Tensor  # [B, ...] the noise added, or which tokens are masked


@dataclass(frozen=True)
class Loss:
    """One loss per row, averaged over all rows of all ranks; the losses of an objective's parts add up."""

    rows: Tensor  # [B]
    metrics: dict[str, Tensor] = field(default_factory=dict)  # [B] or scalars, averaged over rows and parts
    steps: int = 1  # sampling steps in this part, by which its metrics are weighted


@dataclass(frozen=True)
class Placement:
    """Device and dtypes of a model."""

    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32  # of frozen parts
    attention_backend: str = "auto"
    trainable_dtype: torch.dtype | None = None  # of the network that trains; default `dtype`, float32 under fp16
    # Of the network that trains; default `device`. On the meta device its weights stay in their files until the engine
    # has sharded it; a network that cannot be loaded like that is loaded into host memory.
    trainable_device: torch.device | None = None
