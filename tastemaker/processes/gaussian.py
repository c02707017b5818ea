"""Diffusion and flow matching: noise is added along a path, and a network that sees the noisy sample removes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from ..core.distributions import Gaussian, SquaredErrorGaussian, expand_dims_like
from ..core.guidance import GuidedBackbone, count_forward_passes, is_guided, scoring_model, without_guidance
from ..core.policy import Backbone, Guidance, Process, Rollout
from ..core.randomness import Purpose, Randomness
from ..core.rollout_scope import ROLLOUTS
from ..core.types import Condition, Corrupted, Segment, select_rows
from .dynamics import ODE, DenoisingStep, SamplerDynamics, ddim_mean
from .paths import NoisePath, RectifiedFlow

StepDistribution = Gaussian | SquaredErrorGaussian


@dataclass(frozen=True)
class SDEWindow:
    """The sampling steps that use the SDE (MixGRPO, Flow-GRPO-Fast); the others follow the ODE and are not trained."""

    size: int = 2
    start_min: int = 0  # earliest first step
    start_max: int | None = None  # latest first step; as late as it fits if not given
    schedule: Literal["fixed", "progressive", "random"] = "random"
    every: int = 25  # progressive: training steps until it moves
    stride: int = 1  # progressive: sampling steps by which it moves; after the last start it begins again

    def __post_init__(self) -> None:
        if self.size < 1 or self.start_min < 0 or self.every < 1 or self.stride < 1:
            settings = f"size {self.size}, start_min {self.start_min}, every {self.every}, stride {self.stride}"
            raise ValueError(
                f"expected size, every and stride of at least 1 and start_min of at least 0, got {settings}; "
                "correct these settings [TM329]"
            )

    def step_range(self, rng: Randomness, num_steps: int) -> range:
        """The SDE steps at this training step, the same on all ranks."""
        fits = num_steps - 1 - self.size
        latest = fits if self.start_max is None else min(self.start_max, fits)
        num_starts = max(1, latest - self.start_min + 1)
        offset = {
            "fixed": 0,
            "progressive": rng.step // self.every * self.stride % num_starts,
            "random": int(rng.shared_uniform(Purpose.SDE_WINDOW) * num_starts),
        }[self.schedule]
        return range(self.start_min + offset, self.start_min + offset + self.size)


@dataclass(frozen=True)
class GaussianProcess(Process):
    """Diffusion or flow matching: a noise path, the dynamics of the sampler, and its number of steps."""

    path: NoisePath = RectifiedFlow()
    dynamics: SamplerDynamics = ODE()
    num_steps: int = 10
    window: SDEWindow | None = None
    keeps_action_means: ClassVar[bool] = False  # whether segments have the means that actions were sampled from

    def __post_init__(self) -> None:
        if not 1 <= self.num_steps <= 10_000:
            raise ValueError(
                f"'num_steps': expected 1 to 10000 sampling steps, got {self.num_steps}; correct 'num_steps' [TM330]"
            )
        if not isinstance(self.path, self.dynamics.supported_paths):
            name, supported = type(self.dynamics).__name__, self.dynamics.supported_paths.__name__
            raise ValueError(
                f"{name} works on the path {supported} only, got {type(self.path).__name__}; set dynamics.type to "
                "ddim for this path [TM331]"
            )
        if self.window and self.window.start_min + self.window.size >= self.num_steps:
            raise ValueError(
                f"'window': a window of {self.window.size} steps from step {self.window.start_min} must end "
                f"before the last of {self.num_steps} steps; make the window smaller, or raise 'num_steps' "
                "[TM332]"
            )
        self.path.timesteps(self.num_steps)  # refuses what the path does not support

    @property
    def stochastic(self) -> bool:
        return self.dynamics.stochastic

    def with_num_steps(self, num_steps: int) -> Self:
        """A copy with another number of steps. It has no SDE window, whose steps would be of another length."""
        return replace(self, num_steps=num_steps, window=None, dynamics=ODE() if self.window else self.dynamics)

    def with_action_means(self) -> GaussianProcess:
        return GaussianProcessWithMeans(self.path, self.dynamics, self.num_steps, self.window)

    def action_std(self, segment: Segment) -> Tensor:
        """Standard deviation of the noise that a step adds, without a network call: [B]."""
        x = segment.state.flatten(1)[:, :1]
        step = self.dynamics.step(self.path, self.denoising_step(x, segment.t, segment.s, x))
        return step.std

    def deterministic(self) -> Self:
        return replace(self, dynamics=ODE(), window=None)

    def network_calls_per_sample(self, shape: tuple[int, ...]) -> int:
        return self.num_steps

    def count_hidden(self, noisy: Corrupted) -> Tensor:
        return torch.ones_like(noisy.t)

    def wrap_guidance(self, model: Backbone, guidance: Guidance) -> Backbone:
        return GuidedBackbone(model, guidance)

    def predict_clean(self, model: Backbone, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        """The clean sample that the network predicts, in float32 whatever it computes in."""
        return self.path.clean(x, t, model.predict(x, t, cond).float())

    def ode_step(self, x: Tensor, t: Tensor, s: Tensor, clean: Tensor) -> Tensor:
        """Move from level t to s along the ODE towards `clean`; on rectified flow this is Euler's method."""
        return ddim_mean(self.path, DenoisingStep(x, clean, t, s, 0.0), torch.zeros_like(s))

    def denoising_step(self, x: Tensor, t: Tensor, s: Tensor, clean: Tensor) -> DenoisingStep:
        return DenoisingStep(x, clean, t, s, self.path.timesteps(self.num_steps)[1].item())

    def start(self, model: Backbone, cond: Condition, rng: Randomness) -> GaussianRollout:
        return GaussianRollout(self, model, cond, rng)

    def action_distribution(self, model: Backbone, cond: Condition, segment: Segment) -> StepDistribution:
        model, cond = scoring_model(model, cond)
        clean = self.predict_clean(model, segment.state, segment.t, cond)
        step = self.dynamics.step(self.path, self.denoising_step(segment.state, segment.t, segment.s, clean))
        return ignore_untrained(step, segment.action, model)

    def corrupt(
        self, x: Tensor, rng: Randomness, t: Tensor | None = None, noise: Tensor | None = None, draw: int = 0
    ) -> Corrupted:
        if t is None:
            t = self.path.sample_timesteps(rng.uniform(Purpose.TIMESTEP, 1, draw=draw).flatten())
        if noise is None:
            noise = rng.normal(Purpose.NOISE, *x.shape[1:], draw=draw)
        alpha, sigma = expand_dims_like(self.path.alpha(t), x), expand_dims_like(self.path.sigma(t), x)
        return Corrupted(alpha * x + sigma * noise, t, noise)

    def restore(self, model: Backbone, cond: Condition, noisy: Corrupted) -> Gaussian:
        clean = self.predict_clean(model, noisy.x, noisy.t, cond)
        if model.untrained_elements is not None:  # the true clean values: without error and gradient
            alpha, sigma = (expand_dims_like(level(noisy.t), clean) for level in (self.path.alpha, self.path.sigma))
            true = (noisy.x - sigma * noisy.noise) / alpha.clamp(min=1e-6)
            clean = torch.where(model.untrained_elements, true, clean)
        return Gaussian(clean, self.path.output_error_weight(noisy.t).rsqrt())

    def likelihood(self, model: Backbone, cond: Condition, x: Tensor, noisy: Corrupted) -> Tensor:
        """Minus the mean squared error of the network's output at the noise level of `noisy`: [B]."""
        model, cond = without_guidance(model, cond)
        output = model.predict(noisy.x, noisy.t, cond).float()
        error = output - self.path.target(x, noisy.noise, noisy.t)
        if model.untrained_elements is not None:
            error = error.masked_fill(model.untrained_elements, 0)
        return -(error**2).flatten(1).mean(1)


@dataclass(frozen=True)
class GaussianProcessWithMeans(GaussianProcess):
    """A Gaussian process whose segments keep the means of actions: one more latent per stochastic step."""

    keeps_action_means: ClassVar[bool] = True


def ignore_untrained(step: StepDistribution, action: Tensor, model: Backbone) -> StepDistribution:
    """The distribution of a step whose mean, in elements that do not train, is the action: constant there."""
    if model.untrained_elements is None:
        return step
    return replace(step, mean=torch.where(model.untrained_elements, action, step.mean))


class GaussianRollout(Rollout):
    """A rollout from pure noise down the timesteps of the path."""

    def __init__(self, process: GaussianProcess, model: Backbone, cond: Condition, rng: Randomness) -> None:
        self.process, self.model, self.cond, self.rng = process, model, cond, rng
        self.start = self.x = self.clean = rng.normal(Purpose.INITIAL_NOISE, *model.shape)
        self.timesteps = process.path.timesteps(process.num_steps).to(self.x.device)
        self.stochastic_steps: Sequence[int] = range(process.num_steps)
        if process.window:
            self.stochastic_steps = process.window.step_range(rng, process.num_steps)
        self.segments: tuple[Segment, ...] = ()
        self.steps_done, self.network_calls = 0, 0

    @property
    def progress(self) -> float:
        return self.steps_done / self.process.num_steps

    def step(self, *, frozen: bool = False, detach_input: bool = False) -> None:
        """Go to the next timestep.

        `frozen` keeps this network call out of the autograd graph; `detach_input` only stops gradients at its input.
        """
        i, process = self.steps_done, self.process
        t, s = (self.timesteps[j].expand(len(self.x)) for j in (i, i + 1))
        network_input = self.x.detach() if detach_input or frozen else self.x
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen), ROLLOUTS.calls():
            output = self.model.predict(network_input, t, self.cond).float()
        self.clean = process.path.clean(self.x, t, output)
        self.steps_done = i + 1
        self.network_calls += len(self.x) * count_forward_passes(self.model, t)
        # The step onto the clean sample adds no noise, so it has no action to score.
        if process.stochastic and i in self.stochastic_steps and float(self.timesteps[i + 1]) > 0:
            distribution = process.dynamics.step(process.path, process.denoising_step(self.x, t, s, self.clean))
            action = distribution.sample(self.rng, Purpose.SAMPLER_STEP, i)
            if self.model.untrained_elements is not None:
                action = torch.where(self.model.untrained_elements, process.ode_step(self.x, t, s, self.clean), action)
                distribution = ignore_untrained(distribution, action, self.model)
            self.segments += (self._segment(t, s, action.detach(), distribution),)
            self.x = action
        else:
            self.x = process.ode_step(self.x, t, s, self.clean)

    @torch.no_grad()
    def _segment(self, t: Tensor, s: Tensor, action: Tensor, distribution: StepDistribution) -> Segment:
        """An action and its log-probability; without guidance if only rollouts are guided, as updates score."""
        guidance, none = self.model.guidance, action.new_empty(0)
        segment = Segment(t, s, self.x.detach(), action, log_prob=none, mask=none)
        if guidance and guidance.rollouts_only and is_guided(guidance, t):
            distribution = self.process.action_distribution(self.model, self.cond, segment)
            self.network_calls += len(action) * self.model.unguided.forward_passes
        log_prob = distribution.log_prob(action)
        mean = distribution.mean.detach() if self.process.keeps_action_means else None
        return replace(segment, log_prob=log_prob, mask=torch.ones_like(log_prob), mean=mean)

    @property
    def stochastic_until(self) -> float:
        steps = self.process.num_steps if self.process.stochastic else 0
        drawn = [i for i in self.stochastic_steps if i < steps and float(self.timesteps[i + 1]) > 0]
        return (drawn[-1] + 1) / steps if drawn else 0.0

    def set_start(self, start: Tensor) -> None:
        self.start = self.x = self.clean = start

    def preview(self) -> Tensor:
        return self.x if self.steps_done == self.process.num_steps else self.clean

    def select(self, rows: Tensor) -> None:
        self.start, self.x, self.clean = select_rows((self.start, self.x, self.clean), rows)
        self.cond, self.segments, self.rng = select_rows((self.cond, self.segments, self.rng), rows)

    def reseed(self, rng: Randomness) -> None:
        self.rng = rng
