"""Scores that authors published for images, with their provenance: reference_scores.json."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter

from ..core.safe_files import read_json

FILE = Path(__file__).with_name("reference_scores.json")


@dataclass(frozen=True)
class ReferenceScore:
    """What somebody stated about a reward's scores; it cannot be compared without `scores`."""

    reward: str  # its registered name
    source: str  # who stated it, and where
    stated: str  # in words
    images: tuple[str | tuple[float, float, float], ...] = ()  # addresses of files, or plain colors in [0, 1]
    targets: tuple[str | tuple[float, float, float], ...] = ()  # metadata `target` of each image
    prompts: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    tolerance: float = 0.02
    needs_weights: bool = True  # False: follows from the definition, so that it holds for tiny rewards too

    def missing_files(self, folder: str) -> list[str]:
        """The addresses of images that are not in the folder."""
        files = [image for image in (*self.images, *self.targets) if isinstance(image, str)]
        return [file for file in files if not folder or not (Path(folder) / file.rpartition("/")[2]).is_file()]


@cache
def load_reference_scores() -> tuple[ReferenceScore, ...]:
    """All stored reference scores."""
    scores: tuple[ReferenceScore, ...] = TypeAdapter(tuple[ReferenceScore, ...]).validate_python(read_json(FILE))
    return scores
