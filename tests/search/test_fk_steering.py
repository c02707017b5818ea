"""FK steering: potentials, resampling, the distribution it samples, costs and random numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

import pytest
import torch
import toys
from exact_denoiser import DATA_STD, FunctionVerifier, exact_policy, numbered_prompts
from torch import Tensor

from tastemaker.core.errors import RewardError
from tastemaker.core.policy import Guidance
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.processes.dynamics import DDIM, ODE, DenoisingStep, FlowSDE
from tastemaker.processes.gaussian import GaussianProcess, SDEWindow
from tastemaker.search.base import RubricVerifier
from tastemaker.search.best_of_n import BestOfN
from tastemaker.search.fk_steering import (
    FKSteering,
    ParticleWeights,
    Potential,
    draw_index,
    effective_sample_size,
    systematic_resampling,
)

POTENTIALS: tuple[Potential, ...] = get_args(Potential)
PROCESS = GaussianProcess(dynamics=FlowSDE(0.7), num_steps=8)


def test_weights_of_each_potential_by_hand() -> None:
    rewards = [torch.tensor([[-1.0, 0.5]]), torch.tensor([[-2.0, 1.0]])]
    expected = {
        "diff": [[-2, 1], [-4, 2]],  # 2 (r - last r), the first from 0
        "max": [[-2, 1], [-4, 3]],  # a negative reward is not raised to 0
        "add": [[-2, 1], [-8, 4]],
        "rt": [[-2, 1], [-6, 3]],
    }
    for potential in POTENTIALS:
        particles = ParticleWeights(potential, 2.0, (1, 2))
        for reward, log_weight in zip(rewards, expected[potential], strict=True):
            particles.update(reward)
            assert particles.log_weight.tolist() == [log_weight], potential


@pytest.mark.parametrize("potential", POTENTIALS)
def test_potentials_of_every_lineage_multiply_to_the_tilt_of_its_last_reward(potential: Potential) -> None:
    generator = torch.Generator().manual_seed(0)
    particles = ParticleWeights(potential, 3.0, (5, 4))
    product = torch.zeros(5, 4, dtype=torch.float64)  # log, by ancestry
    resampled = 0
    for _ in range(3):
        before = particles.log_weight.clone()
        particles.update(torch.randn(5, 4, generator=generator))
        product += particles.log_weight - before
        rows = particles.resample(torch.rand(5, generator=generator), 0.75 * 4)
        product = product.gather(1, rows)
        resampled += int((particles.log_weight == 0).all(1).sum())
    assert 0 < resampled < 15  # some prompts keep their weights, which later potentials multiply
    last, before = torch.randn(5, 4, generator=generator), particles.log_weight.clone()
    particles.finish(last)
    torch.testing.assert_close(product + particles.log_weight - before, 3.0 * last.double())


def test_prompts_with_a_large_effective_sample_size_keep_particles_and_weights() -> None:
    particles = ParticleWeights("rt", 1.0, (2, 4))
    particles.update(torch.tensor([[0.1, 0.0, 0.0, 0.0], [9.0, 0.0, 0.0, 0.0]]))
    ess = effective_sample_size(particles.log_weight)
    assert ess[0] == pytest.approx(4, abs=0.05) and ess[1] == pytest.approx(1, abs=0.01)
    rows = particles.resample(torch.tensor([0.5, 0.5]), 2.0)
    assert rows.tolist() == [[0, 1, 2, 3], [0, 0, 0, 0]]
    torch.testing.assert_close(
        particles.log_weight, torch.tensor([[0.1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.float64), rtol=1e-6, atol=1e-6
    )


def test_systematic_resampling_is_unbiased_and_has_the_least_spread() -> None:
    weight = torch.tensor([0.5, 0.0, 0.3, 0.2], dtype=torch.float64)
    uniform = (torch.arange(10_000) + 0.5) / 10_000
    rows = systematic_resampling(weight.log().expand(10_000, 4), uniform)
    copies = torch.stack([(rows == i).sum(1) for i in range(4)], 1).double()
    torch.testing.assert_close(copies.mean(0), 4 * weight, rtol=0, atol=1e-3)
    assert ((copies - 4 * weight).abs() < 1).all()  # never more than rounding away from n w
    for edge in (0.0, 1 - 2**-24):  # a particle without weight is never copied, the last is reached
        assert systematic_resampling(weight.log()[None], torch.tensor([edge])).tolist()[0][-1] in (2, 3)
    assert systematic_resampling(torch.zeros(1, 4), torch.tensor([0.3])).tolist() == [[0, 1, 2, 3]]
    drawn = draw_index(weight.log().expand(10_000, 4), uniform).bincount(minlength=4) / 10_000
    torch.testing.assert_close(drawn.double(), weight, rtol=0, atol=1e-3)


def base_moments(process: GaussianProcess) -> tuple[float, float]:
    """Mean and variance of the samples of the exact denoiser without reward: every step is affine."""
    model, (mean, variance) = exact_policy(process).model, (0.0, 1.0)
    levels = process.path.timesteps(process.num_steps)
    cond = model.embed(["", ""])
    probe = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1, 1)
    for t, s in pairwise(levels[:, None].expand(-1, 2)):
        clean = process.predict_clean(model, probe, t, cond)
        if float(s[0]) > 0:
            distribution: Any = process.dynamics.step(process.path, DenoisingStep(probe, clean, t, s, float(levels[1])))
            step, std = distribution.mean.flatten(), float(distribution.std.flatten()[0])
        else:
            step, std = process.ode_step(probe, t, s, clean).flatten(), 0.0
        slope = float(step[1] - step[0])
        mean, variance = float(step[0]) + slope * mean, slope**2 * variance + std**2
    return mean, variance


@pytest.mark.parametrize("potential", POTENTIALS)
@pytest.mark.parametrize("kind", ["linear", "quadratic"])
def test_many_particles_sample_the_tilted_normal_distribution(potential: Potential, kind: str) -> None:
    """p(x0) exp(lambda r(x0)) of a normal p is normal for r = x0 and for r = -(x0 - 1)^2."""
    mean, variance = base_moments(PROCESS)
    assert variance == pytest.approx(DATA_STD**2, rel=0.3)
    if kind == "linear":
        scale, verifier = 1.5, FunctionVerifier(lambda x: x)
        expected, spread = mean + scale * variance, variance
    else:
        scale, verifier = 1.5, FunctionVerifier(lambda x: -((x - 1) ** 2))
        spread = 1 / (1 / variance + 2 * scale)
        expected = spread * (mean / variance + 2 * scale)
    count, search = 1500, FKSteering(64, potential, scale, (0.25, 0.5, 0.75), answer="sample")
    policy, batch = exact_policy(PROCESS), numbered_prompts(count)
    x = search.run(policy, verifier, batch, Randomness(3, 0, torch.arange(count))).x.flatten()
    error = math.sqrt(spread / count)
    assert float(x.mean()) == pytest.approx(expected, abs=4 * error)
    assert abs(expected - mean) > 12 * error  # untilted samples would fail
    assert float(x.var()) == pytest.approx(spread, rel=4 * math.sqrt(2 / count))


def test_copies_receive_their_own_noise() -> None:
    policy, batch, rng = exact_policy(PROCESS), numbered_prompts(1), Randomness(0, 0, torch.arange(1))
    finals: list[Tensor] = []

    def record(x: Tensor) -> Tensor:
        finals.append(x)
        return 50 * x

    FKSteering(8, resample_at=(0.5,), ess_threshold=1).run(policy, FunctionVerifier(record), batch, rng)
    assert len(finals) == 2 and len(finals[1].unique()) == 8
    assert finals[1].min() > finals[0].mean()  # all descend from the best preview


def test_network_and_reward_calls_are_those_made() -> None:
    policy, verifier = exact_policy(PROCESS), FunctionVerifier(lambda x: x)
    rng = Randomness(0, 0, torch.arange(3))
    result = FKSteering(4).run(policy, verifier, numbered_prompts(3), rng)
    # Of steps 2, 4, 5 and 7 the last has no step with noise after it.
    assert verifier.calls == [(2 / 8, 12), (4 / 8, 12), (5 / 8, 12), (1.0, 12)]
    assert result.cost.verifier_calls == sum(count for _, count in verifier.calls)
    assert result.cost.calls == policy.model.predictions == 3 * 4 * 8  # type: ignore[attr-defined]
    best = BestOfN(4).run(exact_policy(PROCESS), FunctionVerifier(lambda x: x), numbered_prompts(3), rng)
    assert best.cost.calls == result.cost.calls
    guided = toys.policy("flow", guidance=Guidance(2.0))
    twice = FKSteering(2).run(guided, RubricVerifier(toys.rubric()), toys.prompts(4), Randomness(0, 0, torch.arange(4)))
    assert twice.cost.calls == 2 * 4 * 2 * 8


@pytest.mark.parametrize("name", ["flow", "epsilon", "masked"])
def test_results_do_not_depend_on_the_split_into_batches(name: str) -> None:
    policy, verifier, search = toys.pretrained_policy(name), RubricVerifier(toys.rubric()), FKSteering(4)
    batch = toys.prompts(8)
    whole = search.run(policy, verifier, batch, Randomness(5, 0, torch.arange(8)))
    again = search.run(policy, verifier, batch, Randomness(5, 0, torch.arange(8)))
    assert torch.equal(whole.x, again.x)
    parts = [search.run(policy, verifier, toys.prompts(4), Randomness(5, 0, torch.arange(4) + k)) for k in (0, 4)]
    torch.testing.assert_close(torch.cat([part.x for part in parts]), whole.x, rtol=1e-4, atol=1e-4)
    other = search.run(policy, verifier, batch, Randomness(6, 0, torch.arange(8)))
    assert not torch.equal(other.x, whole.x)


def test_steering_raises_the_reward_of_a_pretrained_generator() -> None:
    policy, batch, rng = toys.pretrained_policy("flow"), toys.prompts(64), Randomness(11, 0, torch.arange(64))
    verifier = RubricVerifier(toys.rubric())
    single, steered = (FKSteering(n, reward_scale=20).run(policy, verifier, batch, rng) for n in (1, 4))
    assert toys.z_score(single.score, steered.score) > 3
    torch.testing.assert_close(steered.score, toys.rubric().score(policy.decode(steered.x), batch.prompts).total)


def test_samplers_without_noise_are_refused() -> None:
    def run(process: GaussianProcess, search: FKSteering = FKSteering(2)) -> None:
        policy, verifier = exact_policy(process), FunctionVerifier(lambda x: x)
        search.run(policy, verifier, numbered_prompts(1), Randomness(0, 0, torch.arange(1)))

    for dynamics in (ODE(), DDIM(0.0), FlowSDE(0.0)):
        with pytest.raises(ConfigError, match=r"deterministic.*process\.dynamics\.type.*TM1623"):
            run(replace(PROCESS, dynamics=dynamics))
    with pytest.raises(ConfigError, match=r"process\.num_steps.*process\.window.*TM1624"):
        run(replace(PROCESS, num_steps=2))
    early = replace(PROCESS, window=SDEWindow(2, schedule="fixed"))
    with pytest.raises(ConfigError, match="TM1624"):
        run(early)
    run(early, FKSteering(2, resample_at=(0.1,)))  # after the first of two steps with noise
    causal, rng = toys.policy("causal"), Randomness(0, 0, torch.arange(4))
    with pytest.raises(ConfigError, match="TM100"):
        FKSteering(2).run(causal, RubricVerifier(toys.rubric()), toys.prompts(4), rng)
    with pytest.raises(RewardError, match="TM1625"):
        FKSteering(2).run(exact_policy(PROCESS), FunctionVerifier(lambda x: x / 0), numbered_prompts(4), rng)


def test_impossible_settings_are_refused() -> None:
    for settings in ({"reward_scale": 0}, {"reward_scale": math.inf}, {"ess_threshold": 0}, {"ess_threshold": 1.5}):
        with pytest.raises(ValueError, match=r"reward_scale.*ess_threshold.*TM1621"):
            FKSteering(**settings)
    for progress in ((), (0.0,), (0.5, 1.0)):
        with pytest.raises(ValueError, match=r"resample_at.*TM1622"):
            FKSteering(resample_at=progress)
    with pytest.raises(ValueError, match="TM557"):
        FKSteering(0)
