"""FLUX.1 Kontext compared with diffusers' pipeline: samples and reference images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxKontextPipeline, FluxTransformer2DModel
from tiny_pipelines import (
    CLIP_TOKENS,
    T5_VOCAB_SIZE,
    FixedNoise,
    byte_clip_tokenizer,
    byte_t5_tokenizer,
    random_network,
)
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from tastemaker.core.policy import Backbone, Guidance
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement, select_rows
from tastemaker.data.image_io import read_image, save_image
from tastemaker.data.prompts import EditFile
from tastemaker.models.flux import TINY_CONFIGS
from tastemaker.models.flux_kontext import FluxKontextSpec
from tastemaker.models.image_backbone import resize_and_center_crop
from tastemaker.models.latent_packing import pack_latents
from tastemaker.models.pipeline_components import dynamic_shift
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import RectifiedFlow

PROMPTS = ["a red cat", "Two dogs, on a boat"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    pipeline = FluxKontextPipeline(
        FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
        random_network(AutoencoderKL, TINY_CONFIGS["vae"], 1),
        random_network(CLIPTextModel, CLIPTextConfig(**{**TINY_CONFIGS["text_encoder"], **CLIP_TOKENS}), 2),
        byte_clip_tokenizer(),
        random_network(T5EncoderModel, T5Config(**{**TINY_CONFIGS["text_encoder_2"], "vocab_size": T5_VOCAB_SIZE}), 3),
        byte_t5_tokenizer(),
        random_network(FluxTransformer2DModel, TINY_CONFIGS["transformer"], 4),
    )
    pipeline.set_progress_bar_config(disable=True)
    folder = tmp_path_factory.mktemp("kontext")
    pipeline.save_pretrained(folder)
    return pipeline, str(folder)


def random_images(height: int, width: int) -> Tensor:
    return torch.rand(2, 1, 3, height, width, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("edited", [True, False], ids=["edit", "text-to-image"])
@torch.no_grad()
def test_samples_equal_the_diffusers_pipeline(saved: tuple[Any, str], edited: bool) -> None:
    pipeline, folder = saved
    model = FluxKontextSpec(folder, height=96, width=64, max_text_tokens=24).load(Placement())
    noise, images = torch.randn(2, *model.shape, generator=torch.Generator().manual_seed(0)), random_images(96, 64)
    fixed_noise: Any = FixedNoise(noise)
    cond = model.embed(PROMPTS, [{"image": reference} for reference in images] if edited else [])
    sampled = (
        GaussianProcess(RectifiedFlow(dynamic_shift(tokens=24)), num_steps=5)
        .start(model, cond, fixed_noise)
        .finish()
        .final
    )
    options = {"prompt": PROMPTS, "height": 96, "width": 64, "num_inference_steps": 5, "max_sequence_length": 24}
    options |= {"max_area": 96 * 64, "_auto_resize": False, "guidance_scale": 2.5, "latents": pack_latents(noise[:, 0])}
    image = images[:, 0] if edited else None
    latents = pipeline(**options, image=image, output_type="latent").images
    torch.testing.assert_close(pack_latents(sampled[:, 0]), latents, atol=1e-5, rtol=0)
    pixels = pipeline(**options, image=image, output_type="pt").images
    torch.testing.assert_close(model.decode(sampled)[:, 0], pixels, atol=1e-5, rtol=0)


def test_prediction_depends_on_each_samples_reference_image(tmp_path: Path) -> None:
    model = FluxKontextSpec().tiny().load(Placement())
    assert isinstance(model, Backbone)
    images = random_images(48, 40)
    save_image(images[0], tmp_path / "a.png")
    cond = model.embed(["a", "a"], [{"image": str(tmp_path / "a.png")}, {"image": images[1]}])
    x, t = Randomness(0, 0, torch.arange(1)).normal("x", *model.shape).expand(2, -1, -1, -1, -1), torch.full((2,), 0.5)
    out, plain = model.predict(x, t, cond), model.predict(x, t, model.embed(["a", "a"]))
    assert not torch.allclose(out[0], out[1], atol=1e-5) and not torch.allclose(out, plain, atol=1e-5)
    single = model.predict(x[1:], t[1:], select_rows(cond, torch.tensor([1])))
    torch.testing.assert_close(single, out[1:], atol=1e-5, rtol=0)


def test_unconditional_branch_keeps_the_reference_image() -> None:
    process = GaussianProcess(num_steps=2)
    guided = process.wrap_guidance(FluxKontextSpec().tiny().load(Placement()), Guidance(2.0))
    cond = guided.embed(PROMPTS, [{"image": image} for image in random_images(32, 32)])
    assert cond.tensors["reference"].equal(cond.tensors["negative.reference"])
    assert process.start(guided, cond, Randomness(0, 0, torch.arange(2))).finish().final.isfinite().all()


def test_reference_images_are_center_cropped() -> None:
    wide = torch.zeros(1, 3, 20, 80)
    wide[..., 30:50] = 1
    assert (
        resize_and_center_crop(wide, 40, 40).shape == (1, 3, 40, 40)
        and resize_and_center_crop(wide, 40, 40)[..., 4:-4].mean() > 0.99
    )
    assert resize_and_center_crop(wide, 20, 80) is wide or resize_and_center_crop(wide, 20, 80).equal(wide)


def test_batch_with_a_missing_reference_image_is_refused() -> None:
    model = FluxKontextSpec().tiny().load(Placement())
    with pytest.raises(ValueError, match=r"'b'.*`image`.*TM431"):
        model.embed(["a", "b"], [{"image": random_images(32, 32)[0]}, {}])
    with pytest.raises(ConfigError, match=r"FLUX\.1-Kontext-dev.*TM505"):
        FluxKontextSpec().load(Placement())


def test_reference_images_are_read_from_files(tmp_path: Path) -> None:
    save_image(random_images(8, 8)[0], tmp_path / "a.png")
    (tmp_path / "edits.jsonl").write_text(json.dumps({"prompt": "redder", "image": "a.png", "text": "x"}))
    dataset = EditFile(tmp_path / "edits.jsonl").load(0)
    assert dataset.first_prompts(1).metadata == ({"image": str(tmp_path / "a.png"), "text": "x"},)
    (tmp_path / "none.jsonl").write_text(json.dumps({"prompt": "redder"}))
    with pytest.raises(ConfigError, match=r"none\.jsonl, line 1: .*'image'.*TM223"):
        EditFile(tmp_path / "none.jsonl").load(0)
    (tmp_path / "lost.csv").write_text("prompt,image\nredder,b.png\n")
    with pytest.raises(ConfigError, match=r"lost\.csv, line 2: .*b\.png.*TM234"):
        EditFile(tmp_path / "lost.csv").load(0)
    with pytest.raises(ValueError, match=r"\.jsonl or \.csv.*TM222"):
        EditFile(Path("edits.txt"))


def test_tiny_recipe_has_reference_images() -> None:
    metadata = EditFile().load(0).first_prompts(4).metadata
    assert [read_image(Path(entry["image"])).shape for entry in metadata] == [(1, 3, 64, 64)] * 4
