"""Contract of token generators: caches do not change results, and masked tokens are not read."""

from __future__ import annotations

from dataclasses import replace

import torch
import toys

from tastemaker.core.policy import Guidance
from tastemaker.core.randomness import Randomness
from tastemaker.processes.autoregressive import AutoregressiveProcess
from tastemaker.processes.masked import MaskedProcess

ROWS = 8
RNG = Randomness(0, 0, torch.arange(ROWS))
PROMPTS = toys.PROMPTS * 2


def test_cached_log_probs_are_close_to_rescored_in_bfloat16() -> None:
    """Without recomputation the log-probabilities are those of cached calls, which round differently."""
    policy = replace(toys.policy("causal"), process=AutoregressiveProcess(recompute_log_probs=False))
    cond = policy.embed(PROMPTS)
    with torch.autocast("cpu", torch.bfloat16):
        (segment,) = policy.sample(cond, RNG).segments
        log_prob = policy.action_distribution(cond, segment).log_prob(segment.action)
    ratios = (log_prob - segment.log_prob).exp()
    assert (ratios - 1).abs().mean() < 1e-2


def test_cached_decoding_matches_causal_call() -> None:
    for guidance in (None, Guidance(2.0, interval=(0.2, 0.9))):
        policy = toys.policy("causal", guidance=guidance)
        cond = policy.embed(PROMPTS)
        ids = policy.sample(cond, RNG).final
        with torch.no_grad():
            full = policy.model.predict(ids, torch.ones(ROWS), cond)
            cache, last = policy.model.init_cache(cond), None
            for position in range(ids.shape[1]):
                logits, cache = policy.model.decode_step(last, cache, cond)
                torch.testing.assert_close(logits, full[:, position], rtol=1e-4, atol=1e-5)
                last = ids[:, position]


def test_causal_call_ignores_later_tokens() -> None:
    policy = toys.policy("causal")
    cond = policy.embed(PROMPTS)
    ids = policy.sample(cond, RNG).final
    changed = ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 8
    with torch.no_grad():
        before, after = (policy.model.predict(x, torch.ones(ROWS), cond) for x in (ids, changed))
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8:], after[:, 8:])


def test_masked_call_ignores_masked_tokens() -> None:
    policy = toys.policy("masked")
    x, other = torch.zeros(ROWS, 16, dtype=torch.long), torch.ones(ROWS, 16, dtype=torch.long)
    hidden = torch.arange(16).expand(ROWS, 16) < 9
    expected, corrupted = (
        policy.corrupt(ids, RNG, torch.full((ROWS,), 0.5), hidden) for ids in (x, torch.where(hidden, other, x))
    )
    assert torch.equal(expected.x, corrupted.x)


def test_zero_temperature_reveals_most_confident_tokens() -> None:
    policy = replace(toys.policy("masked"), process=MaskedProcess(num_steps=4, temperature=0.0))
    for segment in policy.sample(policy.embed(PROMPTS), RNG).segments[:-1]:
        hidden, revealed = segment.state < 0, segment.mask > 0
        assert not (revealed & ~hidden).any()
        least = segment.log_prob.where(revealed, torch.inf).amin(1)
        most = segment.log_prob.where(hidden & ~revealed, -torch.inf).amax(1)
        assert (least >= most).all()


def test_every_token_is_one_action() -> None:
    for name in ("causal", "masked"):
        policy = toys.policy(name)
        trajectory = policy.sample(policy.embed(PROMPTS), RNG)
        assert torch.equal(sum(segment.mask for segment in trajectory.segments), torch.ones(ROWS, 16))
        for segment in trajectory.segments:
            assert torch.equal(segment.action[segment.mask > 0], trajectory.final[segment.mask > 0])


def test_masked_tokens_are_resampled_every_step() -> None:
    policy = replace(toys.policy("masked"), process=MaskedProcess(num_steps=16))
    with torch.no_grad():
        for p in policy.model.net.parameters():
            p.zero_()  # all tokens are equally likely, so that only the draws count
    first, second = (segment.action for segment in policy.sample(policy.embed(PROMPTS), RNG).segments[:2])
    assert (first == second).float().mean() < 0.5
