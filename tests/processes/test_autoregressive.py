"""Temperature, top-k and top-p sampling, and the scores of sampled tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import toys
from torch import Tensor

from tastemaker.core.randomness import Randomness
from tastemaker.processes.autoregressive import AutoregressiveProcess


def probabilities(process: AutoregressiveProcess, *logits: float) -> Tensor:
    return process.sampler.distribution(torch.tensor([[logits]])).mean[0, 0]


def test_temperature_divides_logits() -> None:
    torch.testing.assert_close(
        probabilities(AutoregressiveProcess(temperature=0.5), 0.0, 1.0, 2.0), torch.tensor([0.0, 2.0, 4.0]).softmax(0)
    )


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@torch.no_grad()
def test_scored_log_probs_equal_those_of_sampling(temperature: float) -> None:
    process = AutoregressiveProcess(temperature, recompute_log_probs=False)
    policy = replace(toys.policy("causal"), process=process)
    toys.perturb(policy, 0.3)
    cond = policy.embed(toys.PROMPTS)
    (segment,) = policy.sample(cond, Randomness(0, 0, torch.arange(4))).segments
    scores = policy.action_distribution(cond, segment).log_prob(segment.action)
    torch.testing.assert_close(scores, segment.log_prob, rtol=1e-4, atol=1e-5)
    logits = policy.model.predict(segment.state, segment.t, cond) / temperature
    expected = torch.distributions.Categorical(logits=logits).log_prob(segment.action)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)


def test_top_k_keeps_most_likely_tokens() -> None:
    result = probabilities(AutoregressiveProcess(top_k=2), 3.0, 1.0, 2.0, 0.0)
    torch.testing.assert_close(result, torch.tensor([3.0, -torch.inf, 2.0, -torch.inf]).softmax(0))


def test_top_k_keeps_ties() -> None:
    result = probabilities(AutoregressiveProcess(top_k=2), 3.0, 1.0, 1.0, 0.0)
    torch.testing.assert_close(result, torch.tensor([3.0, 1.0, 1.0, -torch.inf]).softmax(0))


@pytest.mark.parametrize("k", [0, 4, 5])
def test_top_k_of_zero_or_all_is_identity(k: int) -> None:
    torch.testing.assert_close(
        probabilities(AutoregressiveProcess(top_k=k), 3.0, 1.0, 2.0, 0.0), torch.tensor([3.0, 1.0, 2.0, 0.0]).softmax(0)
    )


def test_top_p_keeps_crossing_token() -> None:
    logits = torch.tensor([0.2, 0.5, 0.3]).log().tolist()
    for p, expected in ((0.4, [0.0, 1.0, 0.0]), (0.6, [0.0, 0.5 / 0.8, 0.3 / 0.8]), (0.9, [0.2, 0.5, 0.3])):
        torch.testing.assert_close(probabilities(AutoregressiveProcess(top_p=p), *logits), torch.tensor(expected))


def test_top_p_keeps_at_least_one_token() -> None:
    torch.testing.assert_close(probabilities(AutoregressiveProcess(top_p=1e-6), 0.0, 9.0), torch.tensor([0.0, 1.0]))


def test_top_p_applies_after_top_k() -> None:
    logits = torch.tensor([0.1, 0.4, 0.3, 0.2]).log().tolist()
    # After top-k the probabilities are 4/7 and 3/7, so the first token is enough for top-p 0.55; before it is 0.4.
    torch.testing.assert_close(probabilities(AutoregressiveProcess(top_k=2, top_p=0.55), *logits), torch.eye(4)[1])
    expected = torch.tensor([0.0, 4 / 7, 3 / 7, 0.0])
    torch.testing.assert_close(probabilities(AutoregressiveProcess(top_k=2, top_p=0.6), *logits), expected)


def test_filtered_tokens_are_never_sampled() -> None:
    distribution = AutoregressiveProcess(top_k=2).sampler.distribution(
        torch.tensor([[[0.0, 5.0, 5.0, 1.0]]]).expand(1000, 1, 4)
    )
    uniform = torch.linspace(0, 1 - 2**-24, 1000)[:, None]
    assert distribution.quantile(uniform).unique().tolist() == [1, 2]


def test_token_frequencies_match_probabilities() -> None:
    distribution = AutoregressiveProcess().sampler.distribution(
        torch.tensor([[[0.1, 0.6, 0.3]]]).log().expand(10_000, 1, 3)
    )
    counts = distribution.quantile(torch.linspace(0, 1 - 2**-24, 10_000)[:, None]).flatten().bincount()
    assert counts.tolist() == pytest.approx([1000, 6000, 3000], abs=2)


def test_invalid_settings_are_refused() -> None:
    for key, value in (("temperature", 0.0), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5)):
        with pytest.raises(ValueError, match=f"{key}.* {value}"):
            AutoregressiveProcess(**{key: value})
