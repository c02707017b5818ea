"""Sana and Sana-Sprint compared with diffusers' pipelines: samples, noise levels, decoder gradients, checkpoints."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    SCMScheduler,
)
from image_pipelines import make_sana_pipeline
from safetensors.torch import save_file
from tiers import fast
from tiny_pipelines import FixedNoise
from torch import Tensor

from tastemaker.config.group_rules import check_shared_prompts
from tastemaker.config.load import load
from tastemaker.core.guidance import GuidedBackbone
from tastemaker.core.lora import Lora
from tastemaker.core.policy import Backbone, Guidance
from tastemaker.core.randomness import Purpose, Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.rollout_scope import ROLLOUTS
from tastemaker.core.types import Placement, select_rows
from tastemaker.models.pretrained import silence_libraries
from tastemaker.models.sana import SanaSpec, SanaSprintSpec, sana_to_original
from tastemaker.models.shared_prompts import adjacent_samples, prompt_ids
from tastemaker.processes.dynamics import ConsistencySampling
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import RectifiedFlow, TrigFlow

PROMPTS = ["a red cat", "Two dogs, on a boat"]
SPEC = SanaSpec(height=96, width=64, max_text_tokens=40)
SPRINT = SanaSprintSpec(height=96, width=64, max_text_tokens=40)


def save(pipeline: Any, folder: Path) -> tuple[Any, str]:
    with silence_libraries():
        pipeline.save_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline, str(folder)


@pytest.fixture(scope="module")
def sana(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    return save(make_sana_pipeline(sprint=False), tmp_path_factory.mktemp("sana"))


@pytest.fixture(scope="module")
def sprint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    return save(make_sana_pipeline(sprint=True), tmp_path_factory.mktemp("sprint"))


OPTIONS = {"height": 96, "width": 64, "use_resolution_binning": False, "max_sequence_length": 40}


@pytest.mark.parametrize("guidance", fast([Guidance(4.5), Guidance(3.0, "blurry"), None], Guidance(4.5)))
@torch.no_grad()
def test_samples_equal_the_diffusers_pipeline(sana: tuple[Any, str], guidance: Guidance | None) -> None:
    pipeline, folder = sana
    model: Backbone = replace(SPEC, weights=folder).load(Placement())
    noise = torch.randn(2, *model.shape, generator=torch.Generator().manual_seed(0))
    fixed_noise: Any = FixedNoise(noise)
    guided = model if guidance is None else GuidedBackbone(model, guidance)
    process = GaussianProcess(RectifiedFlow(3.0), num_steps=5)
    sampled = process.start(guided, guided.embed(PROMPTS), fixed_noise).finish().final
    options = {**OPTIONS, "latents": noise[:, 0], "sigmas": np.linspace(1, 0.2, 5).tolist()}
    options |= {"guidance_scale": guidance.scale if guidance else 1.0}
    options |= {"negative_prompt": guidance.negative_prompt if guidance else ""}
    with silence_libraries():
        latents = pipeline(PROMPTS, output_type="latent", **options).images
        pixels = pipeline(PROMPTS, output_type="pt", **options).images
    torch.testing.assert_close(sampled[:, 0], latents, atol=2e-5, rtol=0)
    torch.testing.assert_close(model.decode(sampled)[:, 0], pixels, atol=2e-5, rtol=0)


class RecordedNoise:
    """Starting noise and the noise of every sampling step, drawn from one generator in the pipeline's order."""

    def __init__(self, *shape: int) -> None:
        self.start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        self.generator = torch.Generator().manual_seed(1)

    def normal(self, purpose: str, *shape: int, draw: int = 0) -> Tensor:
        if purpose == Purpose.INITIAL_NOISE:
            return self.start
        return torch.randn(len(self.start), *shape[1:], generator=self.generator)[:, None]


@pytest.mark.parametrize("steps", fast([1, 2, 4], 2))
@torch.no_grad()
def test_sprint_samples_equal_the_diffusers_pipeline(sprint: tuple[Any, str], steps: int) -> None:
    pipeline, folder = sprint
    model = replace(SPRINT, weights=folder).load(Placement())
    noise: Any = RecordedNoise(2, *model.shape)
    process = GaussianProcess(TrigFlow(), ConsistencySampling(), steps)
    trajectory = process.start(model, model.embed(PROMPTS), noise).finish()
    options = {**OPTIONS, "latents": noise.start[:, 0], "generator": torch.Generator().manual_seed(1)}
    options |= {"num_inference_steps": steps, "intermediate_timesteps": 1.3 if steps == 2 else None}
    with silence_libraries():
        latents = pipeline(PROMPTS, output_type="latent", **options).images
    torch.testing.assert_close(trajectory.final[:, 0], latents, atol=5e-5, rtol=0)
    assert len(trajectory.segments) == steps - 1  # the last step has no noise
    for segment in trajectory.segments:
        again = process.action_distribution(model, trajectory.cond, segment)
        assert again.log_prob(segment.action).equal(segment.log_prob)


def test_sprint_levels_equal_the_diffusers_scheduler() -> None:
    scheduler = SCMScheduler()
    for steps in (1, 2, 3, 4):
        scheduler.set_timesteps(steps, intermediate_timesteps=1.3 if steps == 2 else None)
        angles = TrigFlow().timesteps(steps) * math.pi / 2
        assert (angles - scheduler.timesteps).abs().max() <= 5e-6  # diffusers rounds the right angle up


def test_decoder_gradient_is_the_same_with_checkpointing() -> None:
    results = []
    for recompute in (True, False):
        model = replace(SanaSpec().tiny(), checkpoint_decoder=recompute).load(Placement())
        x = Randomness(0, 0, torch.arange(2)).normal("x", *model.shape).requires_grad_()
        pixels = model.decode(x)
        pixels.square().sum().backward()
        results.append((pixels.detach(), x.grad))
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-4)
    assert bool(results[0][1].any())


def test_encoding_is_that_of_the_autoencoder(sana: tuple[Any, str]) -> None:
    pipeline, folder = sana
    model = replace(SPEC, weights=folder).load(Placement())
    pixels = torch.rand(2, *model.pixels, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = 0.41407 * pipeline.vae.encode(2 * pixels[:, 0] - 1).latent
    torch.testing.assert_close(model.encode(pixels)[:, 0], expected, atol=1e-5, rtol=1e-5)
    assert model.with_size(64, 128).shape == (1, 32, 2, 4)


@pytest.mark.parametrize("spec", fast([SPEC, SPRINT], SPRINT), ids=lambda spec: type(spec).__name__)
def test_single_file_has_the_authors_names(spec: SanaSpec, tmp_path: Path) -> None:
    tiny = replace(spec.tiny(), seed=1)
    expected = tiny.load(Placement()).net.state_dict()
    original = sana_to_original(dict(expected), {})
    assert original["blocks.0.attn.qkv.weight"].shape == (96, 32)
    assert original["blocks.0.cross_attn.kv_linear.bias"].shape == (64,)
    original["pos_embed"] = torch.zeros(1)
    save_file({key: x.contiguous() for key, x in original.items()}, tmp_path / "sana.safetensors")
    loaded = replace(tiny, seed=2, transformer=str(tmp_path / "sana.safetensors")).load(Placement()).net.state_dict()
    assert all(loaded[key].equal(x) for key, x in expected.items())


@pytest.mark.parametrize("adapter", [False, True])
@torch.no_grad()
def test_prompt_layers_compute_once_for_the_samples_of_a_prompt(adapter: bool) -> None:
    """Guided rollouts of two groups of three give the samples and call the layers with four rows instead of twelve."""
    rows, outputs = [], []
    for share in (False, True):
        model = GuidedBackbone(
            replace(SanaSpec().tiny(), share_prompts=share).load(Placement()), Guidance(4.5, "blurry")
        )
        if adapter:
            weights = Lora(rank=2, target_modules=("attn2.to_k", "attn2.to_v")).apply(model, ())
            for i, p in enumerate(weights.trainable().values()):
                torch.nn.init.normal_(p, std=0.5, generator=torch.Generator().manual_seed(i))
        for layer in model.net.modules():
            if isinstance(layer, torch.nn.Linear) and layer.in_features == model.net.config.caption_channels:
                layer.register_forward_pre_hook(lambda layer, inputs: rows.append(len(inputs[0])))
        cond = select_rows(model.embed(["a", "b c"]), torch.tensor([0, 0, 0, 1, 1, 1]))
        rng = Randomness(0, 0, torch.arange(6))
        x, t = rng.normal("x", *model.shape), torch.linspace(0.1, 0.9, 6)
        with ROLLOUTS.calls():
            outputs.append(model.predict(x, t, cond))
        assert not any(layer._forward_hooks for layer in model.net.modules())
        rows.append(-1)
        model.predict(x, t, cond)  # no rollout
        with torch.enable_grad(), ROLLOUTS.calls():
            model.predict(x, t, cond)
        mixed = select_rows(cond, torch.tensor([0, 3, 0, 3, 3, 0]))
        with ROLLOUTS.calls():
            model.predict(x, t, mixed)
    assert rows == [12, -1, 12, 12, 12, 4, -1, 12, 12, 12]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-5 * float(outputs[0].abs().max()))


def test_adjacent_samples_are_counted() -> None:
    cases = {"aaabbb": 3, "aabbbb": 2, "aaab": 1, "ababab": 1, "aaaa": 4, "a": 1}
    assert {text: adjacent_samples(prompt_ids(list(text))) for text in cases} == cases


def test_prompts_are_not_shared_where_ratios_need_the_probabilities_of_rollouts() -> None:
    config = load("grpo-toy-flow", [])
    model = replace(SanaSpec().tiny(), share_prompts=True)
    assert "TM2754" in (check_shared_prompts(replace(config, model=model), 1) or "")
    assert check_shared_prompts(replace(load("nft-toy-flow", []), model=model), 1) is None
    assert check_shared_prompts(replace(config, model=replace(model, share_prompts=False)), 1) is None


def test_prediction_depends_on_prompt_and_distilled_guidance() -> None:
    model = SanaSprintSpec().tiny().load(Placement())
    x = Randomness(0, 0, torch.arange(1)).normal("x", *model.shape).expand(2, -1, -1, -1, -1)
    t, cond = torch.full((2,), 0.5), model.embed(["a", "b"])
    out = model.predict(x, t, cond)
    assert not torch.allclose(out[0], out[1], atol=1e-5)
    assert not torch.allclose(model.with_guidance_scale(1.0).predict(x, t, cond), out, atol=1e-5)
    with pytest.raises(ConfigError, match=r"Sana_1600M.*TM505"):
        SanaSpec().load(Placement())
    with pytest.raises(ValueError, match=r"TM2456"):
        TrigFlow(intermediate_angle=2.0)
