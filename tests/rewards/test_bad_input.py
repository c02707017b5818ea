"""Rewards on unusual input: a finite score, or an error that names the reward and the input."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tastemaker.config.registries import REWARDS
from tastemaker.config.validate import build_component
from tastemaker.core.registry import ConfigError
from tastemaker.core.reward import Reward, RewardError, RewardSpec, Rubric, WeightedReward
from tastemaker.core.types import Metadata, Placement
from tastemaker.data.image_io import ImageError, read_image, save_image
from tastemaker.rewards.color import BrightnessReward
from tastemaker.rewards.function import register_function
from tastemaker.rewards.group import WinRateReward

INNER_REWARD = {"type": "brightness"}


def mean_brightness(images: Tensor, prompts: list[str], **metadata: Any) -> Tensor:
    return images.mean((1, 2, 3))


REQUIRED_SETTINGS: dict[str, dict[str, Any]] = {
    "clipped": {"reward": INNER_REWARD, "min": 0},
    "function": {"function": register_function(mean_brightness)},
    "relative": {"reward": INNER_REWARD, "positive_words": "good", "negative_words": "bad"},
    "sum": {"rewards": [INNER_REWARD]},
}


def random(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


@cache
def tiny(name: str) -> Rubric:
    """A rubric of one reward at tiny size, with only its required settings."""
    try:
        spec = build_component(RewardSpec, {"type": name, **REQUIRED_SETTINGS.get(name, {})}).tiny()
    except ConfigError:
        spec = build_component(RewardSpec, {"type": name, "reward": INNER_REWARD}).tiny()
    if spec.compares_pairs:
        spec = WinRateReward(spec)
    return Rubric({name: WeightedReward(spec, spec.load(Placement()), 0.0)})


def all_metadata(frames: int, height: int, width: int) -> Metadata:
    """Every metadata key that some reward requires."""
    image = random(frames, 3, height, width)
    edit = {"target": image, "image": image}
    return {**edit, "text": "exit", "include": [{"class": "dog", "count": 1}], "tag": "single_object"}


PROMPTS = {
    "empty": "",
    "blank": "  \n\t",
    "long": "a red dog " * 250,  # more words than any text encoder reads
    "one long word": "w" * 2_500,
    "odd": "\x00\ud7ff\U0001f600 ein Käfer 一只猫 {prompt} <image> </s>",
}


SIZES = {"one pixel": (1, 1), "a row": (1, 12), "a column": (12, 1), "odd": (65, 63), "wide": (32, 96)}
PROMPT = 'a red dog that reads "exit"'


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_any_prompt_and_any_size_get_a_finite_score_or_a_reward_error(name: str) -> None:
    cases = {f"prompt: {case}": (random(2, 4, 3, 64, 64), prompt) for case, prompt in PROMPTS.items()}
    cases |= {f"size: {case}": (random(2, 4, 3, *size), PROMPT) for case, size in SIZES.items()}
    problems = {case: find_problem(name, *case_input) for case, case_input in cases.items()}
    assert not {case: text for case, text in problems.items() if text}


def find_problem(name: str, pixels: Tensor, prompt: str) -> str:
    """A description of what is wrong with a reward's scores; empty if nothing is."""
    metadata = [all_metadata(*pixels.shape[1:2], *pixels.shape[3:])] * len(pixels)
    before, version = pixels.clone(), pixels._version
    try:
        scores = tiny(name).score(pixels, [prompt] * len(pixels), metadata, len(pixels)).rewards[name]
    except RewardError as error:
        # An exception from inside a library explains nothing to users; ours name what was expected.
        ours = any(kind in str(error) for kind in ("ValueError", "ConfigError", "ImageError"))
        return "" if ours and f"reward '{name}' failed on" in str(error) else str(error)[:2000]
    if pixels._version != version or not pixels.equal(before):
        return "it wrote into its pixels, which all rewards of this package share"
    right = scores.shape == (len(pixels),) and all(math.isfinite(score) for score in scores.tolist())
    return "" if right else f"scores {scores}"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinite_pixels_are_refused_with_their_samples_before_any_reward_runs(bad: float) -> None:
    batch_sizes: list[int] = []

    class RecordingReward(Reward):
        def score(self, pixels: Tensor, prompts: Any, metadata: Any) -> Tensor:
            batch_sizes.append(len(pixels))
            return pixels.mean((1, 2, 3, 4))

    pixels = random(5, 2, 3, 4, 4)
    pixels[1, 0, 0, 0, 0] = pixels[4, 1, 2, 3, 3] = bad
    rubric = Rubric({"it": WeightedReward(BrightnessReward(), RecordingReward())})
    with pytest.raises(RewardError, match=r"1, 4 .*NaN.*\['b', 'e'\].*TM114"):
        rubric.score(pixels, list("abcde"))
    assert not batch_sizes
    rubric.score(pixels[[0, 2, 3]], list("acd"))
    assert batch_sizes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_pixels_of_any_precision_are_scored(dtype: torch.dtype) -> None:
    rubric = Rubric({"it": WeightedReward(BrightnessReward(), BrightnessReward())})
    assert rubric.score(torch.ones(2, 1, 3, 512, 512, dtype=dtype), ["a", "b"]).total.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (2, 1, 4, 8, 8), (2, 1, 1, 8, 8), (2, 0, 3, 8, 8), (2, 1, 3, 0, 8)])
def test_pixels_of_wrong_shape_are_refused(shape: tuple[int, ...]) -> None:
    rubric = Rubric({"it": WeightedReward(BrightnessReward(), BrightnessReward())})
    with pytest.raises(ValueError, match=r"\[B, F, 3, H, W\].*TM113"):
        rubric.score(torch.zeros(shape), ["a", "b"])


def test_images_of_every_mode_give_the_same_gray(tmp_path: Path) -> None:
    gray = np.full((3, 5), 51, np.uint8)
    Image.fromarray(gray).save(tmp_path / "gray.png")
    Image.fromarray(gray).convert("LA").save(tmp_path / "gray and alpha.png")
    Image.fromarray(np.full((3, 5), 13107, np.uint16)).save(tmp_path / "sixteen bits.png")
    Image.fromarray(np.full((3, 5), 51, np.uint8)).convert("RGBA").save(tmp_path / "rgba.png")
    Image.fromarray(gray).convert("RGB").convert("P").save(tmp_path / "palette.png")
    Image.fromarray(gray).convert("RGB").convert("P").save(tmp_path / "palette.gif")
    Image.new("CMYK", (5, 3), (0, 0, 0, 204)).save(tmp_path / "ink.jpg")
    Image.fromarray(gray).save(tmp_path / "gray.jpg")
    files = sorted(tmp_path.iterdir())
    assert len(files) == 8
    rubric = Rubric({"it": WeightedReward(BrightnessReward(), BrightnessReward())})
    for file in files:
        pixels = read_image(file)
        assert pixels.shape == (1, 3, 3, 5) and pixels.dtype == torch.float32, file
        assert rubric.score(pixels[None], [""]).total.item() == pytest.approx(0.2, abs=0.01), file


def test_one_bit_image_of_one_pixel_is_read(tmp_path: Path) -> None:
    Image.new("1", (1, 1), 1).save(tmp_path / "a.png")
    assert read_image(tmp_path / "a.png").flatten().tolist() == [1.0, 1.0, 1.0]


def test_palette_transparency_is_composited_over_white(tmp_path: Path) -> None:
    image = Image.new("P", (2, 2), 0)
    image.putpalette([0, 0, 0, 255, 0, 0])
    image.save(tmp_path / "a.png", transparency=0)
    assert read_image(tmp_path / "a.png").unique().tolist() == [1.0]


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "gif", "mp4"])
@pytest.mark.parametrize("fraction", [0.3, 0.6, 0.9])
def test_truncated_file_is_refused_or_gives_complete_frames(tmp_path: Path, suffix: str, fraction: float) -> None:
    path = tmp_path / f"a.{suffix}"
    save_image(random(1, 3, 64, 64), path)
    path.write_bytes(path.read_bytes()[: int(fraction * path.stat().st_size)])
    try:
        pixels = read_image(path)
    except ImageError as error:
        assert str(error).count("\n") == 0 and f"read as {'a video' if suffix == 'mp4' else 'an image'}" in str(error)
    else:
        # Only a GIF may decode without an error, because its first frames can be complete.
        assert suffix == "gif" and pixels.shape == (1, 3, 64, 64)
