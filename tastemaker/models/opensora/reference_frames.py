"""Reference frames of Open-Sora: which latents are fixed, from which images, and down to which timestep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...core.types import Metadata
from ...data.image_io import read_image
from ..nets.opensora_vae import CHUNK_LATENTS

EncodePixels = Callable[[Tensor], Tensor]  # pixels [F, 3, H, W] of any size to latents [m, C, h, w]
DEFAULT_RULE = ("0", "0", "0", "0", "1", "0")  # completes rules with fewer values


@dataclass(frozen=True)
class MaskStrategyRule:
    """Latents of a reference that are copied into the video, and the timestep below which they are generated again."""

    reference: int
    source_start: int  # in the reference; counted from its end if negative
    target_start: int  # in the video; counted from its end if negative
    length: int
    edit_ratio: float  # in [0, 1]


def parse_mask_strategy(strategy: str) -> list[MaskStrategyRule]:
    """Rules in Open-Sora's format `loop,reference,source_start,target_start,length,edit_ratio;...`."""
    rules = []
    for text in filter(None, (part.strip() for part in strategy.split(";"))):
        values = text.split(",")
        try:
            numbers = [float(value) for value in (*values, *DEFAULT_RULE[len(values) :])]
        except ValueError:
            numbers = []
        if len(numbers) != len(DEFAULT_RULE) or numbers[0] != 0 or numbers[1] < 0 or not 0 <= numbers[5] <= 1:
            raise ValueError(
                f"metadata: 'mask_strategy' has the rule '{text:.60}'; write up to six numbers (loop = 0, "
                "reference, source start, target start, length, edit ratio), such as 0,0,0,0,1,0 [TM488]"
            )
        reference, source_start, target_start, length = (int(number) for number in numbers[1:5])
        rules.append(MaskStrategyRule(reference, source_start, target_start, length, numbers[5]))
    return rules


def reference_latents(
    metadata: Sequence[Metadata], shape: tuple[int, ...], encode: EncodePixels, device: torch.device
) -> dict[str, Tensor]:
    """`reference_latents` [B, m, C, h, w] and timesteps `fixed_until` [B, m] from metadata `image` and `mask_strategy`.

    A latent is fixed while t is above `fixed_until`, which is 1 for latents without one. Empty without metadata.
    """
    if all(entry.get("image") is None for entry in metadata):
        return {}
    count = len(metadata)
    latents, until = torch.zeros(count, *shape, device=device), torch.ones(count, shape[0], device=device)
    for row, entry in enumerate(metadata):
        if entry.get("image") is not None:
            references = [encode(pixels) for pixels in _read_references(entry["image"])]
            rules = parse_mask_strategy(str(entry.get("mask_strategy", "0")))
            _apply_rules(latents[row], until[row], references, rules)
    return {"reference_latents": latents, "fixed_until": until}


def _read_references(image: object) -> list[Tensor]:
    """Pixels of one or more files, separated by semicolons; or the given pixels."""
    if isinstance(image, Tensor):
        return [image]
    if isinstance(image, (str, Path)):
        return [read_image(Path(path.strip())) for path in str(image).split(";")]
    raise ValueError(
        f"metadata: expected a path, a list of paths or pixels as 'image', got {type(image).__name__}; correct "
        "'image' [TM489]"
    )


def _apply_rules(
    latents: Tensor, until: Tensor, references: Sequence[Tensor], rules: Sequence[MaskStrategyRule]
) -> None:
    for rule in rules:
        if rule.reference >= len(references):
            raise ValueError(
                f"metadata: 'mask_strategy' uses reference {rule.reference}, but 'image' has {len(references)}; "
                f"use references from 0 to {len(references) - 1}, or add images [TM490]"
            )
        source = references[rule.reference]
        start, target = (
            nearest_chunk_start(index if index >= 0 else count + index, count)
            for index, count in ((rule.source_start, len(source)), (rule.target_start, len(latents)))
        )
        length = max(0, min(rule.length, len(latents) - target, len(source) - start))
        latents[target : target + length] = source[start : start + length]
        until[target : target + length] = rule.edit_ratio


def nearest_chunk_start(index: int, count: int) -> int:
    """The nearest start of a chunk, because a latent can be decoded only at its own position within a chunk."""
    chunk = index // CHUNK_LATENTS
    if index % CHUNK_LATENTS > CHUNK_LATENTS / 2 and chunk < count // CHUNK_LATENTS - 1:
        chunk += 1
    return chunk * CHUNK_LATENTS
