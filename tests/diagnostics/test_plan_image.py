"""Plans of image models that take their latents in a list, or source images beside the prompt."""

from __future__ import annotations

import pytest

from tastemaker.config.load import load
from tastemaker.diagnostics.plan import estimate_resources
from tastemaker.models import flux2, z_image

SMALL = [
    "model.height=64",
    "model.width=64",
    "model.max_text_tokens=32",
    "rewards=null",
    "rewards={color: {type: color}}",
]


@pytest.fixture
def small_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, published in ((z_image, z_image.Z_IMAGE), (flux2, flux2.FLUX2)):
        for hub in published.configs:
            monkeypatch.setitem(published.configs, hub, module.TINY_CONFIGS)


@pytest.mark.slow
def test_plan_counts_samples_and_source_images(small_networks: None) -> None:
    turbo = estimate_resources(load("grpo-z-image-turbo", SMALL))
    assert (turbo.collect_batch, turbo.update_batch) == (8, 8)
    path = "process.path.flux2_tokens=16"
    plain, edit = (estimate_resources(load(f"grpo-flux2-klein{end}", [*SMALL, path])) for end in ("", "-edit"))
    assert edit.update_batch == plain.update_batch == 8
    assert (
        1.2 * plain.update_flops < edit.update_flops < 2 * plain.update_flops
    )  # 48 and 64 tokens instead of 32 and 16
