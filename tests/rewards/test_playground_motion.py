"""Playground rewards of clips with tiny random networks, scored through a rubric."""

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
MOTIONS = torch.arange(6) % 6
TEXTS = motion.motion_captions(sample_captions(ROWS).texts(), MOTIONS)


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
    num_frames = (pixels.grad.abs().sum((2, 3, 4)) > 0).sum(1)
    assert (num_frames == (8 if isinstance(spec, PlaygroundMotionReward) else 1)).all()


def test_log_output_is_the_logarithm_of_the_probability() -> None:
    log, probability = (
        rubric(PlaygroundMotionReward(output)).score(clips(), TEXTS).total for output in ("log", "probability")
    )
    assert torch.allclose(log.exp(), probability) and (probability > 0).all() and (probability < 1).all()


def test_probabilities_of_all_motions_sum_to_less_than_one() -> None:
    pixels = clips()[:1].expand(6, -1, -1, -1, -1)
    assert rubric(PlaygroundMotionReward("probability")).score(pixels, TEXTS).total.sum() < 1


@pytest.mark.parametrize(("frames", "size"), [(2, 64), (5, 16)])
def test_clips_of_other_sizes_are_scored(frames: int, size: int) -> None:
    for spec in (PlaygroundMotionReward(), PlaygroundContentReward(PlaygroundVerdictReward())):
        assert rubric(spec).score(clips(frames, size), TEXTS).total.shape == (6,)


def test_content_reward_scores_the_representative_frame() -> None:
    scores = rubric(PlaygroundContentReward(PlaygroundVerdictReward("graded"))).score(clips(), TEXTS).total
    assert torch.equal(
        scores, rubric(PlaygroundVerdictReward("graded")).score(representative_frame(clips(), MOTIONS), TEXTS).total
    )


def test_caption_that_names_no_motion_is_refused() -> None:
    with pytest.raises(RewardError, match=r"motion.*moving left.*TM758"):
        rubric(PlaygroundMotionReward()).score(clips()[:1], ["a photo of a dog"])


def test_content_reward_refuses_a_video_reward() -> None:
    with pytest.raises(ValueError, match=r"no frame.*TM414"):
        PlaygroundContentReward(StillnessReward())
