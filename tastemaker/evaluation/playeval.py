"""Scorers of the playground's benchmarks: PlayEval, PlayEval-Motion and WordEval.

Each uses a network that is never a reward, and can draw real samples of the same prompts for Frechet distances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.randomness import Randomness
from ..core.types import Metadata, Prompts
from ..playground.art import CLASSES, COLORS
from ..playground.detector import Detections, SceneDetector, decode_detections
from ..playground.motion import (
    MOTIONS,
    MotionClassifier,
    paint_clips,
    representative_frame,
    requested_motion,
    resize_clips,
)
from ..playground.network_files import TINY, load_network
from ..playground.networks import first_frame, requested_captions
from ..playground.scenes import Painter, sample_scenes
from ..playground.signs import WORDS, SignPainter
from ..playground.verdict import compute_verdict, partial_credit
from ..rewards.ocr import OcrEngine, normalize_text, text_similarity
from . import geneval_rules
from .evaluate import BenchmarkScorer

HELD_OUT_DETECTOR = "playground/detector1"
HELD_OUT_MOTION = "playground/motion1"
COLOR_NAMES = tuple(COLORS)
MOTION_LABELS = (*MOTIONS, "no motion")
OCR_SIZE = 256  # pixels; not the size of the OCR reward, so that text which is legible at that size only does not count
REAL_SEED = 1


@dataclass(frozen=True)
class PlayEvalScorer(BenchmarkScorer):
    """Scores images of the playground with a held-out detector and GenEval's rules."""

    has_real_images: ClassVar[bool] = True
    net: SceneDetector
    device: torch.device

    @torch.no_grad()
    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> list[dict[str, Any]]:
        """Return strict, lenient and graded scores of each image, with the reasons why it is wrong."""
        captions = requested_captions(prompts, metadata, self.device)
        detections = decode_detections(self.net(first_frame(pixels.to(self.device).float())))
        strict = compute_verdict(detections, captions, strict=True).tolist()
        lenient = compute_verdict(detections, captions, strict=False).tolist()
        graded = partial_credit(detections, captions, strict=True).tolist()
        objects = list_detections(detections)
        rows = []
        for i, requested in enumerate(captions.metadata()):
            _, reasons = geneval_rules.evaluate_detections(objects[i], requested, geneval_rules.PLAYEVAL)
            rows.append({"strict": strict[i], "lenient": lenient[i], "graded": graded[i], "reasons": reasons})
        return rows

    @torch.no_grad()
    def features(self, pixels: Tensor) -> Tensor:
        return self.net.features(first_frame(pixels.to(self.device).float())).cpu()

    def real_samples(self, prompts: Prompts, metadata: Sequence[Metadata], indices: Sequence[int]) -> Tensor:
        """Paint scenes of the captions: [N, 1, 3, 64, 64]."""
        rng = Randomness(REAL_SEED, 0, torch.tensor(list(indices), device=self.device))
        scenes = sample_scenes(requested_captions(prompts, metadata, self.device), rng)
        return Painter("noto", self.device).paint(scenes, rng)


def load_playeval_scorer(weights: str = HELD_OUT_DETECTOR, device: torch.device | str = "cpu") -> PlayEvalScorer:
    return PlayEvalScorer(load_network(SceneDetector, weights, device), torch.device(device))


def list_detections(detections: Detections) -> list[list[geneval_rules.DetectedObject]]:
    """Convert detections to the objects of each image that GenEval's rules take."""
    low, high = (detections.center + sign * detections.size / 2 for sign in (-1, 1))
    boxes = torch.cat([low, high], 2).tolist()
    columns = (detections.class_id.tolist(), boxes, detections.score.tolist(), detections.color.tolist())
    return [
        [
            geneval_rules.DetectedObject(
                CLASSES[class_id], (box[0], box[1], box[2], box[3]), score, COLOR_NAMES[color - 1]
            )
            for class_id, box, score, color in zip(*image, strict=True)
            if score > 0
        ]
        for image in zip(*columns, strict=True)
    ]


@dataclass(frozen=True)
class PlayEvalMotionScorer(BenchmarkScorer):
    """Scores videos of the playground: a held-out detector for the content, a held-out classifier for the motion."""

    has_real_images: ClassVar[bool] = True
    net: MotionClassifier
    scorer: PlayEvalScorer

    @torch.no_grad()
    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> list[dict[str, Any]]:
        """Score each video: correct if a representative frame shows the caption and the motion is as requested."""
        videos = pixels.to(self.scorer.device).float()
        requested = requested_motion(prompts, metadata, self.scorer.device)
        probabilities = self.net(resize_clips(videos)).softmax(1)
        requested_probability = probabilities.gather(1, requested[:, None])[:, 0]
        content = self.scorer.score(representative_frame(videos, requested), prompts, metadata)
        columns = (requested.tolist(), probabilities.argmax(1).tolist(), requested_probability.tolist())
        return [_combine_scores(row, *motion) for row, *motion in zip(content, *columns, strict=True)]

    @torch.no_grad()
    def features(self, pixels: Tensor) -> Tensor:
        """Return motion features and the mean image features of the first, middle and last frame: [N, C]."""
        videos = resize_clips(pixels.to(self.scorer.device).float())
        frames = videos[:, [0, videos.shape[1] // 2, videos.shape[1] - 1]]
        content = self.scorer.features(frames.flatten(0, 1)[:, None]).view(*frames.shape[:2], -1)
        return torch.cat([self.net.features(videos).cpu(), content.mean(1)], 1)

    def real_samples(self, prompts: Prompts, metadata: Sequence[Metadata], indices: Sequence[int]) -> Tensor:
        """Paint videos of the captions: [N, 8, 3, 64, 64]."""
        device = self.scorer.device
        rng = Randomness(REAL_SEED, 0, torch.tensor(list(indices), device=device))
        scenes = sample_scenes(requested_captions(prompts, metadata, device), rng)
        return paint_clips(Painter("noto", device), scenes, requested_motion(prompts, metadata, device), rng)


def _combine_scores(content: dict[str, Any], requested: int, predicted: int, probability: float) -> dict[str, Any]:
    """Combine the scores of a video's content with those of its motion."""
    correct = float(requested == predicted)
    reasons = list(content["reasons"])
    if not correct:
        reasons.append(f"expected {MOTION_LABELS[requested]}, found {MOTION_LABELS[predicted]}")
    return {
        "strict": content["strict"] * correct,
        "lenient": content["lenient"] * correct,
        "graded": (content["graded"] + probability) / 2,
        "content": content["strict"],
        "motion": correct,
        "seen": MOTION_LABELS[predicted],
        "reasons": reasons,
    }


def load_playeval_motion_scorer(
    weights: str = HELD_OUT_DETECTOR, device: torch.device | str = "cpu"
) -> PlayEvalMotionScorer:
    classifier = load_network(MotionClassifier, TINY if weights == TINY else HELD_OUT_MOTION, device)
    return PlayEvalMotionScorer(classifier, load_playeval_scorer(weights, device))


@dataclass(frozen=True)
class WordEvalScorer(BenchmarkScorer):
    """Scores signs with an OCR engine. Frechet features come from a detector, which was not trained on text."""

    has_real_images: ClassVar[bool] = True
    engine: OcrEngine
    scorer: PlayEvalScorer

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> list[dict[str, Any]]:
        """Score each sign: strict if exactly the word was read, lenient if it was among the text, graded similarity."""
        rows = []
        for text, requested in zip(self.engine.read(pixels[:, 0], OCR_SIZE), metadata, strict=True):
            word = normalize_text(requested["text"])
            correct = {"strict": float(text == word), "lenient": float(word in text)}
            rows.append({**correct, "graded": text_similarity(text, word), "read": text})
        return rows

    def features(self, pixels: Tensor) -> Tensor:
        return self.scorer.features(pixels)

    def real_samples(self, prompts: Prompts, metadata: Sequence[Metadata], indices: Sequence[int]) -> Tensor:
        """Paint signs with the words: [N, 1, 3, 64, 64]."""
        word_ids = torch.tensor([WORDS.index(each["text"]) for each in metadata])
        return SignPainter().paint(word_ids, Randomness(REAL_SEED, 0, torch.tensor(list(indices))))


def load_wordeval_scorer(weights: str = HELD_OUT_DETECTOR, device: torch.device | str = "cpu") -> WordEvalScorer:
    return WordEvalScorer(OcrEngine(), load_playeval_scorer(weights, device))
