"""Clips as they are asked of Open-Sora 1.2: sizes, levels, prompts, and frames that are held."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tastemaker.config.build import make_tiny
from tastemaker.config.check import collect_warnings
from tastemaker.config.load import load
from tastemaker.core.guidance import GuidedBackbone
from tastemaker.core.policy import Guidance, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.core.weights import FullFinetuning
from tastemaker.models.opensora.model import OpenSoraSpec
from tastemaker.models.opensora.reference_frames import MaskStrategyRule, nearest_chunk_start, parse_mask_strategy
from tastemaker.models.opensora.resolutions import (
    ASPECT_RATIOS,
    RESOLUTIONS,
    add_score_tags,
    clean_opensora_prompt,
    resolve_num_frames,
    resolve_size,
    timestep_shift,
)
from tastemaker.processes.dynamics import ODE
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import RectifiedFlow

SPEC = OpenSoraSpec().tiny()


def test_published_size_and_length() -> None:
    spec = OpenSoraSpec()
    assert spec.size == (276, 368)
    assert spec.shape == (15, 4, 34, 46)
    assert spec.pixels == (51, 3, 272, 368)
    assert {len(sizes.split()) for sizes in RESOLUTIONS.values()} == {len(ASPECT_RATIOS)}
    for resolution in RESOLUTIONS:
        for shape in ASPECT_RATIOS[:-1]:  # the last is published as 50:27, and is 25:12
            (high, wide), (height, width) = map(int, shape.split(":")), resolve_size(resolution, shape)
            assert height / width == pytest.approx(high / wide, rel=0.02)
    assert (resolve_size("720p", "9:16"), resolve_num_frames("16s"), resolve_num_frames(17)) == ((720, 1280), 408, 17)
    assert OpenSoraSpec(duration=1).shape[0] == 1


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"resolution": "241p"}, "'resolution' is 241p"),
        ({"resolution": "8x8"}, "'resolution' is 8x8"),
        ({"aspect_ratio": "5:7"}, "'aspect_ratio' is 5:7"),
        ({"duration": "3s"}, "'duration' is 3s"),
        ({"duration": 0}, "'duration' is 0"),
    ],
)
def test_invalid_sizes_are_refused(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        OpenSoraSpec(**wrong)


def test_timestep_shift_equals_published_transform() -> None:
    height, width, frames, steps = 276, 368, 51, 30
    ratio = math.sqrt(height * width / 512**2) * math.sqrt(frames // 17 * 5)
    assert timestep_shift(height, width, frames) == pytest.approx(ratio)
    assert timestep_shift(512, 512, 1) == timestep_shift(512, 512, 16) == 1
    t = torch.tensor([1 - i / steps for i in range(steps)])
    published = ratio * t / (1 + (ratio - 1) * t)
    torch.testing.assert_close(RectifiedFlow(timestep_shift(height, width, frames)).timesteps(steps)[:-1], published)


def test_mismatched_timestep_shift_is_reported() -> None:
    assert collect_warnings(load("vader-opensora-hps")) == []
    larger = load("vader-opensora-hps", ["model.resolution=360p", "model.aspect_ratio=9:16"])
    (warning,) = collect_warnings(larger)
    assert warning.startswith("process.path.shift: 2.4108") and "process.path.shift=3.6309" in warning
    assert collect_warnings(load("vader-opensora-hps", ["model.duration=1"])) and not collect_warnings(
        make_tiny(larger)
    )


def test_sampling_equals_published_rectified_flow() -> None:
    model, process = SPEC.load(Placement()), GaussianProcess(RectifiedFlow(2.4), ODE(), 4)
    policy = Policy(GuidedBackbone(model, Guidance(7.0)), process, FullFinetuning().apply(model, ()))
    cond = policy.embed(["a cat on a mat", "a dog"])
    made = policy.sample(cond, Randomness(0, 0, torch.arange(2)))
    net: Any = model.net
    words, seen = cond.tensors["words"], cond.tensors["seen"]
    null = net.y_embedder.y_embedding.expand(2, -1, -1)
    z, levels = made.start.transpose(1, 2), 1000 * process.path.timesteps(4)
    with torch.no_grad():
        for i in range(4):
            given = torch.cat([z, z]), levels[i].repeat(4), torch.cat([words, null]), torch.cat([seen, seen])
            velocity, _ = net(*given, fps=torch.full((4,), 24.0), size=(16, 16)).chunk(2, 1)
            with_words, without = velocity.chunk(2)
            z = z + (without + 7 * (with_words - without)) * (levels[i] - levels[i + 1]) / 1000
    torch.testing.assert_close(made.final, z.transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_with_size_and_single_images() -> None:
    model = SPEC.load(Placement()).with_size(24, 36)
    assert (model.shape, model.pixels, model.size) == ((2, 4, 3, 4), (6, 3, 24, 32), (24, 36))
    x = torch.randn(1, *model.shape)
    with torch.no_grad():
        assert model.predict(x, torch.full((1,), 0.5), model.embed(["a cat"])).shape == x.shape
        assert model.decode(x, [5]).shape == (1, 1, 3, 24, 32)
    still = replace(SPEC, duration=1).load(Placement())
    pixels = still.decode(torch.randn(1, *still.shape))
    assert still.encode(pixels).shape == (1, 1, 4, 2, 2)
    with pytest.raises(ConfigError, match="the clips are 2 frames"):
        still.encode(torch.rand(1, 2, 3, 16, 16))


def test_score_tags_are_added_to_prompts() -> None:
    assert add_score_tags("A cat", 6.5, None, None) == "A cat aesthetic score: 6.5."
    assert (
        add_score_tags("A cat", 6.5, 4, "pan left")
        == "A cat aesthetic score: 6.5. motion score: 4.0. camera motion: pan left."
    )
    assert add_score_tags("A cat. aesthetic score: 5.0.", 6.5, None, None) == "A cat. aesthetic score: 5.0."
    assert clean_opensora_prompt(" A  <b>Big</b> cat\n#1 \u201cruns\u201d &amp; sleeps ") == 'a big cat "runs" sleeps'
    assert clean_opensora_prompt(add_score_tags("A cat", 6.5, None, None)) == "a cat aesthetic score: 6.5."
    told = [
        replace(SPEC, aesthetic_score=score).load(Placement()).embed(["a cat"]).tensors["seen"] for score in (None, 6.5)
    ]
    assert told[0].sum() < told[1].sum()


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ("A red,blue bird.A dog", "a red, blue bird. a dog"),
        ("a state-of-the-art hand-made cat", "a state of the art hand made cat"),
        ("a well-lit, hand-made cat", "a well-lit, hand-made cat"),
        ("IMG1234 of cat.com at 1024x768, page 12", "of at"),
        ("123456789 cats : free download \u2014 @them", "cats:"),
        ("U.S.A. flag ... 1.5 m, 100,000 people", "u. s. a. flag 1.5 m, 100,000 people"),
        ("'whole' \u732b a . b", "whole' a b"),
        ("", ""),
    ],
)
def test_prompt_cleaning(prompt: str, told: str) -> None:
    assert clean_opensora_prompt(prompt) == told


def test_reference_frames_stay_fixed(tmp_path: Path) -> None:
    model = replace(SPEC, duration=34).load(Placement())
    policy = Policy(model, GaussianProcess(RectifiedFlow(2.0), ODE(), 3), FullFinetuning().apply(model, ()))
    picture = torch.rand(1, 3, 20, 24, generator=torch.Generator().manual_seed(0))
    metadata: list[dict[str, Any]] = [{"image": picture, "mask_strategy": "0,0,0,0,1;0,0,0,-5,1,0.5"}, {}]
    cond = policy.embed(["a cat", "a dog"], metadata)
    assert cond.tensors["until"].tolist() == [[0] + [1] * 4 + [0.5] + [1] * 4, [1] * 10]
    made, free = (
        policy.sample(given, Randomness(0, 0, torch.arange(2))) for given in (cond, policy.embed(cond.prompts))
    )
    known = cond.tensors["held"][0, 0]
    torch.testing.assert_close(made.final[0, 0], known, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(made.final[0, 5], known, atol=1e-2)  # drawn anew below half of the noise
    assert not torch.allclose(made.final[0, 1], free.final[0, 1], atol=1e-4)
    torch.testing.assert_close(made.final[1], free.final[1], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="there is no image"):
        policy.embed(["a cat"], [{"image": str(tmp_path / "none.png")}])
    with pytest.raises(ValueError, match="'mask_strategy' uses reference 1"):
        policy.embed(["a cat"], [{"image": picture, "mask_strategy": "0,1"}])


def test_mask_strategy_parsing() -> None:
    first, second = parse_mask_strategy("0;0,1,-5,-5,5,0.4")
    assert first == MaskStrategyRule(0, 0, 0, 1, 0.0)
    assert second == MaskStrategyRule(1, -5, -5, 5, 0.4)
    assert [nearest_chunk_start(at, 15) for at in (0, 2, 3, 10, 13)] == [0, 0, 5, 10, 10]
    for wrong in ("a", "1", "0,0,0,0,1,2", "0,0,0,0,1,0,9", "0,-1"):
        with pytest.raises(ValueError, match="mask_strategy"):
            parse_mask_strategy(wrong)
