"""Classifier-free guidance: scale, interval, rescaling and power schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import toys
from torch import Tensor, nn

from tastemaker.core.guidance import (
    GuidedCausalBackbone,
    apply_guidance,
    batch_conditions,
    in_interval,
    split_conditions,
)
from tastemaker.core.policy import Backbone, Guidance
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import Condition, Metadata, Prompts
from tastemaker.processes.autoregressive import AutoregressiveProcess

TIMESTEP = torch.tensor(0.5)


@pytest.mark.parametrize("name", toys.FAMILIES)
def test_guidance_scale_of_one_is_identity(name: str) -> None:
    plain, guided = toys.policy(name), toys.policy(name, guidance=Guidance(1.0))
    rng = Randomness(0, 0, torch.arange(4))
    expected, samples = (policy.sample(policy.embed(toys.PROMPTS), rng).final for policy in (plain, guided))
    torch.testing.assert_close(expected, samples, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", toys.FAMILIES)
def test_guidance_is_off_outside_its_interval(name: str) -> None:
    plain, guided = toys.policy(name), toys.policy(name, guidance=Guidance(3.0, interval=(0.0, 0.01)))
    rng = Randomness(0, 0, torch.arange(4))
    expected, samples = (policy.sample(policy.embed(toys.PROMPTS), rng).final for policy in (plain, guided))
    torch.testing.assert_close(expected, samples, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["flow", "epsilon", "video", "masked"])
def test_guidance_extrapolates_within_its_interval(name: str) -> None:
    plain = toys.policy(name)
    guided = toys.policy(name, guidance=Guidance(3.0, negative_prompt="a grey", interval=(0.25, 0.75)))
    x = plain.sample(plain.embed(toys.PROMPTS), Randomness(0, 0, torch.arange(4))).final
    t = torch.tensor([0.2, 0.25, 0.75, 0.8])
    with torch.no_grad():
        conditional, unconditional = (
            plain.model.predict(x, t, plain.embed(prompts)) for prompts in (toys.PROMPTS, ["a grey"] * 4)
        )
        guided_output = guided.model.predict(x, t, guided.embed(toys.PROMPTS))
    torch.testing.assert_close(
        guided_output[1:3], (unconditional + 3 * (conditional - unconditional))[1:3], rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(guided_output[::3], conditional[::3], rtol=1e-4, atol=1e-4)


def test_masked_guidance_weight_is_scale_minus_one() -> None:
    conditional, unconditional = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    guided = apply_guidance(Guidance(2.75), conditional, unconditional, TIMESTEP)
    torch.testing.assert_close(guided, (1 + 1.75) * conditional - 1.75 * unconditional)


def test_rescaled_guidance_keeps_conditional_norm() -> None:
    conditional, unconditional = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    rescaled = apply_guidance(Guidance(4.0, rescale=True), conditional, unconditional, TIMESTEP)
    torch.testing.assert_close(rescaled.flatten(1).norm(dim=1), conditional.flatten(1).norm(dim=1))
    plain = apply_guidance(Guidance(4.0), conditional, unconditional, TIMESTEP)
    torch.testing.assert_close(rescaled / plain, (rescaled / plain)[:, :1, :1].expand_as(plain))


def test_guided_condition_holds_both_embeddings() -> None:
    guided = toys.policy("flow", guidance=Guidance(2.0, negative_prompt="a black"))
    cond = guided.embed(toys.PROMPTS)
    positive, negative = split_conditions(cond)
    plain = toys.policy("flow")
    assert torch.equal(positive.tensors["word"], plain.embed(toys.PROMPTS).tensors["word"])
    assert torch.equal(negative.tensors["word"], plain.embed(["a black"] * 4).tensors["word"])
    assert torch.equal(
        batch_conditions(cond).tensors["word"], torch.cat([positive.tensors["word"], negative.tensors["word"]])
    )


@dataclass
class PromptIndicator(Backbone):
    """A causal model of any length whose logits are 1 with a prompt and 0 without."""

    length: int
    net: nn.Module
    forward_passes: int = 1
    pixels: tuple[int, int, int, int] = (1, 3, 1, 1)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.length,)

    def embed(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        return Condition(
            tuple(prompts), {"has_prompt": torch.tensor([float(bool(prompt)) for prompt in prompts])}, tuple(metadata)
        )

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        return cond.tensors["has_prompt"][:, None, None].expand(len(x), self.length, 2)

    def init_cache(self, cond: Condition) -> Any:
        return ()

    def decode_step(self, ids: Tensor | None, cache: Any, cond: Condition) -> tuple[Tensor, Any]:
        return cond.tensors["has_prompt"][:, None].expand(-1, 2), cache

    def encode(self, pixels: Tensor) -> Tensor:
        raise NotImplementedError

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("length", [16, 100, 256, 300, 576])
def test_published_token_interval_is_an_interval_of_t(length: int) -> None:
    """Tokens 0 to n + 1 are guided in the published code: those at t >= 1 - (n + 1) / length."""
    for n in (0, 1, length // 3, length - 3):
        guidance = Guidance(3.0, interval=(1 - (n + 1) / length, 1.0))
        model = GuidedCausalBackbone(PromptIndicator(length, nn.Identity()), guidance)
        cond = model.embed(["a prompt"])
        full = model.predict(torch.zeros(1, length), torch.ones(1), cond)[0, :, 0]
        assert (full == 3).tolist() == [position <= n + 1 for position in range(length)]
        assert (full[n + 2 :] == 1).all()
        cache, cached = model.init_cache(cond), []
        for _ in range(length):
            logits, cache = model.decode_step(None, cache, cond)
            cached.append(float(logits[0, 0]))
        assert cached == full.tolist()


@pytest.mark.parametrize("power", [0.5, 1.0, 2.75])
def test_power_schedule_matches_published(power: float) -> None:
    """s_i = 1 + (s - 1) / 2 * (1 - cos(pi * (i / N)^p)) for token i, in one call or token by token."""
    model = GuidedCausalBackbone(PromptIndicator(36, nn.Identity()), Guidance(4.0, power_schedule=power))
    cond = model.embed(["a prompt"])
    full = model.predict(torch.zeros(1, 36), torch.ones(1), cond)[0, :, 0]
    expected = [1 + 1.5 * (1 - math.cos(math.pi * (i / 36) ** power)) for i in range(36)]
    torch.testing.assert_close(full, torch.tensor(expected))
    cache, cached = model.init_cache(cond), []
    for _ in range(36):
        logits, cache = model.decode_step(None, cache, cond)
        cached.append(float(logits[0, 0]))
    assert cached == full.tolist()


@pytest.mark.parametrize("name", ["flow", "masked"])
def test_power_schedule_ends_at_full_scale(name: str) -> None:
    plain, guided = toys.policy(name), toys.policy(name, guidance=Guidance(3.0, power_schedule=2.0))
    x = plain.sample(plain.embed(toys.PROMPTS), Randomness(0, 0, torch.arange(4))).final
    t = torch.tensor([1.0, 0.5, 0.25, 0.0])
    with torch.no_grad():
        conditional, unconditional = (
            plain.model.predict(x, t, plain.embed(prompts)) for prompts in (toys.PROMPTS, [""] * 4)
        )
        guided_output = guided.model.predict(x, t, guided.embed(toys.PROMPTS))
    scale = torch.tensor([1.0, 2 - math.cos(math.pi / 4), 2 - math.cos(math.pi * 9 / 16), 3.0])
    expected = unconditional + scale.view(-1, *[1] * (conditional.ndim - 1)) * (conditional - unconditional)
    torch.testing.assert_close(guided_output, expected, rtol=1e-4, atol=1e-4)


def test_interval_includes_its_bounds() -> None:
    for steps in (8, 10, 25, 50):
        grid = toys.FAMILIES["flow"].process.path.timesteps(steps)
        for i in range(steps):
            inside = in_interval(grid[:-1], (1 - i / steps, 1.0))
            assert inside.sum() == i + 1


def test_no_unconditional_calls_after_last_guided_token() -> None:
    network_calls = []
    for interval in ((0.0, 1.0), (0.75, 1.0)):  # the second guides the first five of sixteen tokens, from t = 1 to 0.75
        policy, rows = toys.policy("causal", guidance=Guidance(3.0, interval=interval)), list[int]()
        layer = next(layer for layer in policy.model.net.modules() if isinstance(layer, nn.Linear))
        layer.register_forward_hook(lambda layer, inputs, output, rows=rows: rows.append(len(output)))
        with torch.no_grad():
            rollout = policy.process.start(policy.model, policy.embed(toys.PROMPTS), Randomness(0, 0, torch.arange(4)))
            while rollout.progress < 1:
                rollout.step()
        network_calls.append(rollout.network_calls)
        assert rollout.network_calls == sum(rows)
    assert network_calls == [
        16 * 8 + 8,
        5 * 8 + 11 * 4 + 8,
    ]  # one more call per sequence recomputes the log-probabilities


def test_guidance_raises_the_reward() -> None:
    """Guidance needs a network that was trained with prompt dropout."""
    policy = toys.pretrained_policy("flow")
    guided = type(policy)(policy.process.wrap_guidance(policy.model, Guidance(3.0)), policy.process, policy.weights)
    assert toys.z_score(toys.true_rewards(policy), toys.true_rewards(guided)) > 3


@pytest.mark.parametrize(
    "guidance",
    [Guidance(3.0, interval=(0.5, 1.0)), Guidance(3.0, power_schedule=1.5)],
    ids=["interval", "power_schedule"],
)
def test_guided_decoding_matches_guided_causal_call(guidance: Guidance) -> None:
    policy = toys.policy("causal", guidance=guidance)
    cond, rng = policy.embed(toys.PROMPTS), Randomness(0, 0, torch.arange(4))
    cached = type(policy)(policy.model, AutoregressiveProcess(recompute_log_probs=False), policy.weights).sample(
        cond, rng
    )
    recomputed = policy.sample(cond, rng)
    assert torch.equal(cached.final, recomputed.final)
    torch.testing.assert_close(cached.segments[0].log_prob, recomputed.segments[0].log_prob, rtol=1e-4, atol=1e-5)
