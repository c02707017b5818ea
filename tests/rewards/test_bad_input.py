"""What rewards make of bad input: a right answer, or one sentence."""

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

INSIDE = {"type": "brightness"}


def mean_brightness(images: Tensor, prompts: list[str], **metadata: Any) -> Tensor:
    return images.mean((1, 2, 3))


NEEDED: dict[str, dict[str, Any]] = {
    "clipped": {"reward": INSIDE, "min": 0},
    "function": {"function": register_function(mean_brightness)},
    "relative": {"reward": INSIDE, "positive_words": "good", "negative_words": "bad"},
    "sum": {"rewards": [INSIDE]},
}


def random(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


@cache
def tiny(name: str) -> Rubric:
    """A reward at small size, with as few settings as it needs."""
    try:
        spec = build_component(RewardSpec, {"type": name, **NEEDED.get(name, {})}).tiny()
    except ConfigError:
        spec = build_component(RewardSpec, {"type": name, "reward": INSIDE}).tiny()
    return Rubric({name: WeightedReward(spec, spec.load(Placement()), 0.0)})


def metadata(frames: int, height: int, width: int) -> Metadata:
    """What some rewards must be told."""
    picture = random(frames, 3, height, width)
    return {"target": picture, "text": "exit", "include": [{"class": "dog", "count": 1}], "tag": "single_object"}


PROMPTS = {
    "empty": "",
    "blank": "  \n\t",
    "long": "a red dog " * 250,  # more words than any text encoder reads
    "one long word": "w" * 2_500,
    "odd": "\x00\ud7ff\U0001f600 ein Käfer 一只猫 {prompt} <image> </s>",
}


SIZES = {"one pixel": (1, 1), "a row": (1, 12), "a column": (12, 1), "odd": (65, 63), "wide": (32, 96)}
MEAN_LOG_SIZE = 'a red dog that reads "exit"'


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_any_prompt_and_any_size_get_a_finite_score_or_a_reward_error(name: str) -> None:
    cases = {f"prompt: {case}": (random(2, 4, 3, 64, 64), prompt) for case, prompt in PROMPTS.items()}
    cases |= {f"size: {case}": (random(2, 4, 3, *size), MEAN_LOG_SIZE) for case, size in SIZES.items()}
    problems = {case: problem(name, *given) for case, given in cases.items()}
    assert not {case: found for case, found in problems.items() if found}


def problem(name: str, pixels: Tensor, prompt: str) -> str:
    """What is wrong with a reward's answer, or nothing."""
    known = [metadata(*pixels.shape[1:2], *pixels.shape[3:])] * len(pixels)
    try:
        scores = tiny(name).score(pixels, [prompt] * len(pixels), known).rewards[name]
    except RewardError as error:
        # What a library raises from within explains nothing to users; what we raise names what was expected.
        ours = any(kind in str(error) for kind in ("ValueError", "ConfigError", "PictureError"))
        return "" if ours and f"reward '{name}' failed on" in str(error) else str(error)[:2000]
    right = scores.shape == (len(pixels),) and all(math.isfinite(score) for score in scores.tolist())
    return "" if right else f"scores {scores}"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_pixels_that_are_no_numbers_name_their_rows_before_a_reward_sees_them(bad: float) -> None:
    seen: list[int] = []

    class Watchful(Reward):
        def score(self, pixels: Tensor, prompts: Any, metadata: Any) -> Tensor:
            seen.append(len(pixels))
            return pixels.mean((1, 2, 3, 4))

    pixels = random(5, 2, 3, 4, 4)
    pixels[1, 0, 0, 0, 0] = pixels[4, 1, 2, 3, 3] = bad
    rubric = Rubric({"it": WeightedReward(BrightnessReward(), Watchful())})
    with pytest.raises(RewardError, match=r"sample 1, 4 hold NaN or infinity \(prompts \['b', 'e'\]\)"):
        rubric.score(pixels, list("abcde"))
    assert not seen
    rubric.score(pixels[[0, 2, 3]], list("acd"))
    assert seen


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_pixels_of_any_precision_are_scored(dtype: torch.dtype) -> None:
    rubric = Rubric({"it": WeightedReward(BrightnessReward(), BrightnessReward())})
    assert rubric.score(torch.ones(2, 1, 3, 512, 512, dtype=dtype), ["a", "b"]).total.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (2, 1, 4, 8, 8), (2, 1, 1, 8, 8), (2, 0, 3, 8, 8), (2, 1, 3, 0, 8)])
def test_pixels_of_another_shape_are_a_sentence(shape: tuple[int, ...]) -> None:
    rubric = Rubric({"it": WeightedReward(BrightnessReward(), BrightnessReward())})
    with pytest.raises(ValueError, match=r"a rubric was given pixels \[.*; expected \[B, F, 3, H, W\]"):
        rubric.score(torch.zeros(shape), ["a", "b"])


def test_pictures_of_every_mode_say_the_same_grey(tmp_path: Path) -> None:
    grey = np.full((3, 5), 51, np.uint8)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    Image.fromarray(grey).convert("LA").save(tmp_path / "grey and alpha.png")
    Image.fromarray(np.full((3, 5), 13107, np.uint16)).save(tmp_path / "sixteen bits.png")
    Image.fromarray(np.full((3, 5), 51, np.uint8)).convert("RGBA").save(tmp_path / "rgba.png")
    Image.fromarray(grey).convert("RGB").convert("P").save(tmp_path / "palette.png")
    Image.fromarray(grey).convert("RGB").convert("P").save(tmp_path / "palette.gif")
    Image.new("CMYK", (5, 3), (0, 0, 0, 204)).save(tmp_path / "ink.jpg")
    Image.fromarray(grey).save(tmp_path / "grey.jpg")
    files = sorted(tmp_path.iterdir())
    assert len(files) == 8
    rubric = Rubric({"it": WeightedReward(BrightnessReward(), BrightnessReward())})
    for file in files:
        pixels = read_image(file)
        assert pixels.shape == (1, 3, 3, 5) and pixels.dtype == torch.float32, file
        assert rubric.score(pixels[None], [""]).total.item() == pytest.approx(0.2, abs=0.01), file


def test_one_bit_and_one_pixel_are_read(tmp_path: Path) -> None:
    Image.new("1", (1, 1), 1).save(tmp_path / "a.png")
    assert read_image(tmp_path / "a.png").flatten().tolist() == [1.0, 1.0, 1.0]


def test_transparency_of_a_palette_is_over_white(tmp_path: Path) -> None:
    image = Image.new("P", (2, 2), 0)
    image.putpalette([0, 0, 0, 255, 0, 0])
    image.save(tmp_path / "a.png", transparency=0)
    assert read_image(tmp_path / "a.png").unique().tolist() == [1.0]


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "gif", "mp4"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_file_that_ends_early_is_a_sentence_or_what_there_is(tmp_path: Path, suffix: str, share: float) -> None:
    path = tmp_path / f"a.{suffix}"
    save_image(random(1, 3, 64, 64), path)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    try:
        pixels = read_image(path)
    except ImageError as error:
        assert str(error).count("\n") == 0 and f"read as {'a video' if suffix == 'mp4' else 'an image'}" in str(error)
    else:
        # Only GIF, whose frames end where they end, may come back without a complaint.
        assert suffix == "gif" and pixels.shape == (1, 3, 64, 64)
