"""Contract of every generator: sampling, scoring, corruption, likelihood and selection of rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import toys
from contract_cases import (
    BATCH_SIZE,
    cached_policy,
    cached_rollout,
    generator_params,
    make_rng,
    prompts_for,
    rescore,
    sample_rollout,
)

from tastemaker.core.policy import Backbone, Guidance, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import PromptBatch, Trajectory, select_rows
from tastemaker.processes.autoregressive import AutoregressiveProcess
from tastemaker.processes.gaussian import GaussianProcess


@pytest.fixture(params=generator_params())
def kind(request: pytest.FixtureRequest) -> tuple[str, Guidance | None]:
    chosen: tuple[str, Guidance | None] = request.param
    return chosen


@pytest.fixture
def policy(kind: tuple[str, Guidance | None]) -> Policy[Any]:
    return cached_policy(*kind)


@pytest.fixture
def seen(kind: tuple[str, Guidance | None]) -> Trajectory:
    """What the policy samples, recorded without gradients as training does it."""
    return cached_rollout(*kind)


def test_rescored_log_probs_match_rollout(policy: Policy[Any], seen: Trajectory) -> None:
    assert seen.segments
    for now, then in rescore(policy, seen):
        assert torch.equal(now, then)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of FLUX's norms, which stay exact
def test_rescored_log_probs_match_rollout_in_bfloat16(policy: Policy[Any]) -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for now, then in rescore(policy, sample_rollout(policy)):
            assert now.dtype == then.dtype == torch.float32
            assert torch.equal(now, then)


@pytest.mark.parametrize("name", toys.FAMILIES)
def test_encode_decode_round_trip(name: str) -> None:
    """Those of a published one do not: its small autoencoder is random."""
    policy = toys.policy(name)
    frames = policy.model.pixels[0]
    pixels = toys.PALETTE[torch.arange(BATCH_SIZE)].view(BATCH_SIZE, 1, 3, 1, 1).expand(BATCH_SIZE, frames, 3, 8, 8)
    torch.testing.assert_close(policy.decode(policy.encode(pixels)), pixels, rtol=0, atol=1e-5)


@torch.no_grad()
def test_decoded_samples_have_the_declared_size(policy: Policy[Any], seen: Trajectory) -> None:
    final = seen.final
    pixels = policy.decode(final)
    assert pixels.shape == (BATCH_SIZE, *policy.model.pixels)
    assert final.shape == policy.encode(pixels).shape == (BATCH_SIZE, *policy.model.shape)
    assert pixels.min() >= 0
    assert pixels.max() <= 1


def test_decode_single_frames() -> None:
    policy = toys.policy("video")
    final = sample_rollout(policy).final
    assert torch.equal(policy.decode(final, [2, 0]), policy.decode(final)[:, [2, 0]])


def test_corruption_uses_given_level_and_noise(policy: Policy[Any], seen: Trajectory) -> None:
    x = seen.final
    free = policy.corrupt(x, make_rng())
    again = policy.corrupt(x, make_rng(), free.t, free.noise)
    other = policy.corrupt(x, make_rng(), draw=1)
    assert free.x.shape == x.shape
    assert free.t.shape == (BATCH_SIZE,)
    assert torch.equal(free.x, again.x)
    assert torch.equal(free.x, policy.corrupt(x, make_rng()).x)
    if not isinstance(policy.process, AutoregressiveProcess):
        assert not torch.equal(free.x, other.x)


@torch.no_grad()
def test_likelihood_is_independent_of_the_batch(policy: Policy[Any], seen: Trajectory) -> None:
    x, cond = seen.final, seen.cond
    noisy = policy.corrupt(x, make_rng())
    whole = policy.likelihood(cond, x, noisy)
    some = torch.tensor([5, 2])
    assert whole.shape == (BATCH_SIZE,)
    assert (policy.process.count_hidden(noisy) > 0).all()
    part = policy.likelihood(select_rows(cond, some), x[some], select_rows(noisy, some))
    torch.testing.assert_close(part, whole[some], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", toys.FAMILIES)
def test_likelihood_ignores_guidance(name: str) -> None:
    """Or a network that is taught with a recipe for sampling would learn what its guided self should have said."""
    guided = toys.policy(name, guidance=Guidance(3.0))
    plain = Policy(guided.model.unguided, guided.process, guided.weights)
    prompts = ["red circle", "blue square"]
    x = guided.sample(guided.embed(prompts), Randomness(0, 0, torch.arange(2))).final
    noisy = guided.corrupt(x, Randomness(0, 1, torch.arange(2)))
    own = plain.likelihood(plain.embed(prompts), x, noisy)
    torch.testing.assert_close(guided.likelihood(guided.embed(prompts), x, noisy), own, atol=0, rtol=0)


def test_pixel_gradients_exist_for_latent_models_only(policy: Policy[Any]) -> None:
    rollout = policy.rollout(prompts_for(policy), make_rng())
    pixels = policy.decode(rollout.finish().final)
    assert pixels.requires_grad == isinstance(policy.process, GaussianProcess)
    if pixels.requires_grad:
        net = policy.model.net
        vain = policy.model.traits.unused_parameters
        learning = {key: p for key, p in net.named_parameters() if not key.startswith(vain)}
        found = torch.autograd.grad(pixels.mean(), list(learning.values()), allow_unused=True)
        assert learning and [key for key, g in zip(learning, found, strict=True) if g is None] == []


def test_pruned_rollout_uses_the_same_random_numbers(policy: Policy[Any], seen: Trajectory) -> None:
    pruned = policy.rollout(prompts_for(policy), make_rng())
    kept = torch.tensor([6, 1, 3])
    with torch.no_grad():
        pruned.step()
        pruned.step()
        pruned.select(kept)
        few = pruned.finish()
    same(few, select_rows(seen, kept))


@torch.no_grad()
def test_samples_are_independent_of_the_batch(policy: Policy[Any], seen: Trajectory) -> None:
    for row in (0, 5):
        alone = policy.sample(select_rows(prompts_for(policy), torch.tensor([row])), make_rng(row))
        same(alone, select_rows(seen, torch.tensor([row])))


def same(one: Trajectory, other: Trajectory) -> None:
    """Equal up to the rounding of matrix products of other sizes; tokens exactly."""
    assert one.cond.prompts == other.cond.prompts
    assert one.cond.metadata == other.cond.metadata
    assert len(one.segments) == len(other.segments)
    torch.testing.assert_close(one.final, other.final, rtol=1e-4, atol=1e-4)
    for here, there in zip(one.segments, other.segments, strict=True):
        torch.testing.assert_close(here.action, there.action, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(here.log_prob, there.log_prob, rtol=1e-4, atol=1e-4)
        assert torch.equal(here.mask, there.mask)


@torch.no_grad()
def test_samples_are_reproducible_and_differ_by_row_and_step(policy: Policy[Any], seen: Trajectory) -> None:
    first = seen.final
    later = policy.sample(prompts_for(policy), Randomness(0, 1, torch.arange(BATCH_SIZE))).final
    assert torch.equal(first, sample_rollout(policy).final)
    assert not torch.equal(first, later)
    assert len(first.flatten(1).unique(dim=0)) == BATCH_SIZE


def test_rollout_progress_and_previews(policy: Policy[Any]) -> None:
    rollout = policy.rollout(prompts_for(policy), make_rng())
    seen = [rollout.progress]
    with torch.no_grad():
        while rollout.progress < 1:
            rollout.step()
            seen.append(rollout.progress)
            assert policy.decode(rollout.preview()).shape == (BATCH_SIZE, *policy.model.pixels)
    assert seen[0] == 0
    assert seen[-1] == 1
    assert seen == sorted(set(seen))
    assert torch.equal(rollout.preview(), rollout.finish().final)


class Counting:
    """A backbone that counts the rows its network is asked about."""

    def __init__(self, net: torch.nn.Module) -> None:
        self.rows, self.asked = 0, 0
        self.hook = net.register_forward_hook(self._count)

    def _count(self, net: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self.asked += 1
        self.rows += len(output[0] if isinstance(output, tuple) else output)


def test_network_calls_are_counted(policy: Policy[Any]) -> None:
    if isinstance(policy.process, AutoregressiveProcess):
        policy = replace(
            policy, process=AutoregressiveProcess(recompute_log_probs=False)
        )  # the record is not part of the sampler's price
    counted = Counting(policy.model.net)
    rollout = policy.rollout(prompts_for(policy), make_rng())
    with torch.no_grad():
        rollout.step()
        rollout.select(torch.arange(3))
        rollout.finish()
    counted.hook.remove()
    inner, guidance, calls = (
        policy.model.unguided,
        policy.model.guidance,
        policy.process.network_calls_per_sample(policy.model.shape),
    )
    read = BATCH_SIZE + 3 * (calls - 1)
    price = read * inner.forward_passes
    if guidance is not None:  # some levels lie outside its interval, of tokens those after the last it reaches
        assert price < rollout.network_calls < read * policy.model.forward_passes
        price = (
            price + BATCH_SIZE + 3 * int(0.8 * calls)
            if type(inner).make_decoder is not Backbone.make_decoder
            else counted.rows
        )
    assert rollout.network_calls == price
    if type(inner).make_decoder is Backbone.make_decoder:  # whose scribes call no network
        assert counted.rows == price


def test_condition_tensors_have_one_row_per_prompt(seen: Trajectory) -> None:
    cond = seen.cond
    assert len(cond) == BATCH_SIZE
    assert len(cond.metadata) == BATCH_SIZE
    assert cond.tensors
    assert all(len(x) == BATCH_SIZE for x in cond.tensors.values())
    assert cond.repeat(2).prompts[:4] == (cond.prompts[0],) * 2 + (cond.prompts[1],) * 2
    assert all(len(x) == 2 * BATCH_SIZE for x in cond.repeat(2).tensors.values())


def test_select_rows_of_nested_trees(policy: Policy[Any], seen: Trajectory) -> None:
    some = torch.tensor([7, 0])
    few = select_rows(seen, some)
    assert len(few) == 2
    assert few.cond.prompts == (seen.cond.prompts[7], seen.cond.prompts[0])
    assert few.cond.metadata == ({"number": 7}, {"number": 0})
    assert torch.equal(few.final, seen.final[some])
    for here, there in zip(few.segments, seen.segments, strict=True):
        for name in ("t", "s", "state", "action", "log_prob", "mask"):
            assert torch.equal(vars(here)[name], vars(there)[name][some])
    noisy = policy.corrupt(seen.final, make_rng())
    assert torch.equal(select_rows(noisy, some).x, noisy.x[some])


def test_select_rows_of_prompts_and_masks() -> None:
    batch = PromptBatch(("a", "b", "c"), ({"n": 0}, {"n": 1}, {"n": 2}))
    assert select_rows(batch, torch.tensor([True, False, True])) == PromptBatch(("a", "c"), ({"n": 0}, {"n": 2}))
    with pytest.raises(TypeError, match="cannot select rows of set"):
        select_rows({1, 2}, torch.tensor([0]))


def test_model_satisfies_the_backbone_contract(policy: Policy[Any]) -> None:
    assert isinstance(policy.model, Backbone)
