"""Rewards made of rewards."""

from __future__ import annotations

import pytest
import torch

from tastemaker.core.reward import RewardSpec, Rubric, WeightedReward, load_shared_reward
from tastemaker.core.types import Placement
from tastemaker.rewards.color import BrightnessReward, ColorReward
from tastemaker.rewards.compression import JpegReward
from tastemaker.rewards.motion import StillnessReward
from tastemaker.rewards.target_image import MseReward
from tastemaker.rewards.wrappers import ClippedReward, PerFrameReward, RelativeReward

PIXELS = torch.rand(4, 5, 3, 6, 6, generator=torch.Generator().manual_seed(0))
PROMPTS = ("a cat", "a dog", "a red dog", "a bird")


def total(spec: RewardSpec) -> torch.Tensor:
    return Rubric({"it": WeightedReward(spec, load_shared_reward(spec, Placement()))}).score(PIXELS, PROMPTS).total


def color(name: str) -> torch.Tensor:
    """Colour, were every prompt to end in this word."""
    return Rubric({"it": WeightedReward(ColorReward(), ColorReward())}).score(PIXELS, [name] * 4).total


def test_relative_weighs_praise_against_blame() -> None:
    # Praise and blame stand before the prompt, so prompts that name no colour take theirs from them.
    scores = total(RelativeReward(ColorReward(), positive_words="blue", negative_words="yellow", positive_boost=0.25))
    expected = 1.25 * color("blue") - color("yellow")
    expected[2] = 0.25 * color("red")[2]
    torch.testing.assert_close(scores, expected)


def test_clipped_keeps_to_its_bounds_and_passes_gradients_between_them() -> None:
    spec = ClippedReward(BrightnessReward(), 0.25, 0.75)
    pixels = torch.tensor([0.1, 0.5, 0.9])[:, None, None, None, None].expand(3, 1, 3, 2, 2).clone().requires_grad_()
    scores = Rubric({"it": WeightedReward(spec, spec.load(Placement()))}).score(pixels, ["", "", ""]).total
    assert scores.tolist() == pytest.approx([0.25, 0.5, 0.75])
    slope = torch.autograd.grad(scores.sum(), pixels)[0].sum((1, 2, 3, 4))
    assert slope.tolist() == pytest.approx([0, 1, 0])


def test_a_bound_can_be_left_open_and_each_frame_is_clipped_by_itself() -> None:
    frames = PIXELS.mean((2, 3, 4)).clamp(max=0.5)
    torch.testing.assert_close(total(ClippedReward(BrightnessReward(), max=0.5)), frames.mean(1))


@pytest.mark.parametrize(("frames", "place"), [("first", 0), ("middle", 2), ("last", 4), (3, 3), (-2, 3)])
def test_per_frame_asks_one_frame(frames: int, place: int) -> None:
    torch.testing.assert_close(total(PerFrameReward(BrightnessReward(), frames)), PIXELS[:, place].mean((1, 2, 3)))


def test_per_frame_of_all_is_the_mean_over_frames() -> None:
    torch.testing.assert_close(total(PerFrameReward(BrightnessReward())), PIXELS.mean((1, 2, 3, 4)))


def test_per_frame_tells_a_target_which_frame_it_is() -> None:
    spec = PerFrameReward(MseReward(), "last")
    rubric = Rubric({"it": WeightedReward(spec, spec.load(Placement()))})
    metadata = [{"target": clip} for clip in PIXELS]
    assert rubric.score(PIXELS, PROMPTS, metadata).total.tolist() == [0.0] * 4


def test_a_frame_that_is_not_there_is_refused() -> None:
    spec = PerFrameReward(BrightnessReward(), 5)
    with pytest.raises(ValueError, match="have 5 frames"):
        spec.load(Placement()).score(PIXELS, PROMPTS, [{}] * 4)


def test_no_frame_is_picked_for_a_reward_that_reads_clips() -> None:
    with pytest.raises(ValueError, match="no frame can be picked"):
        PerFrameReward(StillnessReward(), "middle")


def test_bounds_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="min"):
        ClippedReward(BrightnessReward(), 1.0, 0.0)
    with pytest.raises(ValueError, match="neither 'min' nor 'max'"):
        ClippedReward(BrightnessReward())


def test_combinators_follow_the_reward_inside() -> None:
    host, clip = (
        ClippedReward(JpegReward(batch_size=3), min=-9.0),
        RelativeReward(StillnessReward(batch_size=2), "calm", "wild"),
    )
    assert (host.differentiable, host.modality, host.runs_on, host.batch_size) == (False, "image", "host", 3)
    assert (clip.differentiable, clip.modality, clip.runs_on, clip.batch_size) == (True, "video", "device", 2)
    assert PerFrameReward(JpegReward()).modality == "image"
    assert PerFrameReward(JpegReward(), "first").modality == "video"


def test_combinators_nest_compare_and_shrink() -> None:
    one, two = (ClippedReward(RelativeReward(ColorReward(), "red", "blue"), 0.0, 1.0) for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert one.tiny() == one
    assert load_shared_reward(one, Placement()) is load_shared_reward(two, Placement())
