"""Teacher forcing: sequences drawn and scored around a given one, many of them by one call of the network."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..distributions import Tokens, keep_top
from ..policy import Policy
from ..processes.autoregressive import Autoregressive
from ..randomness import Randomness
from ..types import Condition, Segment, index

UNTOLD = 0.1  # share of conditions that LlamaGen leaves out while its network is in training mode


@dataclass(frozen=True)
class Forced:
    """Sequences drawn around pictures: every token by what the picture, not the sequence, has before it."""

    cond: Condition
    clean: Tensor  # [B, K] the picture's own tokens
    context: Tensor  # [B, K] what was read: these, or some of them replaced
    drawn: Tensor  # [B, G, K]
    log_prob: Tensor  # [B, G, K] under the weights that drew
    rng: Randomness
    reward: Tensor  # [B, G]
    advantage: Tensor  # [B, G]
    parts: dict[str, Tensor]  # [B, G] each reward by itself

    def __len__(self) -> int:
        return len(self.cond)

    def watched(self) -> dict[str, Tensor]:
        """Rewards, and which pictures' samples earned all the same."""
        flat = (self.reward.amax(1) - self.reward.amin(1) < 1e-8).float()
        return {"reward": self.reward, "flat_groups": flat, **{f"reward/{name}": x for name, x in self.parts.items()}}


def read(policy: Policy[Autoregressive], cond: Condition, context: Tensor) -> Tokens:
    """What comes at each place, by what `context` [B, K] has before it; as decisions are scored."""
    ends, every = torch.ones(len(context), device=context.device), torch.ones_like(context)
    return policy.process.decide(policy.model, cond, Segment(ends, 0 * ends, context, context, every, every))


def drawn(process: Autoregressive, scored: Tokens, uniform: Tensor) -> Tensor:
    """A token for each of the numbers [B, G, K], every sequence by itself: [B, G, K]."""
    passed = keep_top(scored.logits, process.top_k, process.top_p).softmax(-1).cumsum(-1)  # [B, K, V]
    target = uniform.transpose(1, 2) * passed[..., -1:]
    found = torch.searchsorted(passed, target.contiguous(), right=True).clamp(max=passed.shape[-1] - 1)
    return found.transpose(1, 2).contiguous()


def disturbed(policy: Policy[Autoregressive], cond: Condition, x: Tensor, rng: Randomness, share: float) -> Tensor:
    """Tokens [B, K], a share of them replaced by any code there is, all codes alike."""
    codes = read(policy, index(cond, torch.arange(1)), x[:1]).logits.shape[-1]
    other = (rng.uniform("code", x.shape[1]) * codes).long().clamp(max=codes - 1)
    return torch.where(rng.uniform("noise", x.shape[1]) < share, other, x)


def untold(policy: Policy[Autoregressive], cond: Condition, rng: Randomness, draw: int) -> Condition:
    """The same with some conditions left out, by chance."""
    gone = (rng.uniform("untold", 1, draw=draw).flatten() < UNTOLD).tolist()
    return policy.embed(["" if left else prompt for prompt, left in zip(cond.prompts, gone, strict=True)], cond.facts)
