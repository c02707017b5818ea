"""Classifier-free guidance around any backbone, for latents and logits alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from .distributions import expand_dims_like
from .policy import Backbone, BackboneWrapper, Guidance
from .registry import ConfigError
from .types import Condition, Metadata, Prompts

NEGATIVE = "negative."  # prefix of the unconditional tensors in a guided condition


def embed_with_negative(
    model: Backbone, guidance: Guidance, prompts: Prompts, metadata: Sequence[Metadata]
) -> Condition:
    """The conditional and the unconditional embedding in one condition, so that rows are selected together."""
    cond = model.embed(prompts, metadata)
    if model.has_unconditional and not guidance.negative_prompt:
        uncond = model.without_prompt(cond)
    else:
        uncond = model.embed_negative([guidance.negative_prompt] * len(prompts), metadata)
    return replace(cond, tensors={**cond.tensors, **{NEGATIVE + key: x for key, x in uncond.tensors.items()}})


def split_conditions(cond: Condition) -> tuple[Condition, Condition]:
    """Split a guided condition into the conditional and the unconditional one."""
    uncond = {key.removeprefix(NEGATIVE): x for key, x in cond.tensors.items() if key.startswith(NEGATIVE)}
    conditional = {key: x for key, x in cond.tensors.items() if not key.startswith(NEGATIVE)}
    return replace(cond, tensors=conditional), replace(cond, tensors=uncond)


def batch_conditions(cond: Condition) -> Condition:
    """The conditional rows, then the unconditional ones, for one batched call: 2B rows."""
    conditional, uncond = split_conditions(cond)
    tensors = {key: torch.cat([x, uncond.tensors[key]]) for key, x in conditional.tensors.items()}
    return Condition(cond.prompts * 2, tensors, cond.metadata * 2)


def apply_guidance(guidance: Guidance, cond: Tensor, uncond: Tensor, t: Tensor) -> Tensor:
    """uncond + scale * (cond - uncond) where t is in the guidance interval, the conditional prediction elsewhere."""
    guided = (uncond + guidance_scale_at(guidance, t) * (cond - uncond)).to(cond.dtype)
    if guidance.rescale == "token":
        guided = guided * cond.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    elif guidance.rescale:
        cond_norm, guided_norm = (x.flatten(1).norm(dim=1) for x in (cond, guided))
        factor = cond_norm / guided_norm.clamp(min=1e-12)
        factor = factor.clamp(max=1) if guidance.rescale == "limit" else factor
        guided = guided * expand_dims_like(factor, guided)
    return torch.where(in_interval(t, guidance.interval), guided, cond)


def guidance_scale_at(guidance: Guidance, t: Tensor) -> Tensor | float:
    """The guidance scale at each t, by the power schedule if there is one."""
    if guidance.power_schedule is None:
        return guidance.scale
    return 1 + (guidance.scale - 1) / 2 * (1 - torch.cos(math.pi * (1 - t).clamp(min=0) ** guidance.power_schedule))


def in_interval(t: Tensor, interval: tuple[float, float]) -> Tensor:
    """Where t is in the guidance interval, ends included with a tolerance, because t is float32: bool."""
    return (t >= interval[0] - 1e-6) & (t <= interval[1] + 1e-6)


def is_guided(guidance: Guidance, t: Tensor) -> bool:
    """Whether any t is in the guidance interval; if none is, no unconditional prediction is needed."""
    return guidance.interval == (0.0, 1.0) or bool(in_interval(t, guidance.interval).any())


def count_forward_passes(model: Backbone, t: Tensor) -> int:
    """Network calls of one prediction at these timesteps, which depends on the guidance interval."""
    unguided = model.guidance is not None and not is_guided(model.guidance, t)
    return model.unguided.forward_passes if unguided else model.forward_passes


def token_levels(length: int, device: torch.device | None = None) -> Tensor:
    """The t of each token of a sequence, from 1 for the first down to 1 / length: [length]."""
    return 1 - torch.arange(length, device=device) / length


def count_guided_tokens(guidance: Guidance | None, length: int) -> int:
    """Number of tokens that need an unconditional prediction: all up to the last one in the guidance interval."""
    if guidance is None:
        return 0
    inside = in_interval(token_levels(length), guidance.interval).nonzero()
    return int(inside[-1]) + 1 if len(inside) else 0


def without_guidance(model: Backbone, cond: Condition) -> tuple[Backbone, Condition]:
    """The model and its condition without guidance, for likelihoods: a guided model is not a density of the data."""
    return (model.unguided, split_conditions(cond)[0]) if model.guidance else (model, cond)


def scoring_model(model: Backbone, cond: Condition) -> tuple[Backbone, Condition]:
    """The model and condition that score actions: without guidance if only rollouts are guided."""
    rollouts_only = model.guidance is not None and model.guidance.rollouts_only
    return without_guidance(model, cond) if rollouts_only else (model, cond)


class GuidedBackbone(BackboneWrapper):
    """Classifier-free guidance by two predictions in one batched call, or one call where guidance is off.

    Optional abilities that depend on the prompt are those of `unguided`; their callers apply the guidance themselves.
    """

    guidance: Guidance

    def __init__(self, model: Backbone, guidance: Guidance) -> None:
        super().__init__(model)
        self.guidance, self.answers_questions = guidance, model.answers_questions
        self.forward_passes = 2 * model.forward_passes

    def rewrap(self, model: Backbone) -> Self:
        return type(self)(model, self.guidance)

    @property
    def unguided(self) -> Backbone:
        return self.model

    def enable_text_encoder_training(self) -> dict[str, nn.Module]:
        return self.model.enable_text_encoder_training()

    def embed(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        return embed_with_negative(self.model, self.guidance, prompts, metadata)

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        if (self.guidance.rollouts_only and torch.is_grad_enabled()) or not is_guided(self.guidance, t):
            return self.model.predict(x, t, split_conditions(cond)[0])
        conditional, uncond = self._predict_both(x, t, cond)
        return apply_guidance(self.guidance, conditional, uncond, expand_dims_like(t, conditional))

    def _predict_both(self, x: Tensor, t: Tensor, cond: Condition) -> tuple[Tensor, Tensor]:
        """The conditional and the unconditional prediction, in one batched call."""
        both = self.model.predict(torch.cat([x, x]), torch.cat([t, t]), batch_conditions(cond))
        conditional, uncond = both.chunk(2)
        return conditional, uncond

    def token_embeddings(self, ids: Tensor) -> Tensor:
        return self.model.token_embeddings(ids)

    def encode_continuous(self, pixels: Tensor) -> Tensor:
        return self.model.encode_continuous(pixels)

    def score_answers(self, pixels: Tensor, turns: Sequence[Sequence[str]], answers: Sequence[str]) -> Any:
        return self.model.score_answers(pixels, turns, answers)


class GuidedCausalBackbone(GuidedBackbone):
    """Guidance token by token. Both predictions see the same tokens, up to the last one in the guidance interval."""

    def __init__(self, model: Backbone, guidance: Guidance) -> None:
        super().__init__(model, guidance)
        if guidance.rescale == "limit":
            raise ConfigError(
                "guidance.rescale: 'limit' is for latents, but this model samples tokens; use true or false [TM2402]"
            )
        self.num_guided_tokens = count_guided_tokens(guidance, model.shape[0])

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        if self.guidance.rollouts_only and torch.is_grad_enabled():
            return self.model.predict(x, t, split_conditions(cond)[0])
        return apply_guidance(self.guidance, *self._predict_both(x, t, cond), self._levels(x))

    def hidden_states(self, x: Tensor, t: Tensor, cond: Condition) -> tuple[Tensor, Tensor] | None:
        """Guided hidden states: logits are linear in them. None with `rescale`, which needs the norms of logits."""
        if self.guidance.rescale:
            return None
        states_and_head = self.model.hidden_states(torch.cat([x, x]), torch.cat([t, t]), batch_conditions(cond))
        if states_and_head is None:
            return None
        states, head = states_and_head
        conditional, uncond = states.float().chunk(2)
        guided = apply_guidance(self.guidance, conditional, uncond, self._levels(x))
        return guided.to(states.dtype), head

    def _levels(self, x: Tensor) -> Tensor:
        return token_levels(self.shape[0], x.device)[None, : x.shape[1], None]

    def init_cache(self, cond: Condition) -> tuple[Any, Any, int]:
        """The conditional cache, the unconditional cache, and the position of the next token."""
        conditional, uncond = split_conditions(cond)
        return self.model.init_cache(conditional), self.model.init_cache(uncond), 0

    def decode_step(self, ids: Tensor | None, cache: tuple[Any, Any, int], cond: Condition) -> tuple[Tensor, Any]:
        conditional, uncond = split_conditions(cond)
        cond_cache, uncond_cache, position = cache
        cond_logits, cond_cache = self.model.decode_step(ids, cond_cache, conditional)
        if position >= self.num_guided_tokens:
            return cond_logits, (cond_cache, uncond_cache, position + 1)
        uncond_logits, uncond_cache = self.model.decode_step(ids, uncond_cache, uncond)
        t = token_levels(self.shape[0], cond_logits.device)[position]
        guided = apply_guidance(self.guidance, cond_logits, uncond_logits, t)
        return guided, (cond_cache, uncond_cache, position + 1)
