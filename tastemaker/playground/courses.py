"""What each judge learns from, how it is corrected, and its examination on scenes it never saw."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..randomness import Randomness
from ..types import index
from . import damage, detector
from .art import CLASSES, COLORS, Style
from .captions import Captions, draw
from .detector import Detector
from .exam import examine_detector
from .judge import CLEAR, Judge
from .language import ATTRIBUTION, COLOR, COUNTING
from .reading import words
from .scenes import SLOTS, Painter, Scenes, arrange, spoil, truth
from .scorer import QUALITIES, Scorer
from .taste import Taste

SNAPPED = 0.4  # of the scenes to learn from; the others are freer than any the generators learn from
SPOILED = 4  # captions a picture is told from, each wrong in one thing

N = TypeVar("N", bound=nn.Module)
Rows = dict[str, Any]  # a tree of tensors, all with the same rows


@dataclass(frozen=True)
class Course(ABC, Generic[N]):
    """One network's way from scenes to a loss."""

    net: N
    frames: ClassVar[int] = 1  # painted for each row

    @abstractmethod
    def lesson(self, rng: Randomness) -> Rows:
        """Fresh rows to learn from, one for each of the randomness."""

    @abstractmethod
    def loss(self, rows: Rows) -> Tensor:
        """The mean over a batch."""

    @abstractmethod
    def exam(self, rng: Randomness, style: Style) -> dict[str, float]:
        """What the network can do, by name."""


def painted(scenes: Scenes, rng: Randomness, style: Style = "noto") -> Tensor:
    return Painter(style, scenes.kind.device).paint(scenes, rng)[:, 0]


def jumbled(scenes: Scenes, rng: Randomness) -> Scenes:
    """Half of the scenes with other things in other colours: no caption says them, but generators draw them."""
    words = rng.words("jumble", 2 * SLOTS + 1)
    change = (words[:, :1] & 1).bool()
    kind, color = words[:, 1 : SLOTS + 1] % len(CLASSES), words[:, SLOTS + 1 :] % (2 * len(COLORS)) + 1
    color = torch.where(color > len(COLORS), 0, color)
    return replace(scenes, kind=torch.where(change, kind, scenes.kind), color=torch.where(change, color, scenes.color))


def miscounted(captions: Captions, share: float, rng: Randomness) -> Captions:
    """Some captions of scenes with so many of the first thing as nobody asked for, and nothing else."""
    change = rng.uniform("miscount", 1)[:, 0] < share
    count = 1 + rng.words("so many", 1)[:, 0] % SLOTS
    return replace(
        captions,
        task=torch.where(change, COUNTING, captions.task),
        second=torch.where(change, captions.first, captions.second),
        count=torch.where(change, count, captions.count),
    )


def doubtful(scenes: Scenes, captions: Captions) -> Tensor:
    """Where a colour is asked of a thing in its own, which may be that colour or not: [N] bool."""
    natural = (scenes.present & (scenes.color == 0)).any(1)
    return natural & ((captions.task == COLOR) | (captions.task == ATTRIBUTION))


class Detecting(Course[Detector]):
    def lesson(self, rng: Randomness) -> Rows:
        scenes = jumbled(arrange(draw(rng), rng, SNAPPED), rng)
        return {"pixels": damage.augmented(painted(scenes, rng), rng), "scenes": scenes}

    def loss(self, rows: Rows) -> Tensor:
        return detector.loss(self.net(rows["pixels"]), rows["scenes"]).mean()

    def exam(self, rng: Randomness, style: Style) -> dict[str, float]:
        captions = draw(rng)
        scenes = arrange(spoil(captions, 0.5, rng), rng)
        settled = ~doubtful(scenes, captions)
        return examine_detector(self.net, painted(scenes, rng, style), scenes, captions, settled)


class Matching(Course[Scorer]):
    def lesson(self, rng: Randomness) -> Rows:
        captions = draw(rng)
        # Every other caption is its neighbour's with one thing wrong, so that batches hold pictures that are alike.
        neighbour = index(captions, torch.arange(len(rng), device=rng.rows.device) // 2 * 2)
        odd = (torch.arange(len(rng), device=rng.rows.device) % 2).bool()
        captions = chosen(odd, spoil(neighbour, 1.0, rng), captions)
        scenes = arrange(captions, rng, SNAPPED)
        again = torch.arange(len(rng), device=rng.rows.device).repeat_interleave(SPOILED)
        wrong = spoil(index(captions, again), 1.0, rng.repeat(SPOILED))
        false = ~truth(index(scenes, again), wrong, strict=True)
        pixels, quality = flawed(painted(scenes, rng), rng)
        spoiled = words(wrong).view(len(rng), SPOILED, -1)
        rows = {"pixels": pixels, "words": words(captions), "spoiled": spoiled, "quality": quality}
        return {**rows, "false": false.view(-1, SPOILED)}

    def loss(self, rows: Rows) -> Tensor:
        net, read, spoiled = self.net, rows["words"], rows["spoiled"]
        seen = net.see(rows["pixels"])
        told = F.normalize(net.reader(torch.cat([read, spoiled.flatten(0, 1)])).float(), dim=1)
        with torch.autocast(seen.device.type, enabled=False):  # similarities differ by less than bf16 can tell
            return self._contrast(rows, seen, told[: len(read)], told[len(read) :].view(len(read), SPOILED, -1))

    def _contrast(self, rows: Rows, seen: Tensor, told: Tensor, wrong: Tensor) -> Tensor:
        """Every picture to its caption among those of the batch and its spoiled ones, and every caption back."""
        read, scale = rows["words"], self.net.scale.exp().clamp(max=100.0)
        same = (read[:, None] == read[None]).all(2) & ~torch.eye(len(read), dtype=torch.bool, device=read.device)
        near = (scale * seen @ told.T).masked_fill(same, -1e4)
        hard = (scale * (seen[:, None] * wrong).sum(2)).masked_fill(~rows["false"], -1e4)
        goal = torch.arange(len(read), device=read.device)
        quality = F.cross_entropy(scale * self.net.judge_quality(seen)[:, 1:], rows["quality"] - 1)
        return F.cross_entropy(torch.cat([near, hard], 1), goal) + F.cross_entropy(near.T, goal) + quality

    def exam(self, rng: Randomness, style: Style) -> dict[str, float]:
        captions = draw(rng)
        wrong = spoil(captions, 1.0, rng)
        scenes, other = arrange(captions, rng), arrange(wrong, rng)
        false = ~truth(scenes, wrong, strict=True)
        missed = ~truth(other, captions, strict=True) & ~doubtful(other, captions)
        pixels, quality = flawed(painted(scenes, rng, style), rng)
        seen, told = self.net.see(pixels), self.net.read(captions)
        right = (seen * told).sum(1)
        beside = (self.net.see(painted(other, rng, style)) * told).sum(1)
        return {
            "of two captions": share(right > (seen * self.net.read(wrong)).sum(1), false),
            "of two pictures": share(right > beside, missed & (quality == QUALITIES.index("crisp"))),
            "quality": share(self.net.judge_quality(seen)[:, 1:].argmax(1) + 1 == quality),
        }


class Judging(Course[Judge]):
    def lesson(self, rng: Randomness) -> Rows:
        captions = draw(rng)
        scenes = arrange(miscounted(spoil(captions, 0.45, rng), 0.15, rng), rng, SNAPPED)
        draws = rng.uniform("how far", 2)
        t = torch.where(draws[:, 0] < 0.4, 0.0, draws[:, 1])
        pixels = damage.preview(damage.augmented(painted(scenes, rng), rng), t, rng)
        yes, sure = truth(scenes, captions, strict=True), ~doubtful(scenes, captions)
        return {"pixels": pixels, "captions": captions, "yes": yes.float(), "sure": sure.float(), "t": t}

    def loss(self, rows: Rows) -> Tensor:
        yes, clear = self.net(rows["pixels"], rows["captions"]).unbind(1)
        right = F.binary_cross_entropy_with_logits(yes, rows["yes"], rows["sure"])
        return right + F.binary_cross_entropy_with_logits(clear, (rows["t"] <= CLEAR).float())

    def exam(self, rng: Randomness, style: Style) -> dict[str, float]:
        captions = draw(rng)
        scenes = arrange(miscounted(spoil(captions, 0.45, rng), 0.15, rng), rng)
        pixels, t = painted(scenes, rng, style), rng.uniform("how far", 1)[:, 0]
        yes, sure = truth(scenes, captions, strict=True), ~doubtful(scenes, captions)
        early = self.net(damage.preview(pixels, t, rng), captions) > 0
        return {
            "yes of finished": share((self.net(pixels, captions)[:, 0] > 0) == yes, sure),
            "yes of clear": share(early[:, 0] == yes, sure & (t <= CLEAR)),
            "clear": share(early[:, 1] == (t <= CLEAR)),
        }


class Tasting(Course[Taste]):
    def lesson(self, rng: Randomness) -> Rows:
        return self._pairs(rng, "noto")

    def loss(self, rows: Rows) -> Tensor:
        better, worse = self.net(torch.cat([rows["better"], rows["worse"]])).chunk(2)
        # A little of the size itself, else scores drift without end.
        loss: Tensor = -F.logsigmoid(better - worse).mean() + 1e-3 * (better.square() + worse.square()).mean()
        return loss

    def exam(self, rng: Randomness, style: Style) -> dict[str, float]:
        rows = self._pairs(rng, style)
        right = self.net(rows["better"]) > self.net(rows["worse"])
        return {"pairs": share(right), "sound before flawed": share(right, rows["sound"])}

    def _pairs(self, rng: Randomness, style: Style) -> Rows:
        """The same scenes damaged less and more, in ways of their own; half of the better ones not at all."""
        pixels = painted(jumbled(arrange(draw(rng), rng, SNAPPED), rng), rng, style)
        kinds, draws = rng.words("flaws", 2) % 5, rng.uniform("how bad", 3)
        sound = draws[:, 2] < 0.5
        less = torch.where(sound, 0.0, 0.5 * draws[:, 0])
        more = less + 0.1 + (0.9 - less) * draws[:, 1]
        better = damage.damaged(pixels, kinds[:, 0], less, rng)
        kind = torch.where(sound, kinds[:, 1], kinds[:, 0])  # between two kinds nobody can say which is worse
        return {"better": better, "worse": damage.damaged(pixels, kind, more, rng), "sound": sound}


def flawed(pixels: Tensor, rng: Randomness) -> tuple[Tensor, Tensor]:
    """Half of the pictures crisp, the others blurry or noisy, and which word of QUALITIES says so: [N]."""
    draws = rng.uniform("quality", 2)
    quality = 1 + (draws[:, 0] > 0.5).long() + (draws[:, 0] > 0.75).long()
    out_of_focus = torch.where(quality == QUALITIES.index("blurry"), 0.15 + 0.45 * draws[:, 1], 0.0)
    grain = torch.where(quality == QUALITIES.index("noisy"), 0.05 + 0.15 * draws[:, 1], 0.0)
    return damage.noisy(damage.blurry(pixels, out_of_focus), grain, rng).clamp(0, 1), quality


def chosen(first: Tensor, a: Captions, b: Captions) -> Captions:
    """Rows of `a` where `first`, else of `b`."""
    rows = torch.arange(len(first), device=first.device)
    both = {name: torch.cat([x, y]) for (name, x), y in zip(vars(a).items(), vars(b).values(), strict=True)}
    return index(Captions(**both), torch.where(first, rows, rows + len(first)))


def share(right: Tensor, among: Tensor | None = None) -> float:
    picked = right if among is None else right[among]
    return picked.float().mean().item()
