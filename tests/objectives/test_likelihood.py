"""Likelihood objective: loss, prompt dropout and the latent cache."""

from __future__ import annotations

import math

import pytest
import torch
import toys

from tastemaker.objectives.likelihood import LatentCache, Likelihood


def test_diffusion_likelihood_is_minus_the_output_error() -> None:
    objective = Likelihood(prompt_dropout=0.0)
    for name in ("flow", "epsilon", "video"):
        ctx, experience = toys.policy_with_experience(objective, name)
        policy, noisy = ctx.policy, ctx.policy.corrupt(experience.x, experience.rng)
        target = noisy.noise if name == "epsilon" else noisy.noise - experience.x
        error = (policy.model.predict(noisy.x, noisy.t, experience.cond) - target).pow(2).flatten(1).mean(1)
        torch.testing.assert_close(toys.total_loss(objective, ctx, experience), error)


def test_prompt_dropout_rate() -> None:
    policy = toys.policy("flow")
    experience = Likelihood(prompt_dropout=0.25).collect(toys.context(policy, 1000), toys.image_batch(1000, 1, 0))
    assert sum(prompt == "" for prompt in experience.cond.prompts) == pytest.approx(
        250, abs=4 * math.sqrt(1000 * 0.25 * 0.75)
    )


def test_cached_latents_are_not_encoded_again() -> None:
    cache, encoded = LatentCache(), []

    def encode(pixels: torch.Tensor) -> torch.Tensor:
        encoded.append(pixels)
        return pixels.flatten(1)

    pixels, device = torch.rand(4, 1, 3, 2, 2), torch.device("cpu")
    for indices, new in (([0, 3], 2), ([3, 1, 0], 1), ([1, 3], 0)):
        latents = cache.get_or_encode(torch.tensor(indices), pixels[indices], encode, device)
        torch.testing.assert_close(latents, pixels[indices].flatten(1).half().float())
        assert (len(encoded.pop()) if new else 0) == new and not encoded
