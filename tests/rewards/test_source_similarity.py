"""Similarity to the source of an edit, outside of its mask."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tastemaker.core.types import Metadata, Placement
from tastemaker.data.image_io import save_image
from tastemaker.rewards.source_similarity import SourceSimilarityReward


def test_only_changes_outside_of_the_mask_count(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    source = (torch.rand(1, 3, 32, 48, generator=generator) * 255).round() / 255
    mask = torch.zeros(1, 3, 32, 48)
    mask[..., :24] = 1  # the left half may change
    save_image(source, tmp_path / "source.png")
    save_image(mask, tmp_path / "mask.png")
    masked: Metadata = {"image": [str(tmp_path / "source.png"), source.flip(-1)], "mask": str(tmp_path / "mask.png")}
    inside, outside = source.clone(), source.clone()
    inside[..., :24] = 1 - inside[..., :24]
    outside[..., 24:] = (outside[..., 24:] + 0.2).clamp(max=1)
    pixels = torch.stack([source, inside, outside, inside, outside])
    metadata = [masked, masked, masked, {"image": source}, {"image": source}]
    for metric in ("l1", "lpips", "dino"):
        reward = SourceSimilarityReward(metric=metric).tiny().load(Placement())  # type: ignore[arg-type]
        with torch.no_grad():
            same, allowed, changed, whole, half = reward.score(pixels, ["make it"] * 5, metadata).tolist()
        assert same == pytest.approx(1, abs=1e-5) and allowed == pytest.approx(1, abs=1e-5), metric
        assert changed < 0.9999 and whole < 0.9999, metric
        if metric != "dino":  # a change of half of the image counts twice if only that half is compared
            assert 1 - changed == pytest.approx(2 * (1 - half), rel=1e-4), metric
        leaf = pixels[1:3].clone().requires_grad_()
        reward.score(leaf, ["x", "x"], [masked, masked]).sum().backward()
        assert leaf.grad is not None and leaf.grad.isfinite().all()
        assert leaf.grad[..., :24].abs().max() == 0 and leaf.grad[1, ..., 24:].abs().max() > 0, metric


def test_a_prompt_without_a_source_is_an_error() -> None:
    with pytest.raises(ValueError, match="TM2120"):
        SourceSimilarityReward().load(Placement()).score(torch.rand(1, 1, 3, 8, 8), ["make it"], [{}])
