"""Rewards made of rewards."""

from __future__ import annotations

import pytest
import torch

from tastemaker.core.reward import RewardSpec, Rubric, WeightedReward, load_shared_reward
from tastemaker.core.types import Placement
from tastemaker.rewards.color import Brightness, Color
from tastemaker.rewards.combinators import Clipped, PerFrame, Relative
from tastemaker.rewards.jpeg import Jpeg
from tastemaker.rewards.stillness import Stillness
from tastemaker.rewards.target_image import Mse

PIXELS = torch.rand(4, 5, 3, 6, 6, generator=torch.Generator().manual_seed(0))
PROMPTS = ("a cat", "a dog", "a red dog", "a bird")


def total(spec: RewardSpec) -> torch.Tensor:
    return Rubric({"it": WeightedReward(spec, load_shared_reward(spec, Placement()))}).score(PIXELS, PROMPTS).total


def color(name: str) -> torch.Tensor:
    """Colour, were every prompt to end in this word."""
    return Rubric({"it": WeightedReward(Color(), Color())}).score(PIXELS, [name] * 4).total


def test_relative_weighs_praise_against_blame() -> None:
    # Praise and blame stand before the prompt, so prompts that name no colour take theirs from them.
    scores = total(Relative(Color(), praise="blue", blame="yellow", boost=0.25))
    expected = 1.25 * color("blue") - color("yellow")
    expected[2] = 0.25 * color("red")[2]
    torch.testing.assert_close(scores, expected)


def test_clipped_keeps_to_its_bounds_and_passes_gradients_between_them() -> None:
    spec = Clipped(Brightness(), 0.25, 0.75)
    pixels = torch.tensor([0.1, 0.5, 0.9])[:, None, None, None, None].expand(3, 1, 3, 2, 2).clone().requires_grad_()
    scores = Rubric({"it": WeightedReward(spec, spec.load(Placement()))}).score(pixels, ["", "", ""]).total
    assert scores.tolist() == pytest.approx([0.25, 0.5, 0.75])
    slope = torch.autograd.grad(scores.sum(), pixels)[0].sum((1, 2, 3, 4))
    assert slope.tolist() == pytest.approx([0, 1, 0])


def test_a_bound_can_be_left_open_and_each_frame_is_clipped_by_itself() -> None:
    frames = PIXELS.mean((2, 3, 4)).clamp(max=0.5)
    torch.testing.assert_close(total(Clipped(Brightness(), high=0.5)), frames.mean(1))


@pytest.mark.parametrize(("frames", "place"), [("first", 0), ("middle", 2), ("last", 4), (3, 3), (-2, 3)])
def test_per_frame_asks_one_frame(frames: int, place: int) -> None:
    torch.testing.assert_close(total(PerFrame(Brightness(), frames)), PIXELS[:, place].mean((1, 2, 3)))


def test_per_frame_of_all_is_the_mean_over_frames() -> None:
    torch.testing.assert_close(total(PerFrame(Brightness())), PIXELS.mean((1, 2, 3, 4)))


def test_per_frame_tells_a_target_which_frame_it_is() -> None:
    spec = PerFrame(Mse(), "last")
    rubric = Rubric({"it": WeightedReward(spec, spec.load(Placement()))})
    facts = [{"target": clip} for clip in PIXELS]
    assert rubric.score(PIXELS, PROMPTS, facts).total.tolist() == [0.0] * 4


def test_a_frame_that_is_not_there_is_refused() -> None:
    spec = PerFrame(Brightness(), 5)
    with pytest.raises(ValueError, match="frame 5 was asked for, but clips have 5"):
        spec.load(Placement()).score(PIXELS, PROMPTS, [{}] * 4)


def test_no_frame_is_picked_for_a_reward_that_reads_clips() -> None:
    with pytest.raises(ValueError, match="Stillness reads whole clips"):
        PerFrame(Stillness(), "middle")


def test_bounds_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="low must be below high"):
        Clipped(Brightness(), 1.0, 0.0)
    with pytest.raises(ValueError, match="neither 'low' nor 'high'"):
        Clipped(Brightness())


def test_combinators_follow_the_reward_inside() -> None:
    host, clip = Clipped(Jpeg(batch_size=3), low=-9.0), Relative(Stillness(batch_size=2), "calm", "wild")
    assert (host.differentiable, host.reads, host.runs_on, host.batch_size) == (False, "frames", "host", 3)
    assert (clip.differentiable, clip.reads, clip.runs_on, clip.batch_size) == (True, "clip", "device", 2)
    assert PerFrame(Jpeg()).reads == "frames"
    assert PerFrame(Jpeg(), "first").reads == "clip"


def test_combinators_nest_compare_and_shrink() -> None:
    one, two = (Clipped(Relative(Color(), "red", "blue"), 0.0, 1.0) for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert one.tiny() == one
    assert load_shared_reward(one, Placement()) is load_shared_reward(two, Placement())
