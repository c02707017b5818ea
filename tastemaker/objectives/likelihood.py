"""Maximum likelihood: pretraining and supervised fine-tuning of every family of generators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.objective import Context, NoState, Objective, ObjectiveState, drop_prompts
from ..core.policy import Policy, Process
from ..core.randomness import Purpose, Randomness
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
    """Latents of images that come again, by image id. A resumed run encodes them again, so nothing is saved."""

    def __init__(self) -> None:
        self.is_cached = torch.zeros(0, dtype=torch.bool)
        self.latents: Tensor | None = None

    def get_or_encode(
        self, image_ids: Tensor, pixels: Tensor, encode: Callable[[Tensor], Tensor], device: torch.device
    ) -> Tensor:
        """Latents of a batch. Only images that are not cached are moved to the device and encoded; kept as float16."""
        missing = int(image_ids.max()) + 1 - len(self.is_cached)
        if missing > 0:
            self.is_cached = torch.cat([self.is_cached, torch.zeros(missing, dtype=torch.bool)])
        new = (~self.is_cached[image_ids]).nonzero().flatten()
        if len(new):
            encoded = encode(to_device(pixels[new.to(pixels.device)], device))
            encoded = encoded.half() if encoded.is_floating_point() else encoded
            latents = encoded.new_zeros(0, *encoded.shape[1:]) if self.latents is None else self.latents
            if len(latents) < len(self.is_cached):
                latents = grow(latents, len(self.is_cached))
            latents[to_device(image_ids[new], latents.device)] = encoded
            self.is_cached[image_ids[new]], self.latents = True, latents
        assert self.latents is not None
        batch = self.latents[to_device(image_ids, self.latents.device)]
        return batch.float() if batch.is_floating_point() else batch


def grow(x: Tensor, length: int) -> Tensor:
    """Append zeros up to `length` rows. Copied, because autocast on a CPU cannot concatenate half precision."""
    longer = x.new_zeros(length, *x.shape[1:])
    longer[: len(x)] = x
    return longer


def encode_batch(policy: Policy[Process], batch: LikelihoodBatch, rng: Randomness) -> Tensor:
    """The batch in model space: [B, ...]. Latents and tokens that were encoded beforehand are checked."""
    if isinstance(batch, ImageBatch):
        return policy.encode(to_device(batch.pixels, rng.rows.device))
    model = policy.model.unguided
    if isinstance(batch, LatentBatch):
        return model.from_latents(batch)
    shape, expected = tuple(batch.ids.shape[1:]), tuple(policy.model.shape)
    if shape != expected:
        raise ConfigError(
            f"data: an image has {shape[0]} tokens, the model generates {expected[0]}; encode the images at the "
            "size of the model [TM306]"
        )
    if model.codebook_size is not None and (largest := int(batch.ids.max())) >= model.codebook_size:
        raise ConfigError(
            f"data: an image has the token {largest}, but the codebook of the model has {model.codebook_size} "
            f"entries (0 to {model.codebook_size - 1}); encode the images with the tokenizer of the model, or set "
            "model.codebook_size [TM307]"
        )
    return to_device(batch.ids, rng.rows.device)


@dataclass(frozen=True)
class Likelihood(Objective[Process, LikelihoodBatch, EncodedBatch, None]):
    """Pretraining or supervised fine-tuning: flow matching, noise prediction, masked and next-token prediction."""

    prompt_dropout: float = 0.1  # share of captions dropped, for classifier-free guidance
    cache_latents: bool = False  # keep the latents of images that come again: faster, more memory
    consumes: ClassVar[type] = ImageBatch
    also_consumes: ClassVar[tuple[type, ...]] = (TokenBatch, LatentBatch)

    def __post_init__(self) -> None:
        if not 0 <= self.prompt_dropout <= 1:
            raise ValueError(
                f"'prompt_dropout': expected a fraction from 0 to 1, got {self.prompt_dropout}; correct "
                "'prompt_dropout' [TM308]"
            )

    def make_state(self) -> ObjectiveState:
        return LatentCache() if self.cache_latents else NoState()

    @torch.no_grad()
    def collect(self, ctx: Context[Process], batch: LikelihoodBatch) -> EncodedBatch:
        dropped = ctx.host_rng().uniform(Purpose.PROMPT_DROPOUT, 1).flatten() < self.prompt_dropout
        metadata = batch.metadata if isinstance(batch, ImageBatch) else ()
        cond = ctx.policy.embed(drop_prompts(batch.prompts, dropped), metadata)
        return EncodedBatch(cond, self._encode(ctx, batch), ctx.rng)

    def _encode(self, ctx: Context[Process], batch: LikelihoodBatch) -> Tensor:
        if isinstance(batch, ImageBatch) and isinstance(ctx.state, LatentCache) and batch.image_ids is not None:
            return ctx.state.get_or_encode(batch.image_ids, batch.pixels, ctx.policy.encode, ctx.rng.rows.device)
        return encode_batch(ctx.policy, batch, ctx.rng)

    def parts(self, experience: EncodedBatch) -> Sequence[None]:
        return (None,)

    def loss(self, ctx: Context[Process], experience: EncodedBatch, part: None) -> Loss:
        """Negative log-likelihood (or its bound) at a random corruption, per hidden element."""
        policy, x = ctx.policy, experience.x
        noisy = policy.corrupt(x, experience.rng, draw=ctx.epoch)
        log_likelihood = policy.likelihood(experience.cond, x, noisy) / policy.process.count_hidden(noisy)
        return Loss(-log_likelihood, {"log_likelihood": log_likelihood.detach()})
