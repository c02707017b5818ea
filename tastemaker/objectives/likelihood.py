from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.guidance import unwrap_guidance
from ..core.objective import Context, NoState, Objective, ObjectiveState
from ..core.policy import HasCodebookSize, Policy, Process, SupportsEncodedLatents
from ..core.randomness import Randomness
from ..core.registry import ConfigError
from ..core.types import Condition, ImageBatch, LatentBatch, Loss, TokenBatch, to_device

LikelihoodBatch = ImageBatch | TokenBatch | LatentBatch


@dataclass(frozen=True)
class EncodedBatch:
    cond: Condition
    x: Tensor  # [B, ...] in model space
    rng: Randomness

    def __len__(self) -> int:
        return len(self.cond)


class LatentCache(NoState):
    """Pictures that come again, in model space; a resumed run encodes them anew, so none of it is saved."""

    def __init__(self) -> None:
        self.known = torch.zeros(0, dtype=torch.bool)
        self.kept: Tensor | None = None

    def recall(
        self, numbers: Tensor, pixels: Tensor, encode: Callable[[Tensor], Tensor], device: torch.device
    ) -> Tensor:
        """Encode only what was not seen before, and move no more than that; kept in half precision."""
        room = int(numbers.max()) + 1 - len(self.known)
        if room > 0:
            self.known = torch.cat([self.known, torch.zeros(room, dtype=torch.bool)])
        new = (~self.known[numbers]).nonzero().flatten()
        if len(new):
            fresh = encode(to_device(pixels[new.to(pixels.device)], device))
            fresh = fresh.half() if fresh.is_floating_point() else fresh
            kept = fresh.new_zeros(0, *fresh.shape[1:]) if self.kept is None else self.kept
            if len(kept) < len(self.known):
                kept = resize_cache(kept, len(self.known))
            kept[to_device(numbers[new], kept.device)] = fresh
            self.known[numbers[new]], self.kept = True, kept
        assert self.kept is not None
        found = self.kept[to_device(numbers, self.kept.device)]
        return found.float() if found.is_floating_point() else found


def encode_batch(policy: Policy[Process], batch: LikelihoodBatch, rng: Randomness) -> Tensor:
    """Pictures in model space, where those encoded beforehand are already."""
    if isinstance(batch, ImageBatch):
        return policy.encode(to_device(batch.pixels, rng.rows.device))
    model, _ = unwrap_guidance(policy.model)
    if isinstance(batch, LatentBatch):
        if not isinstance(model, SupportsEncodedLatents):
            raise ConfigError("data: this model does not take latents; let it learn from pictures, by data.type")
        return model.taken(batch)
    found, wanted = tuple(batch.ids.shape[1:]), tuple(policy.model.shape)
    if found != wanted:
        raise ConfigError(
            f"data: a picture has {found[0]} tokens, the model writes {wanted[0]}; encode at the model's size"
        )
    if isinstance(model, HasCodebookSize) and (last := int(batch.ids.max())) >= model.codes:
        way = "encode by the model's tokenizer, or set model.codes to its number"
        raise ConfigError(f"data: a picture has the token {last}, the model {model.codes} codes, from 0 on; {way}")
    return to_device(batch.ids, rng.rows.device)


def resize_cache(kept: Tensor, rows: int) -> Tensor:
    """The same with more rows; copied, for under autocast a CPU does not concatenate half precision."""
    more = kept.new_zeros(rows, *kept.shape[1:])
    more[: len(kept)] = kept
    return more


@dataclass(frozen=True)
class Likelihood(Objective[Process, LikelihoodBatch, EncodedBatch, None]):
    """Pretraining and supervised tuning alike: flow matching, noise, masked and next-token prediction."""

    drop: float = 0.1  # of the captions, so that guidance has something to contrast with
    remember: bool = False  # how pictures that come again are encoded: saves time, costs memory
    consumes: ClassVar[type] = ImageBatch
    also: ClassVar[tuple[type, ...]] = (TokenBatch, LatentBatch)

    def __post_init__(self) -> None:
        if not 0 <= self.drop <= 1:
            raise ValueError(f"'drop' is {self.drop}; expected the share of captions to drop, from 0 to 1")

    def memory(self) -> ObjectiveState:
        return LatentCache() if self.remember else NoState()

    @torch.no_grad()
    def collect(self, ctx: Context[Process], batch: LikelihoodBatch) -> EncodedBatch:
        dropped = (ctx.here().uniform("drop", 1).flatten() < self.drop).tolist()
        prompts = ["" if gone else prompt for prompt, gone in zip(batch.prompts, dropped, strict=True)]
        return EncodedBatch(ctx.policy.embed(prompts), self._encoded(ctx, batch), ctx.rng)

    def _encoded(self, ctx: Context[Process], batch: LikelihoodBatch) -> Tensor:
        if isinstance(batch, ImageBatch) and isinstance(ctx.memory, LatentCache) and batch.numbers is not None:
            return ctx.memory.recall(batch.numbers, batch.pixels, ctx.policy.encode, ctx.rng.rows.device)
        return encode_batch(ctx.policy, batch, ctx.rng)

    def parts(self, experience: EncodedBatch) -> Sequence[None]:
        return (None,)

    def loss(self, ctx: Context[Process], experience: EncodedBatch, part: None) -> Loss:
        policy, x = ctx.policy, experience.x
        noisy = policy.corrupt(x, experience.rng, draw=ctx.epoch)
        likelihood = policy.likelihood(experience.cond, x, noisy) / policy.process.hidden(noisy)
        return Loss(-likelihood, {"likelihood": likelihood.detach()})
