"""The discriminator of an autoencoder, with its own optimizer and state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from ..config.schema import DiscriminatorConfig, EngineConfig, OptimConfig
from ..core.autoencoder import HasLastLayer
from ..core.registry import ConfigError
from ..core.types import Loss
from ..core.weights import FullWeights, TensorDict
from ..training.engine import Engine
from ..training.loop import AverageMeter

MAX_ADAPTIVE_WEIGHT = 1e4  # what an adaptive weight may be
MetricValues = Mapping[str, float]


def mean_logit(logits: Tensor) -> Tensor:
    return logits.flatten(1).mean(1)


# What the critic pays for its logits of pictures and of copies, [N, 1, h, w] each: [N].
DISCRIMINATOR_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "hinge": lambda real, fake: (mean_logit(F.relu(1 - real)) + mean_logit(F.relu(1 + fake))) / 2,
    "vanilla": lambda real, fake: (mean_logit(F.softplus(-real)) + mean_logit(F.softplus(fake))) / 2,
    "least_squares": lambda real, fake: (mean_logit((real - 1).square()) + mean_logit(fake.square())) / 2,
}
# What copies pay for the critic's logits of them: [N].
GENERATOR_LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda fake: -mean_logit(fake),
    "non_saturating": lambda fake: mean_logit(F.softplus(-fake)),
    "least_squares": lambda fake: mean_logit((fake - 1).square()),
}


class DiscriminatorTrainer:
    """Train a patch discriminator."""

    def __init__(
        self, net: nn.Module, config: DiscriminatorConfig, engine: EngineConfig, steps: int, optim: OptimConfig
    ) -> None:
        self.net, self.config = net, config
        # Small, and of norms that scalars belong to: every rank holds all of it.
        whole = replace(engine, strategy="replicated", compile=False, context=1)
        self.engine = Engine(whole, config.optim or optim, steps, config.seed)
        self.engine.prepare(FullWeights(net))

    def plays(self, step: int) -> bool:
        """Whether it plays a part in a step; steps are counted over resumes."""
        return step >= self.config.start and self.config.weight > 0

    def stored(self) -> dict[str, TensorDict]:
        """All of its state, live, for checkpoints."""
        return {"critic": self.net.state_dict(), "critic_optimizer": self.engine.optimizer.state()}

    def scaler(self) -> Any:
        return self.engine.scaler.state() if self.engine.scaler else None

    def restore(self, scaler: Any) -> None:
        if self.engine.scaler and scaler:
            self.engine.scaler.restore(scaler)

    def price(self, made: Tensor) -> Tensor:
        """Return the generator's adversarial loss [N], with gradients to the reconstructions only."""
        self.net.requires_grad_(False)
        try:
            return GENERATOR_LOSSES[self.config.deceive](self.net(made))
        finally:
            self.net.requires_grad_(True)

    def learn(self, step: int, pictures: Sequence[Tensor], copies: Sequence[Tensor]) -> MetricValues:
        """One update from pictures and their copies, both in the same pieces."""
        return self.launch(step, pictures, copies)()

    def launch(self, step: int, pictures: Sequence[Tensor], copies: Sequence[Tensor]) -> Callable[[], MetricValues]:
        """Launch one update without waiting for the GPU. Call the returned function to get its metrics."""
        means, engine = AverageMeter(), self.engine
        total = sum(map(len, pictures)) * engine.comm.world
        for i, (pixels, made) in enumerate(zip(pictures, copies, strict=True)):
            with engine.computing():
                real, fake = self.net(pixels), self.net(made)
                rows = DISCRIMINATOR_LOSSES[self.config.loss](real, fake)
            engine.backward(self.config.weight * rows.sum() / total, last=i == len(pictures) - 1)
            told = {"pictures": mean_logit(real.detach()), "copies": mean_logit(fake.detach())}
            means.note(Loss(rows.detach(), told), 1)
        launched = engine.launch(step)
        self._agree()
        numbers = means.fetched(engine.comm)

        def found() -> MetricValues:
            norm = {"grad_norm": launched().grad_norm}  # first, for an update that was refused says why
            return {f"critic/{name}": value for name, value in {**numbers(), **norm}.items()}

        return found

    @torch.no_grad()
    def _agree(self) -> None:
        """Let the norms of all ranks remember the same, so that a checkpoint of the first is one of all."""
        kept = [buffer for buffer in self.net.buffers() if buffer.is_floating_point()]
        if self.engine.comm.world == 1 or not kept:
            return
        mean = self.engine.comm.mean(torch.cat([buffer.flatten() for buffer in kept]))
        for buffer, piece in zip(kept, torch.split(mean, [buffer.numel() for buffer in kept]), strict=True):
            buffer.copy_(piece.view_as(buffer))


class AdaptiveWeight:
    """Adaptive adversarial weight from the gradients of the autoencoder's last layer (VQGAN, equation 7)."""

    def __init__(self, layer: nn.Conv2d) -> None:
        self.layer, self.forward = layer, layer.forward
        self.watches = False
        self.seen: Tensor | None = None  # what went into it last
        # In place, so that no name changes; compilers are to leave it alone, for in a graph nobody could look into it.
        layer.forward = torch.compiler.disable(self._noted)  # type: ignore[method-assign, no-untyped-call]

    def _noted(self, x: Tensor) -> Tensor:
        if self.watches:
            self.seen = x.detach()
        return self.forward(x)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block what goes into the last layer is noted."""
        self.watches = True
        try:
            yield
        finally:
            self.watches = False

    def weight(self, reconstruction: Tensor, adversary: Tensor, made: Tensor) -> Tensor:
        """The ratio of both gradients of the last layer's weights; the graph stays (VQGAN, equation 7)."""
        ours, theirs = (self._norm(loss, made) for loss in (reconstruction, adversary))
        self.seen = None
        return (ours / (theirs + 1e-4)).clamp(0, MAX_ADAPTIVE_WEIGHT)

    def _norm(self, loss: Tensor, made: Tensor) -> Tensor:
        # From the copies' gradient, for a sharded layer has no gradient of its own to be asked for halfway.
        (slope,) = torch.autograd.grad(loss, made, retain_graph=True)
        seen, layer = self.seen, self.layer
        slope = slope.reshape(len(slope), layer.out_channels, -1, *slope.shape[2:]).sum(2)  # a grey one is shown thrice
        assert seen is not None, "the network ran outside of `watching`"
        with torch.autocast(slope.device.type, enabled=False):
            found: Tensor = conv2d_weight(  # type: ignore[no-untyped-call]  # torch has no types for it
                seen.float(), layer.weight.shape, slope.float(), layer.stride, layer.padding, layer.dilation
            )
        norm: Tensor = torch.linalg.vector_norm(found)
        return norm


def build_adaptive_weight(net: nn.Module) -> AdaptiveWeight:
    if not isinstance(net, HasLastLayer):
        raise ConfigError(
            f"critic.adaptive: {type(net).__name__} does not say which layer is its last; set it to false, "
            "or give the network a method `ending`"
        )
    return AdaptiveWeight(net.ending())
