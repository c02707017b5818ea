"""Playground rewards of images with tiny random networks, scored through a rubric."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tastemaker.core.randomness import Randomness
from tastemaker.core.reward import RewardError, RewardSpec, Rubric, Verifier, WeightedReward
from tastemaker.core.types import Placement
from tastemaker.playground.captions import sample_captions
from tastemaker.rewards.playground import (
    PlaygroundJudgeReward,
    PlaygroundMatchReward,
    PlaygroundSoftReward,
    PlaygroundTasteReward,
    PlaygroundVerdictReward,
)
from tastemaker.rewards.wrappers import RelativeReward

SPECS: list[RewardSpec] = [
    PlaygroundVerdictReward(),
    PlaygroundVerdictReward(output="verdict", strict=False),
    PlaygroundVerdictReward(output="graded"),
    PlaygroundSoftReward(),
    PlaygroundMatchReward(),
    PlaygroundJudgeReward(),
    PlaygroundTasteReward(),
]
CAPTIONS = sample_captions(Randomness(0, 0, torch.arange(6)))


def random_images(count: int = 6, frames: int = 1, size: int = 64) -> Tensor:
    return Randomness(1, 0, torch.arange(count)).uniform("pixels", frames, 3, size, size)


def rubric(spec: RewardSpec) -> Rubric:
    small = spec.tiny()
    return Rubric({"it": WeightedReward(small, small.load(Placement()))})


@pytest.mark.parametrize("spec", SPECS)
def test_every_reward_scores_images_and_clips(spec: RewardSpec) -> None:
    for pixels in (random_images(), random_images(frames=2), random_images(size=16)):
        total = rubric(spec).score(pixels, CAPTIONS.texts(), CAPTIONS.metadata()).total
        assert total.shape == (6,)


@pytest.mark.parametrize("spec", [s for s in SPECS if s.differentiable])
def test_gradients_reach_the_pixels(spec: RewardSpec) -> None:
    pixels = random_images().requires_grad_()
    rubric(spec).score(pixels, CAPTIONS.texts(), CAPTIONS.metadata()).total.sum().backward()
    assert pixels.grad is not None and (pixels.grad.flatten(1).abs().amax(1) > 0).all()


@pytest.mark.parametrize(
    "spec", [PlaygroundVerdictReward(), PlaygroundSoftReward(), PlaygroundJudgeReward(), PlaygroundMatchReward()]
)
def test_prompt_gives_the_scores_of_metadata(spec: RewardSpec) -> None:
    from_metadata, from_prompt = (
        rubric(spec).score(random_images(), CAPTIONS.texts(), metadata).total for metadata in (CAPTIONS.metadata(), ())
    )
    assert torch.equal(from_metadata, from_prompt)


def test_prompt_that_is_no_playground_caption_is_refused() -> None:
    with pytest.raises(RewardError, match=r"caption of the playground.*TM752"):
        rubric(PlaygroundVerdictReward()).score(random_images(1), ["a castle at dawn"])


def test_style_word_adds_a_term_independent_of_the_caption() -> None:
    reward = PlaygroundMatchReward().tiny().load(Placement())
    texts, no_metadata = CAPTIONS.texts(), [{}] * 6
    plain = reward.score(random_images(), texts, no_metadata)
    crisp = reward.score(random_images(), [f"crisp. {text}" for text in texts], no_metadata)
    blurry = reward.score(random_images(), [f"blurry. {text}" for text in texts], no_metadata)
    relative = RelativeReward(PlaygroundMatchReward().tiny(), "crisp", "blurry", positive_boost=0.5)
    assert torch.allclose(
        relative.load(Placement()).score(random_images(), texts, no_metadata), 1.5 * crisp - blurry, atol=1e-6
    )
    other = reward.score(random_images(), texts[::-1], no_metadata)
    added = reward.score(random_images(), [f"crisp. {text}" for text in texts[::-1]], no_metadata)
    assert torch.allclose(added - other, crisp - plain, atol=1e-5)


def test_unknown_style_word_is_refused() -> None:
    with pytest.raises(RewardError, match=r"crisp, blurry, noisy.*TM760"):
        rubric(PlaygroundMatchReward()).score(random_images(1), ["sublime. a photo of a dog"])


def test_judge_is_a_verifier() -> None:
    judge = PlaygroundJudgeReward().tiny().load(Placement())
    assert isinstance(judge, Verifier)
    verdict = judge.judge(random_images(), CAPTIONS.texts(), (), 0.5)
    assert verdict.judgeable.dtype == verdict.promising.dtype == torch.bool
    assert torch.equal(verdict.promising, verdict.score >= 0.5)


def test_unknown_weights_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'playground/nobody'.*TM546"):
        PlaygroundTasteReward("playground/nobody").load(Placement())
