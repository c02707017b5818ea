"""How large LlamaGen was published, and which of it was released."""

from __future__ import annotations

from typing import Literal

from ...core.registry import ConfigError
from ..pretrained import WeightsSource
from ..vq import LLAMAGEN, LLAMAGEN_TEXT

LlamagenConditioning = Literal["class", "caption"]
LlamagenSize = Literal["B", "L", "XL", "XXL", "XXXL", "1B", "3B", "7B", "tiny"]
SIZES: dict[LlamagenSize, tuple[int, int, int]] = {
    "B": (768, 12, 12),
    "L": (1024, 24, 16),
    "XL": (1280, 36, 20),
    "XXL": (1536, 48, 24),
    "XXXL": (2560, 48, 40),
    "1B": (2048, 22, 32),
    "3B": (3200, 24, 32),
    "7B": (4096, 32, 32),
    "tiny": (32, 2, 2),
}  # width, depth and heads
DOWNLOAD_SIZES = {"B": "0.4 GB", "L": "1.4 GB", "XL": "3.1 GB", "XXL": "2.8 GB", "3B": "6.2 GB"}  # of the files
RELEASED_SIZES: dict[LlamagenConditioning, tuple[str, ...]] = {
    "class": ("B 256", "L 256", "B 384", "L 384", "XL 384", "XXL 384", "3B 384"),
    "caption": ("XL 256", "XL 512"),
}


def released_source(size: LlamagenSize, pixels: int, told: LlamagenConditioning) -> WeightsSource:
    """The file of that size."""
    if f"{size} {pixels}" not in RELEASED_SIZES[told]:
        raise ConfigError(
            f"model: of size {size} at {pixels} pixels told a {told} none was released; there are "
            f"{', '.join(RELEASED_SIZES[told])}; choose one, or set model.weights"
        )
    if told == "class":
        return WeightsSource(LLAMAGEN, f"c2i_{size}_{pixels}.pt", DOWNLOAD_SIZES[size], "MIT")
    stage = "stage1_256" if pixels == 256 else "stage2_512"
    return WeightsSource(LLAMAGEN_TEXT, f"t2i_{size}_{stage}.pt", DOWNLOAD_SIZES[size], "MIT")
