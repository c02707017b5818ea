"""ChunkedCategorical gives the log-probabilities, KL and gradients of Categorical."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import tastemaker.core.distributions
import tastemaker.models.nets.gpt
from tastemaker.core.distributions import Categorical, ChunkedCategorical, rows_per_chunk
from tastemaker.core.policy import Guidance, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import Placement
from tastemaker.core.weights import FullFinetuning
from tastemaker.models.gpt import GptSpec
from tastemaker.processes.autoregressive import AutoregressiveProcess


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor, Tensor]:
    monkeypatch.setattr(tastemaker.core.distributions, "MAX_CHUNK_LOGITS", 2 * 7 * 50)  # two rows at once
    generator = torch.Generator().manual_seed(0)
    states, weight = torch.randn(5, 7, 12, generator=generator), torch.randn(50, 12, generator=generator)
    return states.requires_grad_(), weight.requires_grad_(), torch.randint(0, 50, (5, 7), generator=generator)


def test_logits_are_computed_in_chunks(inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    assert rows_per_chunk(inputs[0], inputs[1]) == [slice(0, 2), slice(2, 4), slice(4, 6)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunked_log_probs_and_gradients_match_categorical(
    inputs: tuple[Tensor, Tensor, Tensor], temperature: float
) -> None:
    states, weight, ids = inputs
    coefficients = torch.linspace(-1, 2, 35).view(5, 7)
    expected = Categorical(states @ weight.t() / temperature).log_prob(ids)
    log_probs = ChunkedCategorical(states, weight, temperature).log_prob(ids)
    torch.testing.assert_close(log_probs, expected, rtol=1e-5, atol=1e-5)
    expected_gradients = torch.autograd.grad((expected * coefficients).sum(), (states, weight))
    gradients = torch.autograd.grad((log_probs * coefficients).sum(), (states, weight))
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-5, atol=1e-5)


def test_chunked_log_probs_of_several_tokens_match_categorical(inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    states, weight, ids = inputs
    candidates = torch.stack([ids, (ids + 1) % 50, ids], 1)  # one of them twice
    expected, log_probs = (
        Categorical(states @ weight.t()).log_probs(candidates),
        ChunkedCategorical(states, weight).log_probs(candidates),
    )
    torch.testing.assert_close(log_probs, expected, rtol=1e-5, atol=1e-5)
    gradients, expected_gradients = (
        torch.autograd.grad(x.square().sum(), (states, weight)) for x in (log_probs, expected)
    )
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-5, atol=1e-4)


def test_chunked_kl_matches_categorical(inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    states, weight, _ = inputs
    other = states.detach() + 0.1
    expected = Categorical(states @ weight.t()).kl(Categorical(other @ weight.detach().t()))
    kl = ChunkedCategorical(states, weight).kl(ChunkedCategorical(other, weight.detach()))
    torch.testing.assert_close(kl, expected, rtol=1e-5, atol=1e-5)
    gradients, expected_gradients = (torch.autograd.grad(x.sum(), (states, weight)) for x in (kl, expected))
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match=r"KL.*Categorical.*TM079"):
        ChunkedCategorical(states, weight).kl(Categorical(states @ weight.t()))


@pytest.mark.parametrize("guidance", [None, Guidance(3.0, interval=(0.4, 1.0)), Guidance(3.0, rescale=True)])
def test_process_scores_match_with_chunked_logits(guidance: Guidance | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = replace(GptSpec().tiny(), depth=2).load(Placement())
    torch.manual_seed(0)
    for p in model.net.parameters():
        p.data.add_(0.2 * torch.randn_like(p))
    process = AutoregressiveProcess(temperature=0.8)
    weights = FullFinetuning().apply(model, ("reference",))
    policy = Policy(process.wrap_guidance(model, guidance) if guidance else model, process, weights)
    cond = policy.embed(("a photo of a cat", "a photo of a dog", ""))
    (segment,) = policy.sample(cond, Randomness(0, 0, torch.arange(3))).segments
    with torch.no_grad():
        for p in model.net.parameters():
            p.add_(0.1 * torch.randn_like(p))

    def score() -> tuple[Tensor, Tensor, tuple[Tensor, ...], Tensor]:
        with weights.use("reference"):
            reference = policy.action_distribution(cond, segment)
        distribution = policy.action_distribution(cond, segment)
        log_prob = distribution.log_prob(segment.action)
        gradients = torch.autograd.grad(log_prob.exp().sum(), list(model.net.parameters()))
        with torch.no_grad():
            no_grad_distribution = policy.action_distribution(cond, segment)
        assert torch.equal(no_grad_distribution.log_prob(segment.action), log_prob)
        return log_prob, reference.log_prob(segment.action), gradients, no_grad_distribution.kl(reference)

    expected = score()
    for module in (tastemaker.core.distributions, tastemaker.models.nets.gpt):
        monkeypatch.setattr(module, "MAX_CHUNK_LOGITS", 16 * 64)
    rescaled = guidance is not None and bool(guidance.rescale)
    assert isinstance(policy.action_distribution(cond, segment), Categorical if rescaled else ChunkedCategorical)
    torch.testing.assert_close(score(), expected, rtol=1e-4, atol=1e-5)


def test_chunked_logits_use_the_compute_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    model = GptSpec().tiny().load(Placement())
    torch.nn.init.normal_(model.net.get_parameter("output.weight"))
    policy = Policy(model, AutoregressiveProcess(), FullFinetuning().apply(model, ()))
    cond = policy.embed(("a photo of a cat", "a photo of a dog", ""))
    with torch.autocast("cpu", torch.bfloat16):
        (segment,) = policy.sample(cond, Randomness(0, 0, torch.arange(3))).segments
        expected = policy.action_distribution(cond, segment).log_prob(segment.action)
        for module in (tastemaker.core.distributions, tastemaker.models.nets.gpt):
            monkeypatch.setattr(module, "MAX_CHUNK_LOGITS", 16 * 64)
        log_probs = policy.action_distribution(cond, segment).log_prob(segment.action)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs, expected, rtol=1e-3, atol=1e-3)
    torch.autograd.backward(log_probs.sum())
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.net.parameters())
