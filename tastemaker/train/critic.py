"""The critic of an autoencoder: it learns to tell copies from pictures, with an optimizer and a state of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from ..codec import Ending
from ..config.run import CriticConfig, EngineConfig, Optim
from ..registry import ConfigError
from ..types import Loss
from ..weights import FullWeights, Tensors
from .engine import Engine
from .loop import Means

MOST = 1e4  # what an adaptive weight may be
Told = Mapping[str, float]


def fooled(logits: Tensor) -> Tensor:
    return logits.flatten(1).mean(1)


# What the critic pays for its logits of pictures and of copies, [N, 1, h, w] each: [N].
ERRORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "hinge": lambda real, fake: (fooled(F.relu(1 - real)) + fooled(F.relu(1 + fake))) / 2,
    "vanilla": lambda real, fake: (fooled(F.softplus(-real)) + fooled(F.softplus(fake))) / 2,
    "least_squares": lambda real, fake: (fooled((real - 1).square()) + fooled(fake.square())) / 2,
}
# What copies pay for the critic's logits of them: [N].
PRICES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda fake: -fooled(fake),
    "non_saturating": lambda fake: fooled(F.softplus(-fake)),
    "least_squares": lambda fake: fooled((fake - 1).square()),
}


class Critic:
    """A network that judges patches, and how it learns."""

    def __init__(self, net: nn.Module, config: CriticConfig, engine: EngineConfig, steps: int, optim: Optim) -> None:
        self.net, self.config = net, config
        # Small, and of norms that scalars belong to: every rank holds all of it.
        whole = replace(engine, strategy="replicated", compile=False, context=1)
        self.engine = Engine(whole, config.optim or optim, steps, config.seed)
        self.engine.prepare(FullWeights(net))

    def plays(self, step: int) -> bool:
        """Whether it plays a part in a step; steps are counted over resumes."""
        return step >= self.config.start and self.config.weight > 0

    def stored(self) -> dict[str, Tensors]:
        """All of its state, live, for checkpoints."""
        return {"critic": self.net.state_dict(), "critic_optimizer": self.engine.optimizer.state()}

    def scaler(self) -> Any:
        return self.engine.scaler.state() if self.engine.scaler else None

    def restore(self, scaler: Any) -> None:
        if self.engine.scaler and scaler:
            self.engine.scaler.restore(scaler)

    def price(self, made: Tensor) -> Tensor:
        """How far copies are from being taken for pictures, with gradients to them alone: [N]."""
        self.net.requires_grad_(False)
        try:
            return PRICES[self.config.deceive](self.net(made))
        finally:
            self.net.requires_grad_(True)

    def learn(self, step: int, pictures: Sequence[Tensor], copies: Sequence[Tensor]) -> Told:
        """One update from pictures and their copies, both in the same pieces."""
        return self.launch(step, pictures, copies)()

    def launch(self, step: int, pictures: Sequence[Tensor], copies: Sequence[Tensor]) -> Callable[[], Told]:
        """The same; what came of it is told when asked for."""
        means, engine = Means(), self.engine
        total = sum(map(len, pictures)) * engine.comm.world
        for i, (pixels, made) in enumerate(zip(pictures, copies, strict=True)):
            with engine.computing():
                real, fake = self.net(pixels), self.net(made)
                rows = ERRORS[self.config.loss](real, fake)
            engine.backward(self.config.weight * rows.sum() / total, last=i == len(pictures) - 1)
            told = {"pictures": fooled(real.detach()), "copies": fooled(fake.detach())}
            means.note(Loss(rows.detach(), told), 1)
        launched = engine.launch(step)
        self._agree()
        numbers = means.fetched(engine.comm)

        def found() -> Told:
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


class Balance:
    """How much the last layer of an autoencoder feels the critic, against how much it feels the reconstruction."""

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
        return (ours / (theirs + 1e-4)).clamp(0, MOST)

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


def balance(net: nn.Module) -> Balance:
    if not isinstance(net, Ending):
        raise ConfigError(
            f"critic.adaptive: {type(net).__name__} does not say which layer is its last; set it to false, "
            "or give the network a method `ending`"
        )
    return Balance(net.ending())
