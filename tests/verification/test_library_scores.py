"""Rewards beside transformers: equal scores match, and other preprocessing is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from tiny_clip import build_clip, random_clip, save_checkpoint
from torch import Tensor
from transformers import (
    BitImageProcessorPil,
    Dinov2Config,
    Dinov2Model,
    SiglipConfig,
    SiglipImageProcessorPil,
    SiglipModel,
)

from tastemaker.config.catalog import default_spec
from tastemaker.core.types import Placement
from tastemaker.rewards.aesthetic_v25 import AestheticV25Reward
from tastemaker.rewards.backbones import preprocessing
from tastemaker.rewards.backbones.dual_encoder import TINY_SIZES
from tastemaker.rewards.backbones.frozen_models import TINY, silence_transformers
from tastemaker.rewards.backbones.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from tastemaker.rewards.clip import ClipReward
from tastemaker.rewards.image_similarity import ClipImageSimilarityReward, DinoSimilarityReward
from tastemaker.verification.library_scores import LIBRARY, compare_with_library
from tastemaker.verification.report import Check, Settings
from tastemaker.verification.rewards import COMPARED, compared_checks
from tastemaker.verification.runner import Task, verify_task


def compare(kind: str, spec: Any, precision: str = "tiny") -> Check:
    return compare_with_library(kind, spec, spec.load(Placement()), Placement(), precision)


FAST = ("clip", "dino_similarity")
KINDS = [pytest.param(kind, marks=() if kind in FAST else pytest.mark.slow) for kind in LIBRARY]


@pytest.mark.parametrize("kind", KINDS)
def test_tiny_rewards_match_and_another_filter_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = default_spec(kind)
    assert spec is not None
    tiny = spec.tiny()
    check = compare(kind, tiny)
    assert check.verdict == "pass", check.reason

    exact = F.interpolate

    def without_antialiasing(pixels: Tensor, *size: Any, antialias: bool = False, **settings: Any) -> Tensor:
        return exact(pixels, *size, **settings)

    monkeypatch.setattr(preprocessing.F, "interpolate", without_antialiasing)
    assert compare(kind, tiny).verdict == "fail"


def test_status_is_matched() -> None:
    entry = verify_task(Task("reward", "dino_similarity"), Settings(tiny=True, device="cpu"))
    assert (entry.status, entry.checks[-1].name) == ("matched", COMPARED[1])
    assert compared_checks([Check(name, "skip") for name in COMPARED]) == [COMPARED[0]]
    assert compared_checks([Check(COMPARED[0], "pass"), Check(COMPARED[1], "fail")]) == list(COMPARED)


def save(net: Any, processor: Any, folder: Path) -> None:
    with silence_transformers():
        net.save_pretrained(folder)
        processor.save_pretrained(folder)


@pytest.mark.slow
def test_folders_are_read_by_transformers_itself(tmp_path: Path) -> None:
    folder = save_checkpoint(build_clip(), tmp_path / "clip")
    for kind, spec in (("clip", ClipReward(folder)), ("clip_i", ClipImageSimilarityReward(weights=folder))):
        check = compare(kind, spec, "fp32")
        assert check.verdict == "pass", check.reason
    sizes = {**TINY_SIZES, "image_size": 28, "patch_size": 14}
    text = {**TINY_SIZES, "vocab_size": 8, "projection_size": 32}
    siglip = random_clip(SiglipModel, SiglipConfig(text_config=text, vision_config=sizes))
    save(siglip, SiglipImageProcessorPil(size={"height": 28, "width": 28}), tmp_path / "siglip")
    check = compare("aesthetic_v25", AestheticV25Reward(TINY, str(tmp_path / "siglip")), "fp32")
    assert check.verdict == "pass", check.reason
    dino = random_clip(Dinov2Model, Dinov2Config(**sizes))
    processor = BitImageProcessorPil(
        size={"shortest_edge": 256}, crop_size=224, image_mean=IMAGENET_MEAN, image_std=IMAGENET_STD
    )
    save(dino, processor, tmp_path / "dino")
    check = compare("dino_similarity", DinoSimilarityReward(weights=str(tmp_path / "dino")), "fp32")
    assert check.verdict == "pass", check.reason
    assert compare("clip", ClipReward(folder, output="logit")).verdict == "pass"
    stretched = compare("clip", ClipReward(folder, resize_mode="stretch"))
    assert stretched.verdict == "skip" and "resize_mode" in stretched.reason
    assert compare("brightness", default_spec("brightness")).verdict == "skip"
