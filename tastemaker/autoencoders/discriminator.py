"""The discriminator of an autoencoder, with its own optimizer and state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from ..config.schema import DiscriminatorConfig, EngineConfig, OptimConfig
from ..core.autoencoder import as_autoencoder
from ..core.registry import ConfigError
from ..core.types import Loss
from ..core.weights import FullWeights, TensorDict
from ..training.engine import Engine, LaunchedUpdate
from ..training.metrics import AverageMeter

MAX_ADAPTIVE_WEIGHT = 1e4


def mean_logit(logits: Tensor) -> Tensor:
    return logits.flatten(1).mean(1)


# Discriminator losses [N] of its logits [N, 1, h, w] for images and for reconstructions.
DISCRIMINATOR_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "hinge": lambda real, fake: (mean_logit(F.relu(1 - real)) + mean_logit(F.relu(1 + fake))) / 2,
    "vanilla": lambda real, fake: (mean_logit(F.softplus(-real)) + mean_logit(F.softplus(fake))) / 2,
    "least_squares": lambda real, fake: (mean_logit((real - 1).square()) + mean_logit(fake.square())) / 2,
}
# Generator losses [N] of the logits [N, 1, h, w] for reconstructions.
GENERATOR_LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda fake: -mean_logit(fake),
    "non_saturating": lambda fake: mean_logit(F.softplus(-fake)),
    "least_squares": lambda fake: mean_logit((fake - 1).square()),
}


class DiscriminatorTrainer:
    """Trains a patch discriminator beside an autoencoder, with its own engine."""

    def __init__(
        self, net: nn.Module, config: DiscriminatorConfig, engine: EngineConfig, steps: int, optim: OptimConfig
    ) -> None:
        self.net, self.config = net, config
        # Always replicated: it is small, and batch norms have scalar buffers, which cannot be sharded.
        replicated = replace(engine, strategy="replicated", compile=False, context_parallel=1, cpu_offload=False)
        self.engine = Engine(replicated, config.optim or optim, steps, config.seed)
        self.engine.prepare(FullWeights(net))

    def is_active(self, step: int) -> bool:
        """Whether the adversarial loss applies at a step; resumed runs continue to count."""
        return step >= self.config.start_step and self.config.weight > 0

    def state_groups(self) -> dict[str, TensorDict]:
        """Live state dicts of network and optimizer, for checkpoints."""
        return {"discriminator": self.net.state_dict(), "discriminator_optimizer": self.engine.optimizer.state_dict()}

    def scaler_state(self) -> Any:
        return self.engine.scaler.state_dict() if self.engine.scaler else None

    def load_scaler_state(self, scaler: Any) -> None:
        if self.engine.scaler and scaler:
            self.engine.scaler.load_state_dict(scaler)

    def generator_loss(self, reconstructions: Tensor) -> Tensor:
        """The generator's adversarial loss [N], with gradients to the reconstructions only."""
        self.net.requires_grad_(False)
        try:
            return GENERATOR_LOSSES[self.config.generator_loss](self.net(reconstructions))
        finally:
            self.net.requires_grad_(True)

    def update(
        self, step: int, images: Sequence[Tensor], reconstructions: Sequence[Tensor]
    ) -> tuple[dict[str, Tensor], LaunchedUpdate]:
        """Take one optimizer step on images and their reconstructions, both in the same micro-batches.

        Returns the means over all ranks as device scalars, and the launched update.
        """
        means, engine = AverageMeter(), self.engine
        total = sum(map(len, images)) * engine.comm.world_size
        for i, (pixels, output) in enumerate(zip(images, reconstructions, strict=True)):
            with engine.autocast():
                real, fake = self.net(pixels), self.net(output)
                losses = DISCRIMINATOR_LOSSES[self.config.loss](real, fake)
            engine.backward(self.config.weight * losses.sum() / total, last=i == len(images) - 1)
            logits = {"real_logit": mean_logit(real.detach()), "fake_logit": mean_logit(fake.detach())}
            means.add_loss(Loss(losses.detach(), logits), 1, "loss")
        launched = engine.launch_step(step)
        self._average_buffers()
        return {f"discriminator/{name}": value for name, value in means.mean(engine.comm).items()}, launched

    @torch.no_grad()
    def _average_buffers(self) -> None:
        """Average the running statistics of batch norms over ranks, so that the checkpoint of rank 0 is that of all."""
        buffers = [buffer for buffer in self.net.buffers() if buffer.is_floating_point()]
        if self.engine.comm.world_size == 1 or not buffers:
            return
        mean = self.engine.comm.mean(torch.cat([buffer.flatten() for buffer in buffers]))
        for buffer, piece in zip(buffers, torch.split(mean, [buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(piece.view_as(buffer))


class AdaptiveWeight:
    """Adaptive adversarial weight from the gradients of the autoencoder's last layer (VQGAN, equation 7)."""

    def __init__(self, layer: nn.Conv2d) -> None:
        self.layer, self.forward = layer, layer.forward
        self.recording = False
        self.layer_input: Tensor | None = None
        # The method is replaced in place, so that state-dict keys stay; not compiled, because a graph hides the input.
        layer.forward = torch.compiler.disable(self._forward_and_record)  # type: ignore[method-assign, no-untyped-call]

    def _forward_and_record(self, x: Tensor) -> Tensor:
        if self.recording:
            self.layer_input = x.detach()
        return self.forward(x)

    @contextmanager
    def record_inputs(self) -> Iterator[None]:
        """Record the input of the last layer within the block."""
        self.recording = True
        try:
            yield
        finally:
            self.recording = False

    def weight(self, reconstruction_loss: Tensor, adversarial_loss: Tensor, output: Tensor) -> Tensor:
        """Ratio of the gradient norms of both losses at the last layer's weights; the graph is retained."""
        losses = (reconstruction_loss, adversarial_loss)
        reconstruction, adversarial = (self._gradient_norm(loss, output) for loss in losses)
        self.layer_input = None
        return (reconstruction / (adversarial + 1e-4)).clamp(0, MAX_ADAPTIVE_WEIGHT)

    def _gradient_norm(self, loss: Tensor, output: Tensor) -> Tensor:
        # Computed from the gradient of the output, because a sharded weight has no gradient before the backward pass.
        (gradient,) = torch.autograd.grad(loss, output, retain_graph=True)
        x, layer = self.layer_input, self.layer
        gradient = gradient.reshape(len(gradient), layer.out_channels, -1, *gradient.shape[2:]).sum(
            2
        )  # gray is repeated
        assert x is not None, "the network ran outside of `record_inputs`"
        with torch.autocast(gradient.device.type, enabled=False):
            weight_gradient: Tensor = conv2d_weight(  # type: ignore[no-untyped-call]  # torch has no types for it
                x.float(), layer.weight.shape, gradient.float(), layer.stride, layer.padding, layer.dilation
            )
        norm: Tensor = torch.linalg.vector_norm(weight_gradient)
        return norm


def build_adaptive_weight(net: nn.Module) -> AdaptiveWeight:
    layer = as_autoencoder(net).last_layer()
    if layer is None:
        raise ConfigError(
            f"discriminator.adaptive_weight: {type(net).__name__} has no `last_layer`; set "
            "discriminator.adaptive_weight=false, or derive the network from AutoencoderNet and define "
            "`last_layer` [TM550]"
        )
    return AdaptiveWeight(layer)
