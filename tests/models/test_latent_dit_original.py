"""The DiT of nanoVLA-RL: its checkpoints, recorded outputs, noise and sampler, and heads of any width."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.models.latent_dit.model import LatentDit, build_network
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
LINEAR = VariancePreserving(betas="linear", first=1e-4, last=0.02, offset=0, ends_clean=True)


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(FIXTURE)


def test_the_originals_default_has_as_many_weights_as_it_tells() -> None:
    spec = LatentDit(size="B", codec=None, pixels=128, channels=4, factor=4, waves=768, habit="explainingai")
    with torch.device("meta"):
        assert sum(p.numel() for p in LatentDiT(spec.net()).parameters()) == 129_927_952


@pytest.fixture
def original(golden: dict[str, Tensor], tmp_path: Path) -> LatentDit:
    """The original's checkpoint, as its trainer saves it, and the settings it was trained with."""
    torch.save({key[2:]: x.float() for key, x in golden.items() if key.startswith("w.")}, tmp_path / "dit_ckpt.pth")
    return LatentDit(
        codec=None, pixels=64, channels=4, width=32, depth=2, heads=2, inner=64, waves=32, habit="explainingai",
        weights=str(tmp_path / "dit_ckpt.pth"),
    )  # fmt: skip


def test_the_originals_checkpoint_gives_its_recorded_outputs(golden: dict[str, Tensor], original: LatentDit) -> None:
    with safe_open(FIXTURE, "pt") as file:
        settings = json.loads(file.metadata()["config"])["params"]
    assert (settings["hidden_size"], settings["ff_hidden_dim"], settings["num_heads"]) == (32, 64, 2)
    net, habit = build_network(original, Placement()), EMBEDDING_CONVENTIONS["explainingai"]
    torch.testing.assert_close(position_embedding_2d(4, 32, habit), golden["out.pos_embed"], rtol=0, atol=1e-6)
    torch.testing.assert_close(
        sinusoidal_embedding(golden["in.t"], 32, habit), golden["out.time_embedding"], rtol=0, atol=2e-4
    )
    with torch.no_grad():
        found = net(golden["in.x"], golden["in.t"])
    torch.testing.assert_close(found, golden["out.pred"], rtol=0, atol=2e-5)


def test_heads_of_any_width_attend_as_the_original_does() -> None:
    spec = LatentDit(codec=None, pixels=32, channels=4, width=32, depth=1, heads=3, head=8, habit="explainingai")
    attention = LatentDiTAttention(32, 3, spec.net().mixed)
    tensors = {key: torch.randn(x.shape) for key, x in attention.state_dict().items()}
    assert tensors["qkv.weight"].shape == (72, 32) and tensors["out.weight"].shape == (32, 24)
    attention.load_state_dict(tensors)
    h = torch.randn(2, 5, 32)
    q, k, v = (h @ tensors["qkv.weight"].T + tensors["qkv.bias"]).split(24, -1)
    mixed = [
        torch.softmax(q[..., at] @ k[..., at].transpose(1, 2) / 8**0.5, -1) @ v[..., at]
        for at in (slice(0, 8), slice(8, 16), slice(16, 24))
    ]
    wanted = torch.cat(mixed, -1) @ tensors["out.weight"].T + tensors["out.bias"]
    torch.testing.assert_close(attention(h), wanted, atol=2e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match=r"heads that are 24 wide together, diffusers' as wide as the network, 32"):
        replace(spec, habit="diffusers", inner=128).moved({})


def test_the_originals_scheduler_is_our_path(golden: dict[str, Tensor]) -> None:
    levels = torch.arange(1, 1001) / 1000
    torch.testing.assert_close(LINEAR.alpha(levels) ** 2, golden["sched.alpha_cum_prod"], rtol=2e-5, atol=1e-7)
    process, rng = GaussianProcess(LINEAR, DDIM(1.0), 1000), Randomness(0, 0, torch.arange(2))
    x, noise = golden["in.x"], golden["in.noise"]
    noisy = process.corrupt(x, rng, (golden["in.t"] + 1) / 1000, noise)
    torch.testing.assert_close(noisy.x, golden["out.add_noise"], rtol=0, atol=5e-6)


@pytest.mark.parametrize("k", [0, 500, 999])
def test_a_step_of_the_originals_sampler_is_our_ancestral_one(k: int, golden: dict[str, Tensor]) -> None:
    process = GaussianProcess(LINEAR, DDIM(1.0), 1000)
    x, output, fresh = golden["in.x"], golden["in.noise"], golden["in.step_noise"]
    t, s = torch.full((2,), (k + 1) / 1000), torch.full((2,), k / 1000)
    clean = LINEAR.clean(x, t, output)
    torch.testing.assert_close(clean.clamp(-1, 1), golden[f"out.x0_t{k}"], rtol=0, atol=2e-5)
    there = process.dynamics.step(LINEAR, process.stride(x, t, s, clean))
    found = there.mean + there.std.view(-1, 1, 1, 1) * fresh  # type: ignore[attr-defined]
    torch.testing.assert_close(found, golden[f"out.prev_t{k}"], rtol=0, atol=5e-4 if k == 0 else 1e-5)


def test_weights_in_another_layout_name_the_habit_they_need(original: LatentDit) -> None:
    with pytest.raises(ConfigError, match=r"set model\.habit=explainingai"):
        build_network(replace(original, habit="facebook"), Placement())
