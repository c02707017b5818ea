"""Published generators of clips are planned at their full size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tastemaker.config.load import load
from tastemaker.core.registry import ConfigError
from tastemaker.diagnostics.resource_plan import ResourceEstimate, estimate_resources
from tastemaker.models import cogvideox, hunyuanvideo, ltx, mochi, svd
from tastemaker.models.component_configs import COMPONENT_CONFIGS

SMALL: dict[str, tuple[str, Any, tuple[int, int]]] = {
    "cogvideox": (cogvideox.CogVideoX.weights, cogvideox.SMALL, (9, 17)),
    "ltx": (ltx.Ltx.weights, ltx.SMALL, (9, 17)),
    "hunyuanvideo": (hunyuanvideo.HunyuanVideo.weights, hunyuanvideo.SMALL, (5, 9)),
    "mochi": (mochi.Mochi.weights, mochi.SMALL, (7, 13)),
    "svd": (svd.Svd.weights, svd.SMALL, (3, 5)),
}  # where each is published, its parts at small size, and two lengths of clips


def planned(name: str, *overrides: str) -> ResourceEstimate:
    return estimate_resources(load(name, ["rewards.hps=null", *overrides]))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name == "svd" else pytest.mark.slow) for name in SMALL]
)
def test_longer_clips_take_more_and_weigh_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub, sizes, lengths = SMALL[name]
    monkeypatch.setitem(COMPONENT_CONFIGS, hub, sizes)
    asked = ["model.height=64", "model.width=64"]
    short, long = (planned(f"vader-{name}-hps", *asked, f"model.frames={frames}") for frames in lengths)
    assert 0 < short.training < long.training and 0 < short.work < long.work
    assert short.weights == long.weights > 0 and short.frozen == long.frozen > 0


@pytest.mark.slow
def test_only_the_frames_that_are_scored_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    hub, sizes, _ = SMALL["mochi"]
    monkeypatch.setitem(COMPONENT_CONFIGS, hub, sizes)
    asked = ["model.height=64", "model.width=64", "model.frames=13"]
    one, whole = (planned("vader-mochi-hps", *asked, f"objective.frames={frames}") for frames in ("first", "all"))
    assert one.training < whole.training


COUNTS = {
    "zai-org/CogVideoX-2b": ("CogVideoXTransformer3DModel", 1_693_783_872),
    "zai-org/CogVideoX-5b": ("CogVideoXTransformer3DModel", 5_570_283_072),
    "Lightricks/LTX-Video": ("LTXVideoTransformer3DModel", 1_923_385_472),
    "genmo/mochi-1-preview": ("MochiTransformer3DModel", 10_027_677_744),
    "hunyuanvideo-community/HunyuanVideo": ("HunyuanVideoTransformer3DModel", 12_821_012_544),
    "stabilityai/stable-video-diffusion-img2vid-xt": ("UNetSpatioTemporalConditionModel", 1_524_623_082),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": ("WanTransformer3DModel", 4_999_787_712),
}  # by hub id, diffusers' class and the weights that are published


@pytest.mark.parametrize("hub", COUNTS)
def test_networks_have_as_many_weights_as_the_published_ones(hub: str) -> None:
    import diffusers

    name, count = COUNTS[hub]
    kind: Any = getattr(diffusers, name)
    with torch.device("meta"):
        net = kind(**(COMPONENT_CONFIGS[hub].get("transformer") or COMPONENT_CONFIGS[hub]["unet"]))
    assert sum(p.numel() for p in net.parameters()) == count


@pytest.mark.long
def test_open_sora_is_planned_as_large_as_it_is_published() -> None:
    asked = ["model.resolution=32x32", "model.duration=1", "model.words=8"]
    found = planned("vader-opensora-hps", "tuning={type: full}", "engine.trainable=bf16", *asked)
    assert found.weights == pytest.approx(2 * 1.2e9, rel=0.01) and found.training > 0


def test_the_two_transformers_of_wan_are_planned_one_at_a_time() -> None:
    with pytest.raises(ConfigError, match=r"those of one transformer; leave model\.boundary out"):
        planned("vader-wan22-hps")
