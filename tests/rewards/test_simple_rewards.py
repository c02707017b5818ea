"""Rewards with no network: closed forms, gradients and refused inputs."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from tastemaker.core.reward import Rubric, WeightedReward
from tastemaker.core.toy_colors import TOY_COLORS
from tastemaker.core.types import Placement
from tastemaker.data.image_io import save_image, to_uint8
from tastemaker.rewards.color import BrightnessReward, ColorReward
from tastemaker.rewards.compression import CompressionReward, JpegReward
from tastemaker.rewards.motion import StillnessReward
from tastemaker.rewards.target_image import L1Reward, MseReward


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def flat_image(color: tuple[float, float, float], size: int = 8) -> Tensor:
    return torch.tensor(color)[None, None, :, None, None].expand(1, 1, 3, size, size)


def test_jpeg_score_is_the_size_in_kilobytes() -> None:
    pixels = random(1, 1, 3, 32, 32)
    file = BytesIO()
    Image.fromarray(to_uint8(pixels[0, 0])).save(file, "JPEG", quality=80)
    size = len(file.getvalue()) / 1000
    assert JpegReward("compressible", 80).score(pixels, [""], [{}]).item() == pytest.approx(-size)
    assert JpegReward("incompressible", 80).score(pixels, [""], [{}]).item() == pytest.approx(size)


@pytest.mark.parametrize("reward", [JpegReward(), CompressionReward()])
def test_noise_compresses_worse_than_a_flat_image(reward: JpegReward | CompressionReward) -> None:
    pixels = torch.cat([random(1, 1, 3, 32, 32), flat_image((0.2, 0.5, 0.7), 32)])
    noise, plain = reward.score(pixels, ["", ""], [{}, {}]).tolist()
    assert noise < plain


@pytest.mark.parametrize("kind", [JpegReward, CompressionReward])
@pytest.mark.parametrize("quality", [0, 101])
def test_invalid_jpeg_quality_is_refused(kind: type[JpegReward] | type[CompressionReward], quality: int) -> None:
    with pytest.raises(ValueError, match=f"quality.* {quality}\\b"):
        kind(quality=quality)


def test_brightness_is_the_mean_or_the_distance_to_a_target() -> None:
    pixels = flat_image((0.2, 0.4, 0.9))
    assert BrightnessReward().score(pixels, [""], [{}]).item() == pytest.approx(0.5)
    assert BrightnessReward(0.75).score(pixels, [""], [{}]).item() == pytest.approx(-0.25)


@pytest.mark.parametrize("name", TOY_COLORS)
def test_image_of_the_named_color_scores_one(name: str) -> None:
    assert ColorReward().score(
        flat_image(TOY_COLORS[name]), [f"a {name.upper()}, thing"], [{}]
    ).item() == pytest.approx(1)


def test_wrong_color_scores_one_minus_mean_distance() -> None:
    assert ColorReward().score(flat_image(TOY_COLORS["red"]), ["blue"], [{}]).item() == pytest.approx(1 - 1.6 / 3)


def test_last_color_of_the_prompt_is_used() -> None:
    assert ColorReward().score(
        flat_image(TOY_COLORS["red"]), ["a bluebird on blue and red"], [{}]
    ).item() == pytest.approx(1)


def test_custom_colors_replace_the_default_colors() -> None:
    custom = ColorReward({"teal": (0.0, 0.5, 0.5)})
    assert custom.score(flat_image((0.0, 0.5, 0.5)), ["teal"], [{}]).item() == pytest.approx(1)
    with pytest.raises(ValueError, match=r"teal.*TM382"):
        custom.score(flat_image(TOY_COLORS["red"]), ["red"], [{}])


def test_mse_and_l1_measure_the_distance_to_the_target() -> None:
    pixels, target = random(2, 1, 3, 4, 4), random(1, 3, 4, 4, seed=1)
    metadata = [{"target": target}] * 2
    gap = pixels[:, 0] - target
    torch.testing.assert_close(MseReward().score(pixels, ["", ""], metadata), -gap.square().mean((1, 2, 3)))
    torch.testing.assert_close(L1Reward().score(pixels, ["", ""], metadata), -gap.abs().mean((1, 2, 3)))


def test_target_can_be_a_file(tmp_path: Path) -> None:
    pixels = random(1, 3, 4, 4).mul(255).round() / 255
    save_image(pixels, tmp_path / "target.png")
    for path in (tmp_path / "target.png", str(tmp_path / "target.png")):
        assert MseReward().score(pixels[None], [""], [{"target": path}]).item() == pytest.approx(0, abs=1e-12)


def test_clip_is_compared_with_a_target_clip_or_a_target_image() -> None:
    clip = random(1, 3, 3, 4, 4)
    rubric = Rubric({"mse": WeightedReward(MseReward(), MseReward())})
    assert rubric.score(clip, [""], [{"target": clip[0]}]).total.item() == 0
    expected = -(clip - clip[:, :1]).square().mean()
    torch.testing.assert_close(rubric.score(clip, [""], [{"target": clip[0, :1]}]).total[0], expected)


@pytest.mark.parametrize(
    ("metadata", "pattern"),
    [
        ({}, "'cat'.*'target'"),
        (
            {"target": torch.zeros(1, 3, 5, 5)},
            r"'cat'.*\[1, 3, 5, 5\]",
        ),
        ({"target": torch.zeros(2, 3, 4, 4), "frame": 2}, "frame 2"),
        ({"target": "missing.png"}, r"missing\.png"),
    ],
)
def test_missing_or_mismatched_target_is_refused(metadata: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        L1Reward().score(torch.zeros(1, 1, 3, 4, 4), ["cat"], [metadata])


def test_stillness_is_one_for_a_static_clip_and_decreases_with_motion() -> None:
    still = random(1, 1, 3, 4, 4).expand(1, 5, 3, 4, 4)
    assert StillnessReward().score(still, [""], [{}]).item() == pytest.approx(1)
    moving = torch.tensor([0.0, 0.5, 0.0])[None, :, None, None, None].expand(1, 3, 3, 4, 4)
    assert StillnessReward().score(moving, [""], [{}]).item() == pytest.approx(0.5)


def test_stillness_of_a_single_frame_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2 frames.*TM398"):
        StillnessReward().score(random(1, 1, 3, 4, 4), [""], [{}])


@pytest.mark.parametrize(
    "reward",
    [
        BrightnessReward(),
        BrightnessReward(0.9),
        ColorReward(),
        MseReward(),
        L1Reward(),
        StillnessReward(),
        CompressionReward(),
        CompressionReward(quality=30),
    ],
)
def test_gradients_agree_with_finite_differences(
    reward: BrightnessReward | ColorReward | MseReward | L1Reward | StillnessReward | CompressionReward,
) -> None:
    # A side of nine pixels gives a partly padded block and an odd size to halve.
    frames = 2 if reward.modality == "video" else 1
    pixels = random(2, frames, 3, 9, 9, seed=3).double().requires_grad_()
    metadata = [{"target": random(1, 3, 9, 9, seed=4)}] * 2
    assert reward.differentiable
    assert torch.autograd.gradcheck(lambda x: reward.score(x, ["red", "blue"], metadata), (pixels,), fast_mode=True)


def test_network_free_reward_is_its_own_scorer_and_tiny_version() -> None:
    for reward in (
        JpegReward(),
        CompressionReward(),
        BrightnessReward(),
        ColorReward(),
        MseReward(),
        L1Reward(),
        StillnessReward(),
    ):
        assert reward.load(Placement()) is reward
        assert reward.tiny() is reward
