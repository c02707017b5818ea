"""Z-Image compared with diffusers' pipeline: prompts, samples, guidance, timesteps and checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiers import fast
from tiny_pipelines import make_z_image_pipeline, sample_latents

from tastemaker.core.guidance import GuidedBackbone
from tastemaker.core.policy import Backbone, Guidance
from tastemaker.core.types import Placement
from tastemaker.models.z_image import ZImageSpec, to_original
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import RectifiedFlow

PROMPTS = ["a red cat", "Two dogs, on a boat by the sea"]
SPEC = ZImageSpec(height=64, width=48, max_text_tokens=40)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    pipeline, folder = make_z_image_pipeline(shift=6.0), tmp_path_factory.mktemp("z_image")
    pipeline.save_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline, str(folder)


GUIDANCE = {
    "turbo": (None, {"guidance_scale": 0.0}),
    "base": (Guidance(5.0, "blurry"), {"guidance_scale": 4.0}),
    "normalized": (Guidance(5.0, "blurry", rescale="limit"), {"guidance_scale": 4.0, "cfg_normalization": True}),
    "truncated": (Guidance(5.0, "blurry", interval=(0.4, 1.0)), {"guidance_scale": 4.0, "cfg_truncation": 0.6}),
}


@pytest.mark.parametrize("case", fast(GUIDANCE, "base"))
@torch.no_grad()
def test_samples_equal_the_diffusers_pipeline(saved: tuple[Any, str], case: str) -> None:
    pipeline, folder = saved
    guidance, options = GUIDANCE[case]
    model: Backbone = replace(SPEC, weights=folder).load(Placement())
    model = GuidedBackbone(model, guidance) if guidance else model
    noise = torch.randn(2, *model.shape, generator=torch.Generator().manual_seed(0))
    sampled = sample_latents(model, GaussianProcess(RectifiedFlow(6.0), num_steps=4), PROMPTS, noise)
    options = {**options, "height": 64, "width": 48, "num_inference_steps": 4, "max_sequence_length": 40}
    latents, pixels = (  # the pipeline overwrites lists of prompts
        pipeline(
            [*PROMPTS],
            negative_prompt=[guidance.negative_prompt] * 2 if guidance else None,
            latents=noise[:, 0],
            output_type=kind,
            **options,
        ).images
        for kind in ("latent", "pt")
    )
    torch.testing.assert_close(sampled[:, 0], latents, atol=5e-5, rtol=0)
    torch.testing.assert_close(model.decode(sampled)[:, 0], pixels, atol=5e-5, rtol=0)
    assert not torch.allclose(latents[0], latents[1], atol=1e-2)


@pytest.mark.slow
def test_prompts_have_the_template_and_the_hidden_states_of_the_pipeline(saved: tuple[Any, str]) -> None:
    pipeline, folder = saved
    tensors = replace(SPEC, weights=folder).load(Placement()).embed([*PROMPTS, ""]).tensors
    with torch.no_grad():
        expected, _ = pipeline.encode_prompt([*PROMPTS, ""], do_classifier_free_guidance=False, max_sequence_length=40)
    assert tensors["lengths"].tolist() == [len(embeds) for embeds in expected]
    for row, embeds in zip(tensors["prompt_embeds"], expected, strict=True):
        torch.testing.assert_close(row[: len(embeds)], embeds, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_single_file_of_the_authors_replaces_the_transformer(saved: tuple[Any, str], tmp_path: Path) -> None:
    pipeline, folder = saved
    state = pipeline.transformer.state_dict()
    original = to_original(state, {})
    assert original["layers.0.attention.qkv.weight"].shape[0] == 3 * pipeline.transformer.dim
    assert {"x_embedder.weight", "final_layer.linear.weight", "noise_refiner.0.attention.q_norm.weight"} <= {*original}
    for tensors, name in ((original, "model.diffusion_model."), (state, "")):
        save_file({name + key: x.contiguous() for key, x in tensors.items()}, tmp_path / "z.safetensors")
        loaded = replace(SPEC, weights=folder, transformer=str(tmp_path / "z.safetensors")).load(Placement()).net
        assert all(x.equal(state[key]) for key, x in loaded.state_dict().items())


@pytest.mark.slow
def test_predictions_do_not_depend_on_the_batch() -> None:
    model = ZImageSpec().tiny().load(Placement())
    x, t = torch.randn(3, *model.shape, generator=torch.Generator().manual_seed(0)), torch.tensor([0.2, 0.5, 1.0])
    with torch.no_grad():
        batched = model.predict(x, t, model.embed([*PROMPTS, ""]))
        single = model.predict(x[2:], t[2:], model.embed([""]))
    torch.testing.assert_close(batched[2:], single, atol=1e-5, rtol=0)
