"""Video generators compared with diffusers' pipelines: samples, timesteps and LoRA files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiers import fast
from tiny_pipelines import load_adapters
from video_pipelines import CASES, ZERO_SNR, cog_pipeline, save_pipeline, source_metadata

from tastemaker.core.guidance import GuidedBackbone
from tastemaker.core.lora import Lora, LoraWeights
from tastemaker.core.policy import Backbone, Guidance, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import Placement
from tastemaker.core.weights import FullFinetuning
from tastemaker.export import lora
from tastemaker.models.pretrained import silence_libraries
from tastemaker.processes.paths import RectifiedFlow

PROMPTS = ["a red cat on a mat", "two blue dogs"]
ADAPTED = ("wan", "wan-i2v", "wan22-i2v", "cogvideox-5b", "ltx", "hunyuanvideo", "mochi")


@pytest.mark.filterwarnings("ignore:In CPU autocast")  # raised by Mochi
@pytest.mark.parametrize("name", fast(CASES, "wan22", "cogvideox-5b", "wan-i2v"))
def test_samples_equal_the_diffusers_pipeline(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    diffusers_pipeline = save_pipeline(case, tmp_path)
    model: Backbone = replace(case.spec, weights=str(tmp_path)).load(Placement())
    frames, _, height, width = model.pixels
    if case.guidance > 1:
        model = GuidedBackbone(model, Guidance(case.guidance))
    policy = Policy(model, case.process, FullFinetuning().apply(model, ()))
    trajectory = policy.sample(policy.embed(PROMPTS, (source_metadata(case),) * 2), Randomness(0, 0, torch.arange(2)))
    options = {"height": height, "width": width, "num_frames": frames, "num_inference_steps": case.process.num_steps}
    options |= {
        "guidance_scale": case.guidance,
        "max_sequence_length": case.spec.max_text_tokens,
        **(case.call_options or {}),
    }
    with silence_libraries(), torch.no_grad():
        start = case.to_pipeline_latents(trajectory.start)
        latents = diffusers_pipeline(prompt=PROMPTS, latents=start, output_type="latent", **options).frames
        pixels = diffusers_pipeline(prompt=PROMPTS, latents=start, output_type="pt", **options).frames
    assert (case.to_pipeline_latents(trajectory.final) - latents).abs().max() <= 5e-5
    assert (policy.decode(trajectory.final) - pixels).abs().max() <= 1e-5


def test_timesteps_equal_the_diffusers_schedulers() -> None:
    scheduler = cog_pipeline(rotary=False).scheduler
    alphas_cumprod = ZERO_SNR.alpha(torch.arange(1, 1001) / 1000) ** 2
    torch.testing.assert_close(alphas_cumprod, scheduler.alphas_cumprod.float(), rtol=1e-5, atol=1e-9)
    assert all(RectifiedFlow(linear_quadratic_threshold=0.025).timesteps(steps)[-1] == 0 for steps in (1, 10, 25))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "ltx" else [pytest.mark.slow]) for name in ADAPTED]
)
@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_diffusers_pipeline_loads_exported_lora(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    diffusers_pipeline = save_pipeline(case, tmp_path)
    spec = replace(case.spec, weights=str(tmp_path))
    model = spec.load(Placement())
    weights = Lora(rank=2).apply(model, ())
    assert isinstance(weights, LoraWeights)
    for number, p in enumerate(weights.trainable().values()):
        p.data += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
    lora.write_diffusers_lora(weights, spec.layout, tmp_path / lora.DIFFUSERS_LORA_FILE, torch.float32)
    policy = Policy(model, case.process, weights)
    trajectory = policy.sample(policy.embed(PROMPTS, (source_metadata(case),) * 2), Randomness(0, 0, torch.arange(2)))
    frames, _, height, width = model.pixels
    options = {"height": height, "width": width, "num_frames": frames, "num_inference_steps": case.process.num_steps}
    options |= {"guidance_scale": 1.0, "max_sequence_length": case.spec.max_text_tokens, **(case.call_options or {})}
    with silence_libraries(), torch.no_grad():
        start, output = case.to_pipeline_latents(trajectory.start), {"output_type": "latent"}
        before = diffusers_pipeline(prompt=PROMPTS, latents=start, **output, **options).frames
        load_adapters(diffusers_pipeline, spec.layout, tmp_path)
        after = diffusers_pipeline(prompt=PROMPTS, latents=start, **output, **options).frames
    assert (case.to_pipeline_latents(trajectory.final) - after).abs().max() <= 5e-5
    assert (before - after).abs().max() > 1e-2
