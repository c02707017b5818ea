"""SRPO beside its first recipe: from pictures, on Qwen-Image, and with rewards that read no prompt."""

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
from tastemaker.models.flux import Flux
from tastemaker.models.qwen_image import QwenImage, stretch_contrast
from tastemaker.models.sd3 import Sd3
from tastemaker.objectives.srpo import SRPO
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import RectifiedFlow
from tastemaker.rewards.color import Brightness

TOY = SRPO(grid=8, span=(1, 6), length=100, praise=(" ",), blame=("grey",), template="{prompt} {word}", margin=None)
QWEN: Any = load("srpo-qwen-image").objective
EVEN = GaussianProcess(RectifiedFlow(), steps=26)


def illustrated(side: tuple[int, int] = (8, 8)) -> PromptBatch:
    return replace(toys.prompts(4), pictures=torch.rand(4, 1, 3, *side, generator=torch.Generator().manual_seed(0)))


def counted(policy: Policy[Any]) -> list[bool]:
    """Grows by one for every call of the network: whether it is learned from."""
    calls: list[bool] = []
    policy.model.net.register_forward_hook(lambda net, inputs, output: calls.append(torch.is_grad_enabled()))
    return calls


def test_pictures_are_encoded_and_nothing_is_rolled_out() -> None:
    policy, batch = toys.policy("flow"), illustrated()
    calls, ctx = counted(policy), toys.context(policy, 4)
    seen = TOY.collect(ctx, batch)
    assert calls == []
    assert batch.pictures is not None and seen.clean.equal(policy.encode(batch.pictures))
    assert len(seen.noise.flatten(1).unique(dim=0)) == 1
    own = replace(TOY, shared_noise=False).collect(ctx, batch)
    assert len(own.noise.flatten(1).unique(dim=0)) == 4
    losses = toys.backward(TOY, ctx, seen)
    assert all(torch.isfinite(loss.rows).all() for loss in losses)


@pytest.mark.parametrize(("offline", "steps"), [(None, [0, 0, 0]), (2, [0, 0, 8]), (0, [8, 8, 8])])
def test_pictures_give_way_to_samples_at_the_step_asked_for(offline: int | None, steps: list[int]) -> None:
    policy = toys.policy("flow")
    calls, found = counted(policy), []
    for step in (0, 1, 2):
        before = len(calls)
        replace(TOY, offline=offline).collect(toys.context(policy, 4, step=step), illustrated())
        found.append(len(calls) - before)
    assert found == steps


def test_pictures_that_are_asked_for_and_not_there_are_missed() -> None:
    policy = toys.policy("flow")
    for step in (0, 4):
        with pytest.raises(ConfigError, match="the data shows no pictures"):
            replace(TOY, offline=5).collect(toys.context(policy, 4, step=step), toys.prompts(4))
    assert len(replace(TOY, offline=5).collect(toys.context(policy, 4, step=5), toys.prompts(4))) == 4


@pytest.mark.parametrize("spec", fast([Flux(), Sd3(), QwenImage()], Sd3()), ids=lambda spec: type(spec).__name__)
def test_pictures_of_other_sizes_than_the_models_own_are_learned_from(spec: Any) -> None:
    model = spec.tiny().load(Placement())
    policy = Policy(model, EVEN, FullFinetuning().apply(model, ()))
    objective = SRPO(relative=False, margin=None)
    for size in ((32, 64), (64, 32), (48, 48)):
        ctx, batch = toys.context(policy, 4, spec=Brightness()), illustrated(size)
        seen = objective.collect(ctx, batch)
        assert policy.decode(seen.clean).shape == (4, 1, 3, *size)
        for p in policy.weights.trainable().values():
            p.grad = None
        toys.backward(objective, ctx, seen)
        assert sum(float(p.grad.abs().sum()) for p in policy.weights.trainable().values() if p.grad is not None) > 0


def test_predictions_at_another_size_are_those_of_a_model_made_for_it() -> None:
    for spec in (Flux().tiny(), Sd3().tiny(), QwenImage().tiny()):
        square, wide = spec.load(Placement()), replace(spec, height=32, width=64).load(Placement())
        x = toys.context(toys.policy("flow"), 2).rng.normal("x", *wide.shape)
        t, cond = torch.full((2,), 0.5), square.embed(["a cat", "a dog"])
        with torch.no_grad():
            torch.testing.assert_close(square.predict(x, t, cond), wide.predict(x, t, cond), atol=1e-6, rtol=0)
            assert square.decode(x).equal(wide.decode(x))


def test_levels_and_weights_of_qwen_image_are_the_published_ones() -> None:
    """Of 100 points from 0.9 to 0.2, at most 41 apart; the weight is the place's share, shifted by 3."""
    levels = QWEN.levels(EVEN, torch.tensor([50, 2, 98]), "denoise")
    line = [0.9 - 0.7 * i / 99 for i in range(100)]
    assert levels.target.tolist() == pytest.approx([line[50], line[98], line[2]], abs=1e-6)
    assert levels.source.tolist() == pytest.approx([line[9], line[96], line[0]], abs=1e-6)
    assert levels.weight.tolist() == pytest.approx([0.75, 3 * 0.02 / 1.04, 3 * 0.98 / 2.96], abs=1e-6)
    assert levels.boost.tolist() == [0, 0, 0]


def test_each_sample_is_learned_from_at_places_of_its_own() -> None:
    policy = toys.policy("flow")
    calls, ctx = counted(policy), toys.context(policy, 4)
    seen = replace(TOY, draws=3).collect(ctx, toys.prompts(4))
    assert len(calls) == 8 and len(seen) == replace(TOY, draws=3).kept_rows() * 4
    assert seen.clean[0].equal(seen.clean[2]) and not seen.clean[0].equal(seen.clean[3])
    assert seen.cond.prompts[:4] == ("a red",) * 3 + ("a green",)
    assert seen.place.view(4, 3)[0].unique().numel() == 3


def test_carried_strides_only_shrink() -> None:
    policy = toys.policy("flow")
    ctx = toys.context(policy, 4)
    free, carried = (replace(QWEN, draws=4, carried=c).collect(ctx, toys.prompts(4)) for c in (False, True))
    assert free.reach is not None and carried.reach is not None
    assert carried.reach.view(4, 4).equal(free.reach.view(4, 4).cummin(1).values)
    assert not carried.reach.equal(free.reach)


def test_the_loss_of_qwen_image_is_the_weighted_difference_and_nothing_else() -> None:
    policy = toys.policy("flow")
    objective = replace(QWEN, praise=(" ",), blame=("grey",), template="{prompt} {word}")
    ctx = toys.context(policy, 4)
    seen = objective.collect(ctx, toys.prompts(4))
    levels = objective.levels(policy.process, seen.place, "denoise", seen.reach)
    pixels = policy.decode(objective.recover(ctx, seen, levels))
    praised = ctx.rubric.score(pixels, [f"{p}  " for p in seen.cond.prompts]).total
    blamed = ctx.rubric.score(pixels, ["a grey"] * 8).total
    (part,) = objective.parts(seen)
    found = objective.loss(ctx, seen, part).rows
    torch.testing.assert_close(found, -levels.weight * (praised - blamed))


def test_the_weight_leaves_the_loss_alone_without_a_discount() -> None:
    assert SRPO().levels(EVEN, torch.tensor([5, 500, 995]), "inversion").weight.tolist() == [1, 1, 1]


def test_a_reward_that_reads_no_prompt_blames_the_picture_under_noise() -> None:
    policy = toys.policy("flow")
    ctx = toys.context(policy, 4, spec=Brightness())
    objective = replace(TOY, grain=0.5, boost_denoise=(0.0, 0.0), boost_inversion=(0.0, 0.0))
    seen = objective.collect(ctx, toys.prompts(4))
    words, grain = (replace(objective, grain=g).loss(ctx, seen, ("denoise", "inversion")) for g in (0.0, 0.5))
    assert not words.rows.any()  # brightness does not read, so words make no difference
    assert bool(grain.rows.any())
    forth, back = (objective.loss(ctx, seen, (branch,)).metrics for branch in ("denoise", "inversion"))
    assert (forth["relative/denoise"] * back["relative/inversion"] < 0).any()


def test_guidance_of_rollouts_alone_costs_nothing_where_a_gradient_is_wanted() -> None:
    plain = toys.policy("flow")
    guided = toys.policy("flow", guidance=Guidance(3.0, "a grey", rollouts_only=True))
    always = toys.policy("flow", guidance=Guidance(3.0, "a grey"))
    x, t = plain.encode(torch.rand(4, 1, 3, 8, 8)), torch.full((4,), 0.5)
    cond = guided.embed(toys.PROMPTS)
    assert guided.model.predict(x, t, cond).equal(plain.model.predict(x, t, plain.embed(toys.PROMPTS)))
    with torch.no_grad():
        assert guided.model.predict(x, t, cond).equal(always.model.predict(x, t, cond))
        assert not guided.model.predict(x, t, cond).equal(plain.model.predict(x, t, plain.embed(toys.PROMPTS)))


def test_stretched_pictures_reach_from_black_to_white_where_a_gradient_is_wanted() -> None:
    x = torch.tensor([[[[[0.5, -3.0], [2.0, 1.0]]]], [[[[0.1, 0.2], [0.3, 0.5]]]]])
    assert stretch_contrast(x).flatten(1).amin(1).tolist() == pytest.approx([-1, -1])
    assert stretch_contrast(x).flatten(1).amax(1).tolist() == pytest.approx([1, 1])
    model = replace(QwenImage().tiny(), stretch=True).load(Placement())
    latents = toys.context(toys.policy("flow"), 2).rng.normal("x", *model.shape)
    shown = model.decode(latents.requires_grad_())
    assert shown.flatten(1).amin(1).tolist() == pytest.approx([0, 0], abs=1e-6)
    assert shown.flatten(1).amax(1).tolist() == pytest.approx([1, 1], abs=1e-6)
    shown.square().sum().backward()
    assert latents.grad is not None and bool(latents.grad.any())
    with torch.no_grad():
        plain = QwenImage().tiny().load(Placement()).decode(latents)
        assert model.decode(latents).equal(plain) and not plain.equal(shown)


@pytest.mark.parametrize("wrong", [{"draws": 0}, {"grain": -0.1}, {"offline": -1}, {"discount": 0.0}])
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected at least one draw"):
        SRPO(**wrong)


def test_recipes_of_the_two_rewards_keep_their_numbers_and_take_other_words() -> None:
    hps: Any = load("srpo-flux-hps").objective
    pickscore: Any = load("srpo-flux-pickscore").objective
    assert hps == SRPO()
    assert (pickscore.span, pickscore.boost_denoise, pickscore.boost_inversion) == ((5, 30), (0.1, 0.5), (0.6, 0.01))
    own: Any = load("srpo-flux-hps", ["objective.praise=[Realistic photo]", "objective.blame=[CG Render]"]).objective
    assert (own.praise, own.blame, own.span) == (("Realistic photo",), ("CG Render",), (5, 25))


@pytest.mark.slow
def test_a_run_learns_from_pictures_and_then_from_samples(tmp_path: Path) -> None:
    import json

    from tastemaker import build
    from tastemaker.data.image_io import save_image
    from tastemaker.training.events import StepCompleted
    from tastemaker.training.loop import train

    for name, size in (("a", (40, 70)), ("b", (70, 40)), ("c", (40, 60))):
        save_image(torch.rand(1, 3, *size), tmp_path / f"{name}.png")
    rows = [{"prompt": f"picture {name}", "image": f"{name}.png"} for name in "abc"]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = f"data={{type: illustrated_prompts, path: {tmp_path}/rows.jsonl, buckets: [[32, 64], [64, 32]]}}"
    changes = ["objective.offline=2", "steps=3", "batch.prompts=2", "sample.every=0", "engine.device=cpu", data]
    for recipe in ("srpo-flux-hps", "srpo-qwen-image"):
        run = build(load(recipe, [*changes, "process.steps=3"]), tmp_path / recipe, tiny=True)
        losses = [event.metrics["loss"] for event in train(run) if isinstance(event, StepCompleted)]
        run.engine.close()
        assert len(losses) == 3 and all(loss == loss for loss in losses)
