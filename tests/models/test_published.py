"""What all published models share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tastemaker.models.flux import Flux
from tastemaker.models.qwen_image import QwenImage
from tastemaker.models.sd3 import Sd3
from tastemaker.models.sd15 import Sd15
from tastemaker.models.sdxl import Sdxl
from tastemaker.pretrained import Source


@pytest.mark.parametrize("spec", [Flux, QwenImage, Sd3, Sd15, Sdxl])
def test_only_what_is_not_here_is_fetched_and_nothing_else_in_its_place(spec: type[Flux], tmp_path: Path) -> None:
    (usual,) = spec().sources
    assert usual.hub == spec().weights and usual.size != Source("x").size
    assert spec(weights="somebody/else").sources == (Source("somebody/else"),)
    assert spec(weights=str(tmp_path)).sources == () and spec().tiny().sources == ()
