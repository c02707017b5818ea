"""Log-probabilities by what logits are made of equal those by the logits, gradients and all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import tastemaker.core.distributions
import tastemaker.models.nets.decoder_pool
from tastemaker.core.distributions import Categorical, ChunkedCategorical, rows_per_chunk
from tastemaker.core.policy import Guidance, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import Placement
from tastemaker.core.weights import FullFinetuning
from tastemaker.models.gpt import Gpt
from tastemaker.processes.autoregressive import AutoregressiveProcess


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor, Tensor]:
    monkeypatch.setattr(tastemaker.core.distributions, "MAX_CHUNK_LOGITS", 2 * 7 * 50)  # two rows at once
    chance = torch.Generator().manual_seed(0)
    states, weight = torch.randn(5, 7, 12, generator=chance), torch.randn(50, 12, generator=chance)
    return states.requires_grad_(), weight.requires_grad_(), torch.randint(0, 50, (5, 7), generator=chance)


def test_logits_are_made_two_rows_at_a_time(parts: tuple[Tensor, Tensor, Tensor]) -> None:
    assert rows_per_chunk(parts[0], parts[1]) == [slice(0, 2), slice(2, 4), slice(4, 6)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_and_gradients_equal_the_plain_ones(
    parts: tuple[Tensor, Tensor, Tensor], temperature: float
) -> None:
    states, weight, ids = parts
    pull = torch.linspace(-1, 2, 35).view(5, 7)
    plain = Categorical(states @ weight.t() / temperature).log_prob(ids)
    found = ChunkedCategorical(states, weight, temperature).log_prob(ids)
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)
    wanted = torch.autograd.grad((plain * pull).sum(), (states, weight))
    got = torch.autograd.grad((found * pull).sum(), (states, weight))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_several_tokens_a_place_equal_the_plain_ones(parts: tuple[Tensor, Tensor, Tensor]) -> None:
    states, weight, ids = parts
    several = torch.stack([ids, (ids + 1) % 50, ids], 1)  # one of them twice
    plain, found = Categorical(states @ weight.t()).each(several), ChunkedCategorical(states, weight).each(several)
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)
    got, wanted = (torch.autograd.grad(x.square().sum(), (states, weight)) for x in (found, plain))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-4)


def test_divergences_equal_the_plain_ones(parts: tuple[Tensor, Tensor, Tensor]) -> None:
    states, weight, _ = parts
    other = states.detach() + 0.1
    plain = Categorical(states @ weight.t()).kl(Categorical(other @ weight.detach().t()))
    found = ChunkedCategorical(states, weight).kl(ChunkedCategorical(other, weight.detach()))
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)
    got, wanted = (torch.autograd.grad(x.sum(), (states, weight)) for x in (found, plain))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match="no divergence"):
        ChunkedCategorical(states, weight).kl(Categorical(states @ weight.t()))


@pytest.mark.parametrize("guidance", [None, Guidance(3.0, interval=(0.4, 1.0)), Guidance(3.0, rescale=True)])
def test_a_process_scores_the_same_either_way(guidance: Guidance | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = replace(Gpt().tiny(), depth=2).load(Placement())
    torch.manual_seed(0)
    for p in model.net.parameters():
        p.data.add_(0.2 * torch.randn_like(p))
    process = AutoregressiveProcess(temperature=0.8)
    weights = FullFinetuning().apply(model, ("reference",))
    policy = Policy(process.guide(model, guidance) if guidance else model, process, weights)
    cond = policy.embed(("a photo of a cat", "a photo of a dog", ""))
    (segment,) = policy.sample(cond, Randomness(0, 0, torch.arange(3))).segments
    with torch.no_grad():
        for p in model.net.parameters():
            p.add_(0.1 * torch.randn_like(p))

    def scored() -> tuple[Tensor, Tensor, tuple[Tensor, ...], Tensor]:
        with weights.use("reference"):
            reference = policy.decide(cond, segment)
        now = policy.decide(cond, segment)
        log_prob = now.log_prob(segment.action)
        gradients = torch.autograd.grad(log_prob.exp().sum(), list(model.net.parameters()))
        with torch.no_grad():
            again = policy.decide(cond, segment)
        assert torch.equal(again.log_prob(segment.action), log_prob)
        return log_prob, reference.log_prob(segment.action), gradients, again.kl(reference)

    plain = scored()
    for module in (tastemaker.core.distributions, tastemaker.models.nets.decoder_pool):
        monkeypatch.setattr(module, "MAX_CHUNK_LOGITS", 16 * 64)
    rescaled = guidance is not None and bool(guidance.rescale)
    assert isinstance(policy.decide(cond, segment), Categorical if rescaled else ChunkedCategorical)
    torch.testing.assert_close(scored(), plain, rtol=1e-4, atol=1e-5)


def test_half_precision_is_computed_as_the_network_would(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Gpt().tiny().load(Placement())
    torch.nn.init.normal_(model.net.get_parameter("output.weight"))
    policy = Policy(model, AutoregressiveProcess(), FullFinetuning().apply(model, ()))
    cond = policy.embed(("a photo of a cat", "a photo of a dog", ""))
    with torch.autocast("cpu", torch.bfloat16):
        (segment,) = policy.sample(cond, Randomness(0, 0, torch.arange(3))).segments
        plain = policy.decide(cond, segment).log_prob(segment.action)
        for module in (tastemaker.core.distributions, tastemaker.models.nets.decoder_pool):
            monkeypatch.setattr(module, "MAX_CHUNK_LOGITS", 16 * 64)
        found = policy.decide(cond, segment).log_prob(segment.action)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, plain, rtol=1e-3, atol=1e-3)
    torch.autograd.backward(found.sum())
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.net.parameters())
