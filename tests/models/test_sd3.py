"""Stable Diffusion 3 compared with diffusers' pipeline: samples, timesteps, gradients and every objective."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from safetensors.torch import save_file
from tiers import fast
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tastemaker.core.guidance import GuidedBackbone
from tastemaker.core.objective import Context, SingleProcess
from tastemaker.core.policy import Backbone, Guidance, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.reward import Rubric, WeightedReward
from tastemaker.core.types import Placement, PromptBatch
from tastemaker.core.weights import FullFinetuning
from tastemaker.models import sd3
from tastemaker.models.pretrained import silence_libraries
from tastemaker.models.sd3 import TINY_CONFIGS, Sd3Spec
from tastemaker.objectives.grpo import GRPO
from tastemaker.objectives.nft import NFT
from tastemaker.objectives.reward_gradient import RewardGradient
from tastemaker.processes.dynamics import FlowSDE
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import RectifiedFlow
from tastemaker.rewards.color import BrightnessReward

PROMPTS = ["a red cat on a mat", "two blue dogs and a very long walk along the river until evening"]
PUBLISHED_PATH = RectifiedFlow(shift=3.0, sigma_min=0.002994012)
SPEC = Sd3Spec(height=64, width=32, max_text_tokens=24)


def randomness(count: int) -> Randomness:
    return Randomness(0, 0, torch.arange(count))


def clip_tokenizer() -> CLIPTokenizer:
    letters = list(bytes_to_unicode().values())
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[], model_max_length=77)


def t5_tokenizer() -> T5Tokenizer:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\N{LOWER ONE EIGHTH BLOCK}", -2.0)]
    return T5Tokenizer(vocab=[*pieces, *((chr(97 + i), -3.0) for i in range(26))], extra_ids=0)


def make_pipeline(seed: int) -> StableDiffusion3Pipeline:
    torch.manual_seed(seed)
    clip = {"vocab_size": 514, "bos_token_id": 512, "eos_token_id": 513}
    net = SD3Transformer2DModel(**TINY_CONFIGS["transformer"])
    return StableDiffusion3Pipeline(
        transformer=net,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=AutoencoderKL(**TINY_CONFIGS["vae"]),
        text_encoder=CLIPTextModelWithProjection(CLIPTextConfig(**{**TINY_CONFIGS["text_encoder"], **clip})),
        tokenizer=clip_tokenizer(),
        text_encoder_2=CLIPTextModelWithProjection(CLIPTextConfig(**{**TINY_CONFIGS["text_encoder_2"], **clip})),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=T5EncoderModel(T5Config(**TINY_CONFIGS["text_encoder_3"])),
        tokenizer_3=t5_tokenizer(),
    )


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    folder = tmp_path_factory.mktemp("sd3")
    with silence_libraries(), torch.random.fork_rng():
        sd3_pipeline = make_pipeline(0)
        for number, p in enumerate(sd3_pipeline.transformer.parameters()):  # a new transformer ignores its prompt
            p.data.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(number)))
        sd3_pipeline.save_pretrained(folder)
        sd3_pipeline.text_encoder_3.eval()  # new modules apply dropout
        sd3_pipeline.set_progress_bar_config(disable=True)
        yield sd3_pipeline, folder


@pytest.mark.parametrize("guidance", fast([1.0, 4.5], 4.5))
@pytest.mark.parametrize("t5", [True, False])
def test_samples_equal_the_diffusers_pipeline(pipeline: tuple[Any, Path], guidance: float, t5: bool) -> None:
    diffusers_pipeline, folder = pipeline
    model: Backbone = replace(SPEC, weights=str(folder), use_t5=t5).load(Placement())
    if guidance > 1:
        model = GuidedBackbone(model, Guidance(guidance))
    policy = Policy(model, GaussianProcess(PUBLISHED_PATH, num_steps=4), FullFinetuning().apply(model, ()))
    trajectory = policy.sample(policy.embed(PROMPTS), randomness(2))
    options = {
        "height": 64,
        "width": 32,
        "num_inference_steps": 4,
        "guidance_scale": guidance,
        "max_sequence_length": 24,
    }
    text_encoder_3, diffusers_pipeline.text_encoder_3 = (
        diffusers_pipeline.text_encoder_3,
        diffusers_pipeline.text_encoder_3 if t5 else None,
    )
    with silence_libraries():
        latents = diffusers_pipeline(PROMPTS, latents=trajectory.start[:, 0], output_type="latent", **options).images
        pixels = diffusers_pipeline(PROMPTS, latents=trajectory.start[:, 0], output_type="pt", **options).images
    diffusers_pipeline.text_encoder_3 = text_encoder_3
    assert (trajectory.final[:, 0] - latents).abs().max() <= 1e-5
    assert (policy.decode(trajectory.final)[:, 0] - pixels).abs().max() <= 1e-5


def test_timesteps_equal_the_diffusers_scheduler() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    for steps in (1, 10, 28, 40):
        scheduler.set_timesteps(steps)
        assert (PUBLISHED_PATH.timesteps(steps) - scheduler.sigmas).abs().max() <= 2e-7


def test_invalid_path_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'sigma_min'.*1\.5.*TM335"):
        RectifiedFlow(sigma_min=1.5)
    with pytest.raises(ValueError, match=r"'shift_terminal'.*0\.0.*TM335"):
        RectifiedFlow(shift_terminal=0.0)


@pytest.fixture
def policy() -> Policy[Any]:
    model = Sd3Spec().tiny().load(Placement())
    assert isinstance(model, Backbone)
    return Policy(model, GaussianProcess(PUBLISHED_PATH, FlowSDE(0.7), 4), FullFinetuning().apply(model, ()))


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
    x = randomness(1).normal("x", *policy.model.shape).expand(2, -1, -1, -1, -1)
    out = policy.model.predict(x, torch.full((2,), 0.5), policy.embed(PROMPTS))
    assert not torch.allclose(out[0], out[1], atol=1e-5)


def test_encoding_uses_the_published_shift_and_scale(pipeline: tuple[Any, Path]) -> None:
    diffusers_pipeline, folder = pipeline
    model = replace(SPEC, weights=str(folder)).load(Placement())
    pixels = torch.rand(2, *model.pixels, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        raw = diffusers_pipeline.vae.encode(2 * pixels[:, 0] - 1).latent_dist.mode()
    torch.testing.assert_close(model.encode(pixels)[:, 0], (raw - 0.0609) * 1.5305, rtol=1e-5, atol=1e-5)


def test_decoder_gradient_is_the_same_with_checkpointing() -> None:
    grads = []
    for recompute in (True, False):
        model = replace(Sd3Spec().tiny(), checkpoint_decoder=recompute).load(Placement())
        x = randomness(2).normal("x", *model.shape).requires_grad_()
        model.decode(x).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[0], grads[1])
    assert bool(grads[0].any())


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective", [RewardGradient(), GRPO(group_size=2), NFT(group_size=2)], ids=lambda o: type(o).__name__
)
def test_every_objective_changes_the_weights(objective: Any) -> None:
    model = Sd3Spec().tiny().load(Placement())
    weights = FullFinetuning().apply(model, objective.snapshots())
    policy = Policy(model, GaussianProcess(PUBLISHED_PATH, FlowSDE(0.7), 3), weights)
    rubric = Rubric({"light": WeightedReward(BrightnessReward(), BrightnessReward().load(Placement()))})
    ctx = Context(policy, rubric, randomness(2), SingleProcess(), objective.make_state())
    experience = objective.collect(ctx, PromptBatch(tuple(PROMPTS), ({}, {})))
    for part in objective.parts(experience):
        objective.loss(ctx, experience, part).rows.sum().backward()
    unchanged = [key for key, p in weights.trainable().items() if p.grad is None or not bool(p.grad.any())]
    assert unchanged and all(key.startswith(model.traits.unused_parameters) for key in unchanged)


def test_single_file_replaces_the_transformer(pipeline: tuple[Any, Path], tmp_path: Path) -> None:
    _, folder = pipeline
    other = SD3Transformer2DModel(**TINY_CONFIGS["transformer"])
    save_file(other.state_dict(), tmp_path / "other.safetensors")
    spec = replace(SPEC, weights=str(folder), transformer=str(tmp_path / "other.safetensors"))
    loaded = spec.load(Placement()).net.state_dict()
    assert all(loaded[key].equal(x) for key, x in other.state_dict().items())


@pytest.mark.slow
def test_single_file_in_the_original_layout_loads(pipeline: tuple[Any, Path], tmp_path: Path) -> None:
    _, folder = pipeline
    other = SD3Transformer2DModel(**TINY_CONFIGS["transformer"])
    original = {key: x.clone() for key, x in sd3.sd3_to_original(other.state_dict(), other.config).items()}
    complete = {f"model.diffusion_model.{key}": x for key, x in original.items()} | {
        "first_stage_model.x": torch.ones(1)
    }
    for tensors in (original, complete):
        save_file(tensors, tmp_path / "other.safetensors")
        loaded = (
            replace(SPEC, weights=str(folder), transformer=str(tmp_path / "other.safetensors")).load(Placement()).net
        )
        assert all(loaded.state_dict()[key].equal(x) for key, x in other.state_dict().items())


def test_invalid_settings_are_refused(pipeline: tuple[Any, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"TM505"):
        Sd3Spec().load(Placement())
    with pytest.raises(ConfigError, match=r"transformer/config\.json.*TM499"):
        Sd3Spec(weights=str(tmp_path)).load(Placement())
    with pytest.raises(ConfigError, match=r"1024x32.*512.*TM524"):
        Sd3Spec(weights=str(pipeline[1]), height=1024, width=32).load(Placement())
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match=r"this transformer \('a'.*TM503"):
        replace(SPEC, weights=str(pipeline[1]), transformer=str(tmp_path / "a.safetensors")).load(Placement())
