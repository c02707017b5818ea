"""Teacher forcing: sequences drawn and scored around a given one, many of them by one call of the network."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.distributions import TokenDistribution, top_k_top_p_filter
from ..core.guidance import scoring_model
from ..core.policy import Policy
from ..core.randomness import Randomness
from ..core.types import Condition, Segment
from ..processes.autoregressive import AutoregressiveProcess, make_decoder, require_causal


@dataclass(frozen=True)
class TeacherForcedSamples:
    """Sequences drawn around pictures: every token by what the picture, not the sequence, has before it."""

    cond: Condition
    clean: Tensor  # [B, K] the picture's own tokens
    context: Tensor  # [B, 1 or G, K] what was read: these, or some of them replaced; by all samples alike, or by each
    drawn: Tensor  # [B, G, K]
    log_prob: Tensor  # [B, G, K] under the weights that drew
    rng: Randomness
    reward: Tensor  # [B, G]
    advantage: Tensor  # [B, G]
    parts: dict[str, Tensor]  # [B, G] each reward by itself

    def __len__(self) -> int:
        return len(self.cond)

    def segment(self, counts: Tensor) -> Segment:
        """All samples as decisions of one call, of which those count that `counts` [B, G, K] has."""
        tokens, old = self.drawn.flatten(0, 1), self.log_prob.flatten(0, 1)
        ends = torch.ones_like(old[:, 0])
        return Segment(ends, 0 * ends, tokens, tokens, old, counts.flatten(0, 1))

    def watched(self) -> dict[str, Tensor]:
        """Rewards, and which pictures' samples earned all the same."""
        flat = (self.reward.amax(1) - self.reward.amin(1) < 1e-8).float()
        return {"reward": self.reward, "flat_groups": flat, **{f"reward/{name}": x for name, x in self.parts.items()}}


def teacher_forced_distribution(
    policy: Policy[AutoregressiveProcess], cond: Condition, context: Tensor
) -> TokenDistribution:
    """What comes at each place, by what `context` [B, K] has before it; as decisions are scored."""
    ends, every = torch.ones(len(context), device=context.device), torch.ones_like(context)
    return policy.process.decide(policy.model, cond, Segment(ends, 0 * ends, context, context, every, every))


def sample_tokens(process: AutoregressiveProcess, scored: TokenDistribution, uniform: Tensor) -> Tensor:
    """A token for each of the numbers [B, G, K], every sequence by itself: [B, G, K]."""
    passed = top_k_top_p_filter(scored.logits, process.top_k, process.top_p).softmax(-1).cumsum(-1)  # [B, K, V]
    target = uniform.transpose(1, 2) * passed[..., -1:]
    found = torch.searchsorted(passed, target.contiguous(), right=True).clamp(max=passed.shape[-1] - 1)
    return found.transpose(1, 2).contiguous()


def sample_with_mixed_context(
    policy: Policy[AutoregressiveProcess], cond: Condition, given: Tensor, own: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Sequences written token by token, and what was read meanwhile: their own tokens where `own` says so, elsewhere
    the given ones. All [B, K]."""
    model, cond = scoring_model(policy.model, cond)  # drawn from what they will be scored by
    writer, context = make_decoder(require_causal(model), cond, uniform, policy.process.choice), given.clone()
    for place in range(given.shape[1]):
        if place:
            writer.amend(context[:, place - 1])
        writer.write()
        context[:, place] = torch.where(own[:, place], writer.ids[:, place], given[:, place])
    return writer.ids, context


def sample_around(
    policy: Policy[AutoregressiveProcess], cond: Condition, given: Tensor, rng: Randomness, group: int, own: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Samples around given tokens [B, K], what they read, and their log-probabilities: [B, G, K], [B, C, K] and
    [B, G, K], where C is 1 if all read the given tokens, and G if each reads some of its own."""
    uniform = rng.uniform("token", group, given.shape[1])
    if not own:
        scored = teacher_forced_distribution(policy, cond, given)
        tokens = sample_tokens(policy.process, scored, uniform)
        return tokens, given[:, None], scored.each(tokens)
    several, theirs = cond.repeat(group), rng.uniform("own", given.shape[1]) < own  # the same places in all of a group
    around, theirs = (x.repeat_interleave(group, 0) for x in (given, theirs))
    tokens, context = sample_with_mixed_context(policy, several, around, theirs, uniform.flatten(0, 1))
    found = tokens, context, teacher_forced_distribution(policy, several, context).log_prob(tokens)
    written, seen, log_prob = (x.view(uniform.shape) for x in found)
    return written, seen, log_prob


def compute_log_probs(
    policy: Policy[AutoregressiveProcess], cond: Condition, context: Tensor, tokens: Tensor, clean: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of tokens [B, G, K] by contexts [B, C, K], and of the clean ones [B, K] in the mean: [B]."""
    rows, each, length = context.shape
    scored = teacher_forced_distribution(policy, cond.repeat(each), context.flatten(0, 1))
    some, own = tokens.view(rows * each, -1, length), clean.repeat_interleave(each, 0)[:, None]
    both = scored.each(torch.cat([some, own], 1))  # at once, for there may be many logits
    return both[:, :-1].reshape(tokens.shape), both[:, -1].mean(1).view(rows, each).mean(1)
