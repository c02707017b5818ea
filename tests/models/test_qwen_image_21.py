"""Qwen-Image 2.1 compared with diffusers' pipeline: samples, the alpha channel, and batches of several lengths."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiers import fast
from tiny_pipelines import FixedNoise
from torch import Tensor

from tastemaker.core.guidance import GuidedBackbone
from tastemaker.core.policy import Backbone, Guidance
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.models.pretrained import silence_libraries
from tastemaker.models.qwen_image_21 import QwenImage21Spec
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import RectifiedFlow
from tastemaker.verification.whole_pipelines import make_qwen_image_21_pipeline

PROMPTS = ["a red cat on a mat", "two dogs"]
SPEC = QwenImage21Spec(height=64, width=96, max_text_tokens=200)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    folder = tmp_path_factory.mktemp("qwen21")
    with silence_libraries():
        pipeline = make_qwen_image_21_pipeline()
        pipeline.save_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline, str(folder)


@pytest.mark.parametrize("guidance", fast([None, Guidance(3.0, "blurry")], None), ids=["plain", "guided"])
@torch.no_grad()
def test_samples_equal_the_diffusers_pipeline(saved: tuple[Any, str], guidance: Guidance | None) -> None:
    """Prompts of two lengths in one batch; the pipeline gets them one by one, since its padding moves the image."""
    pipeline, folder = saved
    model: Backbone = replace(SPEC, weights=folder).load(Placement())
    guided = model if guidance is None else GuidedBackbone(model, guidance)
    noise = torch.randn(2, *model.shape, generator=torch.Generator().manual_seed(0))
    path = RectifiedFlow(math.exp(0.5 + 0.4 * (24 - 256) / 7936), shift_terminal=0.02)
    fixed_noise: Any = FixedNoise(noise)
    sampled = GaussianProcess(path, num_steps=4).start(guided, guided.embed(PROMPTS), fixed_noise).finish().final
    pixels = model.decode(sampled)[:, 0]
    options: dict[str, Any] = {"height": 64, "width": 96, "num_inference_steps": 4}
    options |= {"true_cfg_scale": guidance.scale, "negative_prompt": guidance.negative_prompt} if guidance else {}
    for row, prompt in enumerate(PROMPTS):
        options["latents"] = noise[row].flatten(2).transpose(1, 2)
        with silence_libraries():
            latents = pipeline(prompt, output_type="latent", **options).images
            rgba = pipeline(prompt, output_type="pt", **options).images
        expected = latents.transpose(1, 2).reshape(1, *model.shape[1:])
        torch.testing.assert_close(sampled[row], expected, atol=2e-5, rtol=0)
        alpha = rgba[:, 3:]
        torch.testing.assert_close(pixels[row : row + 1], rgba[:, :3] * alpha + 1 - alpha, atol=2e-5, rtol=0)


def test_encoded_images_are_opaque(saved: tuple[Any, str]) -> None:
    pipeline, folder = saved
    model = replace(SPEC, weights=folder).load(Placement())
    pixels = torch.rand(2, *model.pixels, generator=torch.Generator().manual_seed(0))
    rgba = torch.cat([2 * pixels[:, 0] - 1, torch.ones(2, 1, 64, 96)], 1)[:, :, None]
    mean, std = (torch.tensor(pipeline.vae.config[key])[:, None, None] for key in ("latents_mean", "latents_std"))
    with torch.no_grad():
        raw = pipeline.vae.encode(rgba).latent_dist.mode()[:, :, 0]
    torch.testing.assert_close(model.encode(pixels)[:, 0], (raw - mean) / std, atol=1e-5, rtol=1e-5)


def test_decoder_gradient_is_the_same_with_checkpointing() -> None:
    grads: list[Tensor | None] = []
    for recompute in (True, False):
        model = replace(QwenImage21Spec().tiny(), checkpoint_decoder=recompute).load(Placement())
        x = Randomness(0, 0, torch.arange(2)).normal("x", *model.shape).requires_grad_()
        model.decode(x).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[0], grads[1])
    assert grads[0] is not None and bool(grads[0].any())


@torch.no_grad()
def test_predictions_do_not_depend_on_the_batch() -> None:
    model = QwenImage21Spec().tiny().load(Placement())
    prompts = ["a", "two blue dogs", "b", ""]
    cond = model.embed(prompts)
    x, t = Randomness(0, 0, torch.arange(4)).normal("x", *model.shape), torch.tensor([0.2, 0.5, 0.8, 1.0])
    batched = model.predict(x, t, cond)
    for row, prompt in enumerate(prompts):
        single = model.predict(x[[row]], t[[row]], model.embed([prompt]))
        torch.testing.assert_close(single[0], batched[row], atol=1e-5, rtol=0)
    assert not torch.allclose(model.predict(x[:1], t[:1], model.embed(["b"])), batched[:1], atol=1e-5)


def test_source_images_are_refused() -> None:
    model = QwenImage21Spec().tiny().load(Placement())
    with pytest.raises(ValueError, match=r"qwen_image_edit.*TM2458"):
        model.embed(["a"], [{"image": torch.zeros(1, 3, 8, 8)}])
    with pytest.raises(ConfigError, match=r"Qwen-Image-2\.1.*TM505"):
        QwenImage21Spec().load(Placement())
