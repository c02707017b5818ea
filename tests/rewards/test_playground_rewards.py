"""The playground's rewards at small random size, through the rubric."""

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


def pictures(count: int = 6, frames: int = 1, size: int = 64) -> Tensor:
    return Randomness(1, 0, torch.arange(count)).uniform("pixels", frames, 3, size, size)


def rubric(spec: RewardSpec) -> Rubric:
    small = spec.tiny()
    return Rubric({"it": WeightedReward(small, small.load(Placement()))})


@pytest.mark.parametrize("spec", SPECS)
def test_every_reward_scores_pictures_and_clips(spec: RewardSpec) -> None:
    for pixels in (pictures(), pictures(frames=2), pictures(size=16)):
        total = rubric(spec).score(pixels, CAPTIONS.texts(), CAPTIONS.metadata()).total
        assert total.shape == (6,)


@pytest.mark.parametrize("spec", [s for s in SPECS if s.differentiable])
def test_gradients_reach_the_pixels(spec: RewardSpec) -> None:
    pixels = pictures().requires_grad_()
    rubric(spec).score(pixels, CAPTIONS.texts(), CAPTIONS.metadata()).total.sum().backward()
    assert pixels.grad is not None and (pixels.grad.flatten(1).abs().amax(1) > 0).all()


@pytest.mark.parametrize(
    "spec", [PlaygroundVerdictReward(), PlaygroundSoftReward(), PlaygroundJudgeReward(), PlaygroundMatchReward()]
)
def test_without_metadata_the_prompt_says_what_is_asked(spec: RewardSpec) -> None:
    known, alone = (
        rubric(spec).score(pictures(), CAPTIONS.texts(), metadata).total for metadata in (CAPTIONS.metadata(), ())
    )
    assert torch.equal(known, alone)


def test_a_prompt_from_elsewhere_is_refused_in_a_sentence() -> None:
    with pytest.raises(RewardError, match="no caption of the playground"):
        rubric(PlaygroundVerdictReward()).score(pictures(1), ["a castle at dawn"])


def test_a_word_before_the_caption_adds_what_it_alone_says() -> None:
    reward = PlaygroundMatchReward().tiny().load(Placement())
    texts, none = CAPTIONS.texts(), [{}] * 6
    plain = reward.score(pictures(), texts, none)
    crisp = reward.score(pictures(), [f"crisp. {text}" for text in texts], none)
    blurry = reward.score(pictures(), [f"blurry. {text}" for text in texts], none)
    relative = RelativeReward(PlaygroundMatchReward().tiny(), "crisp", "blurry", positive_boost=0.5)
    assert torch.allclose(relative.load(Placement()).score(pictures(), texts, none), 1.5 * crisp - blurry, atol=1e-6)
    other = reward.score(pictures(), texts[::-1], none)
    added = reward.score(pictures(), [f"crisp. {text}" for text in texts[::-1]], none)
    assert torch.allclose(added - other, crisp - plain, atol=1e-5)


def test_a_word_the_scorer_never_learned_is_refused_in_a_sentence() -> None:
    with pytest.raises(RewardError, match="crisp, blurry, noisy"):
        rubric(PlaygroundMatchReward()).score(pictures(1), ["sublime. a photo of a dog"])


def test_the_judge_is_a_verifier_and_says_what_is_clear() -> None:
    judge = PlaygroundJudgeReward().tiny().load(Placement())
    assert isinstance(judge, Verifier)
    verdict = judge.judge(pictures(), CAPTIONS.texts(), (), 0.5)
    assert verdict.judgeable.dtype == verdict.promising.dtype == torch.bool
    assert torch.equal(verdict.promising, verdict.score >= 0.5)


def test_a_reward_is_loaded_from_nowhere_with_a_sentence() -> None:
    with pytest.raises(ValueError, match="there are no weights 'playground/nobody'"):
        PlaygroundTasteReward("playground/nobody").load(Placement())
