"""Noise paths: timesteps, coefficients, and DDPO's DDIM step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tastemaker.processes.dynamics import DDIM, DenoisingStep
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import NoisePath, RectifiedFlow, TrigFlow, VariancePreserving

VIDEO = Path(__file__).parent.parent / "fixtures" / "video"
PATHS = [
    RectifiedFlow(),
    RectifiedFlow(shift=3.0),
    TrigFlow(),
    *(VariancePreserving(beta_schedule=b) for b in ("linear", "scaled_linear", "cosine")),
]
MODELSCOPE = VariancePreserving(
    "scaled_linear", 0.00085, 0.012, 1000, timestep_spacing="leading", steps_offset=1, set_alpha_to_one=False
)


def test_leading_timesteps_match_published() -> None:
    golden = load_file(VIDEO / "ddpo_ddim_logprob.safetensors")
    grid = MODELSCOPE.timesteps(25)
    assert (grid[:-1] * 1000).round().long().sub(1).tolist() == golden["timesteps25"].tolist()
    assert float(grid[-1]) == pytest.approx(1 / 1000)


def test_ddim_log_prob_matches_ddpo() -> None:
    """The published mean over each frame and then over frames equals the mean over all elements."""
    golden = load_file(VIDEO / "ddpo_ddim_logprob.safetensors")
    process = GaussianProcess(MODELSCOPE, DDIM(1.0), 25)
    t, next_t = (golden["t"] + 1) / 1000, (golden["t"] + 1 - 40) / 1000
    clean = MODELSCOPE.clean(golden["x"], t, golden["eps"])
    distribution = process.dynamics.step(MODELSCOPE, process.denoising_step(golden["x"], t, next_t, clean))
    log_prob = distribution.log_prob(golden["next"]).flatten()
    torch.testing.assert_close(log_prob, golden["logp_all_dims"], rtol=2e-5, atol=0)
    torch.testing.assert_close(log_prob, golden["logp_per_frame_mean"], rtol=2e-5, atol=0)


def test_ddim_sample_matches_ddpo() -> None:
    """The recorded call treats frames as rows and draws noise from a generator with seed 5."""
    golden = load_file(VIDEO / "ddpo_ddim_logprob.safetensors")
    x, eps, t = golden["x"][0], golden["eps"][0], ((golden["t"][:1] + 1) / 1000).expand(3)
    distribution = DDIM(1.0).step(MODELSCOPE, DenoisingStep(x, MODELSCOPE.clean(x, t, eps), t, t - 0.04, 0.0))
    samples = distribution.mean + distribution.std.view(3, 1, 1, 1) * torch.randn(
        x.shape, generator=torch.Generator().manual_seed(5)
    )
    torch.testing.assert_close(samples, golden["sampled_prev_gen5"], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(distribution.log_prob(samples).flatten(), golden["sampled_prev_logp"], rtol=1e-5, atol=0)


@pytest.mark.parametrize("path", PATHS)
def test_timesteps_decrease_from_noise_to_end(path: NoisePath) -> None:
    for steps in (1, 2, 7, 50):
        grid = path.timesteps(steps)
        assert len(grid) == steps + 1
        assert (grid.diff() < 0).all()
        assert (path.sigma(grid).diff() < 0).all()


def test_shifted_timesteps_match_published() -> None:
    sampling, training = RectifiedFlow(shift=3.0).timesteps(25), RectifiedFlow(shift=3.0).timesteps(50)
    t = torch.linspace(1, 0, 26)
    torch.testing.assert_close(sampling, 3 * t / (1 + 2 * t))
    assert [float(training[i]) for i in (5, 25, 30)] == pytest.approx([0.964286, 0.75, 0.666667], abs=1e-6)


@pytest.mark.parametrize("path", PATHS[2:])
def test_variance_preserving_path_preserves_variance(path: NoisePath) -> None:
    t = torch.linspace(0, 1, 101)
    torch.testing.assert_close(path.alpha(t) ** 2 + path.sigma(t) ** 2, torch.ones(101))


def test_alphas_cumprod_match_betas() -> None:
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    alphas_cumprod = (1 - betas).cumprod(0)
    levels = torch.tensor([0, 1, 499, 998, 999])
    torch.testing.assert_close(
        MODELSCOPE.alpha((levels + 1) / 1000), alphas_cumprod[levels].sqrt().float(), rtol=1e-6, atol=0
    )


def test_trailing_timesteps_start_at_the_noisiest() -> None:
    path = VariancePreserving(timestep_spacing="trailing", set_alpha_to_one=True)
    assert (path.timesteps(4) * 1000).round().tolist() == [1000, 750, 500, 250, 0]


@pytest.mark.parametrize("path", [*PATHS, *(VariancePreserving(prediction_type=p) for p in ("v_prediction", "sample"))])
def test_target_recovers_clean_sample_and_error_weight(path: NoisePath) -> None:
    generator = torch.Generator().manual_seed(0)
    clean, noise = (torch.randn(5, 3, 4, generator=generator) for _ in range(2))
    t = torch.tensor([0.02, 0.2, 0.5, 0.9, 1.0])
    x = path.alpha(t)[:, None, None] * clean + path.sigma(t)[:, None, None] * noise
    output = path.target(clean, noise, t)
    torch.testing.assert_close(path.clean(x, t, output), clean, rtol=1e-3, atol=1e-3)
    difference = path.clean(x, t, output + 0.5) - path.clean(x, t, output)
    torch.testing.assert_close(
        difference.pow(2).flatten(1).mean(1) * path.output_error_weight(t), torch.full((5,), 0.25), rtol=1e-2, atol=0
    )


@pytest.mark.parametrize("path", PATHS)
def test_training_timesteps_are_within_the_path(path: NoisePath) -> None:
    t = path.sample_timesteps(torch.linspace(0, 1 - 2**-24, 1001))
    assert t.min() > 0
    assert t.max() <= 1
    assert (t.diff() >= 0).all()


def test_more_steps_than_timesteps_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\b11\b.*\b10 timesteps.*TM341"):
        GaussianProcess(VariancePreserving(num_train_timesteps=10), DDIM(), 11)
