"""Stable Video Diffusion compared with diffusers' pipeline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiers import fast
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

from tastemaker.core.policy import Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import Placement
from tastemaker.core.weights import FullFinetuning
from tastemaker.models import svd
from tastemaker.models.pretrained import silence_libraries
from tastemaker.models.svd import SvdSpec
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import KarrasPath, karras_sigma
from tastemaker.rewards.backbones.preprocessing import CLIP_MEAN, CLIP_STD


class ClipNormalization:
    """A feature extractor that only normalizes, as CLIP's processor does for images of the right size."""

    def __call__(self, images: Any, **options: Any) -> Any:
        mean, std = (torch.tensor(x).view(3, 1, 1) for x in (CLIP_MEAN, CLIP_STD))
        return SimpleNamespace(pixel_values=(images - mean) / std)


def svd_pipeline(folder: Path) -> Any:
    from diffusers import (
        AutoencoderKLTemporalDecoder,
        EulerDiscreteScheduler,
        StableVideoDiffusionPipeline,
        UNetSpatioTemporalConditionModel,
    )

    with silence_libraries(), torch.random.fork_rng():
        torch.manual_seed(0)
        components = {
            "unet": UNetSpatioTemporalConditionModel(**svd.TINY_CONFIGS["unet"]),
            "vae": AutoencoderKLTemporalDecoder(**svd.TINY_CONFIGS["vae"]),
            "image_encoder": CLIPVisionModelWithProjection(CLIPVisionConfig(**svd.TINY_CONFIGS["image_encoder"])),
        }
        for name, component in components.items():
            component.eval().save_pretrained(folder / name)
        scheduler = EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            prediction_type="v_prediction",
            interpolation_type="linear",
            use_karras_sigmas=True,
            sigma_min=0.002,
            sigma_max=700.0,
            timestep_spacing="leading",
            timestep_type="continuous",
            steps_offset=1,
        )
        pipeline = StableVideoDiffusionPipeline(
            **components, scheduler=scheduler, feature_extractor=ClipNormalization()
        )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # raised by diffusers' scheduler
@pytest.mark.parametrize("guidance", fast([None, (1.0, 3.0)], (1.0, 3.0)))
def test_samples_equal_the_diffusers_pipeline(guidance: tuple[float, float] | None, tmp_path: Path) -> None:
    pipeline = svd_pipeline(tmp_path)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 48, 3), dtype=np.uint8))
    image.save(tmp_path / "first.png")
    spec = replace(SvdSpec().tiny(), weights=str(tmp_path), width=48, guidance_scale=guidance)
    model = spec.load(Placement())
    policy = Policy(model, GaussianProcess(KarrasPath(), num_steps=4), FullFinetuning().apply(model, ()))
    trajectory = policy.sample(
        policy.embed([""], [{"image": tmp_path / "first.png"}]), Randomness(0, 0, torch.arange(1))
    )
    low, high = guidance or (1.0, 1.0)
    options = {"height": 32, "width": 48, "num_frames": 3, "num_inference_steps": 4}
    options |= {"min_guidance_scale": low, "max_guidance_scale": high}
    with silence_libraries(), torch.no_grad():
        latents, pixels = (
            pipeline(
                image, latents=trajectory.start, output_type=kind, generator=torch.Generator().manual_seed(0), **options
            ).frames
            for kind in ("latent", "pt")
        )
    assert (trajectory.final - latents).abs().max() <= 1e-4
    assert (policy.decode(trajectory.final) - pixels).abs().max() <= 1e-5


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_timesteps_equal_the_diffusers_scheduler(tmp_path: Path) -> None:
    scheduler = svd_pipeline(tmp_path).scheduler
    for steps in (1, 10, 25):
        scheduler.set_timesteps(steps)
        torch.testing.assert_close(karras_sigma(KarrasPath().timesteps(steps)), scheduler.sigmas, rtol=2e-6, atol=0)
    timesteps = KarrasPath().sample_timesteps(torch.linspace(0, 1, 9))
    assert timesteps.min() > 0 and timesteps.max() <= 1 and timesteps.equal(timesteps.sort().values)
