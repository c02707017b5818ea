"""Rewards that wrap other rewards: relative, clipped and per-frame."""

from __future__ import annotations

import pytest
import torch

from tastemaker.core.reward import RewardSpec, Rubric, WeightedReward, load_shared_reward
from tastemaker.core.types import Placement
from tastemaker.rewards.color import BrightnessReward, ColorReward
from tastemaker.rewards.compression import JpegReward
from tastemaker.rewards.motion import StillnessReward
from tastemaker.rewards.target_image import MseReward
from tastemaker.rewards.wrappers import ClippedReward, PerFrameReward, RelativeReward, SteppedReward

PIXELS = torch.rand(4, 5, 3, 6, 6, generator=torch.Generator().manual_seed(0))
PROMPTS = ("a cat", "a dog", "a red dog", "a bird")


def total(spec: RewardSpec) -> torch.Tensor:
    return Rubric({"it": WeightedReward(spec, load_shared_reward(spec, Placement()))}).score(PIXELS, PROMPTS).total


def color(name: str) -> torch.Tensor:
    """Color scores with this word as every prompt."""
    return Rubric({"it": WeightedReward(ColorReward(), ColorReward())}).score(PIXELS, [name] * 4).total


def test_relative_subtracts_negative_from_boosted_positive_score() -> None:
    # The words are put before the prompt, so a prompt that names no color takes the color of the words.
    scores = total(RelativeReward(ColorReward(), positive_words="blue", negative_words="yellow", positive_boost=0.25))
    expected = 1.25 * color("blue") - color("yellow")
    expected[2] = 0.25 * color("red")[2]
    torch.testing.assert_close(scores, expected)


def test_clipped_score_stays_in_bounds_with_gradients_between_them() -> None:
    spec = ClippedReward(BrightnessReward(), 0.25, 0.75)
    pixels = torch.tensor([0.1, 0.5, 0.9])[:, None, None, None, None].expand(3, 1, 3, 2, 2).clone().requires_grad_()
    scores = Rubric({"it": WeightedReward(spec, spec.load(Placement()))}).score(pixels, ["", "", ""]).total
    assert scores.tolist() == pytest.approx([0.25, 0.5, 0.75])
    gradient = torch.autograd.grad(scores.sum(), pixels)[0].sum((1, 2, 3, 4))
    assert gradient.tolist() == pytest.approx([0, 1, 0])


def test_one_sided_clipping_applies_to_each_frame() -> None:
    frames = PIXELS.mean((2, 3, 4)).clamp(max=0.5)
    torch.testing.assert_close(total(ClippedReward(BrightnessReward(), max=0.5)), frames.mean(1))


@pytest.mark.parametrize(("frames", "index"), [("first", 0), ("middle", 2), ("last", 4), (3, 3), (-2, 3)])
def test_per_frame_scores_one_frame(frames: int, index: int) -> None:
    torch.testing.assert_close(total(PerFrameReward(BrightnessReward(), frames)), PIXELS[:, index].mean((1, 2, 3)))


def test_per_frame_of_all_is_the_mean_over_frames() -> None:
    torch.testing.assert_close(total(PerFrameReward(BrightnessReward())), PIXELS.mean((1, 2, 3, 4)))


def test_per_frame_passes_the_frame_number_to_the_target() -> None:
    spec = PerFrameReward(MseReward(), "last")
    rubric = Rubric({"it": WeightedReward(spec, spec.load(Placement()))})
    metadata = [{"target": clip} for clip in PIXELS]
    assert rubric.score(PIXELS, PROMPTS, metadata).total.tolist() == [0.0] * 4


def test_frame_out_of_range_is_refused() -> None:
    spec = PerFrameReward(BrightnessReward(), 5)
    with pytest.raises(ValueError, match=r"5 frames.*TM413"):
        spec.load(Placement()).score(PIXELS, PROMPTS, [{}] * 4)


def test_per_frame_refuses_a_video_reward() -> None:
    with pytest.raises(ValueError, match=r"no frame.*TM414"):
        PerFrameReward(StillnessReward(), "middle")


def test_invalid_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match=r"min.*TM412"):
        ClippedReward(BrightnessReward(), 1.0, 0.0)
    with pytest.raises(ValueError, match=r"'min'.*'max'.*TM411"):
        ClippedReward(BrightnessReward())


def test_wrappers_take_traits_of_the_inner_reward() -> None:
    host, clip = (
        ClippedReward(JpegReward(batch_size=3), min=-9.0),
        RelativeReward(StillnessReward(batch_size=2), "calm", "wild"),
    )
    assert (host.differentiable, host.modality, host.runs_on, host.batch_size) == (False, "image", "host", 3)
    assert (clip.differentiable, clip.modality, clip.runs_on, clip.batch_size) == (True, "video", "device", 2)
    assert PerFrameReward(JpegReward()).modality == "image"
    assert PerFrameReward(JpegReward(), "first").modality == "video"


def test_wrappers_nest_hash_and_share_scorers() -> None:
    one, two = (ClippedReward(RelativeReward(ColorReward(), "red", "blue"), 0.0, 1.0) for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert one.tiny() == one
    assert load_shared_reward(one, Placement()) is load_shared_reward(two, Placement())


def test_stepped_reward_maps_scores_to_values() -> None:
    spec = SteppedReward(BrightnessReward(), (0.25, 0.5), (-1.0, 0.0, 2.0))
    pixels = torch.tensor([0.0, 0.25, 0.4, 0.5, 1.0]).view(5, 1, 1, 1, 1).expand(5, 1, 3, 4, 4)
    assert spec.load(Placement()).score(pixels, [""] * 5, [{}] * 5).tolist() == [-1, 0, 0, 2, 2]
    assert not spec.differentiable
    with pytest.raises(ValueError, match=r"thresholds.*TM867"):
        SteppedReward(BrightnessReward(), (0.5, 0.25), (0.0, 1.0, 2.0))
