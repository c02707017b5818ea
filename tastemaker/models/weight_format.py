"""Detect the weight format (safetensors or bin) and variant of a model folder."""

from __future__ import annotations

from pathlib import Path

from .pretrained import VARIANT

WEIGHT_SUFFIXES = (".safetensors", ".bin")  # a pickle is read for its tensors alone: both libraries refuse all else


def detect_weight_format(folder: Path) -> tuple[bool, str | None]:
    """Return whether to read safetensors, and the variant if only variants exist (highest precision first)."""
    names = sorted(file.name for file in folder.glob("*") if file.suffix in WEIGHT_SUFFIXES)
    plain = [name for name in names if not VARIANT.search(name)]
    found = sorted(plain or names, key=lambda name: WEIGHT_SUFFIXES.index(Path(name).suffix))
    if not found:
        return True, None  # which is refused by the libraries, in their own words
    variant = VARIANT.search(found[0])
    return found[0].endswith(WEIGHT_SUFFIXES[0]), variant[1] if variant else None
