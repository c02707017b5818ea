"""Video generators: decoding of selected frames, gradients, LoRA targets and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import fast
from video_pipelines import CASES, save_pipeline

from tastemaker.config.load import load
from tastemaker.core.lora import Lora
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement, select_rows
from tastemaker.diagnostics.plan import estimate_resources
from tastemaker.models import wan
from tastemaker.models.cogvideox import CogVideoXSpec
from tastemaker.models.hunyuanvideo import HunyuanVideoSpec
from tastemaker.models.ltx import LtxSpec
from tastemaker.models.mochi import MochiSpec
from tastemaker.models.svd import SvdSpec
from tastemaker.models.wan import WanSpec
from tastemaker.processes.paths import KarrasPath, VariancePreserving

LONG_VIDEOS: dict[str, tuple[Any, dict[tuple[int, ...], int]]] = {
    # A spec, and how many latents its decoder processes for these frames.
    "wan": (replace(WanSpec().tiny(), frames=13), {(0,): 1, (4,): 2, (5, 0): 3, (12,): 4}),
    "cogvideox": (replace(CogVideoXSpec().tiny(), frames=25), {(0,): 3, (8, 3): 3, (9,): 5, (24,): 7}),
    "ltx": (replace(LtxSpec().tiny(), frames=17), {(0,): 3, (16, 2): 3}),
    "hunyuanvideo": (
        replace(HunyuanVideoSpec().tiny(), frames=29),
        {(0,): 5, (12, 1): 5, (13,): 10, (20,): 5, (28,): 7},
    ),
    "mochi": (replace(MochiSpec().tiny(), frames=13), {(0,): 1, (6,): 2, (7, 2): 3}),
    "svd": (replace(SvdSpec().tiny(), frames=5, decode_chunk_size=2), {(0,): 2, (3, 1): 4, (4,): 1}),
}


@pytest.mark.parametrize("name", fast(LONG_VIDEOS, "wan", "hunyuanvideo"))
def test_selected_frames_equal_the_full_video_with_fewer_latents_decoded(name: str) -> None:
    spec, num_latents = LONG_VIDEOS[name]
    model = spec.load(Placement())
    vae = model.autoencoder.net
    decoded: list[int] = []
    vae.decoder.register_forward_pre_hook(lambda _, inputs: decoded.append(inputs[0].shape[0 if name == "svd" else 2]))
    x = Randomness(0, 0, torch.arange(1)).normal("x", *model.shape)
    with torch.no_grad():
        full = model.decode(x)
        assert full.shape == (1, *model.pixels)
        for frames, latents in num_latents.items():
            decoded.clear()
            torch.testing.assert_close(model.decode(x, frames), full[:, list(frames)], rtol=0, atol=2e-6)
            assert sum(decoded) == latents, frames


@pytest.mark.parametrize("name", fast(LONG_VIDEOS, "wan"))
def test_decoder_gradient_is_the_same_with_checkpointing(name: str) -> None:
    grads = []
    for recompute in (True, False):
        model = replace(LONG_VIDEOS[name][0], checkpoint_decoder=recompute).load(Placement())
        x = Randomness(0, 0, torch.arange(1)).normal("x", *model.shape).requires_grad_()
        model.decode(x, [2]).square().sum().backward()
        assert x.grad is not None and bool(x.grad.any())
        grads.append(x.grad)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


def test_wan_decoder_of_a_patchified_vae_equals_diffusers() -> None:
    from diffusers import AutoencoderKLWan

    config = {"z_dim": 4, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4, "is_residual": True, "patch_size": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        vae = AutoencoderKLWan(
            4, 4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, in_channels=12, out_channels=12, **config
        ).eval()
    x = Randomness(0, 0, torch.arange(1)).normal("x", 4, 3, 2, 2)
    with torch.no_grad():
        full = vae.decode(x, return_dict=False)[0]
        assert torch.equal(wan.wan_decoder(vae, checkpoint_decoder=False)(x, range(9)), full)
        selected = wan.wan_decoder(vae, checkpoint_decoder=True)(x, [4, 1])
        torch.testing.assert_close(selected, full[:, :, [4, 1]], rtol=0, atol=2e-6)


def test_each_expert_gets_the_samples_of_its_noise_levels() -> None:
    model = WanSpec(boundary_ratio=0.875).tiny().load(Placement())
    experts: Any = model.net
    for number, p in enumerate(experts.low.parameters()):
        p.data += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
    x, t = Randomness(0, 0, torch.arange(4)).normal("x", *model.shape), torch.tensor([0.9, 0.2, 0.875, 0.8])
    cond = model.embed(["a", "b", "c", "d"])
    mixed = model.predict(x, t, cond)
    for expert, indices in ((experts.high, [0, 2]), (experts.low, [1, 3])):
        model.net = expert
        single = model.predict(x[indices], t[indices], select_rows(cond, torch.tensor(indices)))
        torch.testing.assert_close(mixed[indices], single, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", fast(LONG_VIDEOS, "wan"))
def test_default_lora_targets_are_attention_layers(name: str) -> None:
    suffixes = ("to_q", "to_k", "to_v", "to_out.0")
    adapters = Lora(rank=2).apply(LONG_VIDEOS[name][0].load(Placement()), ()).trainable()
    assert adapters and all(key.partition(".lora_")[0].endswith(suffixes) for key in adapters)
    all_linear = Lora(rank=2, target_modules="all-linear").apply(LONG_VIDEOS[name][0].load(Placement()), ()).trainable()
    assert len(all_linear) > len(adapters)


def test_latents_equal_the_published_ones() -> None:
    model = WanSpec().tiny().load(Placement())
    pixels = torch.rand(1, *model.pixels, generator=torch.Generator().manual_seed(0))
    vae = model.autoencoder.net
    with torch.no_grad():
        raw = vae.encode(2 * pixels.transpose(1, 2) - 1).latent_dist.mode()
    mean, std = (torch.tensor(vae.config[key]).view(-1, 1, 1, 1) for key in ("latents_mean", "latents_std"))
    torch.testing.assert_close(model.encode(pixels), ((raw - mean) / std).transpose(1, 2))


@pytest.mark.slow
def test_invalid_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'frames'.*80.*81.*TM539"):
        WanSpec(frames=80)
    with pytest.raises(ValueError, match=r"'width'.*32.*700.*TM540"):
        LtxSpec(width=700)
    with pytest.raises(ValueError, match=r"'fps'.*0\.0.*TM465"):
        LtxSpec(fps=0.0)
    with pytest.raises(ConfigError, match=r"TM505"):
        WanSpec().load(Placement())
    with pytest.raises(ConfigError, match=r"1 frames of 32x32.* 5 of.*TM541"):
        WanSpec().tiny().load(Placement()).encode(torch.zeros(1, 1, 3, 32, 32))
    with pytest.raises(ValueError, match=r"no `image`.*TM536"):
        SvdSpec().tiny().load(Placement()).embed(["", ""], [{"image": torch.zeros(1, 3, 32, 32)}, {}])
    for metadata in ((), ({}, {})):
        with pytest.raises(ConfigError, match=r"model\.image\b.*TM535"):
            SvdSpec().tiny().load(Placement()).embed(["", ""], metadata)
    with pytest.raises(ValueError, match=r"'rescale_betas_zero_snr'.*TM337"):
        VariancePreserving(rescale_betas_zero_snr=True)
    with pytest.raises(ValueError, match=r"sigma_max.*TM342"):
        KarrasPath(sigma_max=1e4)
    save_pipeline(CASES["wan22"], tmp_path)
    with pytest.raises(ConfigError, match=r"two transformers.*TM543"):
        replace(WanSpec().tiny(), weights=str(tmp_path)).load(Placement())


@pytest.mark.long  # tests/diagnostics/test_plan_video.py plans clips of other models and of Wan 2.2
def test_planned_activations_grow_with_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        wan.WAN.configs,
        WanSpec.weights,
        {"transformer": wan.TINY_CONFIGS["transformer"], "vae": wan.TINY_CONFIGS["vae"]},
    )
    overrides = ["model.height=64", "model.width=64"]
    short, long = (
        estimate_resources(load("vader-wan-hps", [*overrides, f"model.frames={frames}"])) for frames in (5, 17)
    )
    assert 0 < short.update_activations < long.update_activations
    assert short.weights == long.weights


def test_wan_refuses_a_vae_of_another_size() -> None:
    spec = replace(WanSpec().tiny(), height=64, width=64, latent_channels=48, downsample_factor=16)
    with pytest.raises(ConfigError, match=r"16 channels.* 8.*model\.latent_channels=16.*TM544"):
        spec.load(Placement())
