"""Motion and flicker rewards on synthetic clips with known motion and flicker."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tastemaker.core.reward import Rubric, WeightedReward
from tastemaker.rewards.backbones.optical_flow import estimate_flow, resize_for_flow
from tastemaker.rewards.motion import DynamicsReward, FlickerReward

SIDE = 256
ALTERNATING = torch.tensor([1.0, -1, 1, -1, 1])[:, None, None, None]


def scene(patch: int, seed: int = 0) -> Tensor:
    """A smooth image larger than the frame: [3, 640, 640]."""
    coarse = torch.rand(1, 3, 640 // patch, 640 // patch, generator=torch.Generator().manual_seed(seed))
    return F.interpolate(coarse, (640, 640), mode="bicubic").clamp(0, 1)[0]


def panning_clip(across: int, down: int, patch: int = 16) -> Tensor:
    """A camera pan of (across, down) pixels per frame: [1, 5, 3, 256, 256]."""
    view = scene(patch)
    corners = [(100 + k * down, 100 + k * across) for k in range(5)]
    return torch.stack([view[:, top : top + SIDE, left : left + SIDE] for top, left in corners])[None]


def dynamics(clips: Tensor, top_fraction: float = 1.0) -> float:
    return DynamicsReward(top_fraction).score(clips, [""] * len(clips), [{}] * len(clips)).item()


def flicker(clips: Tensor) -> float:
    return FlickerReward().score(clips, [""] * len(clips), [{}] * len(clips)).item()


@pytest.mark.parametrize(
    ("across", "down", "patch"),
    [(4, 3, 16), (-8, 8, 16), (0, -24, 16), (12, 16, 8), (12, 16, 40), (-8, 8, 8)],
)
def test_known_pan_is_measured_within_a_sixth_of_its_length(across: int, down: int, patch: int) -> None:
    expected = 100 * math.hypot(across, down) / SIDE  # in percent of the side
    assert dynamics(panning_clip(across, down, patch)) == pytest.approx(expected, rel=1 / 6)


def test_optical_flow_recovers_the_direction_of_a_pan() -> None:
    clip = panning_clip(8, -4)[0]
    flow = (
        estimate_flow(resize_for_flow(clip[:1]), resize_for_flow(clip[1:2]))[0, :, 8:-8, 8:-8]
        .flatten(1)
        .median(1)
        .values
        * SIDE
        / 64
    )
    assert flow.tolist() == pytest.approx([-8, 4], abs=0.25)  # the content moves against the camera


def test_score_grows_with_motion_and_is_zero_for_a_static_clip() -> None:
    scores = [dynamics(panning_clip(step, 0)) for step in (0, 1, 6, 24)]
    assert scores[0] == 0 and scores == sorted(scores)


def test_top_fraction_measures_a_small_moving_object() -> None:
    clip = 0.5 * panning_clip(0, 0)
    for k in range(5):
        clip[0, k, :, 100:150, 60 + 8 * k : 110 + 8 * k] = 0.9
    assert dynamics(clip, top_fraction=0.05) == pytest.approx(100 * 8 / SIDE, rel=0.2)
    assert dynamics(clip) < 1


def test_global_brightness_changes_count_as_flicker_and_not_as_motion() -> None:
    steady, amplitude = 0.2 + 0.6 * panning_clip(0, 0), 0.05
    assert dynamics(steady + amplitude * ALTERNATING) < 1e-6
    assert flicker(steady + amplitude * ALTERNATING) == pytest.approx(-amplitude, abs=1e-6)


def test_flicker_ignores_motion_and_fades() -> None:
    moving, amplitude = 0.2 + 0.6 * panning_clip(4, 3), 0.05
    assert flicker(moving) > -0.01
    assert flicker(moving + amplitude * ALTERNATING) == pytest.approx(-amplitude, rel=0.05)
    faded = panning_clip(0, 0) * torch.linspace(1, 0.5, 5)[:, None, None, None]
    assert flicker(faded) > -0.002 and flicker(panning_clip(0, 0)) == 0


@pytest.mark.parametrize("reward", [DynamicsReward(), DynamicsReward(top_fraction=0.1), FlickerReward()])
def test_gradients_agree_with_finite_differences(reward: DynamicsReward | FlickerReward) -> None:
    rng = torch.Generator().manual_seed(1)
    pixels = panning_clip(2, 1)[:, :3, :, :48, :40].double().requires_grad_()
    # The step is short, so that it crosses few kinks (at whole pixels and at sign changes).
    step = 1e-8 * torch.randn(pixels.shape, generator=rng, dtype=torch.float64)
    up, down = (reward.score(pixels.detach() + sign * step, [""], [{}]).item() for sign in (1, -1))
    gradient = torch.autograd.grad(reward.score(pixels, [""], [{}]).sum(), pixels)[0]
    assert (gradient * step).sum().item() == pytest.approx((up - down) / 2, rel=1e-3)


@pytest.mark.parametrize("reward", [DynamicsReward(), FlickerReward()])
@pytest.mark.parametrize("shape", [(1, 1), (1, 90), (8, 8), (70, 50)])
def test_clips_of_any_size_have_finite_gradients(
    reward: DynamicsReward | FlickerReward, shape: tuple[int, int]
) -> None:
    pixels = torch.rand(2, 4, 3, *shape, generator=torch.Generator().manual_seed(2)).requires_grad_()
    scores = Rubric({"it": WeightedReward(reward, reward)}).score(pixels, ["", ""]).total
    assert torch.autograd.grad(scores.sum(), pixels)[0].isfinite().all()
    still = torch.full((1, 3, 3, *shape), 0.5, requires_grad=True)
    assert torch.autograd.grad(reward.score(still, [""], [{}]).sum(), still)[0].abs().max() == 0


def test_sample_scores_are_independent_of_the_batch() -> None:
    clips = torch.cat([panning_clip(4, 0), panning_clip(0, 8)])
    for reward in (DynamicsReward(), FlickerReward()):
        batched = reward.score(clips, ["", ""], [{}, {}])
        single = torch.cat([reward.score(clip[None], [""], [{}]) for clip in clips])
        torch.testing.assert_close(batched, single, atol=1e-5, rtol=1e-4)


def test_too_few_frames_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2 frames or more.*TM398"):
        dynamics(torch.zeros(1, 1, 3, 8, 8))
    with pytest.raises(ValueError, match=r"3 frames or more.*TM398"):
        flicker(torch.zeros(1, 2, 3, 8, 8))
