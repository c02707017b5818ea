"""Diffusion and flow matching: noise is added along a path and undone by a network that sees the noisy sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor

from ..core.distributions import Distribution, Gaussian, broadcast_to_shape
from ..core.guidance import GuidedBackbone, count_forward_passes, without_guidance
from ..core.policy import Backbone, Guidance, Process, Rollout
from ..core.randomness import Randomness
from ..core.types import Condition, Corrupted, Segment, select_rows
from .dynamics import ODE, DenoisingStep, SamplerDynamics, ddim_mean
from .paths import NoisePath, RectifiedFlow


@dataclass(frozen=True)
class SDEWindow:
    """The sampling steps that use the SDE (MixGRPO, Flow-GRPO-Fast); the others follow the ODE and are not trained."""

    size: int = 2
    first: int = 0  # the earliest step it may begin at
    last: int | None = None  # the latest; as late as it fits if not given
    schedule: Literal["fixed", "progressive", "random"] = "random"
    every: int = 25  # progressive: training steps before it moves
    stride: int = 1  # progressive: by how much it moves, back to the first after the last

    def __post_init__(self) -> None:
        if self.size < 1 or self.first < 0 or self.every < 1 or self.stride < 1:
            found = f"size {self.size}, first {self.first}, every {self.every}, stride {self.stride}"
            raise ValueError(f"found {found}; expected size, every and stride of at least 1 and first of at least 0")

    def at(self, rng: Randomness, steps: int) -> range:
        """The stochastic steps of this training step, alike on all ranks."""
        latest = steps - 1 - self.size if self.last is None else min(self.last, steps - 1 - self.size)
        starts = max(1, latest - self.first + 1)
        moved = {
            "fixed": 0,
            "progressive": rng.step // self.every * self.stride % starts,
            "random": int(rng.number("window") * starts),
        }[self.schedule]
        return range(self.first + moved, self.first + moved + self.size)


@dataclass(frozen=True)
class GaussianProcess(Process):
    path: NoisePath = RectifiedFlow()
    dynamics: SamplerDynamics = ODE()
    steps: int = 10
    window: SDEWindow | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= 10_000:
            raise ValueError(f"'steps' is {self.steps}; expected 1 to 10000 sampling steps")
        if not isinstance(self.path, self.dynamics.paths):
            name, wanted = type(self.dynamics).__name__, self.dynamics.paths.__name__
            raise ValueError(
                f"{name} is defined on the {wanted} path, found {type(self.path).__name__}; use ddim there"
            )
        if self.window and self.window.first + self.window.size >= self.steps:
            raise ValueError(
                f"a window of {self.window.size} from step {self.window.first} does not fit before the last of "
                f"{self.steps} steps; make it smaller or take more steps"
            )
        self.path.grid(self.steps)

    @property
    def chance(self) -> bool:
        return self.dynamics.chance

    def in_steps(self, steps: int) -> Self:
        """A window is of steps of a certain length, so of others there is none: all are taken alike."""
        return replace(self, steps=steps, window=None, dynamics=ODE() if self.window else self.dynamics)

    def calls(self, shape: tuple[int, ...]) -> int:
        return self.steps

    def decisions(self, shape: tuple[int, ...]) -> int:
        return self.window.size if self.window else self.steps

    def hidden(self, noisy: Corrupted) -> Tensor:
        return torch.ones_like(noisy.t)

    def guide(self, model: Backbone, guidance: Guidance) -> Backbone:
        return GuidedBackbone(model, guidance)

    def guess(self, model: Backbone, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        """The clean sample the network believes in; float32 whatever the network computes in."""
        return self.path.clean(x, t, model.predict(x, t, cond).float())

    def move(self, x: Tensor, t: Tensor, s: Tensor, clean: Tensor) -> Tensor:
        """Go from level t to s along the ODE, as if `clean` were true; on a straight path this is Euler's step."""
        return ddim_mean(self.path, DenoisingStep(x, clean, t, s, 0.0), torch.zeros_like(s))

    def stride(self, x: Tensor, t: Tensor, s: Tensor, clean: Tensor) -> DenoisingStep:
        return DenoisingStep(x, clean, t, s, self.path.grid(self.steps)[1].item())

    def start(self, model: Backbone, cond: Condition, rng: Randomness) -> GaussianRollout:
        return GaussianRollout(self, model, cond, rng)

    def decide(self, model: Backbone, cond: Condition, segment: Segment) -> Distribution:
        clean = self.guess(model, segment.state, segment.t, cond)
        return self.dynamics.step(self.path, self.stride(segment.state, segment.t, segment.s, clean))

    def corrupt(
        self, x: Tensor, rng: Randomness, t: Tensor | None = None, noise: Tensor | None = None, draw: int = 0
    ) -> Corrupted:
        t = self.path.draw(rng.uniform("level", 1, draw=draw).flatten()) if t is None else t
        noise = rng.normal("noise", *x.shape[1:], draw=draw) if noise is None else noise
        return Corrupted(
            broadcast_to_shape(self.path.alpha(t), x) * x + broadcast_to_shape(self.path.sigma(t), x) * noise, t, noise
        )

    def restore(self, model: Backbone, cond: Condition, noisy: Corrupted) -> Gaussian:
        return Gaussian(self.guess(model, noisy.x, noisy.t, cond), self.path.weight(noisy.t).rsqrt())

    def likelihood(self, model: Backbone, cond: Condition, x: Tensor, noisy: Corrupted) -> Tensor:
        model, cond = without_guidance(model, cond)
        output = model.predict(noisy.x, noisy.t, cond).float()
        return -((output - self.path.target(x, noisy.noise, noisy.t)) ** 2).flatten(1).mean(1)


class GaussianRollout(Rollout):
    """A rollout from pure noise down the levels of the grid."""

    def __init__(self, process: GaussianProcess, model: Backbone, cond: Condition, rng: Randomness) -> None:
        self.process, self.model, self.cond, self.rng = process, model, cond, rng
        self.start = self.x = self.clean = rng.normal("start", *model.shape)
        self.levels = process.path.grid(process.steps).to(self.x.device)
        self.chancy: Sequence[int] = process.window.at(rng, process.steps) if process.window else range(process.steps)
        self.segments: tuple[Segment, ...] = ()
        self.taken, self.price = 0, 0

    @property
    def progress(self) -> float:
        return self.taken / self.process.steps

    def step(self, *, frozen: bool = False, stop_input: bool = False) -> None:
        """One level down; `frozen` keeps this call of the network out of the graph, `stop_input` only what it saw."""
        i, process = self.taken, self.process
        t, s = (self.levels[j].expand(len(self.x)) for j in (i, i + 1))
        seen = self.x.detach() if stop_input or frozen else self.x
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            output = self.model.predict(seen, t, self.cond).float()
        self.clean = process.path.clean(self.x, t, output)
        self.taken, self.price = i + 1, self.price + len(self.x) * count_forward_passes(self.model, t)
        # The step onto the clean sample has no room for noise, so it decides nothing.
        if process.chance and i in self.chancy and float(self.levels[i + 1]) > 0:
            there = process.dynamics.step(process.path, process.stride(self.x, t, s, self.clean))
            action = there.sample(self.rng, "step", i)
            log_prob = there.log_prob(action.detach()).detach()
            segment = Segment(t, s, self.x.detach(), action.detach(), log_prob, torch.ones_like(log_prob))
            self.segments += (segment,)
            self.x = action
        else:
            self.x = process.move(self.x, t, s, self.clean)

    def preview(self) -> Tensor:
        return self.x if self.taken == self.process.steps else self.clean

    def select(self, rows: Tensor) -> None:
        self.start, self.x, self.clean = select_rows((self.start, self.x, self.clean), rows)
        self.cond, self.segments, self.rng = select_rows((self.cond, self.segments, self.rng), rows)

    def redraw(self, rng: Randomness) -> None:
        self.rng = rng
