"""FLUX.2 compared with diffusers' pipelines: prompts, samples, source images, timesteps and checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from PIL import Image
from safetensors.torch import save_file
from tiers import fast
from tiny_pipelines import FixedNoise, make_flux2_pipeline
from torch import Tensor

from tastemaker.core.guidance import GuidedBackbone
from tastemaker.core.policy import Backbone, Guidance
from tastemaker.core.types import Metadata, Placement
from tastemaker.data.image_io import save_image
from tastemaker.models.flux2 import Flux2Spec, to_original
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import RectifiedFlow, flux2_shift

PROMPTS = ["a red cat", "Two dogs, on a boat"]
SPEC = Flux2Spec(height=96, width=64, max_text_tokens=48)
LAYERS = (1, 2, 3)  # of the tiny text encoder, quarters of its layers as published


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, str]]:
    saved = {}
    for name in ("klein", "dev"):
        pipeline, folder = make_flux2_pipeline(dev=name == "dev"), tmp_path_factory.mktemp(name)
        pipeline.save_pretrained(folder)
        pipeline.set_progress_bar_config(disable=True)
        saved[name] = pipeline, str(folder)
    return saved


def source_pixels(count: int) -> list[Tensor]:
    """Images [1, 3, 96, 64] whose values are those of 8-bit files."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, (1, 3, 96, 64), generator=generator) / 255 for _ in range(count)]


def to_pil(pixels: Tensor) -> Image.Image:
    return Image.fromarray((pixels[0] * 255).round().byte().permute(1, 2, 0).numpy())


CASES = {  # pipeline, guidance, source images
    "klein": ("klein", None, 0),
    "klein-base": ("klein", Guidance(4.0), 0),
    "dev": ("dev", None, 0),
    "edit": ("klein", None, 1),
    "guided-edit-of-two": ("klein", Guidance(4.0), 2),
    "dev-edit": ("dev", None, 1),
}


@pytest.mark.parametrize("case", fast(CASES, "guided-edit-of-two"))
@torch.no_grad()
def test_samples_equal_the_diffusers_pipeline(pipelines: dict[str, tuple[Any, str]], case: str) -> None:
    name, guidance, num_sources = CASES[case]
    pipeline, folder = pipelines[name]
    model: Backbone = replace(SPEC, weights=folder, max_text_tokens=200 if name == "dev" else 48).load(Placement())
    model = GuidedBackbone(model, guidance) if guidance else model
    noise = torch.randn(2, *model.shape, generator=torch.Generator().manual_seed(0))
    sources = source_pixels(num_sources)
    metadata: Metadata = {"image": sources[0] if num_sources == 1 else sources}
    fixed: Any = FixedNoise(noise)
    process = GaussianProcess(RectifiedFlow(flux2_tokens=24), num_steps=4)
    sampled = process.start(model, model.embed(PROMPTS, [metadata] * 2 if num_sources else []), fixed).finish().final
    options = {"height": 96, "width": 64, "num_inference_steps": 4, "max_sequence_length": 200 if name == "dev" else 48}
    options |= {"guidance_scale": 4.0 if guidance or name == "dev" else 1.0, "text_encoder_out_layers": LAYERS}
    image = [to_pil(pixels) for pixels in sources] or None
    pixels = pipeline(image, PROMPTS, latents=noise[:, 0], output_type="pt", **options).images
    torch.testing.assert_close(model.decode(sampled)[:, 0], pixels, atol=5e-5, rtol=0)
    assert not torch.allclose(pixels[0], pixels[1], atol=1e-3)


def test_timesteps_equal_the_pipelines_formula() -> None:
    for tokens in (256, 1024, 4096, 4301, 8192):
        for steps in (4, 10, 50, 200):
            mu = torch.tensor(compute_empirical_mu(tokens, steps), dtype=torch.float64)
            assert flux2_shift(tokens, steps) == pytest.approx(float(mu.exp()), rel=1e-6)
    path = RectifiedFlow(2.0, flux2_tokens=1024)
    assert path.timesteps(4).equal(RectifiedFlow(flux2_shift(1024, 4)).timesteps(4))
    assert path.sample_timesteps(torch.tensor([0.5])).equal(RectifiedFlow(2.0).sample_timesteps(torch.tensor([0.5])))


@pytest.mark.slow
def test_prompts_of_dev_begin_with_one_token_although_template_and_tokenizer_have_it(
    pipelines: dict[str, tuple[Any, str]],
) -> None:
    pipeline, folder = pipelines["dev"]
    model = replace(SPEC, weights=folder, max_text_tokens=200).load(Placement())
    encoder: Any = model.prompt_encoder.encoders
    tokens = encoder.text_encoder.tokenize([encoder.format(PROMPTS[0])])["input_ids"][0]
    bos = pipeline.tokenizer.bos_token_id
    assert encoder.text_encoder.tokenizer("").input_ids == [bos] and (tokens == bos).sum() == 1
    with torch.no_grad():
        expected, _ = pipeline.encode_prompt(PROMPTS, max_sequence_length=200, text_encoder_out_layers=LAYERS)
    torch.testing.assert_close(model.embed(PROMPTS).tensors["prompt_embeds"], expected, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_encoding_patches_and_normalizes_as_the_pipeline(pipelines: dict[str, tuple[Any, str]]) -> None:
    pipeline, folder = pipelines["klein"]
    model, pixels = replace(SPEC, weights=folder).load(Placement()), source_pixels(1)[0]
    with torch.no_grad():
        expected = pipeline._encode_vae_image(2 * pixels - 1, None)
    torch.testing.assert_close(model.encode(pixels[None])[:, 0], expected, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["klein", "dev"])
def test_single_file_of_the_authors_replaces_the_transformer(
    pipelines: dict[str, tuple[Any, str]], name: str, tmp_path: Path
) -> None:
    pipeline, folder = pipelines[name]
    state = pipeline.transformer.state_dict()
    original = to_original(state, {})
    assert {"double_blocks.0.img_attn.qkv.weight", "single_blocks.0.linear1.weight", "img_in.weight"} <= {*original}
    assert not any(key in state for key in original)
    for tensors, prefix in ((original, "model.diffusion_model."), (state, "")):
        save_file({prefix + key: x.contiguous() for key, x in tensors.items()}, tmp_path / "f.safetensors")
        loaded = replace(SPEC, weights=folder, transformer=str(tmp_path / "f.safetensors")).load(Placement()).net
        assert all(x.equal(state[key]) for key, x in loaded.state_dict().items())


@pytest.mark.slow
def test_source_images_are_read_from_files_and_must_be_as_many_for_each_prompt(tmp_path: Path) -> None:
    model = Flux2Spec().tiny().load(Placement())
    first, second = source_pixels(2)
    save_image(first, tmp_path / "a.png")
    from_file = model.embed(["a"], [{"image": [str(tmp_path / "a.png"), second]}]).tensors["reference"]
    assert from_file.shape == (1, 2, *model.shape[1:])
    torch.testing.assert_close(from_file, model.embed(["a"], [{"image": (first, second)}]).tensors["reference"])
    with pytest.raises(ValueError, match=r"\[0, 1\].*TM2400"):
        model.embed(["a", "b"], [{"image": first}, {}])
    with pytest.raises(ValueError, match=r"TM2401"):
        model.embed(["a"], [{"image": 3}])


def test_pipeline_of_a_folder_follows_its_network(tmp_path: Path) -> None:
    """A local or fine-tuned dev is loaded by dev's pipeline, whatever its name."""
    assert Flux2Spec(weights="black-forest-labs/FLUX.2-dev").layout.pipeline_class == "Flux2Pipeline"
    assert Flux2Spec(weights="someone/a-fine-tuned-model").layout.pipeline_class == "Flux2KleinPipeline"
    (tmp_path / "transformer").mkdir()
    for config, expected in (
        ({"guidance_embeds": True}, "Flux2Pipeline"),
        ({"num_layers": 8}, "Flux2Pipeline"),  # diffusers' default
        ({"guidance_embeds": False}, "Flux2KleinPipeline"),
    ):
        (tmp_path / "transformer" / "config.json").write_text(json.dumps(config))
        assert Flux2Spec(weights=str(tmp_path)).layout.pipeline_class == expected
