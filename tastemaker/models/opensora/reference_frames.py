"""Frames of a clip that are known beforehand: which latents are held, from what pictures, and until which level."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...core.types import Metadata
from ...data.image_io import read_image
from ..nets.opensora_vae import CHUNK_LATENTS

EncodePixels = Callable[[Tensor], Tensor]  # of pixels [F, 3, H, W] of any size, latents [m, C, h, w]
DEFAULT_RULE = ("0", "0", "0", "0", "1", "0")  # what a rule that breaks off goes on with


@dataclass(frozen=True)
class MaskStrategyRule:
    """Latents of one reference that stand in the clip, and the level below which they are drawn anew."""

    reference: int
    first: int  # in the reference, from its end if below 0
    place: int  # in the clip, likewise
    length: int
    level: float


def parse_mask_strategy(strategy: str) -> list[MaskStrategyRule]:
    """As Open-Sora writes them: `loop, reference, first, place, length, level` and a semicolon between two rules."""
    found = []
    for text in filter(None, (part.strip() for part in strategy.split(";"))):
        told = text.split(",")
        try:
            numbers = [float(value) for value in (*told, *DEFAULT_RULE[len(told) :])]
        except ValueError:
            numbers = []
        if len(numbers) != len(DEFAULT_RULE) or numbers[0] != 0 or numbers[1] < 0 or not 0 <= numbers[5] <= 1:
            raise ValueError(
                f"the fact 'mask_strategy' says '{text:.60}'; expected up to six numbers, loop (0), reference, first, "
                "place, length and level, such as 0,0,0,0,1,0"
            )
        reference, first, place, length = (int(number) for number in numbers[1:5])
        found.append(MaskStrategyRule(reference, first, place, length, numbers[5]))
    return found


def reference_latents(
    facts: Sequence[Metadata], shape: tuple[int, ...], encode: EncodePixels, device: torch.device
) -> dict[str, Tensor]:
    """What facts `image` (paths or pixels) and `mask_strategy` hold: `held` latents [B, m, C, h, w], `until` [B, m].

    A latent is held while the level is above `until`, which is 1 where nothing is held; without facts there is nothing.
    """
    if all(fact.get("image") is None for fact in facts):
        return {}
    latents, until = torch.zeros(len(facts), *shape, device=device), torch.ones(len(facts), shape[0], device=device)
    for row, fact in enumerate(facts):
        if fact.get("image") is not None:
            known = [encode(pixels) for pixels in _pixels(fact["image"])]
            _place(latents[row], until[row], known, parse_mask_strategy(str(fact.get("mask_strategy", "0"))))
    return {"held": latents, "until": until}


def _pixels(image: object) -> list[Tensor]:
    """Pixels themselves, or those of files, a semicolon between two of them."""
    if isinstance(image, Tensor):
        return [image]
    if isinstance(image, (str, Path)):
        return [read_image(Path(path.strip())) for path in str(image).split(";")]
    raise ValueError(f"the fact 'image' is {type(image).__name__}; expected a path, several of them, or pixels")


def _place(latents: Tensor, until: Tensor, known: Sequence[Tensor], found: Sequence[MaskStrategyRule]) -> None:
    for rule in found:
        if rule.reference >= len(known):
            raise ValueError(
                f"the fact 'mask_strategy' asks for reference {rule.reference}, and 'image' names {len(known)}; "
                "they are counted from 0"
            )
        source = known[rule.reference]
        first, place = (
            nearest_chunk_start(at if at >= 0 else count + at, count)
            for at, count in ((rule.first, len(source)), (rule.place, len(latents)))
        )
        length = max(0, min(rule.length, len(latents) - place, len(source) - first))
        latents[place : place + length] = source[first : first + length]
        until[place : place + length] = rule.level


def nearest_chunk_start(at: int, count: int) -> int:
    """The beginning of a chunk that is next to a place, for latents mean what they do only in their own place."""
    chunk = at // CHUNK_LATENTS
    if at % CHUNK_LATENTS > CHUNK_LATENTS / 2 and chunk < count // CHUNK_LATENTS - 1:
        chunk += 1
    return chunk * CHUNK_LATENTS
