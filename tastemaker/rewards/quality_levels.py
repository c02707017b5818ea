"""DeQA-Score and Q-Align: mPLUG-Owl2 rates an image with one of five words, from excellent to bad."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from ..core.reward import BatchSize, PretrainedReward, Reward, RewardCard
from ..core.types import Metadata, Placement, Prompts
from ..models.pretrained import WeightsSource
from .backbones.frozen_models import TINY
from .backbones.mplug_owl2 import MplugOwl2, OwlQuestion, load_mplug_owl2, tiny_mplug_owl2, tokenize_question
from .backbones.preprocessing import CLIP_MEAN, Preprocessing
from .backbones.qwen2_vl import round_to_bytes

DEQA = WeightsSource(
    "zhiyuanyou/DeQA-Score-Mix3", size="16.4 GB", license="MIT on its card; LLaMA 2's license for its base"
)
QALIGN = WeightsSource(
    "q-future/one-align", size="16.4 GB", license="MIT on its card, S-Lab 1.0 (non-commercial) elsewhere; LLaMA 2's"
)
LEVELS = ("excellent", "good", "fair", "poor", "bad")
QUESTION = "USER: How would you rate the {subject} of this image?\n<|image|>\nASSISTANT: The {subject} of the image is"
DEQA_VALUES, QALIGN_VALUES = (5.0, 4.0, 3.0, 2.0, 1.0), (1.0, 0.75, 0.5, 0.25, 0.0)  # of the levels
TINY_QUESTION = OwlQuestion((1, 5, 6), (7, 8), (10, 11, 12, 13, 14))
BACKGROUND = tuple(int(255 * x) / 255 for x in CLIP_MEAN)  # of images that are no squares
Subject = Literal["quality", "aesthetics"]


@dataclass(frozen=True)
class DeqaReward(PretrainedReward):
    """DeQA-Score: the expected technical quality of an image, from 1 (bad) to 5 (excellent). The prompt is not read."""

    weights: str = DEQA.hub  # or a folder that holds the published files
    round_to_bytes: bool = False  # of pixels, as in the published code; the gradient passes straight through
    batch_size: BatchSize = 8
    card: ClassVar[RewardCard] = RewardCard(
        range="1 to 5",
        failure_modes="oversharpening (not measured here); it does not read the prompt",
        memory="16.4 GB in 16 bits; speed not measured",
        sources=(DEQA,),
    )
    differentiable: ClassVar[bool] = True

    def load(self, placement: Placement) -> LevelScorer:
        return load_level_scorer(self.weights, DEQA, "quality", DEQA_VALUES, self.round_to_bytes, placement)


@dataclass(frozen=True)
class QalignReward(PretrainedReward):
    """Q-Align (OneAlign): the expected quality or aesthetics of an image, from 0 to 1. The prompt is not read."""

    weights: str = QALIGN.hub  # or a folder that holds the published files
    subject: Subject = "quality"  # what is rated; aesthetics is taste rather than technical quality
    round_to_bytes: bool = False  # of pixels, as in the published code; the gradient passes straight through
    batch_size: BatchSize = 8
    card: ClassVar[RewardCard] = RewardCard(
        range="0 to 1",
        failure_modes="oversharpening (not measured here); it does not read the prompt",
        memory="16.4 GB in 16 bits; speed not measured",
        sources=(QALIGN,),
    )
    differentiable: ClassVar[bool] = True

    def load(self, placement: Placement) -> LevelScorer:
        return load_level_scorer(self.weights, QALIGN, self.subject, QALIGN_VALUES, self.round_to_bytes, placement)


def load_level_scorer(
    weights: str,
    source: WeightsSource,
    subject: Subject,
    values: tuple[float, ...],
    round_pixels: bool,
    placement: Placement,
) -> LevelScorer:
    """The scorer of a published folder, or a tiny random one."""
    if weights == TINY:
        return LevelScorer(tiny_mplug_owl2(placement), TINY_QUESTION, values, round_pixels)
    net, tokenizer = load_mplug_owl2(weights, source, placement)
    question = tokenize_question(tokenizer, QUESTION.replace("{subject}", subject), LEVELS)
    return LevelScorer(net, question, values, round_pixels)


@dataclass(frozen=True)
class LevelScorer(Reward):
    """The mean of the levels' values, weighted by their probabilities among each other."""

    net: MplugOwl2
    question: OwlQuestion
    values: tuple[float, ...]  # of the answers of the question, in their order
    round_pixels: bool = False

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        probabilities = self.probabilities(pixels[:, 0])
        return probabilities @ probabilities.new_tensor(self.values)

    def probabilities(self, images: Tensor) -> Tensor:
        """Probabilities [B, levels] of images [B, 3, H, W] in [0, 1]."""
        question, parameter = self.question, self.net.lm_head.weight
        prepared = self.preprocess(images).to(parameter.device, parameter.dtype)
        logits: Tensor = self.net(prepared, question.before, question.after, question.answers)
        return logits.softmax(-1).to(images.device)

    def preprocess(self, images: Tensor) -> Tensor:
        """Images padded to a square in the mean color, resized and normalized: [B, 3, S, S]."""
        images = pad_to_square(round_to_bytes(images) if self.round_pixels else images)
        size = self.net.sizes.image_size
        if self.round_pixels and images.shape[-1] != size:
            images = F.interpolate(images, (size, size), mode="bicubic", antialias=True).clamp(0, 1)
            images = round_to_bytes(images)
        return Preprocessing(size, "stretch")(images)


def pad_to_square(images: Tensor) -> Tensor:
    """Images [B, 3, H, W] in the middle of squares of CLIP's mean color, which is rounded down to bytes."""
    height, width = images.shape[-2:]
    if height == width:
        return images
    side = max(height, width)
    background = images.new_tensor(BACKGROUND)[:, None, None]
    top, left = (side - height) // 2, (side - width) // 2
    margins = (left, side - width - left, top, side - height - top)
    return F.pad(images - background, margins) + background
