"""The classifier rewards the class that a prompt names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.rewards.backbones.frozen_models import TINY
from tastemaker.rewards.classifier import NAMES, ClassifierReward


def test_probabilities_of_all_classes_add_up_to_one() -> None:
    scorer = ClassifierReward(weights=TINY).load(Placement())
    pixels = torch.rand(1, 1, 3, 32, 32).expand(10, 1, 3, 32, 32)
    scores = scorer.score(pixels, NAMES, [{}] * 10)
    torch.testing.assert_close(scores.sum(), torch.tensor(1.0))
    logs = ClassifierReward(weights=TINY, output="log_probability").load(Placement()).score(pixels, NAMES, [{}] * 10)
    torch.testing.assert_close(logs.exp(), scores)
    correct = ClassifierReward(weights=TINY, output="correct").load(Placement()).score(pixels, NAMES, [{}] * 10)
    assert correct.sum() == 1 and correct.argmax() == scores.argmax()


def test_prompt_may_be_class_name_class_number_or_sentence() -> None:
    scorer = ClassifierReward(weights=TINY).load(Placement())
    pixels = torch.rand(1, 1, 3, 40, 40).expand(3, 1, 3, 40, 40)  # of another size
    assert scorer.score(pixels, ("ship", "8", "a photo of a ship"), [{}] * 3).unique().numel() == 1
    with pytest.raises(ConfigError):
        scorer.score(pixels[:1], ("a castle",), [{}])


def test_gradients_reach_the_pixels() -> None:
    pixels = torch.rand(2, 1, 3, 32, 32, requires_grad=True)
    ClassifierReward(weights=TINY).load(Placement()).score(pixels, ("cat", "dog"), [{}] * 2).sum().backward()
    assert pixels.grad is not None and pixels.grad.abs().sum() > 0


def test_missing_weights_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tools/cifar_classifier.*TM376"):
        ClassifierReward(weights=str(tmp_path / "none.safetensors")).load(Placement())
