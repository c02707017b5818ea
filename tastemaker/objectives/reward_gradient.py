"""Reward gradients: back-propagate the reward through the sampler (DRaFT, AlignProp, VADER, ReFL, LeapAlign …)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.objective import Context, Objective, require_settings
from ..core.randomness import Purpose, Randomness
from ..core.types import Condition, Loss, PromptBatch
from ..processes.dynamics import ODE
from ..processes.gaussian import GaussianProcess
from .scored_frames import Frames, decode_frames, validate_frames


@dataclass(frozen=True)
class RewardGradientBatch:
    cond: Condition
    rng: Randomness
    samples: Tensor | None = None  # [B, ...] clean samples, for gradient_mode: renoise

    def __len__(self) -> int:
        return len(self.cond)


@dataclass(frozen=True)
class RewardGradient(Objective[GaussianProcess, PromptBatch, RewardGradientBatch, int]):
    """Gradient ascent on the reward through part of the sampling chain.

    `gradient_mode` chooses the sampling steps that keep a graph: `last_steps` is DRaFT-K (K = 1 is VADER's `last`);
    `random` and `from_step` are VADER's, `truncated_normal` AlignProp's: from the step drawn to the end. `steps` trains
    the network at the steps listed only, `single_step` is ReFL's prediction of the clean sample at one step, `renoise`
    is DRaFT-LV. `leap` is LeapAlign: two network calls with a graph, at two steps drawn from the whole trajectory.
    """

    gradient_mode: Literal[
        "last_steps", "random", "truncated_normal", "from_step", "steps", "single_step", "renoise", "leap"
    ] = "last_steps"
    last_steps: int = 1  # number of final steps, for last_steps
    from_step: int = 15  # first step, from 0, for from_step
    steps: tuple[int, ...] = ()  # steps, from 0, for steps
    detach_input: bool = False  # stop gradients at the network's input (DRTune)
    start_step_mean: float = 42.0  # of the first step, for truncated_normal
    start_step_std: float = 5.0
    step_range: tuple[int, int] = (30, 39)  # first and last step that may be drawn, for single_step
    num_renoise: int = 2  # noised copies per sample, for renoise
    leap_discount: float = 0.3  # factor of the gradient through the input of the second network call, for leap
    leap_error_floor: float = 0.1  # the weight of a sample falls with the errors of its leaps above it, for leap
    reward_threshold: float | None = None  # rewards above it are not increased further (ReFL)
    loss_scale: float = 1.0
    frames: Frames = "all"  # frames that are decoded and scored
    needs: ClassVar[type] = GaussianProcess
    needs_gradient: ClassVar[bool] = True
    consumes: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        validate_frames(self.frames)
        if self.gradient_mode == "steps" and not self.steps:
            raise ValueError(
                "'steps' is empty; list the steps to train at, or set 'gradient_mode' to another value than "
                "steps [TM314]"
            )
        from_first = self.from_step >= 0 and min(self.steps, default=0) >= 0
        require_settings(self, "from_step steps", from_first, "steps from 0, the noisiest")
        positive = min(self.last_steps, self.num_renoise) >= 1 and self.start_step_std > 0
        require_settings(self, "last_steps num_renoise start_step_std", positive, "all of them above 0")
        leaps = 0 <= self.leap_discount <= 1 and self.leap_error_floor > 0
        require_settings(self, "leap_discount leap_error_floor", leaps, "a factor from 0 to 1, and a floor above 0")
        if not 0 <= self.step_range[0] <= self.step_range[1]:
            raise ValueError(
                f"'step_range': expected two steps in increasing order, from 0, got {list(self.step_range)}; write "
                "for example step_range: [0, 4] [TM315]"
            )

    def needs_log_probs(self) -> bool:
        return False

    def collect(self, ctx: Context[GaussianProcess], batch: PromptBatch) -> RewardGradientBatch:
        cond = ctx.policy.embed(batch.prompts, batch.metadata)
        samples = ctx.sample(cond, ctx.rng).final if self.gradient_mode == "renoise" else None
        return RewardGradientBatch(cond, ctx.rng, samples)

    def parts(self, experience: RewardGradientBatch) -> Sequence[int]:
        return range(self.num_renoise if self.gradient_mode == "renoise" else 1)

    def leap_steps(self, rng: Randomness, num_steps: int, draw: int = 0) -> tuple[int, int]:
        """The two steps k < j at which `leap` calls the network with a graph, the same on all ranks."""
        if num_steps < 2:
            raise ValueError(
                f"gradient_mode leap connects two sampling steps, but the sampler has {num_steps}; raise "
                "process.num_steps [TM1560]"
            )
        uniform = rng.shared_uniform(Purpose.FIRST_GRADIENT_STEP, draw)
        one, other = divmod(int(uniform * num_steps * (num_steps - 1)), num_steps - 1)
        other += other >= one  # any step but `one`
        return min(one, other), max(one, other)

    def first_step(self, rng: Randomness, num_steps: int, draw: int = 0) -> int:
        """The sampling step from which the graph is kept, the same on all ranks."""
        if self.gradient_mode == "truncated_normal":
            shared = Randomness(rng.seed, rng.step, torch.zeros(1, dtype=torch.int64))
            normal = shared.normal(Purpose.FIRST_GRADIENT_STEP, 64, draw=draw)
            candidates = (self.start_step_mean + self.start_step_std * normal).long().flatten().tolist()
            return next((step for step in candidates if 1 <= step < num_steps), num_steps - 1)
        if self.gradient_mode == "leap":
            return self.leap_steps(rng, num_steps, draw)[0]
        low, high = {
            "last_steps": (max(0, num_steps - self.last_steps),) * 2,
            "random": (0, num_steps - 1),
            "from_step": (self.from_step, self.from_step),
            "steps": (min(self.steps, default=0),) * 2,
            "single_step": self.step_range,
            "renoise": (num_steps - 1,) * 2,  # samples are noised to where the last step begins
        }[self.gradient_mode]
        last = max(self.steps) if self.gradient_mode == "steps" else high
        if last >= num_steps:
            raise ValueError(
                f"reward_gradient uses step {last} of a sampler with {num_steps} steps; choose a step below "
                f"{num_steps}, or raise process.num_steps [TM316]"
            )
        return low + int(rng.shared_uniform(Purpose.FIRST_GRADIENT_STEP, draw) * (high - low + 1))

    def loss(self, ctx: Context[GaussianProcess], experience: RewardGradientBatch, part: int) -> Loss:
        """-reward, or max(0, threshold - reward), of samples whose graph reaches the sampling steps chosen.

        `leap` weights each sample by the inverse of the errors of its two leaps.
        """
        weight: Tensor | None = None
        if self.gradient_mode == "leap":
            x, weight = self._leap(ctx, experience)
        else:
            x = self._sample(ctx, experience, part)
        cond, draw = experience.cond, ctx.epoch * len(self.parts(experience)) + part
        pixels = decode_frames(
            ctx.policy, x, self.frames, experience.rng.uniform(Purpose.FRAME, 1, draw=draw).flatten()
        )
        scores = ctx.rubric.score(pixels, cond.prompts, cond.metadata)
        rows = -scores.total if self.reward_threshold is None else F.relu(self.reward_threshold - scores.total)
        rewards = {f"rewards/{name}": reward.detach() for name, reward in scores.rewards.items()}
        metrics = {"reward/mean": scores.total.detach(), **rewards}
        if weight is not None:
            rows, metrics["leap_weight"] = weight * rows, weight
        return Loss(self.loss_scale * rows / len(self.parts(experience)), metrics)

    def _sample(self, ctx: Context[GaussianProcess], experience: RewardGradientBatch, part: int) -> Tensor:
        process, model, cond = ctx.policy.process, ctx.policy.model, experience.cond
        rollout = process.start(model, cond, experience.rng)
        if experience.samples is not None:
            draw, t = ctx.epoch * self.num_renoise + part, rollout.timesteps[-2].expand(len(experience))
            noisy = process.corrupt(experience.samples, experience.rng, t, draw=draw)
            return process.restore(model, cond, noisy).mean
        first = self.first_step(experience.rng, process.num_steps, ctx.epoch)
        for step in range(process.num_steps):
            frozen = self.gradient_mode == "steps" and step not in self.steps
            with torch.set_grad_enabled(step >= first):
                rollout.step(frozen=frozen, detach_input=self.detach_input)
            if self.gradient_mode == "single_step" and step == first:
                return rollout.clean
        return rollout.preview()

    def _leap(self, ctx: Context[GaussianProcess], experience: RewardGradientBatch) -> tuple[Tensor, Tensor]:
        """Samples [B, ...] whose graph has two network calls however many steps there are, and their weights [B].

        The samples are those of the ODE. One leap goes from step k to step j, the other from there to the end; each
        has the value of the trajectory and the gradient of the network's prediction.
        """
        process = replace(ctx.policy.process, dynamics=ODE(), window=None)
        model, cond = ctx.policy.model, experience.cond
        first, second = self.leap_steps(experience.rng, process.num_steps, ctx.epoch)
        with torch.no_grad():
            rollout, states = process.start(model, cond, experience.rng), []
            for step in range(process.num_steps):
                if step in (first, second):
                    states.append(rollout.x)
                rollout.step()
        start, middle = states
        t, s, end = (rollout.timesteps[i].expand(len(start)) for i in (first, second, -1))

        def leap(x: Tensor, network_input: Tensor, t: Tensor, s: Tensor) -> Tensor:
            output = model.predict(network_input, t, cond).float()
            return process.ode_step(x, t, s, process.path.clean(x, t, output))

        predicted_middle = leap(start, start, t, s)
        x = straight_through(predicted_middle, middle)
        discounted = self.leap_discount * x + (1 - self.leap_discount) * x.detach()
        predicted_final = leap(x, discounted, s, end)
        error = sum_of_leap_errors(
            [predicted_middle - middle, predicted_final - rollout.x], floor=self.leap_error_floor
        )
        return straight_through(predicted_final, rollout.x), 1 / error


def straight_through(prediction: Tensor, value: Tensor) -> Tensor:
    """A tensor with the value of `value` and the gradient of `prediction`."""
    return prediction + (value - prediction).detach()


def sum_of_leap_errors(differences: Sequence[Tensor], floor: float) -> Tensor:
    """Sum of the mean absolute differences [B, ...] of each sample, each at least `floor`, without gradient: [B]."""
    return torch.stack([x.detach().abs().flatten(1).mean(1).clamp(min=floor) for x in differences]).sum(0)
