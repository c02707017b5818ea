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
from . import corruptions, detector
from .art import CLASSES, COLORS, Style
from .caption_encoder import caption_words
from .captions import SceneCaptions, sample_captions
from .detector import SceneDetector
from .detector_evaluation import evaluate_detector
from .image_text_scorer import QUALITIES, ImageTextScorer
from .judge import CLEAR, YesNoJudge
from .language import ATTRIBUTION, COLOR, COUNTING
from .scenes import SLOTS, Painter, Scenes, corrupt_captions, sample_scenes, shows_caption
from .taste import QualityScorer

SNAPPED = 0.4  # of the scenes to learn from; the others are freer than any the generators learn from
SPOILED = 4  # captions a picture is told from, each wrong in one thing

N = TypeVar("N", bound=nn.Module)
TaskBatch = dict[str, Any]  # a tree of tensors, all with the same rows


@dataclass(frozen=True)
class TrainingTask(ABC, Generic[N]):
    """One network's way from scenes to a loss."""

    net: N
    frames: ClassVar[int] = 1  # painted for each row

    @abstractmethod
    def lesson(self, rng: Randomness) -> TaskBatch:
        """Fresh rows to learn from, one for each of the randomness."""

    @abstractmethod
    def loss(self, rows: TaskBatch) -> Tensor:
        """The mean over a batch."""

    @abstractmethod
    def exam(self, rng: Randomness, style: Style) -> dict[str, float]:
        """What the network can do, by name."""


def paint_scenes(scenes: Scenes, rng: Randomness, style: Style = "noto") -> Tensor:
    return Painter(style, scenes.kind.device).paint(scenes, rng)[:, 0]


def randomize_objects(scenes: Scenes, rng: Randomness) -> Scenes:
    """Half of the scenes with other things in other colours: no caption says them, but generators draw them."""
    words = rng.words("jumble", 2 * SLOTS + 1)
    change = (words[:, :1] & 1).bool()
    kind, color = words[:, 1 : SLOTS + 1] % len(CLASSES), words[:, SLOTS + 1 :] % (2 * len(COLORS)) + 1
    color = torch.where(color > len(COLORS), 0, color)
    return replace(scenes, kind=torch.where(change, kind, scenes.kind), color=torch.where(change, color, scenes.color))


def randomize_counts(captions: SceneCaptions, share: float, rng: Randomness) -> SceneCaptions:
    """Some captions of scenes with so many of the first thing as nobody asked for, and nothing else."""
    change = rng.uniform("miscount", 1)[:, 0] < share
    count = 1 + rng.words("so many", 1)[:, 0] % SLOTS
    return replace(
        captions,
        task=torch.where(change, COUNTING, captions.task),
        second=torch.where(change, captions.first, captions.second),
        count=torch.where(change, count, captions.count),
    )


def ambiguous_color(scenes: Scenes, captions: SceneCaptions) -> Tensor:
    """Where a colour is asked of a thing in its own, which may be that colour or not: [N] bool."""
    natural = (scenes.present & (scenes.color == 0)).any(1)
    return natural & ((captions.task == COLOR) | (captions.task == ATTRIBUTION))


class DetectorTask(TrainingTask[SceneDetector]):
    def lesson(self, rng: Randomness) -> TaskBatch:
        scenes = randomize_objects(sample_scenes(sample_captions(rng), rng, SNAPPED), rng)
        return {"pixels": corruptions.augment(paint_scenes(scenes, rng), rng), "scenes": scenes}

    def loss(self, rows: TaskBatch) -> Tensor:
        return detector.detector_loss(self.net(rows["pixels"]), rows["scenes"]).mean()

    def exam(self, rng: Randomness, style: Style) -> dict[str, float]:
        captions = sample_captions(rng)
        scenes = sample_scenes(corrupt_captions(captions, 0.5, rng), rng)
        settled = ~ambiguous_color(scenes, captions)
        return evaluate_detector(self.net, paint_scenes(scenes, rng, style), scenes, captions, settled)


class ScorerTask(TrainingTask[ImageTextScorer]):
    def lesson(self, rng: Randomness) -> TaskBatch:
        captions = sample_captions(rng)
        # Every other caption is its neighbour's with one thing wrong, so that batches hold pictures that are alike.
        neighbour = select_rows(captions, torch.arange(len(rng), device=rng.rows.device) // 2 * 2)
        odd = (torch.arange(len(rng), device=rng.rows.device) % 2).bool()
        captions = select_captions(odd, corrupt_captions(neighbour, 1.0, rng), captions)
        scenes = sample_scenes(captions, rng, SNAPPED)
        again = torch.arange(len(rng), device=rng.rows.device).repeat_interleave(SPOILED)
        wrong = corrupt_captions(select_rows(captions, again), 1.0, rng.repeat(SPOILED))
        false = ~shows_caption(select_rows(scenes, again), wrong, strict=True)
        pixels, quality = degrade_half(paint_scenes(scenes, rng), rng)
        spoiled = caption_words(wrong).view(len(rng), SPOILED, -1)
        rows = {"pixels": pixels, "words": caption_words(captions), "spoiled": spoiled, "quality": quality}
        return {**rows, "false": false.view(-1, SPOILED)}

    def loss(self, rows: TaskBatch) -> Tensor:
        net, read, spoiled = self.net, rows["words"], rows["spoiled"]
        seen = net.see(rows["pixels"])
        told = F.normalize(net.reader(torch.cat([read, spoiled.flatten(0, 1)])).float(), dim=1)
        with torch.autocast(seen.device.type, enabled=False):  # similarities differ by less than bf16 can tell
            return self._contrast(rows, seen, told[: len(read)], told[len(read) :].view(len(read), SPOILED, -1))

    def _contrast(self, rows: TaskBatch, seen: Tensor, told: Tensor, wrong: Tensor) -> Tensor:
        """Every picture to its caption among those of the batch and its spoiled ones, and every caption back."""
        read, scale = rows["words"], self.net.scale.exp().clamp(max=100.0)
        same = (read[:, None] == read[None]).all(2) & ~torch.eye(len(read), dtype=torch.bool, device=read.device)
        near = (scale * seen @ told.T).masked_fill(same, -1e4)
        hard = (scale * (seen[:, None] * wrong).sum(2)).masked_fill(~rows["false"], -1e4)
        goal = torch.arange(len(read), device=read.device)
        quality = F.cross_entropy(scale * self.net.judge_quality(seen)[:, 1:], rows["quality"] - 1)
        return F.cross_entropy(torch.cat([near, hard], 1), goal) + F.cross_entropy(near.T, goal) + quality

    def exam(self, rng: Randomness, style: Style) -> dict[str, float]:
        captions = sample_captions(rng)
        wrong = corrupt_captions(captions, 1.0, rng)
        scenes, other = sample_scenes(captions, rng), sample_scenes(wrong, rng)
        false = ~shows_caption(scenes, wrong, strict=True)
        missed = ~shows_caption(other, captions, strict=True) & ~ambiguous_color(other, captions)
        pixels, quality = degrade_half(paint_scenes(scenes, rng, style), rng)
        seen, told = self.net.see(pixels), self.net.read(captions)
        right = (seen * told).sum(1)
        beside = (self.net.see(paint_scenes(other, rng, style)) * told).sum(1)
        return {
            "of two captions": mean_of(right > (seen * self.net.read(wrong)).sum(1), false),
            "of two pictures": mean_of(right > beside, missed & (quality == QUALITIES.index("crisp"))),
            "quality": mean_of(self.net.judge_quality(seen)[:, 1:].argmax(1) + 1 == quality),
        }


class JudgeTask(TrainingTask[YesNoJudge]):
    def lesson(self, rng: Randomness) -> TaskBatch:
        captions = sample_captions(rng)
        scenes = sample_scenes(randomize_counts(corrupt_captions(captions, 0.45, rng), 0.15, rng), rng, SNAPPED)
        draws = rng.uniform("how far", 2)
        t = torch.where(draws[:, 0] < 0.4, 0.0, draws[:, 1])
        pixels = corruptions.simulate_preview(corruptions.augment(paint_scenes(scenes, rng), rng), t, rng)
        yes, sure = shows_caption(scenes, captions, strict=True), ~ambiguous_color(scenes, captions)
        return {"pixels": pixels, "captions": captions, "yes": yes.float(), "sure": sure.float(), "t": t}

    def loss(self, rows: TaskBatch) -> Tensor:
        yes, clear = self.net(rows["pixels"], rows["captions"]).unbind(1)
        right = F.binary_cross_entropy_with_logits(yes, rows["yes"], rows["sure"])
        return right + F.binary_cross_entropy_with_logits(clear, (rows["t"] <= CLEAR).float())

    def exam(self, rng: Randomness, style: Style) -> dict[str, float]:
        captions = sample_captions(rng)
        scenes = sample_scenes(randomize_counts(corrupt_captions(captions, 0.45, rng), 0.15, rng), rng)
        pixels, t = paint_scenes(scenes, rng, style), rng.uniform("how far", 1)[:, 0]
        yes, sure = shows_caption(scenes, captions, strict=True), ~ambiguous_color(scenes, captions)
        early = self.net(corruptions.simulate_preview(pixels, t, rng), captions) > 0
        return {
            "yes of finished": mean_of((self.net(pixels, captions)[:, 0] > 0) == yes, sure),
            "yes of clear": mean_of(early[:, 0] == yes, sure & (t <= CLEAR)),
            "clear": mean_of(early[:, 1] == (t <= CLEAR)),
        }


class TasteTask(TrainingTask[QualityScorer]):
    def lesson(self, rng: Randomness) -> TaskBatch:
        return self._pairs(rng, "noto")

    def loss(self, rows: TaskBatch) -> Tensor:
        better, worse = self.net(torch.cat([rows["better"], rows["worse"]])).chunk(2)
        # A little of the size itself, else scores drift without end.
        loss: Tensor = -F.logsigmoid(better - worse).mean() + 1e-3 * (better.square() + worse.square()).mean()
        return loss

    def exam(self, rng: Randomness, style: Style) -> dict[str, float]:
        rows = self._pairs(rng, style)
        right = self.net(rows["better"]) > self.net(rows["worse"])
        return {"pairs": mean_of(right), "sound before flawed": mean_of(right, rows["sound"])}

    def _pairs(self, rng: Randomness, style: Style) -> TaskBatch:
        """The same scenes damaged less and more, in ways of their own; half of the better ones not at all."""
        pixels = paint_scenes(randomize_objects(sample_scenes(sample_captions(rng), rng, SNAPPED), rng), rng, style)
        kinds, draws = rng.words("flaws", 2) % 5, rng.uniform("how bad", 3)
        sound = draws[:, 2] < 0.5
        less = torch.where(sound, 0.0, 0.5 * draws[:, 0])
        more = less + 0.1 + (0.9 - less) * draws[:, 1]
        better = corruptions.corrupt(pixels, kinds[:, 0], less, rng)
        kind = torch.where(sound, kinds[:, 1], kinds[:, 0])  # between two kinds nobody can say which is worse
        return {"better": better, "worse": corruptions.corrupt(pixels, kind, more, rng), "sound": sound}


def degrade_half(pixels: Tensor, rng: Randomness) -> tuple[Tensor, Tensor]:
    """Half of the pictures crisp, the others blurry or noisy, and which word of QUALITIES says so: [N]."""
    draws = rng.uniform("quality", 2)
    quality = 1 + (draws[:, 0] > 0.5).long() + (draws[:, 0] > 0.75).long()
    out_of_focus = torch.where(quality == QUALITIES.index("blurry"), 0.15 + 0.45 * draws[:, 1], 0.0)
    grain = torch.where(quality == QUALITIES.index("noisy"), 0.05 + 0.15 * draws[:, 1], 0.0)
    return corruptions.add_noise(corruptions.blur(pixels, out_of_focus), grain, rng).clamp(0, 1), quality


def select_captions(first: Tensor, a: SceneCaptions, b: SceneCaptions) -> SceneCaptions:
    """Rows of `a` where `first`, else of `b`."""
    rows = torch.arange(len(first), device=first.device)
    both = {name: torch.cat([x, y]) for (name, x), y in zip(vars(a).items(), vars(b).values(), strict=True)}
    return select_rows(SceneCaptions(**both), torch.where(first, rows, rows + len(first)))


def mean_of(right: Tensor, among: Tensor | None = None) -> float:
    picked = right if among is None else right[among]
    return picked.float().mean().item()
