"""Contract of latent generators: all dynamics can be rescored, and low noise is restored."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import toys
from contract_cases import (
    BATCH_SIZE,
    cached_policy,
    cached_rollout,
    generator_params,
    make_rng,
    rescore,
    sample_rollout,
)

from tastemaker.core.policy import Guidance
from tastemaker.processes.dynamics import CPS, DDIM, DanceSDE
from tastemaker.processes.gaussian import GaussianProcess, SDEWindow
from tastemaker.processes.paths import RectifiedFlow

LATENTS = generator_params(gaussian=True)


@pytest.mark.parametrize(
    "process",
    [
        GaussianProcess(RectifiedFlow(3.0), DanceSDE(0.3), 6),
        GaussianProcess(RectifiedFlow(), CPS(0.8), 6),
        GaussianProcess(RectifiedFlow(), DDIM(0.5), 6),
        GaussianProcess(RectifiedFlow(), DanceSDE(0.3), 6, SDEWindow(2)),
        GaussianProcess(toys.DARK, DDIM(0.5), 6),
        GaussianProcess(replace(toys.DARK, set_alpha_to_one=False, timestep_spacing="leading"), DDIM(1.0), 6),
    ],
)
def test_rescored_log_probs_match_rollout_for_all_dynamics(process: GaussianProcess) -> None:
    policy = replace(toys.policy("flow"), process=process)
    trajectory = sample_rollout(policy)
    steps = process.num_steps if process.path.timesteps(process.num_steps)[-1] > 0 else process.num_steps - 1
    assert len(trajectory.segments) == (process.window.size if process.window else steps)
    for log_prob, rollout_log_prob in rescore(policy, trajectory):
        assert torch.equal(log_prob, rollout_log_prob)


@pytest.mark.parametrize("kind", LATENTS)
def test_corruption_at_level_zero_is_identity(kind: tuple[str, Guidance | None]) -> None:
    policy, x = cached_policy(*kind), cached_rollout(*kind).final
    torch.testing.assert_close(policy.corrupt(x, make_rng(), torch.zeros(BATCH_SIZE)).x, x)
    torch.testing.assert_close(
        policy.corrupt(x, make_rng(), torch.full((BATCH_SIZE,), 1e-7)).x, x, rtol=1e-3, atol=1e-2
    )


@pytest.mark.parametrize("kind", LATENTS)
@torch.no_grad()
def test_restore_at_low_noise(kind: tuple[str, Guidance | None]) -> None:
    policy, trajectory = cached_policy(*kind), cached_rollout(*kind)
    noisy = policy.corrupt(trajectory.final, make_rng(), torch.full((BATCH_SIZE,), 1e-6))
    torch.testing.assert_close(policy.restore(trajectory.cond, noisy).mean, trajectory.final, rtol=1e-2, atol=2e-2)
