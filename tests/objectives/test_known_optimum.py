"""Training on a Gaussian with an exact denoiser ends at the KL-regularized optimum, which is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
import toys
from exact_denoiser import DATA_STD, ExactDenoiser
from tiers import fast
from torch import Tensor, nn

from tastemaker.core.policy import Policy
from tastemaker.core.reward import Reward, RewardCard, RewardSpec
from tastemaker.core.types import Condition, Metadata, Placement, PromptBatch, Prompts
from tastemaker.core.weights import FullWeights
from tastemaker.objectives.elbo_grpo import ElboGRPO
from tastemaker.objectives.ram import RAM
from tastemaker.processes.dynamics import ODE
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import RectifiedFlow

START = -1.0
STEPS, RATE = 12, 0.4
SAMPLING_STEPS = 60  # Euler's method: with 24 steps the optimum is 6 % closer to the start, with 150 1 %


class Mean(nn.Module):
    """The mean of the data, the only number that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.tensor(START))


@dataclass
class MovableDenoiser(ExactDenoiser):
    """The optimal denoiser of normal data with a trainable mean: whatever it is, the model is a Gaussian."""

    net: nn.Module = field(default_factory=Mean)

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        mean: Any = self.net.mean
        return super().predict(x - (1 - t.view(-1, 1, 1, 1, 1)) * mean, t, cond) - mean

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        return x.expand(-1, -1, 3, -1, -1)


@dataclass(frozen=True)
class ValueReward(RewardSpec, Reward):
    """The sample itself, a linear reward."""

    batch_size = 1_000_000
    card: ClassVar[RewardCard] = RewardCard(range="any", failure_modes="anything")
    differentiable = False
    modality = "image"
    runs_on = "device"

    def load(self, placement: Placement) -> ValueReward:
        return self

    def tiny(self) -> ValueReward:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        return pixels.flatten(1)[:, 0]


def train_mean(objective: Any, rate: float) -> float:
    """Mean of the trained model, averaged over the last third of the steps."""
    model = MovableDenoiser()
    process = GaussianProcess(RectifiedFlow(), ODE(), SAMPLING_STEPS)
    policy: Policy[Any] = Policy(model, process, FullWeights(model.net, objective.snapshots()))
    (mean,), seen = list(model.net.parameters()), []
    for step in range(STEPS):
        ctx = toys.context(policy, 1, step=step, spec=ValueReward())
        experience = objective.collect(ctx, PromptBatch(("a number",), ({},)))
        toys.backward(objective, ctx, experience)
        with torch.no_grad():
            mean -= rate * mean.grad
            mean.grad = None
        objective.after_update(ctx)
        seen.append(mean.item())
    return sum(seen[-STEPS // 3 :]) / len(seen[-STEPS // 3 :])


@pytest.mark.parametrize("anchor", fast([1.0, 2.5], 2.5))
def test_epg_with_an_anchor_ends_where_ram_does(anchor: float) -> None:
    """With weight c of the anchor the optimum is RAM's with m = 1 / c: the Gaussian moved by m standard deviations.

    A linear reward tilts a Gaussian into the same Gaussian at another mean; advantages are in standard deviations.
    """
    settings: dict[str, Any] = {"group_size": 2048, "num_timesteps": 4}
    epg = ElboGRPO(
        **settings,
        likelihood="uniform",
        loss_type="epg",
        ratio="none",
        kl_coef=anchor,
        timestep_sampling="path",
        timestep_sharing="independent",
        noise_sharing="independent",
    )
    ram = RAM(**settings, reward_multiplier=1 / anchor, baseline="live")
    expected = START + DATA_STD / anchor
    by_epg, by_ram = train_mean(epg, RATE / anchor), train_mean(ram, RATE)
    assert by_epg - START == pytest.approx(expected - START, rel=0.05)
    assert by_epg - START == pytest.approx(by_ram - START, rel=0.01)
