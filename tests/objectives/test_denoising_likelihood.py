"""Likelihoods from denoising errors: recorded values, all kinds against each other, all paths."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
import toys
from golden_cases import assert_golden, load_cases

from tastemaker.core.policy import Guidance
from tastemaker.core.randomness import Randomness
from tastemaker.objectives.denoising_likelihood import (
    LikelihoodKind,
    denoising_likelihood,
    error_likelihood,
    predict_clean,
    velocity_distance,
    velocity_level,
)
from tastemaker.processes.paths import RectifiedFlow, VariancePreserving

KINDS: dict[str, LikelihoodKind] = {"Uniform": "uniform", "t": "t", "ghuber": "ghuber"}
CASES = [("awm", name) for name in load_cases("awm")] + [("elbo_ratio", name) for name in load_cases("elbo_ratio")]


@pytest.mark.parametrize(("file", "name"), CASES)
def test_likelihoods_and_anchors_match_recorded_values(file: str, name: str) -> None:
    case = load_cases(file)[name]
    kind: LikelihoodKind = KINDS[case.config["weighting"]] if file == "awm" else "adaptive"
    x = case.inputs
    for output, velocities in (("log_prob", "v"), ("old_log_prob", "v_old"), ("ref_log_prob", "v_ref")):
        if output not in case.outputs:
            continue
        levels = [
            error_likelihood(clean_of(x, velocities, j), x["x0"], t.expand(len(x["x0"])), kind)
            for j, t in enumerate(x["t"])
        ]
        assert_golden(torch.stack(levels), case.outputs[output])
    if "kl_loss" in case.outputs:
        distances = [
            velocity_distance(clean_of(x, "v", j), clean_of(x, "v_ref", j), t.expand(len(x["x0"])))
            for j, t in enumerate(x["t"])
        ]
        assert_golden(torch.stack(distances).mean(), case.outputs["kl_loss"])


def clean_of(x: dict[str, torch.Tensor], velocities: str, level: int) -> torch.Tensor:
    t = x["t"][level]
    return (1 - t) * x["x0"] + t * x["noise"][level] - t * x[velocities][level]


def test_kinds_are_weights_and_powers_of_the_same_error() -> None:
    generator = torch.Generator().manual_seed(0)
    clean, error = torch.randn(2, 3, 4, 4, generator=generator, dtype=torch.float64)
    t = torch.tensor([0.9, 0.5, 0.1], dtype=torch.float64)
    prediction = clean - t.view(-1, 1, 1) * error
    square, absolute = (error**2).flatten(1).mean(1), error.abs().flatten(1).mean(1)
    expected = {
        "uniform": square,
        "t": t * square,
        "t2": t**2 * square,
        "huber": t * square.sqrt(),
        "ghuber": t / 0.25 * square**0.25,
        "adaptive": t * square / absolute,
        "adaptive_v": square / absolute,
        "elbo": (1 - t) / (t + 1e-3) * square,
    }
    assert set(expected) == set(get_args(LikelihoodKind))
    for kind in get_args(LikelihoodKind):
        torch.testing.assert_close(error_likelihood(prediction, clean, t, kind), -expected[kind], rtol=2e-2, atol=1e-3)
    for kind, power, factor in (("huber", 0.5, 2.0), ("t", 1.0, 1.0)):
        other = error_likelihood(prediction, clean, t, kind)  # type: ignore[arg-type]
        assert_golden(error_likelihood(prediction, clean, t, "ghuber", power), factor * other)


def test_the_same_network_has_the_same_likelihood_on_every_path() -> None:
    """A noisy sample of a variance-preserving path, divided by alpha + sigma, is one of the straight path."""
    path, t = VariancePreserving(), torch.tensor([0.05, 0.4, 0.8])
    level = velocity_level(path, t)
    assert torch.equal(velocity_level(RectifiedFlow(), t), t)
    assert ((level > 0) & (level < 1)).all() and (level.diff() > 0).all()
    torch.testing.assert_close(level / (1 - level), path.sigma(t) / path.alpha(t))


@pytest.mark.parametrize("name", ["flow", "epsilon", "video"])
def test_likelihood_of_a_policy_ignores_guidance_and_has_gradients(name: str) -> None:
    policy: Any = toys.policy(name, guidance=Guidance(3.0))
    rng = Randomness(0, 0, torch.arange(4))
    cond = policy.embed(toys.PROMPTS)
    clean = policy.sample(cond, rng).final
    noisy = policy.corrupt(clean, rng)
    likelihood = denoising_likelihood(policy, cond, clean, noisy, "adaptive")
    error = predict_clean(policy, cond, noisy).double() - clean.double()
    expected = -(error**2).flatten(1).mean(1) / error.abs().flatten(1).mean(1)
    torch.testing.assert_close(likelihood, expected, rtol=1e-5, atol=0)
    assert likelihood.dtype == torch.float64
    assert toys.gradient(policy, likelihood.sum()).abs().sum() > 0
