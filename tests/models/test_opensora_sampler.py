"""Sampling from Open-Sora 1.2: video sizes, timesteps, prompts and reference frames."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tastemaker.config.build import make_tiny
from tastemaker.config.config_warnings import collect_warnings
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
        for aspect_ratio in ASPECT_RATIOS[:-1]:  # the last is published as 50:27, and is 25:12
            (high, wide), (height, width) = map(int, aspect_ratio.split(":")), resolve_size(resolution, aspect_ratio)
            assert height / width == pytest.approx(high / wide, rel=0.02)
    assert (resolve_size("720p", "9:16"), resolve_num_frames("16s"), resolve_num_frames(17)) == ((720, 1280), 408, 17)
    assert OpenSoraSpec(duration=1).shape[0] == 1


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"resolution": "241p"}, "'resolution'.*241p"),
        ({"resolution": "8x8"}, "'resolution'.*8x8"),
        ({"aspect_ratio": "5:7"}, "'aspect_ratio'.*5:7"),
        ({"duration": "3s"}, "'duration'.*3s"),
        ({"duration": 0}, "'duration'.*0"),
    ],
)
def test_invalid_sizes_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        OpenSoraSpec(**settings)


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
    trajectory = policy.sample(cond, Randomness(0, 0, torch.arange(2)))
    net: Any = model.net
    text_embeds, text_mask = cond.tensors["prompt_embeds"], cond.tensors["attention_mask"]
    null_embeds = net.y_embedder.y_embedding.expand(2, -1, -1)
    z, timesteps = trajectory.start.transpose(1, 2), 1000 * process.path.timesteps(4)
    with torch.no_grad():
        for i in range(4):
            inputs = (
                torch.cat([z, z]),
                timesteps[i].repeat(4),
                torch.cat([text_embeds, null_embeds]),
                torch.cat([text_mask, text_mask]),
            )
            velocity, _ = net(*inputs, fps=torch.full((4,), 24.0), size=(16, 16)).chunk(2, 1)
            conditional, unconditional = velocity.chunk(2)
            z = z + (unconditional + 7 * (conditional - unconditional)) * (timesteps[i] - timesteps[i + 1]) / 1000
    torch.testing.assert_close(trajectory.final, z.transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_with_size_changes_shapes_and_single_images_decode() -> None:
    model = SPEC.load(Placement()).with_size(24, 36)
    assert (model.shape, model.pixels, model.size) == ((2, 4, 3, 4), (6, 3, 24, 32), (24, 36))
    x = torch.randn(1, *model.shape)
    with torch.no_grad():
        assert model.predict(x, torch.full((1,), 0.5), model.embed(["a cat"])).shape == x.shape
        assert model.decode(x, [5]).shape == (1, 1, 3, 24, 32)
    image_model = replace(SPEC, duration=1).load(Placement())
    pixels = image_model.decode(torch.randn(1, *image_model.shape))
    assert image_model.encode(pixels).shape == (1, 1, 4, 2, 2)
    with pytest.raises(ConfigError, match=r"2 frames.*TM541"):
        image_model.encode(torch.rand(1, 2, 3, 16, 16))


def test_score_tags_are_added_to_prompts() -> None:
    assert add_score_tags("A cat", 6.5, None, None) == "A cat aesthetic score: 6.5."
    assert (
        add_score_tags("A cat", 6.5, 4, "pan left")
        == "A cat aesthetic score: 6.5. motion score: 4.0. camera motion: pan left."
    )
    assert add_score_tags("A cat. aesthetic score: 5.0.", 6.5, None, None) == "A cat. aesthetic score: 5.0."
    assert clean_opensora_prompt(" A  <b>Big</b> cat\n#1 \u201cruns\u201d &amp; sleeps ") == 'a big cat "runs" sleeps'
    assert clean_opensora_prompt(add_score_tags("A cat", 6.5, None, None)) == "a cat aesthetic score: 6.5."
    text_masks = [
        replace(SPEC, aesthetic_score=score).load(Placement()).embed(["a cat"]).tensors["attention_mask"]
        for score in (None, 6.5)
    ]
    assert text_masks[0].sum() < text_masks[1].sum()


@pytest.mark.parametrize(
    ("prompt", "cleaned"),
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
def test_prompt_cleaning(prompt: str, cleaned: str) -> None:
    assert clean_opensora_prompt(prompt) == cleaned


def test_reference_frames_stay_fixed(tmp_path: Path) -> None:
    model = replace(SPEC, duration=34).load(Placement())
    policy = Policy(model, GaussianProcess(RectifiedFlow(2.0), ODE(), 3), FullFinetuning().apply(model, ()))
    image = torch.rand(1, 3, 20, 24, generator=torch.Generator().manual_seed(0))
    metadata: list[dict[str, Any]] = [{"image": image, "mask_strategy": "0,0,0,0,1;0,0,0,-5,1,0.5"}, {}]
    cond = policy.embed(["a cat", "a dog"], metadata)
    assert cond.tensors["fixed_until"].tolist() == [[0] + [1] * 4 + [0.5] + [1] * 4, [1] * 10]
    trajectory, unconstrained = (
        policy.sample(c, Randomness(0, 0, torch.arange(2))) for c in (cond, policy.embed(cond.prompts))
    )
    reference = cond.tensors["reference_latents"][0, 0]
    torch.testing.assert_close(trajectory.final[0, 0], reference, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(trajectory.final[0, 5], reference, atol=1e-2)  # resampled below noise level 0.5
    assert not torch.allclose(trajectory.final[0, 1], unconstrained.final[0, 1], atol=1e-4)
    torch.testing.assert_close(trajectory.final[1], unconstrained.final[1], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"none\.png.*TM166"):
        policy.embed(["a cat"], [{"image": str(tmp_path / "none.png")}])
    with pytest.raises(ValueError, match=r"'mask_strategy'.* 1.*TM490"):
        policy.embed(["a cat"], [{"image": image, "mask_strategy": "0,1"}])


def test_mask_strategy_parsing() -> None:
    first, second = parse_mask_strategy("0;0,1,-5,-5,5,0.4")
    assert first == MaskStrategyRule(0, 0, 0, 1, 0.0)
    assert second == MaskStrategyRule(1, -5, -5, 5, 0.4)
    assert [nearest_chunk_start(frame, 15) for frame in (0, 2, 3, 10, 13)] == [0, 0, 5, 10, 10]
    for text in ("a", "1", "0,0,0,0,1,2", "0,0,0,0,1,0,9", "0,-1"):
        with pytest.raises(ValueError, match=r"mask_strategy.*TM488"):
            parse_mask_strategy(text)
