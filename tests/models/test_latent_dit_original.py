"""The DiT of nanoVLA-RL: checkpoints, recorded outputs, noise schedule and sampler."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from tastemaker.compat.linear_noise_scheduler import LinearNoiseScheduler
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.models.latent_dit.model import LatentDitSpec, load_latent_dit
from tastemaker.models.nets.latent_dit import (
    EMBEDDING_CONVENTIONS,
    LatentDiT,
    LatentDiTAttention,
    position_embedding_2d,
    sinusoidal_embedding,
)
from tastemaker.processes.dynamics import DDIM
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import VariancePreserving

FIXTURE = Path(__file__).parent.parent / "fixtures/base/explainingai_dit_ddpm_tiny.safetensors"
LINEAR = VariancePreserving(
    beta_schedule="linear", beta_start=1e-4, beta_end=0.02, steps_offset=0, set_alpha_to_one=True
)


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(FIXTURE)


def test_default_size_has_the_originals_parameter_count() -> None:
    spec = LatentDitSpec(
        variant="B",
        autoencoder=None,
        image_size=128,
        latent_channels=4,
        downsample_factor=4,
        timestep_embed_dim=768,
        convention="explainingai",
    )
    with torch.device("meta"):
        assert sum(p.numel() for p in LatentDiT(spec.network_config()).parameters()) == 129_927_952


@pytest.fixture
def original(golden: dict[str, Tensor], tmp_path: Path) -> LatentDitSpec:
    """A spec with the original trainer's checkpoint and the settings it was trained with."""
    torch.save({key[2:]: x.float() for key, x in golden.items() if key.startswith("w.")}, tmp_path / "dit_ckpt.pth")
    return LatentDitSpec(
        autoencoder=None,
        image_size=64,
        latent_channels=4,
        width=32,
        depth=2,
        heads=2,
        intermediate_size=64,
        timestep_embed_dim=32,
        convention="explainingai",
        weights=str(tmp_path / "dit_ckpt.pth"),
    )


def test_original_checkpoint_gives_its_recorded_outputs(golden: dict[str, Tensor], original: LatentDitSpec) -> None:
    with safe_open(FIXTURE, "pt") as file:
        settings = json.loads(file.metadata()["config"])["params"]
    assert (settings["hidden_size"], settings["ff_hidden_dim"], settings["num_heads"]) == (32, 64, 2)
    net, convention = load_latent_dit(original, Placement()), EMBEDDING_CONVENTIONS["explainingai"]
    torch.testing.assert_close(position_embedding_2d(4, 32, convention), golden["out.pos_embed"], rtol=0, atol=1e-6)
    torch.testing.assert_close(
        sinusoidal_embedding(golden["in.t"], 32, convention), golden["out.time_embedding"], rtol=0, atol=2e-4
    )
    with torch.no_grad():
        actual = net(golden["in.x"], golden["in.t"])
    torch.testing.assert_close(actual, golden["out.pred"], rtol=0, atol=2e-5)


def test_attention_with_other_head_dim_equals_the_original() -> None:
    spec = LatentDitSpec(
        autoencoder=None,
        image_size=32,
        latent_channels=4,
        width=32,
        depth=1,
        heads=3,
        head_dim=8,
        convention="explainingai",
    )
    attention = LatentDiTAttention(32, 3, spec.network_config().attention_width)
    tensors = {key: torch.randn(x.shape) for key, x in attention.state_dict().items()}
    assert tensors["qkv.weight"].shape == (72, 32) and tensors["out.weight"].shape == (32, 24)
    attention.load_state_dict(tensors)
    h = torch.randn(2, 5, 32)
    q, k, v = (h @ tensors["qkv.weight"].T + tensors["qkv.bias"]).split(24, -1)
    heads = [
        torch.softmax(q[..., head] @ k[..., head].transpose(1, 2) / 8**0.5, -1) @ v[..., head]
        for head in (slice(0, 8), slice(8, 16), slice(16, 24))
    ]
    expected = torch.cat(heads, -1) @ tensors["out.weight"].T + tensors["out.bias"]
    torch.testing.assert_close(attention(h), expected, atol=2e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match=r"width 24.* 32.*TM441"):
        replace(spec, convention="diffusers", intermediate_size=128).to_diffusers({})


def test_path_equals_the_originals_scheduler(golden: dict[str, Tensor]) -> None:
    timesteps = torch.arange(1, 1001) / 1000
    torch.testing.assert_close(LINEAR.alpha(timesteps) ** 2, golden["sched.alpha_cum_prod"], rtol=2e-5, atol=1e-7)
    process, rng = GaussianProcess(LINEAR, DDIM(1.0), 1000), Randomness(0, 0, torch.arange(2))
    x, noise = golden["in.x"], golden["in.noise"]
    noisy = process.corrupt(x, rng, (golden["in.t"] + 1) / 1000, noise)
    torch.testing.assert_close(noisy.x, golden["out.add_noise"], rtol=0, atol=5e-6)


@pytest.mark.parametrize("k", [0, 500, 999])
def test_ddim_step_equals_the_originals_sampler(k: int, golden: dict[str, Tensor]) -> None:
    process = GaussianProcess(LINEAR, DDIM(1.0), 1000)
    x, output, step_noise = golden["in.x"], golden["in.noise"], golden["in.step_noise"]
    t, s = torch.full((2,), (k + 1) / 1000), torch.full((2,), k / 1000)
    clean = LINEAR.clean(x, t, output)
    torch.testing.assert_close(clean.clamp(-1, 1), golden[f"out.x0_t{k}"], rtol=0, atol=2e-5)
    step = process.dynamics.step(LINEAR, process.denoising_step(x, t, s, clean))
    actual = step.mean + step.std.view(-1, 1, 1, 1) * step_noise  # type: ignore[attr-defined]
    torch.testing.assert_close(actual, golden[f"out.prev_t{k}"], rtol=0, atol=5e-4 if k == 0 else 1e-5)


def test_published_scheduler_methods_equal_the_original(golden: dict[str, Tensor]) -> None:
    scheduler, x, noise = LinearNoiseScheduler(1000, 1e-4, 0.02), golden["in.x"], golden["in.noise"]
    torch.testing.assert_close(scheduler.betas, golden["sched.betas"], rtol=1e-6, atol=0)
    torch.testing.assert_close(scheduler.alpha_cum_prod, golden["sched.alpha_cum_prod"], rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(scheduler.add_noise(x, noise, golden["in.t"]), golden["out.add_noise"])
    for k in (0, 500, 999):
        previous, clean = scheduler.sample_prev_timestep(x, noise, k, golden["in.step_noise"])
        torch.testing.assert_close(previous, golden[f"out.prev_t{k}"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(clean, golden[f"out.x0_t{k}"], rtol=1e-5, atol=1e-5)
    torch.manual_seed(0)
    drawn = scheduler.sample_prev_timestep(x, noise, torch.tensor(500))[0]
    torch.manual_seed(0)
    assert torch.equal(drawn, scheduler.sample_prev_timestep(x, noise, 500, torch.randn(x.shape))[0])
    assert scheduler.path == LINEAR
    with pytest.raises(ConfigError, match=r"num_timesteps 1,.*TM849"):
        LinearNoiseScheduler(1)


def test_export_has_the_keys_and_tensors_of_the_original(golden: dict[str, Tensor], original: LatentDitSpec) -> None:
    net = load_latent_dit(original, Placement())
    exported = original.to_authors(net.state_dict())
    expected = {key[2:]: x.float() for key, x in golden.items() if key.startswith("w.")}
    assert exported.keys() == expected.keys() and all(torch.equal(exported[key], x) for key, x in expected.items())
    with pytest.raises(ConfigError, match="TM850"):
        replace(original, convention="facebook").to_authors({})
    with pytest.raises(ConfigError, match="TM851"):
        replace(original, conditioning="class").to_authors({})


def test_weights_of_another_convention_are_refused(original: LatentDitSpec) -> None:
    with pytest.raises(ConfigError, match=r"set model\.convention=explainingai.*TM438"):
        load_latent_dit(replace(original, convention="facebook"), Placement())
