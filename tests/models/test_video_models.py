"""What today's generators of clips owe to those who train them: frames, gradients, adapters, sentences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import fast
from video_pipelines import CASES, pipeline

from tastemaker.config.load import load
from tastemaker.core.lora import Lora
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement, select_rows
from tastemaker.diagnostics.resource_plan import estimate_resources
from tastemaker.models import video_decoding, wan
from tastemaker.models.cogvideox import CogVideoX
from tastemaker.models.component_configs import COMPONENT_CONFIGS
from tastemaker.models.hunyuanvideo import HunyuanVideo
from tastemaker.models.ltx import Ltx
from tastemaker.models.mochi import Mochi
from tastemaker.models.svd import Svd
from tastemaker.models.wan import Wan
from tastemaker.processes.karras import KarrasPath
from tastemaker.processes.paths import VariancePreserving

LONG: dict[str, tuple[Any, dict[tuple[int, ...], int]]] = {
    # A spec, and by frames how many latents its decoder sees.
    "wan": (replace(Wan().tiny(), frames=13), {(0,): 1, (4,): 2, (5, 0): 3, (12,): 4}),
    "cogvideox": (replace(CogVideoX().tiny(), frames=25), {(0,): 3, (8, 3): 3, (9,): 5, (24,): 7}),
    "ltx": (replace(Ltx().tiny(), frames=17), {(0,): 3, (16, 2): 3}),
    "hunyuanvideo": (replace(HunyuanVideo().tiny(), frames=29), {(0,): 5, (12, 1): 5, (13,): 10, (20,): 5, (28,): 7}),
    "mochi": (replace(Mochi().tiny(), frames=13), {(0,): 1, (6,): 2, (7, 2): 3}),
    "svd": (replace(Svd().tiny(), frames=5, at_once=2), {(0,): 2, (3, 1): 4, (4,): 1}),
}


@pytest.mark.parametrize("name", fast(LONG, "wan", "hunyuanvideo"))
def test_frames_asked_for_are_those_of_the_whole_clip_and_no_more_is_decoded(name: str) -> None:
    spec, asked = LONG[name]
    model = spec.load(Placement())
    vae = model.codec.net
    seen: list[int] = []
    vae.decoder.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[0 if name == "svd" else 2]))
    x = Randomness(0, 0, torch.arange(1)).normal("x", *model.shape)
    with torch.no_grad():
        whole = model.decode(x)
        assert whole.shape == (1, *model.pixels)
        for frames, latents in asked.items():
            seen.clear()
            torch.testing.assert_close(model.decode(x, frames), whole[:, list(frames)], rtol=0, atol=2e-6)
            assert sum(seen) == latents, frames


@pytest.mark.parametrize("name", fast(LONG, "wan"))
def test_frames_send_their_gradient_back_with_and_without_recomputation(name: str) -> None:
    grads = []
    for recompute in (True, False):
        model = replace(LONG[name][0], recompute=recompute).load(Placement())
        x = Randomness(0, 0, torch.arange(1)).normal("x", *model.shape).requires_grad_()
        model.decode(x, [2]).square().sum().backward()
        assert x.grad is not None and bool(x.grad.any())
        grads.append(x.grad)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


def test_an_autoencoder_that_folds_squares_into_channels_shows_frames_as_published() -> None:
    from diffusers import AutoencoderKLWan

    small = {"z_dim": 4, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4, "is_residual": True, "patch_size": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        vae = AutoencoderKLWan(
            4, 4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, in_channels=12, out_channels=12, **small
        ).eval()
    x = Randomness(0, 0, torch.arange(1)).normal("x", 4, 3, 2, 2)
    with torch.no_grad():
        whole = vae.decode(x, return_dict=False)[0]
        assert torch.equal(video_decoding.wan_decoder(vae, recompute=False)(x, range(9)), whole)
        some = video_decoding.wan_decoder(vae, recompute=True)(x, [4, 1])
        torch.testing.assert_close(some, whole[:, :, [4, 1]], rtol=0, atol=2e-6)


def test_each_expert_sees_the_rows_of_its_own_levels() -> None:
    model = Wan(boundary=0.875).tiny().load(Placement())
    experts: Any = model.net
    for number, p in enumerate(experts.low.parameters()):
        p.data += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
    x, t = Randomness(0, 0, torch.arange(4)).normal("x", *model.shape), torch.tensor([0.9, 0.2, 0.875, 0.8])
    cond = model.embed(["a", "b", "c", "d"])
    together = model.predict(x, t, cond)
    for expert, rows in ((experts.high, [0, 2]), (experts.low, [1, 3])):
        model.net = expert
        alone = model.predict(x[rows], t[rows], select_rows(cond, torch.tensor(rows)))
        torch.testing.assert_close(together[rows], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", fast(LONG, "wan"))
def test_adapters_go_onto_attention_unless_asked_for_elsewhere(name: str) -> None:
    ends = ("to_q", "to_k", "to_v", "to_out.0")
    found = Lora(rank=2).apply(LONG[name][0].load(Placement()), ()).trainable()
    assert found and all(key.partition(".lora_")[0].endswith(ends) for key in found)
    more = Lora(rank=2, targets="all-linear").apply(LONG[name][0].load(Placement()), ()).trainable()
    assert len(more) > len(found)


def test_latents_of_clips_are_the_published_ones() -> None:
    model = Wan().tiny().load(Placement())
    pixels = torch.rand(1, *model.pixels, generator=torch.Generator().manual_seed(0))
    vae = model.codec.net
    with torch.no_grad():
        raw = vae.encode(2 * pixels.transpose(1, 2) - 1).latent_dist.mode()
    mean, std = (torch.tensor(vae.config[key]).view(-1, 1, 1, 1) for key in ("latents_mean", "latents_std"))
    torch.testing.assert_close(model.encode(pixels), ((raw - mean) / std).transpose(1, 2))


@pytest.mark.slow
def test_mistakes_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'frames' is 80; expected one more than a multiple of 4, such as 81"):
        Wan(frames=80)
    with pytest.raises(ValueError, match="'width' is 700; expected a multiple of 32"):
        Ltx(width=700)
    with pytest.raises(ValueError, match=r"'rate' is 0\.0; expected frames a second"):
        Ltx(rate=0.0)
    with pytest.raises(ConfigError, match="are not here; expected a local path, or Wan-AI/Wan2"):
        Wan().load(Placement())
    with pytest.raises(
        ConfigError, match=r"the clips are 1 frames of 32x32 and the model makes 5 of 32x32; set data\.size"
    ):
        Wan().tiny().load(Placement()).encode(torch.zeros(1, 1, 3, 32, 32))
    with pytest.raises(ValueError, match="a prompt has no fact 'image', but others have; give a path or pixels"):
        Svd().tiny().load(Placement()).embed(["", ""], [{"image": torch.zeros(1, 3, 32, 32)}, {}])
    for facts in ((), ({}, {})):
        with pytest.raises(ConfigError, match=r"found no picture for a prompt; set model\.image, or give each"):
            Svd().tiny().load(Placement()).embed(["", ""], facts)
    with pytest.raises(ValueError, match="'ends_dark' with prediction 'epsilon' leaves nothing to predict"):
        VariancePreserving(ends_dark=True)
    with pytest.raises(ValueError, match="expected 0 < smallest < largest <= 700"):
        KarrasPath(largest=1e4)
    pipeline(CASES["wan22"], tmp_path)
    with pytest.raises(
        ConfigError, match=r"holds two transformers, expected the level they meet at; set model\.boundary"
    ):
        replace(Wan().tiny(), weights=str(tmp_path)).load(Placement())


@pytest.mark.long  # tests/diagnostics/test_plan_video.py plans clips of other models and of Wan 2.2
def test_wan_can_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        COMPONENT_CONFIGS, Wan.weights, {"transformer": wan.SMALL["transformer"], "vae": wan.SMALL["vae"]}
    )
    asked = ["model.height=64", "model.width=64"]
    short, long = (estimate_resources(load("vader-wan-hps", [*asked, f"model.frames={frames}"])) for frames in (5, 17))
    assert 0 < short.training < long.training
    assert short.weights == long.weights


def test_wan_refuses_an_autoencoder_of_another_of_its_sizes() -> None:
    asked = replace(Wan().tiny(), height=64, width=64, channels=48, factor=16)
    with pytest.raises(ConfigError, match=r"has 16 channels and factor 8, found 48 and 16; set model.channels=16"):
        asked.load(Placement())
