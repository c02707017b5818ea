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
def trajectory(kind: tuple[str, Guidance | None]) -> Trajectory:
    """A rollout of the policy without gradients."""
    return cached_rollout(*kind)


def test_rescored_log_probs_match_rollout(policy: Policy[Any], trajectory: Trajectory) -> None:
    assert trajectory.segments
    for log_prob, rollout_log_prob in rescore(policy, trajectory):
        assert torch.equal(log_prob, rollout_log_prob)


@pytest.mark.filterwarnings(
    "ignore:Mismatch dtype between input and weight"
)  # of the norms of FLUX, which stay in fp32
def test_rescored_log_probs_match_rollout_in_bfloat16(policy: Policy[Any]) -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for log_prob, rollout_log_prob in rescore(policy, sample_rollout(policy)):
            assert log_prob.dtype == rollout_log_prob.dtype == torch.float32
            assert torch.equal(log_prob, rollout_log_prob)


@pytest.mark.parametrize("name", toys.FAMILIES)
def test_encode_decode_round_trip(name: str) -> None:
    """Only toys: the small autoencoders of published models are random."""
    policy = toys.policy(name)
    frames = policy.model.pixels[0]
    pixels = toys.PALETTE[torch.arange(BATCH_SIZE)].view(BATCH_SIZE, 1, 3, 1, 1).expand(BATCH_SIZE, frames, 3, 8, 8)
    torch.testing.assert_close(policy.decode(policy.encode(pixels)), pixels, rtol=0, atol=1e-5)


@torch.no_grad()
def test_decoded_samples_have_the_declared_size(policy: Policy[Any], trajectory: Trajectory) -> None:
    final = trajectory.final
    pixels = policy.decode(final)
    assert pixels.shape == (BATCH_SIZE, *policy.model.pixels)
    assert final.shape == policy.encode(pixels).shape == (BATCH_SIZE, *policy.model.shape)
    assert pixels.min() >= 0
    assert pixels.max() <= 1


def test_decode_single_frames() -> None:
    policy = toys.policy("video")
    final = sample_rollout(policy).final
    assert torch.equal(policy.decode(final, [2, 0]), policy.decode(final)[:, [2, 0]])


def test_corruption_uses_given_level_and_noise(policy: Policy[Any], trajectory: Trajectory) -> None:
    x = trajectory.final
    random = policy.corrupt(x, make_rng())
    repeated = policy.corrupt(x, make_rng(), random.t, random.noise)
    second_draw = policy.corrupt(x, make_rng(), draw=1)
    assert random.x.shape == x.shape
    assert random.t.shape == (BATCH_SIZE,)
    assert torch.equal(random.x, repeated.x)
    assert torch.equal(random.x, policy.corrupt(x, make_rng()).x)
    if not isinstance(policy.process, AutoregressiveProcess):
        assert not torch.equal(random.x, second_draw.x)


@torch.no_grad()
def test_likelihood_is_independent_of_the_batch(policy: Policy[Any], trajectory: Trajectory) -> None:
    x, cond = trajectory.final, trajectory.cond
    noisy = policy.corrupt(x, make_rng())
    full = policy.likelihood(cond, x, noisy)
    indices = torch.tensor([5, 2])
    assert full.shape == (BATCH_SIZE,)
    assert (policy.process.count_hidden(noisy) > 0).all()
    subset = policy.likelihood(select_rows(cond, indices), x[indices], select_rows(noisy, indices))
    torch.testing.assert_close(subset, full[indices], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", toys.FAMILIES)
def test_likelihood_ignores_guidance(name: str) -> None:
    """Supervised training with a guidance setting trains the unguided network."""
    guided = toys.policy(name, guidance=Guidance(3.0))
    plain = Policy(guided.model.unguided, guided.process, guided.weights)
    prompts = ["red circle", "blue square"]
    x = guided.sample(guided.embed(prompts), Randomness(0, 0, torch.arange(2))).final
    noisy = guided.corrupt(x, Randomness(0, 1, torch.arange(2)))
    expected = plain.likelihood(plain.embed(prompts), x, noisy)
    torch.testing.assert_close(guided.likelihood(guided.embed(prompts), x, noisy), expected, atol=0, rtol=0)


def test_pixel_gradients_exist_for_latent_models_only(policy: Policy[Any]) -> None:
    rollout = policy.rollout(prompts_for(policy), make_rng())
    pixels = policy.decode(rollout.finish().final)
    assert pixels.requires_grad == isinstance(policy.process, GaussianProcess)
    if pixels.requires_grad:
        net = policy.model.net
        unused = policy.model.traits.unused_parameters
        trainable = {key: p for key, p in net.named_parameters() if not key.startswith(unused)}
        gradients = torch.autograd.grad(pixels.mean(), list(trainable.values()), allow_unused=True)
        assert trainable and [key for key, g in zip(trainable, gradients, strict=True) if g is None] == []


def test_pruned_rollout_uses_the_same_random_numbers(policy: Policy[Any], trajectory: Trajectory) -> None:
    pruned = policy.rollout(prompts_for(policy), make_rng())
    indices = torch.tensor([6, 1, 3])
    with torch.no_grad():
        pruned.step()
        pruned.step()
        pruned.select(indices)
        subset = pruned.finish()
    assert_trajectories_close(subset, select_rows(trajectory, indices))


@torch.no_grad()
def test_samples_are_independent_of_the_batch(policy: Policy[Any], trajectory: Trajectory) -> None:
    for row in (0, 5):
        single = policy.sample(select_rows(prompts_for(policy), torch.tensor([row])), make_rng(row))
        assert_trajectories_close(single, select_rows(trajectory, torch.tensor([row])))


def assert_trajectories_close(actual: Trajectory, expected: Trajectory) -> None:
    """Latents are equal up to rounding of matrix products of other sizes, tokens exactly."""
    assert actual.cond.prompts == expected.cond.prompts
    assert actual.cond.metadata == expected.cond.metadata
    assert len(actual.segments) == len(expected.segments)
    torch.testing.assert_close(actual.final, expected.final, rtol=1e-4, atol=1e-4)
    for segment, expected_segment in zip(actual.segments, expected.segments, strict=True):
        torch.testing.assert_close(segment.action, expected_segment.action, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(segment.log_prob, expected_segment.log_prob, rtol=1e-4, atol=1e-4)
        assert torch.equal(segment.mask, expected_segment.mask)


@torch.no_grad()
def test_samples_are_reproducible_and_differ_by_row_and_step(policy: Policy[Any], trajectory: Trajectory) -> None:
    first = trajectory.final
    next_step = policy.sample(prompts_for(policy), Randomness(0, 1, torch.arange(BATCH_SIZE))).final
    assert torch.equal(first, sample_rollout(policy).final)
    assert not torch.equal(first, next_step)
    assert len(first.flatten(1).unique(dim=0)) == BATCH_SIZE


def test_rollout_progress_and_previews(policy: Policy[Any]) -> None:
    rollout = policy.rollout(prompts_for(policy), make_rng())
    progress = [rollout.progress]
    with torch.no_grad():
        while rollout.progress < 1:
            rollout.step()
            progress.append(rollout.progress)
            assert policy.decode(rollout.preview()).shape == (BATCH_SIZE, *policy.model.pixels)
    assert progress[0] == 0
    assert progress[-1] == 1
    assert progress == sorted(set(progress))
    assert torch.equal(rollout.preview(), rollout.finish().final)


class CallCounter:
    """Counts the calls of a network and the rows in them."""

    def __init__(self, net: torch.nn.Module) -> None:
        self.rows, self.calls = 0, 0
        self.hook = net.register_forward_hook(self._count)

    def _count(self, net: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self.calls += 1
        self.rows += len(output[0] if isinstance(output, tuple) else output)


def test_network_calls_are_counted(policy: Policy[Any]) -> None:
    if isinstance(policy.process, AutoregressiveProcess):
        policy = replace(
            policy, process=AutoregressiveProcess(recompute_log_probs=False)
        )  # recomputation is not counted as sampling
    counter = CallCounter(policy.model.net)
    rollout = policy.rollout(prompts_for(policy), make_rng())
    with torch.no_grad():
        rollout.step()
        rollout.select(torch.arange(3))
        rollout.finish()
    counter.hook.remove()
    unguided, guidance, calls = (
        policy.model.unguided,
        policy.model.guidance,
        policy.process.network_calls_per_sample(policy.model.shape),
    )
    rows_read = BATCH_SIZE + 3 * (calls - 1)
    expected = rows_read * unguided.forward_passes
    if guidance is not None:  # guidance is off at levels outside of its interval
        assert expected < rollout.network_calls < rows_read * policy.model.forward_passes
        expected = (
            expected + BATCH_SIZE + 3 * int(0.8 * calls)
            if type(unguided).make_decoder is not Backbone.make_decoder
            else counter.rows
        )
    assert rollout.network_calls == expected
    if type(unguided).make_decoder is Backbone.make_decoder:  # token decoders do not call the network
        assert counter.rows == expected


def test_condition_tensors_have_one_row_per_prompt(trajectory: Trajectory) -> None:
    cond = trajectory.cond
    assert len(cond) == BATCH_SIZE
    assert len(cond.metadata) == BATCH_SIZE
    assert cond.tensors
    assert all(len(x) == BATCH_SIZE for x in cond.tensors.values())
    assert cond.repeat(2).prompts[:4] == (cond.prompts[0],) * 2 + (cond.prompts[1],) * 2
    assert all(len(x) == 2 * BATCH_SIZE for x in cond.repeat(2).tensors.values())


def test_select_rows_of_nested_trees(policy: Policy[Any], trajectory: Trajectory) -> None:
    indices = torch.tensor([7, 0])
    subset = select_rows(trajectory, indices)
    assert len(subset) == 2
    assert subset.cond.prompts == (trajectory.cond.prompts[7], trajectory.cond.prompts[0])
    assert subset.cond.metadata == ({"number": 7}, {"number": 0})
    assert torch.equal(subset.final, trajectory.final[indices])
    for segment, full_segment in zip(subset.segments, trajectory.segments, strict=True):
        for name in ("t", "s", "state", "action", "log_prob", "mask"):
            assert torch.equal(vars(segment)[name], vars(full_segment)[name][indices])
    noisy = policy.corrupt(trajectory.final, make_rng())
    assert torch.equal(select_rows(noisy, indices).x, noisy.x[indices])


def test_select_rows_of_prompts_and_masks() -> None:
    batch = PromptBatch(("a", "b", "c"), ({"n": 0}, {"n": 1}, {"n": 2}))
    assert select_rows(batch, torch.tensor([True, False, True])) == PromptBatch(("a", "c"), ({"n": 0}, {"n": 2}))
    with pytest.raises(TypeError, match=r"\bset\b.*TM119"):
        select_rows({1, 2}, torch.tensor([0]))


def test_model_satisfies_the_backbone_contract(policy: Policy[Any]) -> None:
    assert isinstance(policy.model, Backbone)
