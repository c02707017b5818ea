"""Resource estimates of published video generators at full size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tastemaker.config.load import load
from tastemaker.core.lora import Lora
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.diagnostics.fake_backbones import lent_encoders
from tastemaker.diagnostics.fake_run import _frozen_parameters
from tastemaker.diagnostics.plan import ResourceEstimate, estimate_resources
from tastemaker.models import cogvideox, hunyuanvideo, hunyuanvideo15, ltx, ltx2, mochi, svd, wan, wan_i2v
from tastemaker.models.pipeline_components import PublishedModel

SMALL: dict[str, tuple[PublishedModel, tuple[int, int]]] = {
    "cogvideox": (cogvideox.COGVIDEOX, (9, 17)),
    "ltx": (ltx.LTX, (9, 17)),
    "hunyuanvideo": (hunyuanvideo.HUNYUANVIDEO, (5, 9)),
    "hunyuanvideo15": (hunyuanvideo15.HUNYUANVIDEO15, (5, 9)),
    "ltx2": (ltx2.LTX2, (9, 17)),
    "mochi": (mochi.MOCHI, (7, 13)),
    "svd": (svd.SVD, (3, 5)),
}  # each model and two numbers of frames


def estimate(name: str, *overrides: str) -> ResourceEstimate:
    return estimate_resources(load(name, ["rewards.hps=null", *overrides]))


ONLY_LONG = ("svd", "ltx2", "hunyuanvideo15")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in ONLY_LONG else pytest.mark.slow) for name in SMALL]
)
def test_longer_videos_need_more_activations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    published, lengths = SMALL[name]
    monkeypatch.setitem(published.configs, published.releases[0].hub, published.tiny_configs)
    settings = ["model.height=64", "model.width=64"]
    short, long = (estimate(f"vader-{name}-hps", *settings, f"model.frames={frames}") for frames in lengths)
    assert 0 < short.update_activations < long.update_activations and 0 < short.flops < long.flops
    assert short.weights == long.weights > 0 and short.frozen == long.frozen > 0


@pytest.mark.slow
def test_only_scored_frames_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    published, _ = SMALL["mochi"]
    monkeypatch.setitem(published.configs, published.releases[0].hub, published.tiny_configs)
    settings = ["model.height=64", "model.width=64", "model.frames=13"]
    one_frame, all_frames = (
        estimate("vader-mochi-hps", *settings, f"objective.frames={frames}") for frames in ("first", "all")
    )
    assert one_frame.update_activations < all_frames.update_activations


COUNTS = {
    "zai-org/CogVideoX-2b": ("CogVideoXTransformer3DModel", 1_693_783_872),
    "zai-org/CogVideoX-5b": ("CogVideoXTransformer3DModel", 5_570_283_072),
    "Lightricks/LTX-Video": ("LTXVideoTransformer3DModel", 1_923_385_472),
    "genmo/mochi-1-preview": ("MochiTransformer3DModel", 10_027_677_744),
    "hunyuanvideo-community/HunyuanVideo": ("HunyuanVideoTransformer3DModel", 12_821_012_544),
    "stabilityai/stable-video-diffusion-img2vid-xt": ("UNetSpatioTemporalConditionModel", 1_524_623_082),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": ("WanTransformer3DModel", 4_999_787_712),
}  # Hub id: class in diffusers and published number of parameters


def count_parameters(hub: str, name: str) -> int:
    import diffusers

    models = [published for published, _ in SMALL.values()]
    configs = next(model.configs[hub] for model in (*models, wan.WAN, wan_i2v.WAN_I2V) if hub in model.configs)
    network_class: Any = getattr(diffusers, name)
    with torch.device("meta"):
        net = network_class(**(configs.get("transformer") or configs["unet"]))
    return sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize("hub", COUNTS)
def test_networks_have_the_published_number_of_weights(hub: str) -> None:
    name, count = COUNTS[hub]
    assert count_parameters(hub, name) == count


ROUNDED = {
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": ("WanTransformer3DModel", 16.4e9),
    "Lightricks/LTX-2": ("LTX2VideoTransformer3DModel", 19e9),
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": ("HunyuanVideo15Transformer3DModel", 8.3e9),
}  # numbers of parameters that are published in billions only


@pytest.mark.parametrize("hub", [pytest.param(hub, marks=pytest.mark.slow) for hub in ROUNDED])
def test_networks_have_about_the_published_number_of_weights(hub: str) -> None:
    name, count = ROUNDED[hub]
    assert count_parameters(hub, name) == pytest.approx(count, rel=0.01)


@pytest.mark.long
def test_plan_open_sora() -> None:
    settings = ["model.resolution=32x32", "model.duration=1", "model.max_text_tokens=8"]
    resources = estimate("vader-opensora-hps", "tuning={type: full}", "engine.param_dtype=bf16", *settings)
    assert resources.weights == pytest.approx(2 * 1.2e9, rel=0.01) and resources.update_activations > 0


@pytest.mark.parametrize("spec", [wan_i2v.WanI2VSpec(), svd.SvdSpec()], ids=["wan_i2v", "svd"])
def test_image_encoder_that_visits_the_gpu_is_not_counted_as_resident(spec: Any) -> None:
    backbone = spec.tiny().load(Placement(torch.device("cpu")))
    vae = sum(p.numel() for p in backbone.autoencoder.net.parameters())
    weights = Lora(rank=2).apply(backbone, ())
    assert sum(p.numel() for p in _frozen_parameters(backbone, weights)) == vae > 0
    assert backbone.net not in (lent := lent_encoders(spec, backbone, torch.float32)) and lent


def test_plan_counts_both_transformers_of_wan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both transformers are in memory, and each call of the network runs one of them."""
    tiny = {**wan.WAN.tiny_configs, "transformer_2": wan.WAN.tiny_configs["transformer"]}
    monkeypatch.setitem(wan.WAN.configs, "Wan-AI/Wan2.2-T2V-A14B-Diffusers", tiny)
    settings = ["model.height=64", "model.width=64", "model.frames=5"]
    two, one = (
        estimate("vader-wan22-hps", *settings, f"model.boundary_ratio={boundary}") for boundary in (0.875, "null")
    )
    assert two.weights > one.weights and two.optimizer_state == one.optimizer_state > 0
    assert two.flops == pytest.approx(one.flops, rel=0.01) and two.update_activations > 0
    with pytest.raises(ConfigError, match=r"one transformer.*model\.boundary_ratio.*TM542"):
        estimate("vader-wan22-hps", "model.weights=Wan-AI/Wan2.1-T2V-14B-Diffusers")
