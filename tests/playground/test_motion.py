"""Animated scenes of the playground: motions, captions and painted clips."""

import pytest
import torch

from tastemaker.core.randomness import Randomness
from tastemaker.core.types import select_rows
from tastemaker.playground import motion
from tastemaker.playground.captions import sample_captions
from tastemaker.playground.motion import FRAMES, MOTIONS, animate, paint_clips
from tastemaker.playground.scenes import Painter, sample_scenes, shows_caption


def rng(count: int, start: int = 0) -> Randomness:
    return Randomness(0, 0, torch.arange(start, start + count))


def test_motions_round_trip_through_captions() -> None:
    motions = motion.sample_motion(rng(600))
    assert torch.bincount(motions).min() > 60
    assert torch.equal(motion.parse_motion(motion.motion_captions(sample_captions(rng(600)).texts(), motions)), motions)
    with pytest.raises(ValueError, match=r"'a photo of a car'.*motion.*moving left.*TM758"):
        motion.parse_motion(["a photo of a car"])


def test_corrupt_motion_changes_the_motion() -> None:
    motions = motion.sample_motion(rng(600))
    assert (motion.corrupt_motion(motions, 1.0, rng(600)) != motions).all()
    assert torch.equal(motion.corrupt_motion(motions, 0.0, rng(600)), motions)


def test_every_frame_shows_the_caption() -> None:
    captions, motions = sample_captions(rng(1200)), torch.arange(1200) % len(MOTIONS)
    frames, angles = animate(sample_scenes(captions, rng(1200), 0.5), motions)
    assert len(frames) == 1200 * FRAMES and angles.shape == frames.x.shape
    assert shows_caption(frames, select_rows(captions, torch.arange(1200).repeat_interleave(FRAMES)), strict=True).all()
    half = frames.size / 2
    for center in (frames.x, frames.y):
        assert ((center - half > -1e-3) & (center + half < 64 + 1e-3))[frames.present].all()


@pytest.mark.parametrize(
    ("direction", "axis", "sign"), [("left", 0, -1), ("right", 0, 1), ("up", 1, -1), ("down", 1, 1)]
)
def test_motion_is_uniform_in_its_direction(direction: str, axis: int, sign: int) -> None:
    motions = torch.full((32,), MOTIONS.index(f"moving {direction}"))
    frames, _ = animate(sample_scenes(sample_captions(rng(32)), rng(32)), motions)
    centers = torch.stack([frames.x, frames.y]).view(2, 32, FRAMES, 4)
    steps = centers.diff(dim=2)
    assert torch.allclose(steps[axis], torch.tensor(sign * 12.8 / 7), atol=1e-4)  # a fifth of the image in total
    assert torch.allclose(steps[1 - axis], torch.tensor(0.0), atol=1e-4)


def test_turning_objects_stay_and_growing_objects_grow() -> None:
    scenes = sample_scenes(sample_captions(rng(32)), rng(32))
    turning, angles = animate(scenes, torch.full((32,), MOTIONS.index("turning")))
    assert (angles.view(32, FRAMES, 4).diff(dim=1) > 0.4).all() and (
        turning.x.view(32, FRAMES, 4).diff(dim=1) == 0
    ).all()
    growing, angles = animate(scenes, torch.full((32,), MOTIONS.index("growing")))
    assert (growing.size.view(32, FRAMES, 4).diff(dim=1) > 0).all() and (angles == 0).all()
    assert torch.allclose(growing.size.view(32, FRAMES, 4)[:, -1], scenes.size)


def test_videos_do_not_depend_on_the_batch() -> None:
    captions, motions = sample_captions(rng(12)), torch.arange(12) % len(MOTIONS)
    clips = paint_clips(Painter(), sample_scenes(captions, rng(12)), motions, rng(12))
    assert clips.shape == (12, FRAMES, 3, 64, 64) and clips.min() >= 0 and clips.max() <= 1
    for row in range(12):
        scenes = sample_scenes(sample_captions(rng(1, row)), rng(1, row))
        assert torch.equal(clips[row : row + 1], paint_clips(Painter(), scenes, motions[row : row + 1], rng(1, row)))
    changed = (clips.diff(dim=1).abs().amax(2) > 0.02).flatten(2).float()  # [N, 7, pixels]
    assert (changed.mean(2) > 0.001).all() and (changed.mean(2) < 0.5).all()
