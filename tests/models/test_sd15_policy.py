"""Policies of Stable Diffusion 1.5 and XL: log-probabilities, gradients, dtypes and objectives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from PIL import Image
from stable_diffusion_toys import PROMPTS, SPECS, make_rng
from tiers import fast

from tastemaker.config.build import build
from tastemaker.config.load import load
from tastemaker.core.objective import Objective
from tastemaker.core.policy import Backbone, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import ImageBatch, LikeBatch, Placement, PreferenceBatch, PromptBatch
from tastemaker.core.weights import FullFinetuning
from tastemaker.models.sdxl import SdxlSpec
from tastemaker.objectives.ddpo import DDPO
from tastemaker.objectives.dpo import DPO
from tastemaker.objectives.grpo import GRPO
from tastemaker.objectives.likelihood import Likelihood
from tastemaker.objectives.nft import NFT
from tastemaker.objectives.reward_gradient import RewardGradient
from tastemaker.objectives.srpo import SRPO
from tastemaker.processes.dynamics import DDIM
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import VariancePreserving
from tastemaker.rewards.color import BrightnessReward
from tastemaker.training import activation_memory
from tastemaker.training.events import StepCompleted
from tastemaker.training.loop import train


@pytest.fixture(params=SPECS)
def policy(request: pytest.FixtureRequest) -> Policy[Any]:
    model = SPECS[request.param].tiny().load(Placement())
    assert isinstance(model, Backbone)
    return Policy(
        model, GaussianProcess(VariancePreserving(), DDIM(1.0), 4), FullFinetuning().apply(model, ("reference", "old"))
    )


def test_recorded_log_probs_equal_recomputed_ones(policy: Policy[Any]) -> None:
    trajectory = policy.sample(policy.embed(PROMPTS), make_rng())
    pixels = policy.decode(trajectory.final)
    assert pixels.shape == (4, *policy.model.pixels) and trajectory.final.shape[1:] == policy.model.shape
    assert pixels.min() >= 0 and pixels.max() <= 1
    for segment in trajectory.segments:
        assert policy.action_distribution(trajectory.cond, segment).log_prob(segment.action).equal(segment.log_prob)


def test_predictions_do_not_depend_on_the_batch(policy: Policy[Any]) -> None:
    batched = policy.sample(policy.embed(PROMPTS), make_rng()).final
    single = policy.sample(policy.embed(PROMPTS[2:3]), Randomness(0, 0, torch.tensor([2]))).final
    assert torch.allclose(batched[2:3], single, atol=1e-4)


def test_prediction_depends_on_word_order(policy: Policy[Any]) -> None:
    x, t = make_rng(1).normal("x", *policy.model.shape).expand(3, -1, -1, -1, -1), torch.full((3,), 0.5)
    out = policy.model.predict(x, t, policy.embed(("a dog left of a cat", "a cat left of a dog", "")))
    assert not torch.allclose(out[0], out[1], atol=1e-6) and not torch.allclose(out[0], out[2], atol=1e-6)


def test_checkpointing_gives_every_parameter_the_same_gradient(policy: Policy[Any]) -> None:
    x, gradients = policy.encode(torch.rand(4, *policy.model.pixels)), []
    for _ in range(2):
        policy.likelihood(policy.embed(PROMPTS), x, policy.corrupt(x, make_rng())).sum().backward()
        gradients.append({key: p.grad.clone() for key, p in policy.weights.trainable().items() if p.grad is not None})
        policy.model.net.zero_grad()
        activation_memory.checkpoint_activations(policy.model.net)
    assert [key for key in policy.weights.trainable() if not bool(gradients[0][key].any())] == []
    assert all(torch.allclose(g, gradients[1][key], atol=1e-5) for key, g in gradients[0].items())


def test_pixels_carry_gradients_and_latents_are_scaled(policy: Policy[Any]) -> None:
    x = make_rng().normal("x", *policy.model.shape).requires_grad_()
    policy.decode(x).sum().backward()
    assert x.grad is not None and bool(x.grad.any())
    model: Any = policy.model
    raw = model.autoencoder.net.encode(2 * torch.ones(1, *policy.model.pixels)[:, 0] - 1).latent_dist.mode()
    scaled = policy.encode(torch.ones(1, *policy.model.pixels))[:, 0]
    assert torch.allclose(scaled, raw * model.autoencoder.net.config.scaling_factor)


OBJECTIVES: dict[str, Objective[Any, Any, Any, Any]] = {
    "draft": RewardGradient(),
    "alignprop": RewardGradient(gradient_mode="truncated_normal", start_step_mean=2.0, start_step_std=1.0),
    "refl": RewardGradient(gradient_mode="single_step", step_range=(2, 3), reward_threshold=2.0, loss_scale=1e-3),
    "draft_lv": RewardGradient(gradient_mode="renoise"),
    "ddpo": DDPO(),
    "grpo": GRPO(group_size=4),
    "nft": NFT(group_size=4),
    "srpo": SRPO(relative=False),
    "dpo": DPO(beta=2500.0),
    "likelihood": Likelihood(),
}


@pytest.mark.parametrize("name", fast(OBJECTIVES, "alignprop", "refl"))  # others: objectives/test_published.py
def test_every_objective_reaches_the_network(name: str, policy: Policy[Any]) -> None:
    objective = OBJECTIVES[name]
    pixels = torch.rand(4, *policy.model.pixels)
    batch = {
        PromptBatch: PromptBatch(PROMPTS, ({},) * 4),
        PreferenceBatch: PreferenceBatch(PROMPTS, pixels, 1 - pixels),
        LikeBatch: LikeBatch(PROMPTS, pixels, torch.arange(len(pixels)) % 2 == 0),
        ImageBatch: ImageBatch(PROMPTS, pixels),
    }[objective.consumes]
    ctx = toys.context(policy, len(batch), objective.make_state(), spec=BrightnessReward())
    losses = toys.backward(objective, ctx, objective.collect(ctx, batch))
    assert all(loss.rows.isfinite().all() for loss in losses)
    total = sum(p.grad.abs().sum() for p in policy.weights.trainable().values() if p.grad is not None)
    assert total > 0


def test_sdxl_vae_never_runs_in_fp16() -> None:
    model = SdxlSpec().tiny().load(Placement(dtype=torch.float16))
    assert (
        model.autoencoder.net.dtype == torch.float32 and model.prompt_encoder.encoders.first.net.dtype == torch.float16
    )
    x = make_rng(1).normal("x", *model.shape)
    plain = model.decode(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.decode(x).equal(plain)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bf16_embeddings_work_with_weights_of_either_dtype(name: str, dtype: torch.dtype) -> None:
    model = SPECS[name].tiny().load(Placement(dtype=torch.bfloat16))
    model.net.to(dtype)
    out = model.predict(make_rng().normal("x", *model.shape), torch.full((4,), 0.5), model.embed(PROMPTS))
    assert out.dtype == dtype and out.isfinite().all()


def test_dpo_recipe_reads_pairs_from_a_file(tmp_path: Path) -> None:
    for name, gray in (("light", 250), ("dark", 5)):
        Image.new("RGB", (40, 40), (gray, gray, gray)).save(tmp_path / f"{name}.png")
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a light", "chosen": "light.png", "rejected": "dark.png"}\n' * 4)
    overrides = [
        "objective={type: dpo, beta: 2500}",
        "rewards={}",
        f"data={{type: pair_file, path: {tmp_path}/pairs.jsonl, image_size: 32}}",
        *("batch={prompts: 4}", "steps=1", "sample.every=0", "guard.every=0", "engine.precision=fp32"),
    ]
    run = build(load("dpo-sdxl", overrides), tmp_path / "run", tiny=True)
    assert [event.step for event in train(run) if isinstance(event, StepCompleted)] == [1]
