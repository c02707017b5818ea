"""Likelihoods of samples from denoising errors: minus the error of a noised sample, weighted in one of several ways.

Objectives on the forward process (AWM, V-GRPO, EPG, RAM, DGPO, CRD) differ in their coefficients; this part is shared.
"""

from __future__ import annotations

import math
from typing import Literal, cast

import torch
from torch import Tensor

from ..core.distributions import expand_dims_like
from ..core.guidance import without_guidance
from ..core.policy import Policy, Process
from ..core.types import Condition, Corrupted
from ..processes.gaussian import GaussianProcess
from ..processes.paths import NoisePath

LikelihoodKind = Literal["uniform", "t", "t2", "huber", "ghuber", "adaptive", "adaptive_v", "elbo"]
SampleLikelihood = Literal["output", LikelihoodKind]  # output: that of the process, the only one of tokens
MIN_ABS_ERROR = 1e-5  # of the self-normalized kinds
HUBER_EPS = 1e-10  # added to squared errors before a root


def velocity_level(path: NoisePath, t: Tensor) -> Tensor:
    """The level of the straight path with the same ratio of noise to signal, sigma / (alpha + sigma): [B].

    It is t on rectified flow. Divided by alpha + sigma, a sample of any path is one of the straight path, so that one
    definition of a velocity serves networks that predict velocities, noise or clean samples.
    """
    alpha, sigma = path.alpha(t), path.sigma(t)
    return sigma / (alpha + sigma)


def predict_clean(policy: Policy[GaussianProcess], cond: Condition, noisy: Corrupted) -> Tensor:
    """The clean samples that the network predicts with its condition and without guidance: [B, ...]."""
    model, cond = without_guidance(policy.model, cond)
    return policy.process.restore(model, cond, noisy).mean


def denoising_likelihood(
    policy: Policy[GaussianProcess],
    cond: Condition,
    clean: Tensor,
    noisy: Corrupted,
    kind: LikelihoodKind,
    ghuber_power: float = 0.25,
) -> Tensor:
    """Likelihood of samples `clean` [B, ...] given their corruption, without guidance: [B] float64."""
    level = velocity_level(policy.process.path, noisy.t)
    return error_likelihood(predict_clean(policy, cond, noisy), clean, level, kind, ghuber_power)


def sample_likelihood(
    policy: Policy[Process], cond: Condition, x: Tensor, noisy: Corrupted, kind: SampleLikelihood
) -> Tensor:
    """Log-likelihood of samples given their corruption, without guidance: [B].

    `output` is that of the process: on diffusion models, minus the squared error of the network's output.
    """
    if kind == "output":
        return policy.likelihood(cond, x, noisy)
    return denoising_likelihood(as_gaussian(policy), cond, x, noisy, kind).float()


def prediction_likelihood(
    path: NoisePath, prediction: Tensor, x: Tensor, noisy: Corrupted, kind: SampleLikelihood
) -> Tensor:
    """`sample_likelihood` of samples [B, ...] by the clean samples that a network predicts: [B]."""
    if kind == "output":
        return -path.output_error_weight(noisy.t) * ((prediction - x) ** 2).flatten(1).mean(1)
    return error_likelihood(prediction, x, velocity_level(path, noisy.t), kind).float()


def as_gaussian(policy: Policy[Process]) -> Policy[GaussianProcess]:
    """The same policy; its process has to be Gaussian, which objectives check in `find_problem` before a run."""
    assert isinstance(policy.process, GaussianProcess)
    return cast(Policy[GaussianProcess], policy)


def error_likelihood(
    prediction: Tensor, clean: Tensor, level: Tensor, kind: LikelihoodKind, ghuber_power: float = 0.25
) -> Tensor:
    """Minus the error of predicted clean samples [B, ...] at levels [B] of the straight path: [B] float64.

    With d = velocity - (noise - clean) and m = mean d^2, the error of the clean sample is -level * d:

    uniform     m                              t, t2       level m, level^2 m
    huber       level (sqrt m - 0)             ghuber      level / p (m^p - 0), each m with 1e-10 added
    adaptive    mean e^2 / mean |e|, e = -level d          adaptive_v  m / mean |d|; both means without gradient
    elbo        (1 - level) / (level + 0.001) m

    Computed in float64, because ratios are differences of nearly equal errors.
    """
    level = level.double()
    error = prediction.double() - clean.double()
    if kind == "adaptive":
        return -self_normalized_square(error)
    error = error / expand_dims_like(level, error)
    if kind == "adaptive_v":
        return -self_normalized_square(error)
    square = (error**2).flatten(1).mean(1)
    if kind in ("huber", "ghuber"):
        power = 0.5 if kind == "huber" else ghuber_power
        scale = level if kind == "huber" else level / power
        return -scale * ((square + HUBER_EPS).pow(power) - math.pow(HUBER_EPS, power))
    weights = {"uniform": torch.ones_like(level), "t": level, "t2": level**2, "elbo": (1 - level) / (level + 1e-3)}
    return -weights[kind] * square


def self_normalized_square(error: Tensor) -> Tensor:
    """Mean squared error divided by the mean absolute error, whose gradient is stopped: [B]."""
    scale = error.detach().abs().flatten(1).mean(1).clamp(min=MIN_ABS_ERROR)
    return (error**2).flatten(1).mean(1) / scale


def velocity_distance(prediction: Tensor, other: Tensor, level: Tensor) -> Tensor:
    """Mean squared distance of the velocities that two predictions of clean samples imply: [B] float64."""
    difference = (prediction.double() - other.double()) / expand_dims_like(level.double(), prediction)
    return (difference**2).flatten(1).mean(1)


def velocity_norm(noisy: Corrupted, clean: Tensor, prediction: Tensor, level: Tensor) -> Tensor:
    """Root mean square of the velocity, noise - clean on the straight path, that a predicted clean sample implies: [B].

    An error of the clean sample is -level times an error of the velocity.
    """
    velocity = noisy.noise - clean + (clean - prediction) / expand_dims_like(level, clean)
    return (velocity.double() ** 2).flatten(1).mean(1).sqrt()


def norm_guard(
    noisy: Corrupted, clean: Tensor, prediction: Tensor, reference: Tensor, level: Tensor
) -> tuple[Tensor, Tensor]:
    """NormGuard: the squared excess of the velocity's norm over the reference's, and the ratio of both: [B] each.

    Norms are root mean squares. Rewards inflate them, which oversaturates images; smaller norms are not penalized. The
    ratio has no gradient.
    """
    norm, reference_norm = (velocity_norm(noisy, clean, each, level) for each in (prediction, reference))
    return (norm - reference_norm).clamp(min=0) ** 2, (norm / reference_norm).detach()


def find_norm_guard_problem(process: Process, coefficient: float) -> str | None:
    """Why the norm of velocities cannot be penalized on this process; None if it can or is not."""
    if isinstance(process, GaussianProcess) or not coefficient:
        return None
    return "objective.norm_guard_coef: token models have no velocity; set objective.norm_guard_coef=0 [TM1543]"
