"""What the watcher of clips learns from: the six motions, and clips that show none of them in ways generators find."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.randomness import Randomness
from . import corruptions, motion
from .art import Style
from .captions import sample_captions
from .motion import FRAMES, GROWING, MOTIONS, TURNING
from .motion_classifier import NO_MOTION, MotionClassifier
from .scenes import SIDE, SLOTS, Painter, Scenes, sample_scenes
from .training_tasks import SNAPPED, TaskBatch, TrainingTask, mean_of, randomize_objects

WRONG = 0.4  # of the clips to learn from show no motion
NO_MOTION_KINDS = (
    "frozen",
    "shuffled",
    "jumping",
    "to and fro",
    "at odds",
    "changing",
    "vanishing",
    "shrinking",
    "noise",
)
FROZEN, SHUFFLED, JUMPING, TO_AND_FRO, AT_ODDS, CHANGING, VANISHING, SHRINKING, NOISE = range(len(NO_MOTION_KINDS))
# Where the same noise lies in each frame; without order, so that it does not move.
SHIFTS = ((0, 0), (29, 11), (5, 50), (44, 37), (17, 3), (58, 24), (35, 61), (9, 31))


class MotionTask(TrainingTask[MotionClassifier]):
    frames: ClassVar[int] = FRAMES

    def lesson(self, rng: Randomness) -> TaskBatch:
        said = motion.sample_motion(rng)
        wrong = rng.uniform("wrong", 1)[:, 0] < WRONG
        way = torch.where(wrong, rng.words("way", 1)[:, 0] % len(NO_MOTION_KINDS), -1)
        clips = augment_clips(paint_training_clips(said, way, rng, SNAPPED), rng)
        return {"clips": clips, "shown": torch.where(wrong, NO_MOTION, said)}

    def loss(self, rows: TaskBatch) -> Tensor:
        return F.cross_entropy(self.net(rows["clips"]), rows["shown"])

    def exam(self, rng: Randomness, style: Style) -> dict[str, float]:
        said, way = motion.sample_motion(rng), rng.words("way", 1)[:, 0] % len(NO_MOTION_KINDS)
        right = motion.paint_clips(Painter(style, said.device), sample_scenes(sample_captions(rng), rng), said, rng)
        none = self.net(paint_training_clips(said, way, rng, 1.0, style)).argmax(1) == NO_MOTION
        return {
            "motion": mean_of(self.net(right).argmax(1) == said),
            "motion of flawed": mean_of(self.net(augment_clips(right, rng)).argmax(1) == said),
            "none": mean_of(none),
            "none of frozen": mean_of(self.net(right[:, :1].expand_as(right)).argmax(1) == NO_MOTION),
        }


def paint_training_clips(said: Tensor, way: Tensor, rng: Randomness, snapped: float, style: Style = "noto") -> Tensor:
    """Clips of random scenes moving as said, or wrong in one of WAYS where `way` is no less than 0."""
    scenes = randomize_objects(sample_scenes(sample_captions(rng), rng, snapped), rng)
    way = torch.where((way == AT_ODDS) & (scenes.present.sum(1) < 2), FROZEN, way)  # one thing is never at odds
    frames, angles = motion.animate(scenes, motions(said, way, rng), clocks(said, way, rng))
    clips = motion.paint_frames(Painter(style, said.device), corrupt_frames(frames, way, rng), angles, rng)
    return torch.where((way == NOISE).view(-1, 1, 1, 1, 1), textures(rng), clips)


def motions(said: Tensor, way: Tensor, rng: Randomness) -> Tensor:
    """What each thing does; where they are at odds, neighbours never do the same: [N, 4]."""
    further = 1 + rng.words("at odds", 1) % (len(MOTIONS) - 1)
    apart = (said[:, None] + further * torch.arange(SLOTS, device=said.device)) % len(MOTIONS)
    shrinks = torch.where(way == SHRINKING, GROWING, said)
    return torch.where((way == AT_ODDS)[:, None], apart, shrinks[:, None])


def clocks(said: Tensor, way: Tensor, rng: Randomness) -> Tensor:
    """How far the motion is in each frame; what turns may turn back as well: [N, 8]."""
    draws, pace = rng.uniform("clock", 2, FRAMES), rng.uniform("pace", 4)
    even = torch.linspace(0, 1, FRAMES, device=said.device).expand(len(said), -1)
    back = (way == SHRINKING) | ((said == TURNING) & (pace[:, 0] < 0.3))
    steady = 0.5 + (0.6 + 0.55 * pace[:, 1:2]) * (even - 0.5) + 0.06 * (draws[:, 0] - 0.5)
    time = torch.where(back[:, None], 1 - steady, steady)
    cut = 1 + (pace[:, 2:3] * (FRAMES - 1)).long()  # the first frame after a change
    later = (torch.arange(FRAMES, device=said.device) >= cut).float()
    turned = 1 - (2 * even - 1).abs()
    others = {
        FROZEN: pace[:, 3:] + 0.2 * (pace[:, 1:2] - 0.5) * even,
        SHUFFLED: even.gather(1, draws[:, 1].argsort(1)),
        JUMPING: later,
        TO_AND_FRO: torch.where(pace[:, 0:1] < 0.5, turned, 1 - turned),
    }
    for place, clock in others.items():
        time = torch.where((way == place)[:, None], clock, time)
    return time


def corrupt_frames(frames: Scenes, way: Tensor, rng: Randomness) -> Scenes:
    """Frames [N * 8] with things that change into others for some frames, or are not there."""
    draws = rng.uniform("mistake", FRAMES)
    cut = 1 + (rng.uniform("change", 1) * (FRAMES - 1)).long()
    later = (torch.arange(FRAMES, device=way.device) >= cut) & (way == CHANGING)[:, None]
    gone = ((draws < 0.5) | (draws[:, :1] < 0.2)) & (way == VANISHING)[:, None]
    changed, absent = later.view(-1, 1), gone.view(-1, 1)
    return replace(
        frames,
        kind=torch.where(changed, frames.kind.roll(FRAMES, 0), frames.kind),
        color=torch.where(changed, frames.color.roll(FRAMES, 0), frames.color),
        present=frames.present & ~absent,
    )


def textures(rng: Randomness) -> Tensor:
    """Clouds that have nothing to do with each other: [N, 8, 3, 64, 64]."""
    clouds = rng.uniform("clouds", FRAMES * 3, 8, 8)
    return F.interpolate(clouds, size=(SIDE, SIDE), mode="bilinear").view(len(rng), FRAMES, 3, SIDE, SIDE)


def augment_clips(clips: Tensor, rng: Randomness) -> Tensor:
    """Mild flaws to see through: partial blur, noise that flickers, light that does; every third row none."""
    draws, flicker = rng.uniform("augment", 4), rng.uniform("flicker", FRAMES)
    some = (draws[:, 3] > 1 / 3).float()
    light = 1 + some[:, None] * (0.3 * (draws[:, 2:3] - 0.5) + 0.08 * (flicker - 0.5))
    soft = corruptions.blur((clips * light[..., None, None, None]).flatten(1, 2), 0.4 * some * draws[:, 0])
    grain = rng.normal("grain", 3, SIDE, SIDE) * (0.12 * some * draws[:, 1]).view(-1, 1, 1, 1)
    noise = torch.cat([grain.roll(shift, (2, 3)) for shift in SHIFTS], 1)
    return (soft + noise).clamp(0, 1).view_as(clips)
