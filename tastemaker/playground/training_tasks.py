"""Training data, loss and evaluation of each playground reward model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.randomness import Randomness
from ..core.types import select_rows
from . import corruptions, detector, motion
from .art import CLASSES, COLORS, Style
from .captions import ATTRIBUTION, COLOR, COUNTING, SceneCaptions, sample_captions
from .detector import THRESHOLD, Detections, SceneDetector, decode_detections
from .motion import FRAMES, GROWING, MOTIONS, NO_MOTION, TURNING, MotionClassifier
from .networks import CLEAR, QUALITIES, ImageTextScorer, QualityScorer, YesNoJudge, caption_words
from .purposes import PlaygroundPurpose
from .scenes import SIDE, SLOTS, Painter, Scenes, corrupt_captions, sample_scenes, shows_caption
from .verdict import compute_verdict


def evaluate_detector(
    net: SceneDetector, pixels: Tensor, scenes: Scenes, captions: SceneCaptions, unambiguous: Tensor
) -> dict[str, float]:
    """Accuracies and errors of a detector by name; verdicts on the unambiguous pairs [N] only."""
    detections = decode_detections(net(pixels))
    near, error = nearest_detections(detections, scenes)  # [N, 4] each
    there, dyed = scenes.present, scenes.present & (scenes.color > 0)
    class_id, color = (column.gather(1, near) for column in (detections.class_id, detections.color))
    scores = {
        "class": _mean(((class_id == scenes.class_id) & (error < 8))[there]),
        "colour": _mean((color == scenes.color)[dyed]),
        "centre error, px": _mean(error[there & (error < 8)]),
        "box overlap": _mean(box_iou(detections, near, scenes)[there & (error < 8)]),
        "number of things": _mean((detections.score > THRESHOLD).sum(1) == there.sum(1)),
    }
    for name, strict in (("verdict", True), ("lenient verdict", False)):
        agree = compute_verdict(detections, captions, strict).bool() == shows_caption(scenes, captions, strict)
        scores[name] = _mean(agree[unambiguous])
    return scores


def nearest_detections(detections: Detections, scenes: Scenes) -> tuple[Tensor, Tensor]:
    """The nearest detection of each object, and its distance in pixels: [N, 4] each."""
    centers = torch.stack([scenes.x, scenes.y], 2)
    apart = torch.cdist(centers, detections.center).masked_fill((detections.score <= THRESHOLD)[:, None], torch.inf)
    error, near = apart.min(2)
    return near, error


def box_iou(detections: Detections, near: Tensor, scenes: Scenes) -> Tensor:
    """Intersection over union of each object's box and that of its nearest detection: [N, 4]."""
    place = near[..., None].expand(-1, -1, 2)
    center, span, spans = detections.center.gather(1, place), detections.size.gather(1, place), scenes.extents()
    middle = torch.stack([scenes.x, scenes.y], 2)
    low = torch.maximum(center - span / 2, middle - spans / 2)
    high = torch.minimum(center + span / 2, middle + spans / 2)
    shared = (high - low).clamp(min=0).prod(2)
    return shared / (span.prod(2) + spans.prod(2) - shared)


def _mean(values: Tensor) -> float:
    return values.float().mean().item()


SNAPPED = 0.4  # fraction of snapped scenes; the others vary more than the data of generators
NUM_NEGATIVES = 4  # corrupted captions per image

N = TypeVar("N", bound=nn.Module)
TaskBatch = dict[str, Any]  # a tree of tensors with the same first dimension


@dataclass(frozen=True)
class TrainingTask(ABC, Generic[N]):
    """Training data, loss and evaluation of a network."""

    net: N
    frames: ClassVar[int] = 1  # per sample

    @abstractmethod
    def sample_batch(self, rng: Randomness) -> TaskBatch:
        """Sample training data, one sample per row of the randomness."""

    @abstractmethod
    def loss(self, rows: TaskBatch) -> Tensor:
        """The mean loss of a batch."""

    @abstractmethod
    def evaluate(self, rng: Randomness, style: Style) -> dict[str, float]:
        """Scores of the network by name."""


def paint_scenes(scenes: Scenes, rng: Randomness, style: Style = "noto") -> Tensor:
    return Painter(style, scenes.class_id.device).paint(scenes, rng)[:, 0]


def randomize_objects(scenes: Scenes, rng: Randomness) -> Scenes:
    """Randomize classes and colors of half of the scenes: no caption describes them, but generators paint them."""
    words = rng.words(PlaygroundPurpose.OBJECTS, 2 * SLOTS + 1)
    change = (words[:, :1] & 1).bool()
    kind, color = words[:, 1 : SLOTS + 1] % len(CLASSES), words[:, SLOTS + 1 :] % (2 * len(COLORS)) + 1
    color = torch.where(color > len(COLORS), 0, color)
    return replace(
        scenes, class_id=torch.where(change, kind, scenes.class_id), color=torch.where(change, color, scenes.color)
    )


def randomize_counts(captions: SceneCaptions, share: float, rng: Randomness) -> SceneCaptions:
    """Turn a fraction of captions into a random count of their first object."""
    change = rng.uniform(PlaygroundPurpose.MISCOUNT, 1)[:, 0] < share
    count = 1 + rng.words(PlaygroundPurpose.WRONG_COUNT, 1)[:, 0] % SLOTS
    return replace(
        captions,
        task=torch.where(change, COUNTING, captions.task),
        second=torch.where(change, captions.first, captions.second),
        count=torch.where(change, count, captions.count),
    )


def ambiguous_color(scenes: Scenes, captions: SceneCaptions) -> Tensor:
    """Where a color is requested of an object in its natural color, which may or may not match: [N] bool."""
    natural = (scenes.present & (scenes.color == 0)).any(1)
    return natural & ((captions.task == COLOR) | (captions.task == ATTRIBUTION))


class DetectorTask(TrainingTask[SceneDetector]):
    def sample_batch(self, rng: Randomness) -> TaskBatch:
        scenes = randomize_objects(sample_scenes(sample_captions(rng), rng, SNAPPED), rng)
        return {"pixels": corruptions.augment(paint_scenes(scenes, rng), rng), "scenes": scenes}

    def loss(self, rows: TaskBatch) -> Tensor:
        return detector.detector_loss(self.net(rows["pixels"]), rows["scenes"]).mean()

    def evaluate(self, rng: Randomness, style: Style) -> dict[str, float]:
        captions = sample_captions(rng)
        scenes = sample_scenes(corrupt_captions(captions, 0.5, rng), rng)
        unambiguous = ~ambiguous_color(scenes, captions)
        return evaluate_detector(self.net, paint_scenes(scenes, rng, style), scenes, captions, unambiguous)


class ScorerTask(TrainingTask[ImageTextScorer]):
    def sample_batch(self, rng: Randomness) -> TaskBatch:
        captions = sample_captions(rng)
        # Every other caption is a corruption of its neighbor, so that batches hold similar images.
        neighbour = select_rows(captions, torch.arange(len(rng), device=rng.rows.device) // 2 * 2)
        odd = (torch.arange(len(rng), device=rng.rows.device) % 2).bool()
        captions = select_captions(odd, corrupt_captions(neighbour, 1.0, rng), captions)
        scenes = sample_scenes(captions, rng, SNAPPED)
        again = torch.arange(len(rng), device=rng.rows.device).repeat_interleave(NUM_NEGATIVES)
        wrong = corrupt_captions(select_rows(captions, again), 1.0, rng.repeat(NUM_NEGATIVES))
        false = ~shows_caption(select_rows(scenes, again), wrong, strict=True)
        pixels, quality = degrade_half(paint_scenes(scenes, rng), rng)
        spoiled = caption_words(wrong).view(len(rng), NUM_NEGATIVES, -1)
        rows = {"pixels": pixels, "words": caption_words(captions), "spoiled": spoiled, "quality": quality}
        return {**rows, "false": false.view(-1, NUM_NEGATIVES)}

    def loss(self, rows: TaskBatch) -> Tensor:
        net, read, spoiled = self.net, rows["words"], rows["spoiled"]
        seen = net.encode_images(rows["pixels"])
        embedded = F.normalize(net.reader(torch.cat([read, spoiled.flatten(0, 1)])).float(), dim=1)
        with torch.autocast(seen.device.type, enabled=False):  # bf16 cannot resolve similarities
            return self._contrast(
                rows, seen, embedded[: len(read)], embedded[len(read) :].view(len(read), NUM_NEGATIVES, -1)
            )

    def _contrast(self, rows: TaskBatch, seen: Tensor, captions: Tensor, wrong: Tensor) -> Tensor:
        """CLIP's loss: each image against the batch's captions and its negatives, and each caption against images."""
        read, scale = rows["words"], self.net.scale.exp().clamp(max=100.0)
        same = (read[:, None] == read[None]).all(2) & ~torch.eye(len(read), dtype=torch.bool, device=read.device)
        near = (scale * seen @ captions.T).masked_fill(same, -1e4)
        hard = (scale * (seen[:, None] * wrong).sum(2)).masked_fill(~rows["false"], -1e4)
        goal = torch.arange(len(read), device=read.device)
        quality = F.cross_entropy(scale * self.net.judge_quality(seen)[:, 1:], rows["quality"] - 1)
        return F.cross_entropy(torch.cat([near, hard], 1), goal) + F.cross_entropy(near.T, goal) + quality

    def evaluate(self, rng: Randomness, style: Style) -> dict[str, float]:
        captions = sample_captions(rng)
        wrong = corrupt_captions(captions, 1.0, rng)
        scenes, other = sample_scenes(captions, rng), sample_scenes(wrong, rng)
        false = ~shows_caption(scenes, wrong, strict=True)
        missed = ~shows_caption(other, captions, strict=True) & ~ambiguous_color(other, captions)
        pixels, quality = degrade_half(paint_scenes(scenes, rng, style), rng)
        seen, embedded = self.net.encode_images(pixels), self.net.encode_captions(captions)
        right = (seen * embedded).sum(1)
        beside = (self.net.encode_images(paint_scenes(other, rng, style)) * embedded).sum(1)
        return {
            "of two captions": masked_mean(right > (seen * self.net.encode_captions(wrong)).sum(1), false),
            "of two pictures": masked_mean(right > beside, missed & (quality == QUALITIES.index("crisp"))),
            "quality": masked_mean(self.net.judge_quality(seen)[:, 1:].argmax(1) + 1 == quality),
        }


class JudgeTask(TrainingTask[YesNoJudge]):
    def sample_batch(self, rng: Randomness) -> TaskBatch:
        captions = sample_captions(rng)
        scenes = sample_scenes(randomize_counts(corrupt_captions(captions, 0.45, rng), 0.15, rng), rng, SNAPPED)
        draws = rng.uniform(PlaygroundPurpose.PREVIEW_STRENGTH, 2)
        t = torch.where(draws[:, 0] < 0.4, 0.0, draws[:, 1])
        pixels = corruptions.simulate_preview(corruptions.augment(paint_scenes(scenes, rng), rng), t, rng)
        yes, sure = shows_caption(scenes, captions, strict=True), ~ambiguous_color(scenes, captions)
        return {"pixels": pixels, "captions": captions, "yes": yes.float(), "sure": sure.float(), "t": t}

    def loss(self, rows: TaskBatch) -> Tensor:
        yes, clear = self.net(rows["pixels"], rows["captions"]).unbind(1)
        right = F.binary_cross_entropy_with_logits(yes, rows["yes"], rows["sure"])
        return right + F.binary_cross_entropy_with_logits(clear, (rows["t"] <= CLEAR).float())

    def evaluate(self, rng: Randomness, style: Style) -> dict[str, float]:
        captions = sample_captions(rng)
        scenes = sample_scenes(randomize_counts(corrupt_captions(captions, 0.45, rng), 0.15, rng), rng)
        pixels, t = paint_scenes(scenes, rng, style), rng.uniform(PlaygroundPurpose.PREVIEW_STRENGTH, 1)[:, 0]
        yes, sure = shows_caption(scenes, captions, strict=True), ~ambiguous_color(scenes, captions)
        early = self.net(corruptions.simulate_preview(pixels, t, rng), captions) > 0
        return {
            "yes of finished": masked_mean((self.net(pixels, captions)[:, 0] > 0) == yes, sure),
            "yes of clear": masked_mean(early[:, 0] == yes, sure & (t <= CLEAR)),
            "clear": masked_mean(early[:, 1] == (t <= CLEAR)),
        }


class TasteTask(TrainingTask[QualityScorer]):
    def sample_batch(self, rng: Randomness) -> TaskBatch:
        return self._pairs(rng, "noto")

    def loss(self, rows: TaskBatch) -> Tensor:
        better, worse = self.net(torch.cat([rows["better"], rows["worse"]])).chunk(2)
        # A small penalty of the scores themselves, which would drift otherwise.
        loss: Tensor = -F.logsigmoid(better - worse).mean() + 1e-3 * (better.square() + worse.square()).mean()
        return loss

    def evaluate(self, rng: Randomness, style: Style) -> dict[str, float]:
        rows = self._pairs(rng, style)
        right = self.net(rows["better"]) > self.net(rows["worse"])
        return {"pairs": masked_mean(right), "sound before flawed": masked_mean(right, rows["sound"])}

    def _pairs(self, rng: Randomness, style: Style) -> TaskBatch:
        """Pairs of images of one scene, corrupted less and more; half of the better ones are not corrupted."""
        pixels = paint_scenes(randomize_objects(sample_scenes(sample_captions(rng), rng, SNAPPED), rng), rng, style)
        kinds, draws = rng.words(PlaygroundPurpose.FLAW, 2) % 5, rng.uniform(PlaygroundPurpose.FLAW_STRENGTH, 3)
        sound = draws[:, 2] < 0.5
        less = torch.where(sound, 0.0, 0.5 * draws[:, 0])
        more = less + 0.1 + (0.9 - less) * draws[:, 1]
        better = corruptions.corrupt(pixels, kinds[:, 0], less, rng)
        kind = torch.where(sound, kinds[:, 1], kinds[:, 0])  # strengths of different corruptions are not comparable
        return {"better": better, "worse": corruptions.corrupt(pixels, kind, more, rng), "sound": sound}


def degrade_half(pixels: Tensor, rng: Randomness) -> tuple[Tensor, Tensor]:
    """Degrade half of the images by blur or noise; returns them and their indices into QUALITIES: [N]."""
    draws = rng.uniform(PlaygroundPurpose.QUALITY, 2)
    quality = 1 + (draws[:, 0] > 0.5).long() + (draws[:, 0] > 0.75).long()
    out_of_focus = torch.where(quality == QUALITIES.index("blurry"), 0.15 + 0.45 * draws[:, 1], 0.0)
    grain = torch.where(quality == QUALITIES.index("noisy"), 0.05 + 0.15 * draws[:, 1], 0.0)
    return corruptions.add_noise(corruptions.blur(pixels, out_of_focus), grain, rng).clamp(0, 1), quality


def select_captions(first: Tensor, a: SceneCaptions, b: SceneCaptions) -> SceneCaptions:
    """Select rows of `a` where `first` is true, else of `b`."""
    rows = torch.arange(len(first), device=first.device)
    both = {name: torch.cat([x, y]) for (name, x), y in zip(vars(a).items(), vars(b).values(), strict=True)}
    return select_rows(SceneCaptions(**both), torch.where(first, rows, rows + len(first)))


def masked_mean(right: Tensor, among: Tensor | None = None) -> float:
    picked = right if among is None else right[among]
    return picked.float().mean().item()


NO_MOTION_RATIO = 0.4  # of training videos
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
# Shifts of the same noise in each frame, without order, so that it does not move.
SHIFTS = ((0, 0), (29, 11), (5, 50), (44, 37), (17, 3), (58, 24), (35, 61), (9, 31))


class MotionTask(TrainingTask[MotionClassifier]):
    frames: ClassVar[int] = FRAMES

    def sample_batch(self, rng: Randomness) -> TaskBatch:
        motions = motion.sample_motion(rng)
        wrong = rng.uniform(PlaygroundPurpose.NO_MOTION, 1)[:, 0] < NO_MOTION_RATIO
        way = torch.where(wrong, rng.words(PlaygroundPurpose.NO_MOTION_KIND, 1)[:, 0] % len(NO_MOTION_KINDS), -1)
        clips = augment_clips(paint_training_clips(motions, way, rng, SNAPPED), rng)
        return {"clips": clips, "shown": torch.where(wrong, NO_MOTION, motions)}

    def loss(self, rows: TaskBatch) -> Tensor:
        return F.cross_entropy(self.net(rows["clips"]), rows["shown"])

    def evaluate(self, rng: Randomness, style: Style) -> dict[str, float]:
        motions = motion.sample_motion(rng)
        way = rng.words(PlaygroundPurpose.NO_MOTION_KIND, 1)[:, 0] % len(NO_MOTION_KINDS)
        right = motion.paint_clips(
            Painter(style, motions.device), sample_scenes(sample_captions(rng), rng), motions, rng
        )
        none = self.net(paint_training_clips(motions, way, rng, 1.0, style)).argmax(1) == NO_MOTION
        return {
            "motion": masked_mean(self.net(right).argmax(1) == motions),
            "motion of flawed": masked_mean(self.net(augment_clips(right, rng)).argmax(1) == motions),
            "none": masked_mean(none),
            "none of frozen": masked_mean(self.net(right[:, :1].expand_as(right)).argmax(1) == NO_MOTION),
        }


def paint_training_clips(
    motions: Tensor, way: Tensor, rng: Randomness, snapped: float, style: Style = "noto"
) -> Tensor:
    """Videos of random scenes with these motions, or with one of NO_MOTION_KINDS where `way` is at least 0."""
    scenes = randomize_objects(sample_scenes(sample_captions(rng), rng, snapped), rng)
    way = torch.where((way == AT_ODDS) & (scenes.present.sum(1) < 2), FROZEN, way)  # needs two objects
    frames, angles = motion.animate(
        scenes, sample_object_motions(motions, way, rng), sample_frame_times(motions, way, rng)
    )
    clips = motion.paint_frames(Painter(style, motions.device), corrupt_frames(frames, way, rng), angles, rng)
    return torch.where((way == NOISE).view(-1, 1, 1, 1, 1), sample_noise_clips(rng), clips)


def sample_object_motions(motions: Tensor, way: Tensor, rng: Randomness) -> Tensor:
    """Motions of each object; different ones for neighbors where `way` is AT_ODDS: [N, 4]."""
    further = 1 + rng.words(PlaygroundPurpose.OBJECT_MOTION, 1) % (len(MOTIONS) - 1)
    apart = (motions[:, None] + further * torch.arange(SLOTS, device=motions.device)) % len(MOTIONS)
    shrinks = torch.where(way == SHRINKING, GROWING, motions)
    return torch.where((way == AT_ODDS)[:, None], apart, shrinks[:, None])


def sample_frame_times(motions: Tensor, way: Tensor, rng: Randomness) -> Tensor:
    """Progress of the motion in each frame; turning objects turn in either direction: [N, 8]."""
    draws, pace = rng.uniform(PlaygroundPurpose.FRAME_TIME, 2, FRAMES), rng.uniform(PlaygroundPurpose.PACE, 4)
    even = torch.linspace(0, 1, FRAMES, device=motions.device).expand(len(motions), -1)
    back = (way == SHRINKING) | ((motions == TURNING) & (pace[:, 0] < 0.3))
    steady = 0.5 + (0.6 + 0.55 * pace[:, 1:2]) * (even - 0.5) + 0.06 * (draws[:, 0] - 0.5)
    time = torch.where(back[:, None], 1 - steady, steady)
    cut = 1 + (pace[:, 2:3] * (FRAMES - 1)).long()  # the first frame after a change
    later = (torch.arange(FRAMES, device=motions.device) >= cut).float()
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
    """Frames [N * 8] with objects that change or vanish in some frames, by `way`."""
    draws = rng.uniform(PlaygroundPurpose.WRONG_FRAME, FRAMES)
    cut = 1 + (rng.uniform(PlaygroundPurpose.CUT, 1) * (FRAMES - 1)).long()
    later = (torch.arange(FRAMES, device=way.device) >= cut) & (way == CHANGING)[:, None]
    gone = ((draws < 0.5) | (draws[:, :1] < 0.2)) & (way == VANISHING)[:, None]
    changed, absent = later.view(-1, 1), gone.view(-1, 1)
    return replace(
        frames,
        class_id=torch.where(changed, frames.class_id.roll(FRAMES, 0), frames.class_id),
        color=torch.where(changed, frames.color.roll(FRAMES, 0), frames.color),
        present=frames.present & ~absent,
    )


def sample_noise_clips(rng: Randomness) -> Tensor:
    """Independent smooth noise in each frame: [N, 8, 3, 64, 64]."""
    clouds = rng.uniform(PlaygroundPurpose.NOISE_CLIP, FRAMES * 3, 8, 8)
    return F.interpolate(clouds, size=(SIDE, SIDE), mode="bilinear").view(len(rng), FRAMES, 3, SIDE, SIDE)


def augment_clips(clips: Tensor, rng: Randomness) -> Tensor:
    """Augment videos with blur, flickering noise and brightness; a third of them stay as they are."""
    draws, flicker = rng.uniform(PlaygroundPurpose.AUGMENTATION, 4), rng.uniform(PlaygroundPurpose.FLICKER, FRAMES)
    some = (draws[:, 3] > 1 / 3).float()
    light = 1 + some[:, None] * (0.3 * (draws[:, 2:3] - 0.5) + 0.08 * (flicker - 0.5))
    soft = corruptions.blur((clips * light[..., None, None, None]).flatten(1, 2), 0.4 * some * draws[:, 0])
    grain = rng.normal(PlaygroundPurpose.GRAIN, 3, SIDE, SIDE) * (0.12 * some * draws[:, 1]).view(-1, 1, 1, 1)
    noise = torch.cat([grain.roll(shift, (2, 3)) for shift in SHIFTS], 1)
    return (soft + noise).clamp(0, 1).view_as(clips)
