"""Differentiable image preprocessing matches transformers, PIL and torchvision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tastemaker.rewards.backbones.preprocessing import CLIP_MEAN, CLIP_STD, IMAGENET_MEAN, IMAGENET_STD, Preprocessing

SIZES = [(64, 64), (224, 224), (300, 200), (201, 333), (512, 512), (37, 500), (1, 1)]


def blocky_image(height: int, width: int) -> Image.Image:
    """An image with flat areas and hard edges."""
    rng = np.random.default_rng(height * 1000 + width)
    coarse = rng.integers(0, 256, (min(8, height), min(8, width), 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.NEAREST)


def to_tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 255


@pytest.mark.parametrize("size", SIZES)
def test_crop_matches_the_clip_processor(size: tuple[int, int]) -> None:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    image = blocky_image(*size)
    theirs = CLIPImageProcessorPil()(image, return_tensors="pt")["pixel_values"]
    ours = Preprocessing(224)(to_tensor(image))
    difference = (ours - theirs) * torch.tensor(CLIP_STD)[:, None, None]
    assert ours.shape == theirs.shape and difference.abs().mean() < 1e-3


@pytest.mark.parametrize("size", SIZES)
def test_stretch_matches_a_plain_resize(size: tuple[int, int]) -> None:
    image = blocky_image(*size)
    theirs = to_tensor(image.resize((96, 96), Image.Resampling.BILINEAR))
    ours = Preprocessing(96, "stretch", "bilinear", (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))(to_tensor(image))
    assert (ours - theirs).abs().mean() < 2e-3  # rounding costs half a gray level


def test_padding_is_black_before_normalization() -> None:
    wide = torch.ones(1, 3, 50, 100)
    out = Preprocessing(224, "pad")(wide)
    black, white = ((torch.tensor([x] * 3) - torch.tensor(CLIP_MEAN)) / torch.tensor(CLIP_STD) for x in (0.0, 1.0))
    assert torch.allclose(out[0, :, 0, 0], black) and torch.allclose(out[0, :, 112, 112], white, atol=1e-5)
    assert torch.allclose(out[0, :, 56:168], white[:, None, None].expand(3, 112, 224), atol=1e-5)


@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
def test_gradients_match_finite_differences(fit: str) -> None:
    pixels = (0.1 + 0.8 * torch.rand(1, 3, 6, 9, dtype=torch.float64)).requires_grad_()
    preprocessing = Preprocessing(4, fit, "bilinear", IMAGENET_MEAN, IMAGENET_STD)  # type: ignore[arg-type]
    assert torch.autograd.gradcheck(preprocessing, (pixels,))


def imagereward_preprocessing(image: Image.Image) -> Tensor:
    """ImageReward's preprocessing: torchvision's resize and crop, written with PIL."""
    width, height = image.size
    shorter = min(width, height)
    width, height = int(224 * width / shorter), int(224 * height / shorter)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = round((width - 224) / 2), round((height - 224) / 2)
    return to_tensor(image.crop((left, top, left + 224, top + 224)))


@pytest.mark.parametrize("size", [*SIZES, (224, 227), (231, 224), (448, 455)])
def test_rounded_crops_match_torchvision(size: tuple[int, int]) -> None:
    image = blocky_image(*size)
    ours = Preprocessing(224, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), crop_rounding="round")(to_tensor(image))
    assert (ours - imagereward_preprocessing(image)).abs().mean() < 1e-3


def test_overshoot_is_kept_or_clipped() -> None:
    pixels = torch.zeros(1, 3, 8, 8)
    pixels[..., 4:] = 1
    plain = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    unclipped, clipped = (Preprocessing(32, overshoot=overshoot, **plain)(pixels) for overshoot in ("keep", "clip"))  # type: ignore[arg-type]
    assert unclipped.max() > 1.01 and unclipped.min() < -0.01
    assert torch.equal(clipped, unclipped.clamp(0, 1))


@pytest.mark.parametrize(
    ("size", "expected"), [((334, 500), (150, 224)), ((500, 333), (224, 149)), ((1, 900), (1, 224))]
)
def test_padding_rounds_the_shorter_side(size: tuple[int, int], expected: tuple[int, int]) -> None:
    black = tuple((0 - mean) / std for mean, std in zip(CLIP_MEAN, CLIP_STD, strict=True))
    out = Preprocessing(224, "pad")(torch.ones(1, 3, *size))
    visible = (out[0, 0] - black[0]).abs() > 1e-3
    assert (int(visible.any(1).sum()), int(visible.any(0).sum())) == expected
