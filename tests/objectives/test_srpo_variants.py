"""SRPO variants: offline images, Qwen-Image, and rewards without prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from tiers import fast

from tastemaker.config.load import load
from tastemaker.core.policy import Guidance, Policy
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement, PromptBatch
from tastemaker.core.weights import FullFinetuning
from tastemaker.models.flux import FluxSpec
from tastemaker.models.qwen_image import QwenImageSpec, stretch_contrast
from tastemaker.models.sd3 import Sd3Spec
from tastemaker.objectives.srpo import SRPO
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import RectifiedFlow
from tastemaker.rewards.color import BrightnessReward

TOY = SRPO(
    num_grid_steps=8,
    timestep_range=(1, 6),
    num_train_timesteps=100,
    positive_words=(" ",),
    negative_words=("grey",),
    template="{prompt} {word}",
    reward_margin=None,
)
QWEN: Any = load("srpo-qwen-image").objective
RECTIFIED_FLOW = GaussianProcess(RectifiedFlow(), num_steps=26)


def prompts_with_images(size: tuple[int, int] = (8, 8)) -> PromptBatch:
    return replace(toys.prompts(4), images=torch.rand(4, 1, 3, *size, generator=torch.Generator().manual_seed(0)))


def record_calls(policy: Policy[Any]) -> list[bool]:
    """Return a list that records for each network call whether gradients are enabled."""
    calls: list[bool] = []
    policy.model.net.register_forward_hook(lambda net, inputs, output: calls.append(torch.is_grad_enabled()))
    return calls


def test_offline_images_replace_rollouts() -> None:
    policy, batch = toys.policy("flow"), prompts_with_images()
    calls, ctx = record_calls(policy), toys.context(policy, 4)
    experience = TOY.collect(ctx, batch)
    assert calls == []
    assert batch.images is not None and experience.clean.equal(policy.encode(batch.images))
    assert len(experience.noise.flatten(1).unique(dim=0)) == 1
    independent = replace(TOY, shared_noise=False).collect(ctx, batch)
    assert len(independent.noise.flatten(1).unique(dim=0)) == 4
    losses = toys.backward(TOY, ctx, experience)
    assert all(torch.isfinite(loss.rows).all() for loss in losses)


@pytest.mark.parametrize(("offline_steps", "expected"), [(None, [0, 0, 0]), (2, [0, 0, 8]), (0, [8, 8, 8])])
def test_offline_steps_end_offline_training(offline_steps: int | None, expected: list[int]) -> None:
    policy = toys.policy("flow")
    calls, num_calls = record_calls(policy), []
    for step in (0, 1, 2):
        before = len(calls)
        replace(TOY, offline_steps=offline_steps).collect(toys.context(policy, 4, step=step), prompts_with_images())
        num_calls.append(len(calls) - before)
    assert num_calls == expected


def test_offline_steps_need_images() -> None:
    policy = toys.policy("flow")
    for step in (0, 4):
        with pytest.raises(ConfigError, match=r"objective\.offline_steps.*TM322"):
            replace(TOY, offline_steps=5).collect(toys.context(policy, 4, step=step), toys.prompts(4))
    assert len(replace(TOY, offline_steps=5).collect(toys.context(policy, 4, step=5), toys.prompts(4))) == 4


@pytest.mark.parametrize(
    "spec", fast([FluxSpec(), Sd3Spec(), QwenImageSpec()], Sd3Spec()), ids=lambda spec: type(spec).__name__
)
def test_offline_images_of_other_sizes(spec: Any) -> None:
    model = spec.tiny().load(Placement())
    policy = Policy(model, RECTIFIED_FLOW, FullFinetuning().apply(model, ()))
    objective = SRPO(relative=False, reward_margin=None)
    for size in ((32, 64), (64, 32), (48, 48)):
        ctx, batch = toys.context(policy, 4, spec=BrightnessReward()), prompts_with_images(size)
        experience = objective.collect(ctx, batch)
        assert policy.decode(experience.clean).shape == (4, 1, 3, *size)
        for p in policy.weights.trainable().values():
            p.grad = None
        toys.backward(objective, ctx, experience)
        assert sum(float(p.grad.abs().sum()) for p in policy.weights.trainable().values() if p.grad is not None) > 0


def test_predictions_at_other_sizes_match_a_model_of_that_size() -> None:
    for spec in (FluxSpec().tiny(), Sd3Spec().tiny(), QwenImageSpec().tiny()):
        square, wide = spec.load(Placement()), replace(spec, height=32, width=64).load(Placement())
        x = toys.context(toys.policy("flow"), 2).rng.normal("x", *wide.shape)
        t, cond = torch.full((2,), 0.5), square.embed(["a cat", "a dog"])
        with torch.no_grad():
            torch.testing.assert_close(square.predict(x, t, cond), wide.predict(x, t, cond), atol=1e-6, rtol=0)
            assert square.decode(x).equal(wide.decode(x))


def test_qwen_image_levels_and_weights_match_published() -> None:
    """100 points from 0.9 to 0.2 with strides of at most 41; the weight is the relative index, shifted by 3."""
    levels = QWEN.levels(RECTIFIED_FLOW, torch.tensor([50, 2, 98]), "denoise")
    grid = [0.9 - 0.7 * i / 99 for i in range(100)]
    assert levels.target.tolist() == pytest.approx([grid[50], grid[98], grid[2]], abs=1e-6)
    assert levels.source.tolist() == pytest.approx([grid[9], grid[96], grid[0]], abs=1e-6)
    assert levels.weight.tolist() == pytest.approx([0.75, 3 * 0.02 / 1.04, 3 * 0.98 / 2.96], abs=1e-6)
    assert levels.boost.tolist() == [0, 0, 0]


def test_timesteps_per_sample() -> None:
    policy = toys.policy("flow")
    calls, ctx = record_calls(policy), toys.context(policy, 4)
    experience = replace(TOY, timesteps_per_sample=3).collect(ctx, toys.prompts(4))
    assert len(calls) == 8 and len(experience) == replace(TOY, timesteps_per_sample=3).experience_per_prompt() * 4
    assert experience.clean[0].equal(experience.clean[2]) and not experience.clean[0].equal(experience.clean[3])
    assert experience.cond.prompts[:4] == ("a red",) * 3 + ("a green",)
    assert experience.grid_index.view(4, 3)[0].unique().numel() == 3


def test_monotone_strides_never_grow() -> None:
    policy = toys.policy("flow")
    ctx = toys.context(policy, 4)
    independent, monotone = (
        replace(QWEN, timesteps_per_sample=4, monotone_stride=is_monotone).collect(ctx, toys.prompts(4))
        for is_monotone in (False, True)
    )
    assert independent.max_stride is not None and monotone.max_stride is not None
    assert monotone.max_stride.view(4, 4).equal(independent.max_stride.view(4, 4).cummin(1).values)
    assert not monotone.max_stride.equal(independent.max_stride)


def test_qwen_image_loss_is_weighted_difference() -> None:
    policy = toys.policy("flow")
    objective = replace(QWEN, positive_words=(" ",), negative_words=("grey",), template="{prompt} {word}")
    ctx = toys.context(policy, 4)
    experience = objective.collect(ctx, toys.prompts(4))
    levels = objective.levels(policy.process, experience.grid_index, "denoise", experience.max_stride)
    pixels = policy.decode(objective.recover_clean(ctx, experience, levels))
    positive = ctx.rubric.score(pixels, [f"{p}  " for p in experience.cond.prompts]).total
    negative = ctx.rubric.score(pixels, ["a grey"] * 8).total
    (part,) = objective.parts(experience)
    losses = objective.loss(ctx, experience, part).rows
    torch.testing.assert_close(losses, -levels.weight * (positive - negative))


def test_no_timestep_weights_by_default() -> None:
    assert SRPO().levels(RECTIFIED_FLOW, torch.tensor([5, 500, 995]), "inversion").weight.tolist() == [1, 1, 1]


def test_contrast_noise_for_rewards_without_prompts() -> None:
    policy = toys.policy("flow")
    ctx = toys.context(policy, 4, spec=BrightnessReward())
    objective = replace(TOY, contrast_noise=0.5, discount_pos=(0.0, 0.0), discount_inv=(0.0, 0.0))
    experience = objective.collect(ctx, toys.prompts(4))
    without_noise, with_noise = (
        replace(objective, contrast_noise=noise).loss(ctx, experience, ("denoise", "inversion")) for noise in (0.0, 0.5)
    )
    assert not without_noise.rows.any()  # brightness does not depend on the prompt
    assert bool(with_noise.rows.any())
    denoise, inversion = (objective.loss(ctx, experience, (branch,)).metrics for branch in ("denoise", "inversion"))
    assert (denoise["relative_reward/denoise"] * inversion["relative_reward/inversion"] < 0).any()


def test_rollouts_only_guidance_is_off_with_gradients() -> None:
    plain = toys.policy("flow")
    guided = toys.policy("flow", guidance=Guidance(3.0, "a grey", rollouts_only=True))
    always = toys.policy("flow", guidance=Guidance(3.0, "a grey"))
    x, t = plain.encode(torch.rand(4, 1, 3, 8, 8)), torch.full((4,), 0.5)
    cond = guided.embed(toys.PROMPTS)
    assert guided.model.predict(x, t, cond).equal(plain.model.predict(x, t, plain.embed(toys.PROMPTS)))
    with torch.no_grad():
        assert guided.model.predict(x, t, cond).equal(always.model.predict(x, t, cond))
        assert not guided.model.predict(x, t, cond).equal(plain.model.predict(x, t, plain.embed(toys.PROMPTS)))


def test_stretch_contrast_with_gradients() -> None:
    x = torch.tensor([[[[[0.5, -3.0], [2.0, 1.0]]]], [[[[0.1, 0.2], [0.3, 0.5]]]]])
    assert stretch_contrast(x).flatten(1).amin(1).tolist() == pytest.approx([-1, -1])
    assert stretch_contrast(x).flatten(1).amax(1).tolist() == pytest.approx([1, 1])
    model = replace(QwenImageSpec().tiny(), stretch_contrast=True).load(Placement())
    latents = toys.context(toys.policy("flow"), 2).rng.normal("x", *model.shape)
    pixels = model.decode(latents.requires_grad_())
    assert pixels.flatten(1).amin(1).tolist() == pytest.approx([0, 0], abs=1e-6)
    assert pixels.flatten(1).amax(1).tolist() == pytest.approx([1, 1], abs=1e-6)
    pixels.square().sum().backward()
    assert latents.grad is not None and bool(latents.grad.any())
    with torch.no_grad():
        plain = QwenImageSpec().tiny().load(Placement()).decode(latents)
        assert model.decode(latents).equal(plain) and not plain.equal(pixels)


@pytest.mark.parametrize(
    ("key", "value"),
    [("timesteps_per_sample", 0), ("contrast_noise", -0.1), ("offline_steps", -1), ("timestep_weight_shift", 0.0)],
)
def test_invalid_settings_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{key}.* {value}"):
        SRPO(**{key: value})


def test_srpo_recipes_match_published_settings() -> None:
    hps: Any = load("srpo-flux-hps").objective
    pickscore: Any = load("srpo-flux-pickscore").objective
    assert hps == SRPO()
    assert (pickscore.timestep_range, pickscore.discount_pos, pickscore.discount_inv) == (
        (5, 30),
        (0.1, 0.5),
        (0.6, 0.01),
    )
    changed: Any = load(
        "srpo-flux-hps", ["objective.positive_words=[Realistic photo]", "objective.negative_words=[CG Render]"]
    ).objective
    assert (changed.positive_words, changed.negative_words, changed.timestep_range) == (
        ("Realistic photo",),
        ("CG Render",),
        (5, 25),
    )


@pytest.mark.slow
def test_run_trains_offline_then_online(tmp_path: Path) -> None:
    import json

    from tastemaker import build
    from tastemaker.data.image_io import save_image
    from tastemaker.training.events import StepCompleted
    from tastemaker.training.loop import train

    for name, size in (("a", (40, 70)), ("b", (70, 40)), ("c", (40, 60))):
        save_image(torch.rand(1, 3, *size), tmp_path / f"{name}.png")
    rows = [{"prompt": f"picture {name}", "image": f"{name}.png"} for name in "abc"]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = f"data={{type: prompts_with_images, path: {tmp_path}/rows.jsonl, buckets: [[32, 64], [64, 32]]}}"
    settings = ["objective.offline_steps=2", "steps=3", "batch.prompts=2", "sample.every=0", "engine.device=cpu", data]
    for recipe in ("srpo-flux-hps", "srpo-qwen-image"):
        run = build(load(recipe, [*settings, "process.num_steps=3"]), tmp_path / recipe, tiny=True)
        losses = [event.metrics["loss/policy"] for event in train(run) if isinstance(event, StepCompleted)]
        run.engine.close()
        assert len(losses) == 3 and all(loss == loss for loss in losses)
