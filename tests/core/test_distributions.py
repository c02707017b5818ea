"""Gaussian distributions of actions, against PyTorch's."""

from __future__ import annotations

import torch
from torch.distributions import Normal, kl_divergence

from tastemaker.core.distributions import Gaussian


def test_gaussian_kl_and_log_prob_are_element_means_of_the_closed_forms() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, other_mean, value = (torch.randn(3, 4, 5, generator=generator) for _ in range(3))
    std = torch.tensor([0.05, 0.5, 2.0])
    gaussian, other = Gaussian(mean, std), Gaussian(other_mean, std)
    normal, other_normal = (Normal(x, std[:, None, None].expand_as(x)) for x in (mean, other_mean))
    expected = kl_divergence(normal, other_normal).mean((1, 2))[:, None]
    torch.testing.assert_close(gaussian.kl(other), expected)
    torch.testing.assert_close(gaussian.log_prob(value), normal.log_prob(value).mean((1, 2))[:, None])
