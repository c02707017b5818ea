"""What samples around pictures earn: by what they look like, and by what their tokens stand for."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..core.guidance import unwrap_guidance
from ..core.objective import Context
from ..core.policy import Policy, SupportsTokenEmbeddings
from ..core.registry import ConfigError
from ..core.types import ImageBatch
from ..processes.autoregressive import AutoregressiveProcess


def reconstruction_rewards(
    ctx: Context[AutoregressiveProcess], batch: ImageBatch, tokens: Tensor, pixels: Tensor, latent: float
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
    near = latent_cosine_reward(ctx.policy, tokens, pixels)
    return found.total.view(-1, group) + latent * near, {**parts, "latent": near}


def latent_cosine_reward(policy: Policy[AutoregressiveProcess], tokens: Tensor, pixels: Tensor) -> Tensor:
    """Of samples [B, G, K], the cosine of what their tokens stand for to what the picture was before it had any, less
    one: [B, G], nought at best."""
    model, _ = unwrap_guidance(policy.model)
    if not isinstance(model, SupportsTokenEmbeddings):
        raise ConfigError("objective.latent: the tokens of this model stand for no vectors; set objective.latent=0")
    wanted = model.latents(pixels).flatten(1).repeat_interleave(tokens.shape[1], 0)
    return F.cosine_similarity(model.vectors(tokens.flatten(0, 1)).flatten(1), wanted).view(tokens.shape[:2]) - 1
