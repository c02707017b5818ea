"""Qwen-Image-Edit-Plus compared with diffusers' pipeline: one to three sources of different sizes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from image_pipelines import make_qwen_edit_pipeline
from PIL import Image
from rich.console import Console
from tiers import fast
from tiny_pipelines import FixedNoise
from torch import Tensor

from tastemaker.core.guidance import GuidedBackbone
from tastemaker.core.policy import Guidance
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement, select_rows
from tastemaker.data.embedding_precompute import EmbedOptions, embed_prompts
from tastemaker.data.image_io import save_image, to_uint8
from tastemaker.data.prompts import EditFile
from tastemaker.models.pretrained import silence_libraries
from tastemaker.models.qwen_image_edit import QwenImageEditSpec, size_of_area
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import RectifiedFlow

PROMPT = "make the cup red"
SPEC = QwenImageEditSpec(height=64, width=96, max_text_tokens=1400, source_pixels=64 * 64, condition_pixels=96 * 96)
SIZES = [(80, 60), (48, 96), (64, 64)]  # height and width of the sources


@pytest.fixture(
    scope="module", params=[pytest.param(False, id="2509", marks=pytest.mark.slow), pytest.param(True, id="2511")]
)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    folder = tmp_path_factory.mktemp("edit")
    with silence_libraries():
        pipeline = make_qwen_edit_pipeline(zero_cond_t=request.param)
        pipeline.save_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline, str(folder)


def random_source(number: int) -> Tensor:
    noise = torch.rand(1, 3, *SIZES[number], generator=torch.Generator().manual_seed(number))
    return (noise * 255).round() / 255


@pytest.mark.parametrize("count", fast([1, 2, 3], 3))
@torch.no_grad()
def test_samples_equal_the_diffusers_pipeline(
    saved: tuple[Any, str], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, folder = saved
    module = "diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus"
    monkeypatch.setattr(f"{module}.VAE_IMAGE_SIZE", SPEC.source_pixels)
    monkeypatch.setattr(f"{module}.CONDITION_IMAGE_SIZE", SPEC.condition_pixels)
    sources = [random_source(number) for number in range(count)]
    model = GuidedBackbone(replace(SPEC, weights=folder).load(Placement()), Guidance(4.0, " ", rescale="token"))
    noise = torch.randn(1, *model.shape, generator=torch.Generator().manual_seed(0))
    path = RectifiedFlow(math.exp(0.5 + 0.4 * (24 - 256) / 7936), shift_terminal=0.02)
    fixed_noise: Any = FixedNoise(noise)
    cond = model.embed([PROMPT], [{"image": sources if count > 1 else sources[0]}])
    sampled = GaussianProcess(path, num_steps=4).start(model, cond, fixed_noise).finish().final
    options = {"height": 64, "width": 96, "num_inference_steps": 4, "negative_prompt": " ", "true_cfg_scale": 4.0}
    options |= {"image": [Image.fromarray(to_uint8(each)[0]) for each in sources], "latents": noise.flatten(1, 2)}
    with silence_libraries():
        latents = pipeline(prompt=PROMPT, output_type="latent", **options).images
        pixels = pipeline(prompt=PROMPT, output_type="pt", **options).images
    torch.testing.assert_close(sampled.flatten(1, 2), latents, atol=2e-5, rtol=0)
    torch.testing.assert_close(model.decode(sampled)[:, 0], pixels, atol=2e-5, rtol=0)


@torch.no_grad()
def test_samples_do_not_depend_on_the_others_of_a_batch(tmp_path: Path) -> None:
    model = QwenImageEditSpec().tiny().load(Placement())
    save_image(random_source(0), tmp_path / "a.png")
    images: list[Any] = [
        str(tmp_path / "a.png"),
        [random_source(1), random_source(2)],
        random_source(1),
        random_source(0),
    ]
    cond = model.embed(["a", "bb", "a", "a"], [{"image": image} for image in images])
    x, t = Randomness(0, 0, torch.arange(4)).normal("x", *model.shape), torch.full((4,), 0.5)
    x[3] = x[0]
    batched = model.predict(x, t, cond)
    torch.testing.assert_close(batched[3], batched[0], atol=1e-6, rtol=0)  # a file and its pixels
    for row, image in enumerate(images):
        single = model.embed([cond.prompts[row]], [{"image": image}])
        torch.testing.assert_close(model.predict(x[[row]], t[:1], single)[0], batched[row], atol=1e-5, rtol=0)
        selected = select_rows(cond, torch.tensor([row]))
        torch.testing.assert_close(model.predict(x[[row]], t[:1], selected)[0], batched[row], atol=1e-5, rtol=0)
    plain = model.predict(x, t, model.embed(["a", "bb", "a", "a"]))
    assert not torch.allclose(plain, batched, atol=1e-4)


def test_prompt_embeddings_depend_on_the_sources() -> None:
    model = QwenImageEditSpec().tiny().load(Placement())
    cond = model.embed(["a", "a"], [{"image": random_source(0)}, {"image": random_source(2)}])
    first, second = cond.tensors["prompt_embeds"]
    assert not torch.allclose(first, second, atol=1e-5)
    again = model.embed(["a"], [{"image": random_source(2)}]).tensors["prompt_embeds"]
    torch.testing.assert_close(again[0], second)


def test_sources_that_cannot_be_read_are_refused() -> None:
    model = QwenImageEditSpec().tiny().load(Placement())
    source = random_source(0)
    with pytest.raises(ValueError, match=r"'b'.*`image`.*TM2451"):
        model.embed(["a", "b"], [{"image": source}, {}])
    with pytest.raises(ValueError, match=r"4 images.*TM2455"):
        model.embed(["a"], [{"image": [source] * 4}])
    with pytest.raises(ValueError, match=r"got int.*TM2450"):
        model.embed(["a"], [{"image": [3]}])
    with pytest.raises(ConfigError, match=r"TM2452"):
        replace(QwenImageEditSpec().tiny(), max_text_tokens=2).load(Placement()).embed(["a"], [{"image": [source] * 3}])
    with pytest.raises(ConfigError, match=r"Qwen-Image-Edit-2509.*TM505"):
        QwenImageEditSpec().load(Placement())


@pytest.mark.parametrize(("size", "expected"), [((768, 1024), (896, 1184)), ((512, 512), (1024, 1024))])
def test_sources_keep_their_aspect_ratio(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert size_of_area(1024 * 1024, *size) == expected
    assert size_of_area(1024, 1, 1000) == (32, 1024)


def test_sources_of_the_sample_size_make_one_network_call() -> None:
    model = replace(QwenImageEditSpec().tiny(), source_fit="sample", source_pixels=64 * 64).load(Placement())
    cond = model.embed(["a", "b"], [{"image": random_source(0)}, {"image": random_source(1)}])
    assert cond.tensors["sources"].shape == (2, 4, 64)
    assert cond.tensors["source_sizes"].tolist() == [[[2, 2], [0, 0], [0, 0]]] * 2
    assert model.with_size(64, 32).embed(["a"], [{"image": random_source(0)}]).tensors["sources"].shape == (1, 8, 64)


@pytest.mark.slow
def test_embeddings_are_stored_with_their_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = EmbedOptions("models/qwen-image-edit", ["data={type: edit_file}"], None, tmp_path)
    embed_prompts(options, Placement(), tiny=True, console=Console(quiet=True))
    batch = EditFile().load(0).first_prompts(2)
    models = [replace(QwenImageEditSpec().tiny(), embeddings=folder).load(Placement()) for folder in (None, tmp_path)]
    computed, stored = (
        GuidedBackbone(model, Guidance(4.0, " ")).embed(batch.prompts, batch.metadata).tensors for model in models
    )
    torch.testing.assert_close(stored, computed)
    monkeypatch.setattr(models[1].prompt_encoder, "_load", None)  # the encoder was not needed, or it would be there
    with pytest.raises(TypeError):
        models[1].embed(batch.prompts, [{"image": random_source(1)}] * 2)  # other sources were not embedded
