"""Wan image-to-video: the source image in samples, log-probabilities and the cache, and settings that are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import toys
from torch import Tensor
from video_pipelines import CASES, save_pipeline

from tastemaker.core.policy import Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.core.weights import FullFinetuning
from tastemaker.models import condition_images
from tastemaker.models.ltx2 import Ltx2Spec
from tastemaker.models.wan_i2v import WanI2VSpec
from tastemaker.processes.dynamics import FlowSDE
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import RectifiedFlow

PROMPTS = ["a cat jumps", "a dog sleeps"]


def images(count: int) -> list[Tensor]:
    return [torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]


def test_first_frame_stays_the_image_whatever_the_weights_say() -> None:
    model = WanI2VSpec(image_conditioning="first_frame").tiny().load(Placement())
    policy = Policy(model, GaussianProcess(RectifiedFlow(3.0), FlowSDE(0.7), 3), FullFinetuning().apply(model, ()))
    cond = policy.embed(PROMPTS, [{"image": image} for image in images(2)])
    trajectory, known = policy.sample(cond, Randomness(0, 0, torch.arange(2))), cond.tensors["image_latents"]
    torch.testing.assert_close(trajectory.final[:, :1], known, rtol=1e-4, atol=1e-5)
    assert not known[0].equal(known[1])
    before = policy.action_distribution(cond, trajectory.segments[0]).mean.detach()
    toys.perturb(policy, 0.05)
    after = policy.action_distribution(cond, trajectory.segments[0]).mean.detach()
    assert before[:, 0].equal(after[:, 0]) and not torch.allclose(before[:, 1:], after[:, 1:])
    noisy = policy.corrupt(trajectory.final, Randomness(1, 0, torch.arange(2)))
    restored = policy.restore(cond, noisy).mean
    torch.testing.assert_close(restored[:, :1], known, rtol=1e-3, atol=1e-4)


def test_each_image_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(condition_images, "MAX_CACHED_IMAGES", 2)
    model = WanI2VSpec().tiny().load(Placement())
    encoded: list[int] = []
    encode = model.images.encode
    monkeypatch.setattr(model.images, "encode", lambda pixels: encoded.append(len(pixels)) or encode(pixels))
    first, second, third = images(3)
    for batch in ((first, second), (second, first), (first, [third])):
        cond = model.embed(PROMPTS, [{"image": image} for image in batch])
    assert len(encoded) == 3
    assert cond.tensors["image_embeds"].shape == (2, 5, 16) and cond.tensors["image_latents"].shape == (2, *model.shape)
    model.embed(PROMPTS[:1], [{"image": second}])  # least recently used, so no longer in the cache
    assert len(encoded) == 4


def test_the_image_of_the_settings_is_for_prompts_without_one() -> None:
    model = WanI2VSpec(image_conditioning="latents", image=toys.IMAGE).tiny().load(Placement())
    own = images(1)[0]
    latents = model.embed(PROMPTS, [{}, {"image": own}]).tensors["image_latents"]
    torch.testing.assert_close(latents[0], model.embed(PROMPTS).tensors["image_latents"][1])
    assert not torch.allclose(latents[0], latents[1])


@pytest.mark.slow
def test_wrong_settings_and_images_are_refused(tmp_path: Path) -> None:
    save_pipeline(CASES["wan22-ti2v"], tmp_path)
    spec = replace(WanI2VSpec(image_conditioning="latents").tiny(), weights=str(tmp_path))
    with pytest.raises(ConfigError, match=r"image_conditioning.*'first_frame'.*TM2501"):
        spec.load(Placement())
    with pytest.raises(ValueError, match=r"'max_text_tokens'.*512.*600.*TM2502"):
        WanI2VSpec(max_text_tokens=600)
    model = replace(spec, image_conditioning="first_frame").load(Placement())
    with pytest.raises(ConfigError, match=r"one image, got 2.*TM2500"):
        model.embed(PROMPTS[:1], [{"image": images(2)}])
    with pytest.raises(ConfigError, match=r"model\.image\b.*TM535"):
        model.embed(PROMPTS)
    with pytest.raises(ValueError, match=r"'fps'.*0.*TM2503"):
        Ltx2Spec(fps=0.0)
    with pytest.raises(ValueError, match=r"'max_text_tokens'.*128.*100.*TM2504"):
        Ltx2Spec(max_text_tokens=100)
