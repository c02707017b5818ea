"""LTX-2: samples of video and sound compared with diffusers' pipeline, and sound that is sampled but not trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from video_pipelines import Case, ltx2_pipeline, save_pipeline

from tastemaker.core.guidance import GuidedBackbone
from tastemaker.core.lora import Lora, LoraWeights
from tastemaker.core.policy import Guidance, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import Corrupted, Placement
from tastemaker.core.weights import FullFinetuning
from tastemaker.export import lora
from tastemaker.models.ltx2 import Ltx2Spec
from tastemaker.models.pipeline_components import dynamic_shift
from tastemaker.models.pretrained import silence_libraries
from tastemaker.processes.dynamics import FlowSDE
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import RectifiedFlow

PROMPTS = ["a red cat on a mat", "two blue dogs"]
SPEC = Ltx2Spec().tiny()
PATH = RectifiedFlow(dynamic_shift(SPEC.video_tokens, 0.95, 2.05, 1024, 4096), shift_terminal=0.1)
CASE = Case(ltx2_pipeline, SPEC, GaussianProcess(PATH, num_steps=4))


def run_pipeline(pipeline: Any, start: Tensor, guidance: float, output: str = "latent") -> Any:
    """Video [B, C, f, h, w] and audio [B, 8, L, 16] of diffusers' pipeline, with the guidance of LTX-2.0."""
    tokens = SPEC.video_tokens
    options = {"height": SPEC.height, "width": SPEC.width, "num_frames": SPEC.frames, "frame_rate": SPEC.fps}
    options |= {"num_inference_steps": 4, "guidance_scale": guidance, "audio_guidance_scale": guidance}
    options |= {"stg_scale": 0.0, "audio_stg_scale": 0.0, "modality_scale": 1.0, "audio_modality_scale": 1.0}
    options |= {"guidance_rescale": 0.0, "audio_guidance_rescale": 0.0, "use_cross_timestep": False}
    with silence_libraries(), torch.no_grad():
        return pipeline(
            prompt=PROMPTS,
            latents=start[:, :tokens],
            audio_latents=start[:, tokens:],
            max_sequence_length=SPEC.max_text_tokens,
            output_type=output,
            **options,
        )


def split_streams(x: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens in the layout of the pipeline's latents of video and audio."""
    (frames, channels, height, width), tokens = SPEC.video_shape, SPEC.video_tokens
    video = x[:, :tokens].view(len(x), frames, height, width, channels).movedim(-1, 1)
    return video, x[:, tokens:].unflatten(2, (8, 16)).transpose(1, 2)


def test_video_and_audio_equal_the_diffusers_pipeline(tmp_path: Path) -> None:
    pipeline = save_pipeline(CASE, tmp_path)
    model = GuidedBackbone(replace(SPEC, weights=str(tmp_path)).load(Placement()), Guidance(4.0))
    policy = Policy(model, CASE.process, FullFinetuning().apply(model, ()))
    trajectory = policy.sample(policy.embed(PROMPTS), Randomness(0, 0, torch.arange(2)))
    published = run_pipeline(pipeline, trajectory.start, 4.0)
    video, audio = split_streams(trajectory.final)
    assert (video - published.frames).abs().max() <= 5e-5
    assert (audio - published.audio).abs().max() <= 5e-5
    with torch.no_grad():
        pixels = pipeline.vae.decode(published.frames, return_dict=False)[0]
    expected = (pixels / 2 + 0.5).clamp(0, 1).transpose(1, 2)
    assert (policy.decode(trajectory.final) - expected).abs().max() <= 5e-5


@pytest.mark.slow
def test_diffusers_pipeline_loads_the_exported_adapter(tmp_path: Path) -> None:
    pipeline = save_pipeline(CASE, tmp_path)
    spec = replace(SPEC, weights=str(tmp_path))
    model = spec.load(Placement())
    weights = Lora(rank=2).apply(model, ())
    assert isinstance(weights, LoraWeights)
    for number, p in enumerate(weights.trainable().values()):
        p.data += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
    lora.write_diffusers_lora(weights, spec.layout, tmp_path / lora.DIFFUSERS_LORA_FILE, torch.float32)
    policy = Policy(model, CASE.process, weights)
    trajectory = policy.sample(policy.embed(PROMPTS), Randomness(0, 0, torch.arange(2)))
    before = run_pipeline(pipeline, trajectory.start, 1.0).frames
    pipeline.load_lora_weights(tmp_path, weight_name=lora.DIFFUSERS_LORA_FILE)
    after = run_pipeline(pipeline, trajectory.start, 1.0).frames
    assert (split_streams(trajectory.final)[0] - after).abs().max() <= 1e-4
    assert (before - after).abs().max() > 1e-2


def test_audio_is_sampled_but_not_trained() -> None:
    model = SPEC.load(Placement())
    process, tokens = GaussianProcess(RectifiedFlow(2.0), FlowSDE(0.7), 3), SPEC.video_tokens
    policy = Policy(model, process, FullFinetuning().apply(model, ()))
    cond = policy.embed(PROMPTS)
    trajectory = policy.sample(cond, Randomness(0, 0, torch.arange(2)))
    first = trajectory.segments[0]
    ode = process.deterministic().start(model, cond, Randomness(0, 0, torch.arange(2)))
    with torch.no_grad():
        ode.step()
    torch.testing.assert_close(first.action[:, tokens:], ode.x[:, tokens:])
    assert not torch.allclose(first.action[:, :tokens], ode.x[:, :tokens], atol=1e-3)
    for p in policy.weights.trainable().values():
        p.data += 0.01
    distribution = policy.action_distribution(cond, first)
    mean, weights = distribution.mean[:, tokens:], list(policy.weights.trainable().values())
    assert mean.equal(first.action[:, tokens:])  # so no ratio and no gradient of the sound
    gradients = torch.autograd.grad(mean.sum(), weights, retain_graph=True, allow_unused=True, materialize_grads=True)
    assert not any(gradient.any() for gradient in gradients)
    noise = Randomness(1, 0, torch.arange(2)).normal("noise", *model.shape)
    noisy = policy.corrupt(trajectory.final, Randomness(2, 0, torch.arange(2)), torch.full((2,), 0.6), noise)
    restored = policy.restore(cond, noisy).mean
    torch.testing.assert_close(restored[:, tokens:], trajectory.final[:, tokens:], rtol=1e-4, atol=1e-4)
    other = trajectory.final.clone()
    other[:, tokens:] += 1  # an error in the sound alone
    same_network_input = Corrupted(noisy.x, noisy.t, noise)
    likelihoods = [policy.likelihood(cond, x, same_network_input) for x in (trajectory.final, other)]
    torch.testing.assert_close(*likelihoods)


def test_clips_are_encoded_with_zero_sound_and_only_needed_latents_are_decoded() -> None:
    model = replace(SPEC, frames=17).load(Placement())
    spec: Any = model.spec
    pixels = torch.rand(1, *model.pixels, generator=torch.Generator().manual_seed(0))
    x = model.encode(pixels)
    assert x.shape == (1, *model.shape) and not x[:, spec.video_tokens :].any()
    decoded: list[int] = []
    model.autoencoder.net.decoder.register_forward_pre_hook(lambda _, inputs: decoded.append(inputs[0].shape[2]))
    with torch.no_grad():
        full, part = model.decode(x), model.decode(x, [5, 0])
    torch.testing.assert_close(part, full[:, [5, 0]], rtol=0, atol=2e-5)
    assert decoded == [3, 2]
