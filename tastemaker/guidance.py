"""Classifier-free guidance around any backbone: latents and logits extrapolate alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from .distributions import like
from .policy import Backbone, CausalBackbone, Guidance, Headed
from .types import Condition, Facts, Prompts

NEGATIVE = "negative."


@runtime_checkable
class Contrasted(Protocol):
    """A backbone that knows by itself what its rows would be without their prompts."""

    def without(self, cond: Condition) -> Condition: ...


def embed(model: Backbone, guidance: Guidance, prompts: Prompts, facts: Sequence[Facts]) -> Condition:
    """Both conditions in one, so that rows of them are selected together."""
    cond = model.embed(prompts, facts)
    if isinstance(model, Contrasted) and not guidance.negative:
        without = model.without(cond)
    else:
        without = model.embed([guidance.negative] * len(prompts), facts)
    return replace(cond, tensors={**cond.tensors, **{NEGATIVE + key: x for key, x in without.tensors.items()}})


def split(cond: Condition) -> tuple[Condition, Condition]:
    """With and without the prompt."""
    without = {key.removeprefix(NEGATIVE): x for key, x in cond.tensors.items() if key.startswith(NEGATIVE)}
    own = {key: x for key, x in cond.tensors.items() if not key.startswith(NEGATIVE)}
    return replace(cond, tensors=own), replace(cond, tensors=without)


def both(cond: Condition) -> Condition:
    """The rows with the prompt, then the rows without it, for one batched call."""
    own, without = split(cond)
    tensors = {key: torch.cat([x, without.tensors[key]]) for key, x in own.tensors.items()}
    return Condition(cond.prompts * 2, tensors, cond.facts * 2)


def extrapolate(guidance: Guidance, given: Tensor, without: Tensor, t: Tensor) -> Tensor:
    """Guided at levels within the interval, the conditional prediction elsewhere."""
    guided = (without + strength(guidance, t) * (given - without)).to(given.dtype)
    if guidance.rescale == "token":
        guided = guided * given.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    elif guidance.rescale:
        norms = [x.flatten(1).norm(dim=1) for x in (given, guided)]
        guided = guided * like(norms[0] / norms[1].clamp(min=1e-12), guided)
    return torch.where(within(t, guidance.interval), guided, given)


def strength(guidance: Guidance, t: Tensor) -> Tensor | float:
    """The scale at each level."""
    if guidance.rise is None:
        return guidance.scale
    return 1 + (guidance.scale - 1) / 2 * (1 - torch.cos(math.pi * (1 - t).clamp(min=0) ** guidance.rise))


def within(t: Tensor, interval: tuple[float, float]) -> Tensor:
    """Where guidance is on; levels are float32 and bounds are not, so a bound that names a level must reach it."""
    return (t >= interval[0] - 1e-6) & (t <= interval[1] + 1e-6)


def guides(guidance: Guidance, t: Tensor) -> bool:
    """Whether any of these levels is guided; if none is, nothing need be read without its prompt."""
    return guidance.interval == (0.0, 1.0) or bool(within(t, guidance.interval).any())


def passes(model: Backbone, t: Tensor) -> int:
    """How often a prediction at these levels reads a row."""
    inner, guidance = unguided(model)
    return inner.passes if guidance is not None and not guides(guidance, t) else model.passes


def levels(length: int, device: torch.device | None = None) -> Tensor:
    """The level of each token of a sequence: [length]."""
    return 1 - torch.arange(length, device=device) / length


def guided_places(guidance: Guidance, length: int) -> int:
    """How many places of a sequence have to be read without the prompt too: up to the last that is guided."""
    inside = within(levels(length), guidance.interval).nonzero()
    return int(inside[-1]) + 1 if len(inside) else 0


def twice_read(model: Backbone) -> int:
    """How many tokens of a sequence are written by reading with the prompt and without."""
    guidance = unguided(model)[1]
    return 0 if guidance is None else guided_places(guidance, model.shape[0])


def unguided(model: Backbone) -> tuple[Backbone, Guidance | None]:
    """What is guided, and how."""
    return (model.model, model.guidance) if isinstance(model, Guided | GuidedCausal) else (model, None)


def alone(model: Backbone, cond: Condition) -> tuple[Backbone, Condition]:
    """The network itself and what it reads: guidance is for sampling, and no model of the data."""
    inner, guidance = unguided(model)
    return (inner, split(cond)[0]) if guidance else (model, cond)


def scoring(model: Backbone, cond: Condition) -> tuple[Backbone, Condition]:
    """What decisions are scored by: the model itself where rollouts alone are guided, with or without gradients."""
    inner, guidance = unguided(model)
    return (inner, split(cond)[0]) if guidance and guidance.rollouts_only else (model, cond)


class Guided:
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

    def embed(self, prompts: Prompts, facts: Sequence[Facts] = ()) -> Condition:
        return embed(self.model, self.guidance, prompts, facts)

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        if (self.guidance.rollouts_only and torch.is_grad_enabled()) or not guides(self.guidance, t):
            return self.model.predict(x, t, split(cond)[0])
        given, without = self.model.predict(torch.cat([x, x]), torch.cat([t, t]), both(cond)).chunk(2)
        return extrapolate(self.guidance, given, without, like(t, given))

    def encode(self, pixels: Tensor) -> Tensor:
        return self.model.encode(pixels)

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        return self.model.decode(x, frames)


class GuidedCausal:
    """Guidance token by token; both halves read the same tokens, up to the last that is guided."""

    def __init__(self, model: CausalBackbone, guidance: Guidance) -> None:
        self.model, self.guidance = model, guidance
        self.shape, self.pixels, self.passes = model.shape, model.pixels, 2 * model.passes
        self.guided = guided_places(guidance, model.shape[0])

    @property
    def net(self) -> nn.Module:
        return self.model.net

    @net.setter
    def net(self, net: nn.Module) -> None:
        self.model.net = net

    def embed(self, prompts: Prompts, facts: Sequence[Facts] = ()) -> Condition:
        return embed(self.model, self.guidance, prompts, facts)

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        if self.guidance.rollouts_only and torch.is_grad_enabled():
            return self.model.predict(x, t, split(cond)[0])
        given, without = self.model.predict(torch.cat([x, x]), torch.cat([t, t]), both(cond)).chunk(2)
        return extrapolate(self.guidance, given, without, self._levels(x))

    def states(self, x: Tensor, t: Tensor, cond: Condition) -> tuple[Tensor, Tensor] | None:
        """Extrapolated as the logits would be, for these are linear in them; unless their norms are wanted."""
        if not isinstance(self.model, Headed) or self.guidance.rescale:
            return None
        found = self.model.states(torch.cat([x, x]), torch.cat([t, t]), both(cond))
        if found is None:
            return None
        given, without = found[0].float().chunk(2)
        guided = extrapolate(self.guidance, given, without, self._levels(x))
        return guided.to(found[0].dtype), found[1]

    def _levels(self, x: Tensor) -> Tensor:
        return levels(self.shape[0], x.device)[None, : x.shape[1], None]

    def begin(self, cond: Condition) -> tuple[Any, Any, int]:
        own, without = split(cond)
        return self.model.begin(own), self.model.begin(without), 0

    def extend(self, ids: Tensor | None, cache: tuple[Any, Any, int], cond: Condition) -> tuple[Tensor, Any]:
        own, without = split(cond)
        first, second, place = cache
        given, first = self.model.extend(ids, first, own)
        if place >= self.guided:
            return given, (first, second, place + 1)
        plain, second = self.model.extend(ids, second, without)
        t = levels(self.shape[0], given.device)[place]
        return extrapolate(self.guidance, given, plain, t), (first, second, place + 1)

    def encode(self, pixels: Tensor) -> Tensor:
        return self.model.encode(pixels)

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        return self.model.decode(x, frames)
