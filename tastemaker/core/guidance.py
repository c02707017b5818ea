"""Classifier-free guidance around any backbone: latents and logits extrapolate alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from .distributions import broadcast_to_shape
from .policy import Backbone, CausalBackbone, Guidance, SupportsHiddenStates
from .types import Condition, Metadata, Prompts

NEGATIVE = "negative."


@runtime_checkable
class SupportsUnconditional(Protocol):
    """A backbone that knows by itself what its rows would be without their prompts."""

    def without(self, cond: Condition) -> Condition: ...


def embed_with_negative(model: Backbone, guidance: Guidance, prompts: Prompts, facts: Sequence[Metadata]) -> Condition:
    """Both conditions in one, so that rows of them are selected together."""
    cond = model.embed(prompts, facts)
    if isinstance(model, SupportsUnconditional) and not guidance.negative:
        without = model.without(cond)
    else:
        without = model.embed([guidance.negative] * len(prompts), facts)
    return replace(cond, tensors={**cond.tensors, **{NEGATIVE + key: x for key, x in without.tensors.items()}})


def split_conditions(cond: Condition) -> tuple[Condition, Condition]:
    """With and without the prompt."""
    without = {key.removeprefix(NEGATIVE): x for key, x in cond.tensors.items() if key.startswith(NEGATIVE)}
    own = {key: x for key, x in cond.tensors.items() if not key.startswith(NEGATIVE)}
    return replace(cond, tensors=own), replace(cond, tensors=without)


def batch_conditions(cond: Condition) -> Condition:
    """The rows with the prompt, then the rows without it, for one batched call."""
    own, without = split_conditions(cond)
    tensors = {key: torch.cat([x, without.tensors[key]]) for key, x in own.tensors.items()}
    return Condition(cond.prompts * 2, tensors, cond.facts * 2)


def apply_guidance(guidance: Guidance, given: Tensor, without: Tensor, t: Tensor) -> Tensor:
    """Guided at levels within the interval, the conditional prediction elsewhere."""
    guided = (without + guidance_scale_at(guidance, t) * (given - without)).to(given.dtype)
    if guidance.rescale == "token":
        guided = guided * given.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    elif guidance.rescale:
        norms = [x.flatten(1).norm(dim=1) for x in (given, guided)]
        guided = guided * broadcast_to_shape(norms[0] / norms[1].clamp(min=1e-12), guided)
    return torch.where(in_interval(t, guidance.interval), guided, given)


def guidance_scale_at(guidance: Guidance, t: Tensor) -> Tensor | float:
    """The scale at each level."""
    if guidance.rise is None:
        return guidance.scale
    return 1 + (guidance.scale - 1) / 2 * (1 - torch.cos(math.pi * (1 - t).clamp(min=0) ** guidance.rise))


def in_interval(t: Tensor, interval: tuple[float, float]) -> Tensor:
    """Where guidance is on; levels are float32 and bounds are not, so a bound that names a level must reach it."""
    return (t >= interval[0] - 1e-6) & (t <= interval[1] + 1e-6)


def is_guided(guidance: Guidance, t: Tensor) -> bool:
    """Whether any of these levels is guided; if none is, nothing need be read without its prompt."""
    return guidance.interval == (0.0, 1.0) or bool(in_interval(t, guidance.interval).any())


def count_forward_passes(model: Backbone, t: Tensor) -> int:
    """How often a prediction at these levels reads a row."""
    inner, guidance = unwrap_guidance(model)
    return inner.passes if guidance is not None and not is_guided(guidance, t) else model.passes


def token_levels(length: int, device: torch.device | None = None) -> Tensor:
    """The level of each token of a sequence: [length]."""
    return 1 - torch.arange(length, device=device) / length


def count_guided_tokens(guidance: Guidance, length: int) -> int:
    """How many places of a sequence have to be read without the prompt too: up to the last that is guided."""
    inside = in_interval(token_levels(length), guidance.interval).nonzero()
    return int(inside[-1]) + 1 if len(inside) else 0


def count_doubled_tokens(model: Backbone) -> int:
    """How many tokens of a sequence are written by reading with the prompt and without."""
    guidance = unwrap_guidance(model)[1]
    return 0 if guidance is None else count_guided_tokens(guidance, model.shape[0])


def unwrap_guidance(model: Backbone) -> tuple[Backbone, Guidance | None]:
    """What is guided, and how."""
    return (model.model, model.guidance) if isinstance(model, GuidedBackbone | GuidedCausalBackbone) else (model, None)


def without_guidance(model: Backbone, cond: Condition) -> tuple[Backbone, Condition]:
    """The network itself and what it reads: guidance is for sampling, and no model of the data."""
    inner, guidance = unwrap_guidance(model)
    return (inner, split_conditions(cond)[0]) if guidance else (model, cond)


def scoring_model(model: Backbone, cond: Condition) -> tuple[Backbone, Condition]:
    """What decisions are scored by: the model itself where rollouts alone are guided, with or without gradients."""
    inner, guidance = unwrap_guidance(model)
    return (inner, split_conditions(cond)[0]) if guidance and guidance.rollouts_only else (model, cond)


class GuidedBackbone:
    """Guidance by two predictions in one batched call; by one where it is off."""

    def __init__(self, model: Backbone, guidance: Guidance) -> None:
        self.model, self.guidance = model, guidance
        self.shape, self.pixels, self.passes = model.shape, model.pixels, 2 * model.passes

    @property
    def net(self) -> nn.Module:
        return self.model.net

    @net.setter
    def net(self, net: nn.Module) -> None:
        self.model.net = net

    def embed(self, prompts: Prompts, facts: Sequence[Metadata] = ()) -> Condition:
        return embed_with_negative(self.model, self.guidance, prompts, facts)

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        if (self.guidance.rollouts_only and torch.is_grad_enabled()) or not is_guided(self.guidance, t):
            return self.model.predict(x, t, split_conditions(cond)[0])
        given, without = self.model.predict(torch.cat([x, x]), torch.cat([t, t]), batch_conditions(cond)).chunk(2)
        return apply_guidance(self.guidance, given, without, broadcast_to_shape(t, given))

    def encode(self, pixels: Tensor) -> Tensor:
        return self.model.encode(pixels)

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        return self.model.decode(x, frames)


class GuidedCausalBackbone:
    """Guidance token by token; both halves read the same tokens, up to the last that is guided."""

    def __init__(self, model: CausalBackbone, guidance: Guidance) -> None:
        self.model, self.guidance = model, guidance
        self.shape, self.pixels, self.passes = model.shape, model.pixels, 2 * model.passes
        self.guided = count_guided_tokens(guidance, model.shape[0])

    @property
    def net(self) -> nn.Module:
        return self.model.net

    @net.setter
    def net(self, net: nn.Module) -> None:
        self.model.net = net

    def embed(self, prompts: Prompts, facts: Sequence[Metadata] = ()) -> Condition:
        return embed_with_negative(self.model, self.guidance, prompts, facts)

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        if self.guidance.rollouts_only and torch.is_grad_enabled():
            return self.model.predict(x, t, split_conditions(cond)[0])
        given, without = self.model.predict(torch.cat([x, x]), torch.cat([t, t]), batch_conditions(cond)).chunk(2)
        return apply_guidance(self.guidance, given, without, self._levels(x))

    def states(self, x: Tensor, t: Tensor, cond: Condition) -> tuple[Tensor, Tensor] | None:
        """Extrapolated as the logits would be, for these are linear in them; unless their norms are wanted."""
        if not isinstance(self.model, SupportsHiddenStates) or self.guidance.rescale:
            return None
        found = self.model.states(torch.cat([x, x]), torch.cat([t, t]), batch_conditions(cond))
        if found is None:
            return None
        given, without = found[0].float().chunk(2)
        guided = apply_guidance(self.guidance, given, without, self._levels(x))
        return guided.to(found[0].dtype), found[1]

    def _levels(self, x: Tensor) -> Tensor:
        return token_levels(self.shape[0], x.device)[None, : x.shape[1], None]

    def begin(self, cond: Condition) -> tuple[Any, Any, int]:
        own, without = split_conditions(cond)
        return self.model.begin(own), self.model.begin(without), 0

    def extend(self, ids: Tensor | None, cache: tuple[Any, Any, int], cond: Condition) -> tuple[Tensor, Any]:
        own, without = split_conditions(cond)
        first, second, place = cache
        given, first = self.model.extend(ids, first, own)
        if place >= self.guided:
            return given, (first, second, place + 1)
        plain, second = self.model.extend(ids, second, without)
        t = token_levels(self.shape[0], given.device)[place]
        return apply_guidance(self.guidance, given, plain, t), (first, second, place + 1)

    def encode(self, pixels: Tensor) -> Tensor:
        return self.model.encode(pixels)

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        return self.model.decode(x, frames)
