"""HunyuanVideo 1.5: samples compared with diffusers' pipeline and its guider, adapters, and frames that are decoded."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from video_pipelines import Case, save_pipeline

from tastemaker.core.guidance import GuidedBackbone
from tastemaker.core.lora import Lora, LoraWeights
from tastemaker.core.policy import Guidance, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import Placement
from tastemaker.core.weights import FullFinetuning
from tastemaker.export import lora
from tastemaker.models.hunyuanvideo15 import HunyuanVideo15Spec
from tastemaker.models.pretrained import silence_libraries
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import RectifiedFlow
from tastemaker.verification.whole_pipelines import make_hunyuanvideo15_pipeline

PROMPTS = ['a red cat on a mat, a sign says "hello"', "two blue dogs"]
SPEC = replace(HunyuanVideo15Spec().tiny(), max_text_tokens=64)
CASE = Case(partial(make_hunyuanvideo15_pipeline, SPEC), SPEC, GaussianProcess(RectifiedFlow(5.0), num_steps=3))


def run_pipeline(pipeline: Any, start: Tensor, output: str) -> Tensor:
    options = {"height": SPEC.height, "width": SPEC.width, "num_frames": SPEC.frames, "num_inference_steps": 3}
    with silence_libraries(), torch.no_grad():
        frames: Tensor = pipeline(prompt=PROMPTS, latents=start.transpose(1, 2), output_type=output, **options).frames
    return frames


def test_samples_equal_the_diffusers_pipeline(tmp_path: Path) -> None:
    pipeline = save_pipeline(CASE, tmp_path)
    model = GuidedBackbone(replace(SPEC, weights=str(tmp_path)).load(Placement()), Guidance(6.0))
    policy = Policy(model, CASE.process, FullFinetuning().apply(model, ()))
    cond = policy.embed(PROMPTS)
    assert cond.tensors["glyph_mask"].sum(1)[0] > 0 == cond.tensors["glyph_mask"].sum(1)[1]
    trajectory = policy.sample(cond, Randomness(0, 0, torch.arange(2)))
    latents = run_pipeline(pipeline, trajectory.start, "latent")
    assert (trajectory.final.transpose(1, 2) - latents).abs().max() <= 5e-5
    with torch.no_grad():
        pipeline.vae.enable_slicing()
        pixels = pipeline.vae.decode(latents / pipeline.vae.config.scaling_factor, return_dict=False)[0]
    expected = (pixels / 2 + 0.5).clamp(0, 1).transpose(1, 2)
    assert (policy.decode(trajectory.final) - expected).abs().max() <= 5e-5


@pytest.mark.slow
def test_the_transformer_of_diffusers_loads_the_exported_adapter(tmp_path: Path) -> None:
    pipeline = save_pipeline(CASE, tmp_path)
    spec = replace(SPEC, weights=str(tmp_path))
    model = spec.load(Placement())
    weights = Lora(rank=2).apply(model, ())
    assert isinstance(weights, LoraWeights)
    for number, p in enumerate(weights.trainable().values()):
        p.data += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
    file = tmp_path / lora.DIFFUSERS_LORA_FILE
    lora.write_diffusers_lora(weights, spec.layout, file, torch.float32)
    policy = Policy(model, CASE.process, weights)
    trajectory = policy.sample(policy.embed(PROMPTS), Randomness(0, 0, torch.arange(2)))
    pipeline.guider = type(pipeline.guider)(guidance_scale=1.0)
    before = run_pipeline(pipeline, trajectory.start, "latent")
    pipeline.transformer.load_lora_adapter(tmp_path, weight_name=file.name, prefix="transformer")
    after = run_pipeline(pipeline, trajectory.start, "latent")
    assert (trajectory.final.transpose(1, 2) - after).abs().max() <= 1e-4
    assert (before - after).abs().max() > 1e-2


def test_only_latents_up_to_the_last_frame_are_decoded() -> None:
    model = replace(HunyuanVideo15Spec().tiny(), frames=13).load(Placement())
    decoded: list[int] = []
    model.autoencoder.net.decoder.register_forward_pre_hook(lambda _, inputs: decoded.append(inputs[0].shape[2]))
    x = Randomness(0, 0, torch.arange(1)).normal("x", *model.shape)
    with torch.no_grad():
        full, part = model.decode(x), model.decode(x, [5, 0])
    torch.testing.assert_close(part, full[:, [5, 0]], rtol=0, atol=2e-6)
    assert full.shape == (1, *model.pixels) and decoded == [4, 3]
