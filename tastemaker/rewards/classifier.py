"""Whether a picture shows the class that its prompt names, by a classifier of small photographs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from ..core.reward import BatchSize, RewardCard
from ..core.types import Metadata, Placement, Prompts
from ..data.class_labels import ClassLabels
from .backbones.cifar10_classifier import Cifar10Classifier, load_cifar10_classifier
from .backbones.loading import TINY

NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@dataclass(frozen=True)
class Classifier:
    """How sure PyPI's cifar-10-model is of the class its prompt names; tools/cifar_classifier.py makes its file."""

    weights: str = "cifar10.safetensors"
    says: Literal["probability", "log_probability", "correct"] = "probability"
    batch_size: BatchSize = 1024
    about: ClassVar[RewardCard] = RewardCard(
        range="0 to 1",
        hacked_by="whatever texture the classifier takes for the class: it is wrong of one real photograph in five",
        memory="4 MB",
    )
    differentiable: ClassVar[bool] = True
    reads: ClassVar[Literal["frames"]] = "frames"
    runs_on: ClassVar[Literal["device"]] = "device"

    def load(self, placement: Placement) -> ClassifierScorer:
        return ClassifierScorer(load_cifar10_classifier(self.weights, placement), self.says)

    def tiny(self) -> Self:
        return replace(self, weights=TINY)


@dataclass(frozen=True)
class ClassifierScorer:
    net: Cifar10Classifier
    says: str
    classes: ClassLabels = ClassLabels(len(NAMES), tuple((name,) for name in NAMES))

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        wanted = torch.tensor([self.classes.number(prompt) for prompt in prompts], device=pixels.device)
        with torch.autocast(pixels.device.type, enabled=False):
            logits: Tensor = self.net(pixels[:, 0].float())
        if self.says == "correct":
            return (logits.argmax(1) == wanted).to(pixels.dtype)
        sure = logits.log_softmax(1).gather(1, wanted[:, None])[:, 0]
        return (sure if self.says == "log_probability" else sure.exp()).to(pixels.dtype)
