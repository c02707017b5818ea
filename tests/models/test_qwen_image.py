"""Qwen-Image compared with diffusers' pipeline: samples, timesteps, gradients, and training by every objective."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from safetensors.torch import save_file
from tiers import fast
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tastemaker.core.guidance import GuidedBackbone
from tastemaker.core.objective import Context, SingleProcess
from tastemaker.core.policy import Backbone, Guidance, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.reward import Rubric, WeightedReward
from tastemaker.core.types import Placement, PromptBatch
from tastemaker.core.weights import FullFinetuning
from tastemaker.models.pretrained import silence_libraries
from tastemaker.models.qwen_image import TINY_CONFIGS, QwenImageSpec
from tastemaker.objectives.grpo import GRPO
from tastemaker.objectives.nft import NFT
from tastemaker.objectives.reward_gradient import RewardGradient
from tastemaker.objectives.srpo import SRPO
from tastemaker.processes.dynamics import FlowSDE
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import RectifiedFlow
from tastemaker.rewards.color import BrightnessReward

PROMPTS = ["a red cat on a mat", "two blue dogs"]
SPEC = QwenImageSpec(height=64, width=32, max_text_tokens=280)
SCHEDULER = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}


def published_path(tokens: int) -> RectifiedFlow:
    """The path with the timestep shift of an image of this number of tokens."""
    return RectifiedFlow(shift=math.exp(0.5 + 0.4 * (tokens - 256) / (8192 - 256)), shift_terminal=0.02)


def randomness(count: int) -> Randomness:
    return Randomness(0, 0, torch.arange(count))


def make_pipeline(seed: int) -> QwenImagePipeline:
    torch.manual_seed(seed)
    text_encoder = TINY_CONFIGS["text_encoder"]
    text_config = {
        **text_encoder["text_config"],
        "vocab_size": 300,
        "bos_token_id": 256,
        "eos_token_id": 256,
        "pad_token_id": 256,
    }
    config = Qwen2_5_VLConfig(**{**text_encoder, "text_config": text_config})
    letters = {letter: i for i, letter in enumerate(bytes_to_unicode().values())}
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=AutoencoderKLQwenImage(**TINY_CONFIGS["vae"]).eval(),
        text_encoder=Qwen2_5_VLForConditionalGeneration(config).eval(),
        tokenizer=Qwen2Tokenizer(vocab=letters, merges=[]),
        transformer=QwenImageTransformer2DModel(**TINY_CONFIGS["transformer"]),
    )


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    folder = tmp_path_factory.mktemp("qwen")
    with silence_libraries(), torch.random.fork_rng():
        qwen = make_pipeline(0)
        for number, p in enumerate(qwen.transformer.parameters()):  # a new transformer ignores its prompt
            p.data.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(number)))
        qwen.save_pretrained(folder)
        qwen.set_progress_bar_config(disable=True)
        yield qwen, folder


@pytest.mark.parametrize("guidance", [None, Guidance(4.0, " ", rescale="token")], ids=["plain", "guided"])
@pytest.mark.parametrize("max_text_tokens", fast([280, 180], 180), ids=["complete", "truncated"])
def test_samples_equal_the_diffusers_pipeline(
    pipeline: tuple[Any, Path], guidance: Guidance | None, max_text_tokens: int
) -> None:
    diffusers_pipeline, folder = pipeline
    model: Backbone = replace(SPEC, weights=str(folder), max_text_tokens=max_text_tokens).load(Placement())
    if guidance:
        model = GuidedBackbone(model, guidance)
    policy = Policy(model, GaussianProcess(published_path(8), num_steps=4), FullFinetuning().apply(model, ()))
    trajectory = policy.sample(policy.embed(PROMPTS), randomness(2))
    negative = [" "] * 2 if guidance else None
    options = {"height": 64, "width": 32, "num_inference_steps": 4, "max_sequence_length": max_text_tokens}
    options |= {"negative_prompt": negative, "true_cfg_scale": 4.0 if guidance else 1.0}
    with silence_libraries():
        start = trajectory.start.flatten(1, 2)
        latents = diffusers_pipeline(PROMPTS, latents=start, output_type="latent", **options).images
        pixels = diffusers_pipeline(PROMPTS, latents=start, output_type="pt", **options).images
    assert (trajectory.final.flatten(1, 2) - latents).abs().max() <= 1e-5
    assert (policy.decode(trajectory.final)[:, 0] - pixels).abs().max() <= 1e-5


@pytest.mark.parametrize(("height", "width", "shift"), [(1328, 1328, 2.3033), (1024, 1024, 2.0007), (720, 720, 1.8026)])
def test_timesteps_equal_the_diffusers_scheduler(height: int, width: int, shift: float) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(**SCHEDULER)
    tokens = math.prod(QwenImageSpec(height=height, width=width).shape[:2])
    path = published_path(tokens)
    assert round(path.shift, 4) == pytest.approx(shift, abs=1e-4)
    for steps in (2, 10, 50):
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps), mu=math.log(path.shift))
        assert (path.timesteps(steps) - scheduler.sigmas).abs().max() <= 3e-7


@pytest.fixture
def policy() -> Policy[Any]:
    model = QwenImageSpec().tiny().load(Placement())
    assert isinstance(model, Backbone)
    return Policy(model, GaussianProcess(published_path(4), FlowSDE(0.7), 4), FullFinetuning().apply(model, ()))


def test_recorded_log_probs_equal_recomputed_ones(policy: Policy[Any]) -> None:
    trajectory = policy.sample(policy.embed([*PROMPTS, ""]), randomness(3))
    pixels = policy.decode(trajectory.final)
    assert pixels.shape == (3, *policy.model.pixels)
    assert pixels.min() >= 0 and pixels.max() <= 1
    with torch.no_grad():
        for segment in trajectory.segments:
            assert policy.action_distribution(trajectory.cond, segment).log_prob(segment.action).equal(segment.log_prob)


def test_predictions_do_not_depend_on_the_batch(policy: Policy[Any]) -> None:
    batched = policy.sample(policy.embed([*PROMPTS, ""]), randomness(3)).final
    single = policy.sample(policy.embed([""]), Randomness(0, 0, torch.tensor([2]))).final
    assert torch.allclose(batched[2:], single, atol=1e-4)


def test_prediction_depends_on_the_prompt(policy: Policy[Any]) -> None:
    x = randomness(1).normal("x", *policy.model.shape).expand(2, -1, -1, -1)
    out = policy.model.predict(x, torch.full((2,), 0.5), policy.embed(PROMPTS))
    assert not torch.allclose(out[0], out[1], atol=1e-5)


def test_encoding_uses_the_published_mean_and_std(pipeline: tuple[Any, Path]) -> None:
    diffusers_pipeline, folder = pipeline
    model = replace(SPEC, weights=str(folder)).load(Placement())
    pixels = torch.rand(2, *model.pixels, generator=torch.Generator().manual_seed(0))
    mean, std = (
        torch.tensor(diffusers_pipeline.vae.config[key])[:, None, None] for key in ("latents_mean", "latents_std")
    )
    with torch.no_grad():
        raw = diffusers_pipeline.vae.encode(2 * pixels[:, 0, :, None] - 1).latent_dist.mode()[:, :, 0]
    packed = diffusers_pipeline._pack_latents((raw - mean) / std, 2, 16, 8, 4)
    torch.testing.assert_close(model.encode(pixels).flatten(1, 2), packed, rtol=1e-5, atol=1e-5)


def test_decoder_gradient_is_the_same_with_checkpointing() -> None:
    grads = []
    for recompute in (True, False):
        model = replace(QwenImageSpec().tiny(), checkpoint_decoder=recompute).load(Placement())
        x = randomness(2).normal("x", *model.shape).requires_grad_()
        model.decode(x).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[0], grads[1])
    assert bool(grads[0].any())


OBJECTIVES = [
    RewardGradient(),
    GRPO(group_size=2),
    NFT(group_size=2),
    SRPO(relative=False, branches=("denoise",), reward_margin=None),
]


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: type(o).__name__)
def test_every_objective_changes_the_weights(objective: Any) -> None:
    model = QwenImageSpec().tiny().load(Placement())
    weights = FullFinetuning().apply(model, objective.snapshots())
    guided = GuidedBackbone(model, Guidance(4.0, " ", rescale="token"))
    policy = Policy(guided, GaussianProcess(published_path(4), FlowSDE(0.7), 3), weights)
    rubric = Rubric({"light": WeightedReward(BrightnessReward(), BrightnessReward().load(Placement()))})
    ctx = Context(policy, rubric, randomness(2), SingleProcess(), objective.make_state())
    experience = objective.collect(ctx, PromptBatch(tuple(PROMPTS), ({}, {})))
    for part in objective.parts(experience):
        objective.loss(ctx, experience, part).rows.sum().backward()
    unchanged = [key for key, p in weights.trainable().items() if p.grad is None or not bool(p.grad.any())]
    assert unchanged and all(key.startswith(model.traits.unused_parameters) for key in unchanged)


@pytest.mark.slow
def test_single_file_replaces_the_transformer(pipeline: tuple[Any, Path], tmp_path: Path) -> None:
    other = QwenImageTransformer2DModel(**TINY_CONFIGS["transformer"])
    tensors = {f"model.diffusion_model.{key}": x for key, x in other.state_dict().items()}
    save_file(tensors, tmp_path / "other.safetensors")
    spec = replace(SPEC, weights=str(pipeline[1]), transformer=str(tmp_path / "other.safetensors"))
    loaded = spec.load(Placement()).net.state_dict()
    assert all(loaded[key].equal(x) for key, x in other.state_dict().items())


def test_invalid_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"TM505"):
        QwenImageSpec().load(Placement())
    with pytest.raises(ConfigError, match=r"transformer cannot be read.*TM501"):
        QwenImageSpec(weights=str(tmp_path)).load(Placement())
