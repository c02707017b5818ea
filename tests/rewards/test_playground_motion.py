"""Rewards of clips of the playground at small random size, through the rubric."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tastemaker.core.randomness import Randomness
from tastemaker.core.reward import RewardError, RewardSpec, Rubric, WeightedReward
from tastemaker.core.types import Placement
from tastemaker.playground import motion
from tastemaker.playground.captions import sample_captions
from tastemaker.playground.motion import representative_frame
from tastemaker.rewards.motion import StillnessReward
from tastemaker.rewards.playground import (
    PlaygroundContentReward,
    PlaygroundMotionReward,
    PlaygroundSoftReward,
    PlaygroundVerdictReward,
)

ROWS = Randomness(0, 0, torch.arange(6))
SAID = torch.arange(6) % 6
TEXTS = motion.motion_captions(sample_captions(ROWS).texts(), SAID)


def clips(frames: int = 8, size: int = 64) -> Tensor:
    return ROWS.uniform("pixels", frames, 3, size, size)


def rubric(spec: RewardSpec) -> Rubric:
    small = spec.tiny()
    return Rubric({"it": WeightedReward(small, small.load(Placement()))})


@pytest.mark.parametrize("spec", [PlaygroundMotionReward(), PlaygroundContentReward(PlaygroundSoftReward())])
def test_gradients_reach_the_frames_that_count(spec: RewardSpec) -> None:
    pixels = clips().requires_grad_()
    rubric(spec).score(pixels, TEXTS).total.sum().backward()
    assert pixels.grad is not None
    felt = (pixels.grad.abs().sum((2, 3, 4)) > 0).sum(1)
    assert (felt == (8 if isinstance(spec, PlaygroundMotionReward) else 1)).all()


def test_the_logarithm_is_that_of_the_probability() -> None:
    log, share = (rubric(PlaygroundMotionReward(form)).score(clips(), TEXTS).total for form in ("log", "probability"))
    assert torch.allclose(log.exp(), share) and (share > 0).all() and (share < 1).all()


def test_of_all_motions_and_none_the_probabilities_are_one_together() -> None:
    pixels = clips()[:1].expand(6, -1, -1, -1, -1)
    assert rubric(PlaygroundMotionReward("probability")).score(pixels, TEXTS).total.sum() < 1


@pytest.mark.parametrize(("frames", "size"), [(2, 64), (5, 16)])
def test_clips_of_other_sizes_are_scored(frames: int, size: int) -> None:
    for spec in (PlaygroundMotionReward(), PlaygroundContentReward(PlaygroundVerdictReward())):
        assert rubric(spec).score(clips(frames, size), TEXTS).total.shape == (6,)


def test_content_is_what_the_reward_of_stills_says_of_the_frame_that_tells() -> None:
    whole = rubric(PlaygroundContentReward(PlaygroundVerdictReward("graded"))).score(clips(), TEXTS).total
    assert torch.equal(
        whole, rubric(PlaygroundVerdictReward("graded")).score(representative_frame(clips(), SAID), TEXTS).total
    )


def test_a_caption_without_motion_is_refused_in_a_sentence() -> None:
    with pytest.raises(RewardError, match="names no motion; expected it to end in one of moving left"):
        rubric(PlaygroundMotionReward()).score(clips()[:1], ["a photo of a dog"])


def test_of_a_reward_of_clips_no_frame_is_picked() -> None:
    with pytest.raises(ValueError, match="no frame can be picked"):
        PlaygroundContentReward(StillnessReward())
