"""What samples around pictures earn: by what they look like, and by what their tokens stand for."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..guidance import unguided
from ..objective import Context
from ..policy import Policy, Spelled
from ..processes.autoregressive import Autoregressive
from ..registry import ConfigError
from ..types import Pictures


def earned(
    ctx: Context[Autoregressive], batch: Pictures, tokens: Tensor, pixels: Tensor, latent: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """All that samples [B, G, K] of pictures earn, and each reward by itself: [B, G].

    Rewards find the picture in the fact `target`, and its prompt even where the network was not told.
    """
    group = tokens.shape[1]
    facts = [{"target": picture} for picture in pixels for _ in range(group)]
    prompts = [prompt for prompt in batch.prompts for _ in range(group)]
    found = ctx.rubric.score(ctx.policy.decode(tokens.flatten(0, 1)), prompts, facts)
    parts = {name: part.view(-1, group) for name, part in found.parts.items()}
    if not latent:
        return found.total.view(-1, group), parts
    near = nearness(ctx.policy, tokens, pixels)
    return found.total.view(-1, group) + latent * near, {**parts, "latent": near}


def nearness(policy: Policy[Autoregressive], tokens: Tensor, pixels: Tensor) -> Tensor:
    """Of samples [B, G, K], the cosine of what their tokens stand for to what the picture was before it had any, less
    one: [B, G], nought at best."""
    model, _ = unguided(policy.model)
    if not isinstance(model, Spelled):
        raise ConfigError("objective.latent: the tokens of this model stand for no vectors; set objective.latent=0")
    wanted = model.latents(pixels).flatten(1).repeat_interleave(tokens.shape[1], 0)
    return F.cosine_similarity(model.vectors(tokens.flatten(0, 1)).flatten(1), wanted).view(tokens.shape[:2]) - 1
