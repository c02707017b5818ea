"""In which form a folder of the hub's keeps its tensors."""

from __future__ import annotations

from pathlib import Path

from ..pretrained import VARIANT

ENDS = (".safetensors", ".bin")  # a pickle is read for its tensors alone: both libraries refuse all else


def form(folder: Path) -> tuple[bool, str | None]:
    """Whether it is to be read from safetensors, and in which variant if there is no other; the fullest comes first."""
    names = sorted(file.name for file in folder.glob("*") if file.suffix in ENDS)
    plain = [name for name in names if not VARIANT.search(name)]
    found = sorted(plain or names, key=lambda name: ENDS.index(Path(name).suffix))
    if not found:
        return True, None  # which is refused by the libraries, in their own words
    variant = VARIANT.search(found[0])
    return found[0].endswith(ENDS[0]), variant[1] if variant else None
