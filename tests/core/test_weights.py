"""Snapshots of weights, for every family and kind of tuning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toys
from torch import Tensor

from tastemaker.core.lora import Lora
from tastemaker.core.policy import Guidance, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.weights import FrozenCopyFinetuning, FullFinetuning, Tuning, ema_decay_warmup

TUNINGS = [FullFinetuning(), FullFinetuning(snapshots_on_cpu=True), FrozenCopyFinetuning(), Lora(rank=4)]
SNAPSHOTS = ("reference", "old", "ema")


@pytest.fixture(params=TUNINGS, ids=["full", "host", "frozen_copy", "lora"])
def tuning(request: pytest.FixtureRequest) -> Tuning:
    return request.param


@pytest.fixture(params=toys.FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def predict(policy: Policy[Any]) -> Tensor:
    """Return the output of the network for a fixed input."""
    rng = Randomness(0, 0, torch.arange(4))
    x = torch.arange(16).expand(4, 16) % 8 if len(policy.model.shape) == 1 else rng.normal("x", *policy.model.shape)
    with torch.no_grad():
        return policy.model.predict(x, torch.full((4,), 0.5), policy.embed(toys.PROMPTS))


def copy_parameters(policy: Policy[Any]) -> dict[str, Tensor]:
    return {key: p.detach().clone() for key, p in policy.weights.net.named_parameters()}


def test_live_weights_are_restored_after_use(family: str, tuning: Tuning) -> None:
    policy = toys.policy(family, tuning, SNAPSHOTS)
    base = predict(policy)
    toys.perturb(policy, 0.1)
    live, before = copy_parameters(policy), predict(policy)
    assert not torch.equal(base, before)
    for name in SNAPSHOTS:
        with policy.weights.use(name):
            torch.testing.assert_close(predict(policy), base, rtol=1e-6, atol=1e-6)
        assert torch.equal(predict(policy), before)
    assert all(torch.equal(live[key], p) for key, p in policy.weights.net.named_parameters())


def test_lora_reference_is_the_base_model(family: str) -> None:
    plain = predict(toys.policy(family))
    policy = toys.policy(family, Lora(rank=4), ("reference",))
    torch.testing.assert_close(predict(policy), plain, rtol=0, atol=0)
    toys.perturb(policy, 0.1)
    with policy.weights.use("reference"):
        assert torch.equal(predict(policy), plain)
    assert not torch.equal(predict(policy), plain)


def test_live_weights_are_restored_after_an_error(tuning: Tuning) -> None:
    policy = toys.policy("flow", tuning, ("old",))
    toys.perturb(policy, 0.1)
    before = predict(policy)
    with pytest.raises(RuntimeError, match="planted"), policy.weights.use("old"):
        raise RuntimeError("planted")
    assert torch.equal(predict(policy), before)
    assert all(p.requires_grad for p in policy.weights.trainable().values())


def test_snapshots_run_without_gradients(family: str, tuning: Tuning) -> None:
    policy = toys.policy(family, tuning, ("old", "reference"))
    x = policy.sample(policy.embed(toys.PROMPTS), Randomness(0, 0, torch.arange(4))).final
    noisy = policy.corrupt(x, Randomness(0, 1, torch.arange(4)))
    toys.perturb(policy, 0.1)
    with policy.weights.use("old"):
        assert not policy.likelihood(policy.embed(toys.PROMPTS), x, noisy).requires_grad
    policy.likelihood(policy.embed(toys.PROMPTS), x, noisy).sum().backward()
    trainable = policy.weights.trainable()
    assert trainable
    gradients = {key: p.grad for key, p in trainable.items()}
    assert all(g is not None for g in gradients.values())
    others = {id(p) for p in trainable.values()}
    assert all(p.grad is None for p in policy.weights.net.parameters() if id(p) not in others)


def test_update_snapshot_is_an_ema_step(tuning: Tuning) -> None:
    policy = toys.policy("flow", tuning, ("old", "ema"))
    start = {key: x.detach().clone() for key, x in policy.weights.snapshot_tensors()["ema"].items()}
    toys.perturb(policy, 0.1)
    live = {key: p.detach().clone() for key, p in policy.weights.trainable().items()}
    policy.weights.update_snapshot("ema", 0.75)
    policy.weights.update_snapshot("old")
    stored = policy.weights.snapshot_tensors()
    for key, x in stored["ema"].items():
        torch.testing.assert_close(x.detach(), 0.75 * start[key] + 0.25 * live[key], rtol=1e-5, atol=1e-6)
    assert all(torch.equal(x, live[key]) for key, x in stored["old"].items())
    output = predict(policy)
    with policy.weights.use("old"):
        assert torch.equal(predict(policy), output)


def test_training_does_not_change_snapshots(tuning: Tuning) -> None:
    policy = toys.policy("causal", tuning, SNAPSHOTS)
    before = {
        name: {key: x.detach().clone() for key, x in tensors.items()}
        for name, tensors in policy.weights.snapshot_tensors().items()
    }
    toys.perturb(policy, 0.1)
    for name, snapshot in policy.weights.snapshot_tensors().items():
        assert all(torch.equal(x, before[name][key]) for key, x in snapshot.items())


def test_unknown_snapshot_is_refused(tuning: Tuning) -> None:
    policy = toys.policy("flow", tuning, ("old",))
    with pytest.raises(ValueError, match=r"'odl'.*TM120"), policy.weights.use("odl"):
        pass


def test_lora_starts_as_the_base_model() -> None:
    policy = toys.policy("flow", Lora(rank=2))
    trainable = sum(p.numel() for p in policy.weights.trainable().values())
    assert 0 < trainable < 0.2 * sum(p.numel() for p in policy.model.net.parameters())
    assert all("lora_" in key for key in policy.weights.trainable())


def test_lora_target_modules_by_name() -> None:
    policy = toys.policy("flow", Lora(rank=2, target_modules=("up", "down")))
    assert {key.split(".")[2] for key in policy.weights.trainable()} == {"up", "down"}


def test_ema_decay_warmup() -> None:
    assert [ema_decay_warmup(0.9, n) for n in (0, 1, 10)] == pytest.approx([1 / 10, 2 / 11, 11 / 20])
    assert ema_decay_warmup(0.9, 10_000) == 0.9


def test_frozen_copy_switches_the_guided_network() -> None:
    policy = toys.policy("flow", FrozenCopyFinetuning(), ("old",), Guidance(2.0))
    base = predict(policy)
    toys.perturb(policy, 0.1)
    with policy.weights.use("old"):
        assert torch.equal(predict(policy), base)
    assert not torch.equal(predict(policy), base)
