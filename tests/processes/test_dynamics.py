"""Sampler dynamics and SDE windows, against published values and formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
import torch
import toys
from torch import Tensor, nn

from tastemaker.core.distributions import Distribution, expand_dims_like
from tastemaker.core.policy import Backbone, Guidance
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import Condition, Metadata, Prompts
from tastemaker.processes.dynamics import (
    CPS,
    DDIM,
    ODE,
    ConsistencySampling,
    DanceSDE,
    DenoisingStep,
    FlowSDE,
    SamplerDynamics,
)
from tastemaker.processes.gaussian import GaussianProcess, SDEWindow
from tastemaker.processes.paths import NoisePath, RectifiedFlow, TrigFlow, VariancePreserving


def published_inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Return the latent, the velocity and the next latent of the published cases."""
    generator = torch.Generator().manual_seed(0)
    x, velocity, next_x = (torch.randn(2, 16, 64, generator=generator) for _ in range(3))
    return x, velocity, next_x


def denoising_step(dynamics: SamplerDynamics, steps: int, i: int) -> tuple[Distribution, Tensor]:
    """Return the distribution of the i-th step of a sampler with shift 3, and its next latent."""
    path, (x, velocity, next_x) = RectifiedFlow(shift=3.0), published_inputs()
    process = GaussianProcess(path, dynamics, steps)
    t, s = path.timesteps(steps)[i : i + 2, None].expand(2, 2)
    clean = path.clean(x, t, velocity)
    return dynamics.step(path, process.denoising_step(x, t, s, clean)), next_x


@pytest.mark.parametrize(
    ("dynamics", "steps", "i", "std", "log_prob"),
    [
        (DanceSDE(0.3), 16, 0, 0.0442326, [-539.5667, -530.3885]),
        (DanceSDE(0.3), 16, 5, 0.0561952, [-333.6713, -327.4746]),
        (DanceSDE(0.3), 16, 14, 0.1095445, [-86.5147, -83.8526]),
        (FlowSDE(0.7), 25, 0, 0.7, [-2.245804, -2.247998]),
        (FlowSDE(0.7), 25, 3, 0.418194, [-5.568437, -5.506597]),
        (FlowSDE(0.7), 25, 24, 0.0824958, [-151.3678, -146.9629]),
    ],
)
def test_sde_std_and_log_prob_match_published(dynamics, steps, i, std, log_prob) -> None:
    distribution, next_x = denoising_step(dynamics, steps, i)
    assert distribution.std.tolist() == pytest.approx([std, std], rel=2e-6)
    assert distribution.log_prob(next_x).flatten().tolist() == pytest.approx(log_prob, rel=2e-6)


@pytest.mark.parametrize(("i", "g"), [(0, 5.980788), (3, 3.283289), (24, 0.247487)])
def test_flow_sde_diffusion_matches_published(i: int, g: float) -> None:
    distribution, _ = denoising_step(FlowSDE(0.7), 25, i)
    t, s = RectifiedFlow(shift=3.0).timesteps(25)[i : i + 2]
    assert float(distribution.std[0] / (t - s).sqrt()) == pytest.approx(g, rel=2e-6)


def test_cps_step_matches_formula() -> None:
    x, velocity, next_x = published_inputs()
    distribution, _ = denoising_step(CPS(0.8), 25, 3)
    t, s = RectifiedFlow(shift=3.0).timesteps(25)[3:5]
    std = s * math.sin(0.8 * math.pi / 2)
    mean = (1 - s) * (x - t * velocity) + (s**2 - std**2).sqrt() * (x + (1 - t) * velocity)
    torch.testing.assert_close(distribution.mean, mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(distribution.std, std.expand(2))
    torch.testing.assert_close(distribution.log_prob(next_x), -((next_x - mean) ** 2).flatten(1).mean(1, keepdim=True))


EXACT = (FlowSDE(0.7, "exact"), FlowSDE(1.5, "exact"), DanceSDE(0.3, "exact"), DanceSDE(1.0, "exact"))


def linear_step(dynamics: SamplerDynamics, t: float, s: float, data_std: float, second: float) -> tuple[float, float]:
    """Factor of x in the mean, and variance, of a step from t to s with the optimal denoiser of N(0, data_std^2)."""
    one, level = torch.ones(1, dtype=torch.float64), torch.tensor([t], dtype=torch.float64)
    clean = (1 - level) * data_std**2 / ((1 - level) ** 2 * data_std**2 + level**2) * one
    distribution = dynamics.step(RectifiedFlow(), DenoisingStep(one, clean, level, torch.full_like(level, s), second))
    return float(distribution.mean), float(distribution.std) ** 2


def sampled_variance(dynamics: SamplerDynamics, levels: Sequence[float], data_std: float) -> list[float]:
    """Variances at all levels but the first, starting from the right one: an exact recursion, nothing is drawn."""
    variance, variances = ((1 - levels[0]) * data_std) ** 2 + levels[0] ** 2, []
    for t, s in pairwise(levels):
        factor, added = linear_step(dynamics, t, s, data_std, levels[1])
        variance = factor**2 * variance + added
        variances.append(variance)
    return variances


@pytest.mark.parametrize("dynamics", EXACT)
def test_exact_transition_keeps_the_share_of_noise_that_the_sde_keeps(dynamics: FlowSDE | DanceSDE) -> None:
    """With a known clean sample the SDE is linear: its share of old noise by numerical integration, variance s^2."""
    t, s = 0.9, 0.55
    u = torch.linspace(s, t, 200_001, dtype=torch.float64)
    squared_g = dynamics.noise_level**2 * (u / (1 - u) if isinstance(dynamics, FlowSDE) else torch.ones_like(u))
    kept = math.exp(-float(torch.trapezoid(squared_g / (2 * u**2), u)))
    factor, variance = linear_step(dynamics, t, s, 0.0, 0.0)  # a clean sample of 0, so that x is t times the noise
    assert factor * t == pytest.approx(s * kept, rel=1e-8)
    assert variance == pytest.approx(s**2 * (1 - kept**2), rel=1e-8)


@pytest.mark.parametrize("dynamics", EXACT)
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_exact_transition_has_the_marginals_of_the_flow_in_any_number_of_steps(
    dynamics: FlowSDE | DanceSDE, steps: int
) -> None:
    levels = torch.linspace(0.95, 0.2, steps + 1, dtype=torch.float64).tolist()
    assert sampled_variance(dynamics, levels, 0.0) == pytest.approx([s**2 for s in levels[1:]], rel=1e-9)
    euler = sampled_variance(type(dynamics)(dynamics.noise_level), levels, 0.0)[-1]
    assert euler > 1.03 * levels[-1] ** 2  # excess noise of Euler-Maruyama


def test_exact_transition_loses_the_spread_that_the_prediction_leaves_open() -> None:
    """The predicted clean sample stays as it is within a step, although new noise would change it."""
    changes: dict[tuple[str, int], float] = {}
    for steps in (8, 200):
        levels = torch.linspace(0.95, 0.05, steps + 1, dtype=torch.float64).tolist()
        target = (0.95 * 0.8) ** 2 + 0.05**2
        for transition in ("euler", "exact"):
            changes[transition, steps] = sampled_variance(FlowSDE(0.7, transition), levels, 0.8)[-1] / target - 1
    assert changes["exact", 8] == pytest.approx(-0.287, abs=2e-3) and abs(changes["euler", 8]) < 0.01
    assert max(map(abs, (changes["exact", 200], changes["euler", 200]))) < 0.02


def test_first_exact_step_of_flow_sde_replaces_all_noise() -> None:
    factor, variance = linear_step(FlowSDE(0.7, "exact"), 1.0, 0.8, 0.0, 0.9)
    assert factor == 0 and variance == pytest.approx(0.64)


@pytest.mark.parametrize(
    "dynamics", [ODE(), DDIM(0.0), FlowSDE(0.0), DanceSDE(0.0), CPS(0.0), FlowSDE(0.0, "exact"), DanceSDE(0.0, "exact")]
)
def test_dynamics_without_noise_are_euler_steps(dynamics: SamplerDynamics) -> None:
    x, velocity, _ = published_inputs()
    distribution, _ = denoising_step(dynamics, 25, 3)
    t, s = RectifiedFlow(shift=3.0).timesteps(25)[3:5]
    torch.testing.assert_close(distribution.mean, x + (s - t) * velocity, rtol=1e-5, atol=1e-5)
    assert not distribution.std.any()
    assert not dynamics.stochastic


@pytest.mark.parametrize("path", [RectifiedFlow(), VariancePreserving(), VariancePreserving(beta_schedule="cosine")])
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_ddim_step_has_the_target_noise_level(path: NoisePath, eta: float) -> None:
    """A step from x_t with the true clean sample has the marginal of x_s, whatever eta."""
    clean, noise = torch.zeros(1, 4096), Randomness(0, 0, torch.arange(1)).normal("noise", 4096)
    t, s = torch.tensor([0.8]), torch.tensor([0.4])
    x = path.alpha(t) * clean + path.sigma(t) * noise
    distribution = DDIM(eta).step(path, DenoisingStep(x, clean, t, s, 0.0))
    noise_scale = (path.sigma(s) ** 2 - distribution.std**2).sqrt()
    torch.testing.assert_close(distribution.mean, noise_scale * noise, rtol=1e-5, atol=1e-6)


@dataclass
class OptimalDenoiser(Backbone):
    """The optimal denoiser of data that is normal with a standard deviation of 2."""

    process: GaussianProcess
    net: nn.Module = field(default_factory=nn.Identity)
    shape: tuple[int, ...] = (4096,)
    pixels: tuple[int, int, int, int] = (1, 3, 1, 1)
    forward_passes: int = 1

    def embed(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        return Condition(tuple(prompts))

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        alpha, sigma = (expand_dims_like(f(t), x) for f in (self.process.path.alpha, self.process.path.sigma))
        clean = 4 * alpha / (4 * alpha**2 + sigma**2) * x
        return self.process.path.target(clean, (x - alpha * clean) / sigma, t)

    def encode(self, pixels: Tensor) -> Tensor:
        return pixels

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        return x


@pytest.mark.parametrize(
    "process",
    [
        GaussianProcess(RectifiedFlow(), ODE(), 100),
        GaussianProcess(RectifiedFlow(shift=3.0), ODE(), 100),
        GaussianProcess(RectifiedFlow(), DDIM(1.0), 100),
        GaussianProcess(RectifiedFlow(), FlowSDE(0.7), 100),
        GaussianProcess(RectifiedFlow(), FlowSDE(0.7), 100, SDEWindow(20)),
        GaussianProcess(RectifiedFlow(), DanceSDE(0.3), 100),
        GaussianProcess(TrigFlow(), DDIM(1.0), 100),
        GaussianProcess(RectifiedFlow(), FlowSDE(1.5, "exact"), 100),
        GaussianProcess(VariancePreserving(set_alpha_to_one=True), ODE(), 100),
        GaussianProcess(VariancePreserving(prediction_type="v_prediction", set_alpha_to_one=True), DDIM(1.0), 100),
        GaussianProcess(VariancePreserving(beta_schedule="cosine", timestep_spacing="trailing"), DDIM(0.5), 100),
    ],
)
def test_optimal_denoiser_samples_the_data_distribution(process: GaussianProcess) -> None:
    """CPS is not included: it preserves the coefficients of clean sample and noise, not the variance."""
    model = OptimalDenoiser(process)
    rng = Randomness(0, 0, torch.arange(2))
    trajectory = process.start(model, model.embed(["", ""]), rng).finish()
    assert float(trajectory.final.std()) == pytest.approx(2.0, rel=0.05)
    assert float(trajectory.final.mean()) == pytest.approx(0.0, abs=0.1)
    noises = [s.action - process.action_distribution(model, trajectory.cond, s).mean for s in trajectory.segments]
    for previous, current in pairwise(noises):  # each step draws new noise
        assert abs(float(torch.corrcoef(torch.stack([previous.flatten(), current.flatten()]))[0, 1])) < 0.05


@pytest.mark.parametrize("path", [RectifiedFlow(), TrigFlow(), VariancePreserving()])
def test_consistency_sampling_noises_the_clean_sample_anew(path: NoisePath) -> None:
    """The density of a step is exactly that of the noise it draws, and it keeps nothing of the noise before."""
    t, s = torch.tensor([0.9, 0.8]), torch.tensor([0.5, 0.3])
    rng = Randomness(0, 0, torch.arange(2))
    x, clean = rng.normal("x", 4096), rng.normal("clean", 4096)
    step = ConsistencySampling().step(path, DenoisingStep(x, clean, t, s, 0.0))
    torch.testing.assert_close(step.mean, path.alpha(s)[:, None] * clean)
    torch.testing.assert_close(step.std, path.sigma(s))
    other = ConsistencySampling().step(path, DenoisingStep(-x, clean, t, s, 0.0))
    assert torch.equal(other.mean, step.mean)
    normal = torch.distributions.Normal(step.mean, step.std[:, None])
    action = step.sample(rng, "noise")
    torch.testing.assert_close(step.log_prob(action)[:, 0], normal.log_prob(action).mean(1))


def test_dynamics_on_unsupported_path_are_refused() -> None:
    with pytest.raises(ValueError, match=r"FlowSDE.*RectifiedFlow.*VariancePreserving.*TM331"):
        GaussianProcess(VariancePreserving(), FlowSDE())


def window_starts(window: SDEWindow, steps: int, num_training_steps: int) -> list[int]:
    rows = torch.arange(2)
    return [window.step_range(Randomness(0, step, rows), steps).start for step in range(num_training_steps)]


@pytest.mark.parametrize(
    ("guidance", "calls"),
    [
        (Guidance(3.0), 8),
        (Guidance(3.0, rollouts_only=True), 8 + 3),  # three steps of four add noise
        (Guidance(3.0, interval=(0.5, 1.0), rollouts_only=True), 7 + 3),
    ],
)
def test_guided_samples_have_a_first_ratio_of_one(guidance: Guidance, calls: int) -> None:
    process = GaussianProcess(RectifiedFlow(), FlowSDE(), 4).with_action_means()
    policy = replace(toys.policy("flow", guidance=guidance), process=process)
    cond = policy.embed(toys.PROMPTS)
    with torch.no_grad():
        rollout = policy.rollout(cond, Randomness(0, 0, torch.arange(4)))
        segments = rollout.finish().segments
    for segment in segments:
        for gradient in (True, False):  # of the network that trains, and of its reference
            with torch.set_grad_enabled(gradient):
                distribution = policy.action_distribution(cond, segment)
            assert distribution.log_prob(segment.action).equal(segment.log_prob)
            assert distribution.mean.equal(segment.mean)
    assert len(segments) == 3 and rollout.network_calls == 4 * calls


def test_fixed_sde_window() -> None:
    assert set(window_starts(SDEWindow(4, start_min=3, schedule="fixed"), 25, 60)) == {3}


def test_progressive_sde_window() -> None:
    window = SDEWindow(4, start_min=1, start_max=3, schedule="progressive", every=2)
    assert window_starts(window, 25, 10) == [1, 1, 2, 2, 3, 3, 1, 1, 2, 2]
    strides = SDEWindow(2, start_min=0, start_max=4, schedule="progressive", every=1, stride=2)
    assert window_starts(strides, 10, 6) == [0, 2, 4, 1, 3, 0]


def test_random_sde_window_is_shared_and_excludes_last_step() -> None:
    window = SDEWindow(3, start_min=2)
    windows = set()
    for step in range(200):
        ranges = {window.step_range(Randomness(0, step, torch.arange(4) + 4 * rank), 10) for rank in range(3)}
        assert len(ranges) == 1
        windows.add(ranges.pop())
    assert {r.start for r in windows} == {2, 3, 4, 5, 6}
    assert all(len(r) == 3 and r.stop <= 9 for r in windows)


def test_sde_window_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\b8 steps.*TM332"):
        GaussianProcess(RectifiedFlow(), FlowSDE(), 8, SDEWindow(4, start_min=4))
