"""Plans of image models that take their latents in a list, or source images beside the prompt."""

from __future__ import annotations

import pytest
import torch
from tiers import fast

from tastemaker.config.load import load
from tastemaker.diagnostics.plan import estimate_resources
from tastemaker.models import flux2, qwen_image_21, sana, z_image

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


COUNTS = {  # published numbers of parameters in billions, and how far they are rounded
    "Tongyi-MAI/Z-Image": (z_image.Z_IMAGE, "ZImageTransformer2DModel", 6, 0.03),
    "black-forest-labs/FLUX.2-klein-4B": (flux2.FLUX2, "Flux2Transformer2DModel", 4, 0.04),
    "black-forest-labs/FLUX.2-klein-9B": (flux2.FLUX2, "Flux2Transformer2DModel", 9, 0.01),
    "black-forest-labs/FLUX.2-dev": (flux2.FLUX2, "Flux2Transformer2DModel", 32, 0.01),
    "Qwen/Qwen-Image-2.1": (qwen_image_21.QWEN_IMAGE_21, "QwenImage21Transformer2DModel", 7, 0.02),
    "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers": (sana.SANA, "SanaTransformer2DModel", 1.6, 0.01),
    "Efficient-Large-Model/Sana_Sprint_0.6B_1024px_diffusers": (sana.SPRINT, "SanaTransformer2DModel", 0.6, 0.02),
}


@pytest.mark.parametrize("hub", fast(COUNTS, "Tongyi-MAI/Z-Image"))
def test_networks_have_about_the_published_number_of_weights(hub: str) -> None:
    import diffusers

    published, name, billions, tolerance = COUNTS[hub]
    with torch.device("meta"):
        net = getattr(diffusers, name)(**published.configs[hub]["transformer"])
    assert sum(p.numel() for p in net.parameters()) == pytest.approx(billions * 1e9, rel=tolerance)
