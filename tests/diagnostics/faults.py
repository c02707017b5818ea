"""Faults of runs that raise no error, each planted in one component that a recipe can name."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from tastemaker.core.model_spec import ModelSpec
from tastemaker.core.objective import Objective, ScoredRollout
from tastemaker.core.reward import Reward, RewardCard, RewardSpec
from tastemaker.core.types import Condition, Loss, Placement, PromptBatch
from tastemaker.data.dataset import Dataset
from tastemaker.data.prompts import InlinePrompts
from tastemaker.models.toy import ToyCausalSpec, ToyFlowBackbone, ToyFlowSpec, ToyTokenBackbone
from tastemaker.objectives.grpo import GRPO
from tastemaker.processes.autoregressive import AutoregressiveProcess
from tastemaker.processes.gaussian import GaussianProcess


@dataclass(frozen=True)
class FaultyFlowSpec(ModelSpec):
    """Base of the flow toys with a faulty backbone."""

    frames: int = 1
    shape = (1, 3, 8, 8)
    process_type: ClassVar[type] = GaussianProcess

    def tiny(self):
        return self


@dataclass(frozen=True)
class UnseededNoise(FaultyFlowSpec):
    """Its network adds unseeded noise, like dropout in training mode."""

    def load(self, placement: Placement):
        model = ToyFlowSpec().load(placement)
        predict = model.predict
        model.predict = lambda x, t, cond: predict(x, t, cond) + 0.1 * torch.randn_like(x)
        return model


@dataclass(frozen=True)
class BrokenCache(ModelSpec):
    """A causal toy whose cache loses the values that were written."""

    frames = 1
    shape = ToyTokenBackbone.shape
    process_type: ClassVar[type] = AutoregressiveProcess

    def load(self, placement: Placement):
        model = ToyCausalSpec().load(placement)
        decode_step = model.decode_step

        def extend(ids: Tensor | None, cache, cond: Condition):
            logits, cache = decode_step(ids, cache, cond)
            return logits, tuple((k, 0 * v) for k, v in cache)

        model.decode_step = extend
        return model

    def tiny(self):
        return self


@dataclass(frozen=True)
class UnusedLayer(FaultyFlowSpec):
    """Its network has a layer that is never called."""

    def load(self, placement: Placement):
        model = ToyFlowSpec().load(placement)
        model.net.spare = nn.Linear(4, 4)
        return model


@dataclass(frozen=True)
class StaleWeights(FaultyFlowSpec):
    """It samples with a copy of the network made before training, like a stale compiled or served network."""

    def load(self, placement: Placement):
        model = ToyFlowSpec().load(placement)
        copied, live = copy.deepcopy(model.net), model.predict

        def predict(x: Tensor, t: Tensor, cond: Condition) -> Tensor:
            return live(x, t, cond) if torch.is_grad_enabled() else copied(x, t, cond.tensors["word"]).view_as(x)

        model.predict = predict
        return model


@dataclass(frozen=True)
class WrongRange(FaultyFlowSpec):
    """Its decoder returns pixels in [-1, 1]."""

    def load(self, placement: Placement):
        class Codec(ToyFlowBackbone):
            def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
                return 2 * super().decode(x, frames) - 1

        return Codec(ToyFlowSpec(), placement)


@dataclass(frozen=True)
class DetachedKL(Objective):
    """Its KL is computed without a graph, so it changes the loss but not the gradient."""

    group_size: int = 4
    needs_stochastic: ClassVar[bool] = True
    consumes: ClassVar[type] = PromptBatch

    def inner(self) -> GRPO:
        return GRPO(group_size=self.group_size, clip_range=1e-3, kl_coef=0.1)

    def snapshots(self):
        return ("reference",)

    def without_kl(self):
        return NoKL(self.group_size)

    def collect(self, ctx, batch) -> ScoredRollout:
        return self.inner().collect(ctx, batch)

    def parts(self, experience):
        return self.inner().parts(experience)

    def loss(self, ctx, experience, part) -> Loss:
        with torch.no_grad():
            with_kl = self.inner().loss(ctx, experience, part)
        plain = replace(self.inner(), kl_coef=0.0).loss(ctx, experience, part)
        return Loss(plain.rows + (with_kl.rows - plain.rows).detach(), plain.metrics)


@dataclass(frozen=True)
class NoKL(DetachedKL):
    def loss(self, ctx, experience, part) -> Loss:
        return replace(self.inner(), kl_coef=0.0).loss(ctx, experience, part)


NUM_CALLS = [0]


@dataclass(frozen=True)
class UncheckpointedState(DetachedKL):
    """It has state outside of the checkpoint."""

    def without_kl(self):
        return None

    def collect(self, ctx, batch) -> ScoredRollout:
        NUM_CALLS[0] += 1
        experience = super().collect(ctx, batch)
        return replace(experience, advantage=experience.advantage / NUM_CALLS[0])


@dataclass(frozen=True)
class Constant(RewardSpec, Reward):
    """A reward that gives all samples the same score, or NaN."""

    broken: bool = False  # NaN
    batch_size: int = 64
    card: ClassVar[RewardCard] = RewardCard(range="always 1", failure_modes="everything")
    differentiable: ClassVar[bool] = False
    modality: ClassVar[str] = "image"
    runs_on: ClassVar[str] = "device"

    def load(self, placement: Placement):
        return self

    def tiny(self):
        return self

    def score(self, pixels, prompts, metadata) -> Tensor:
        return torch.full((len(pixels),), torch.nan if self.broken else 1.0)


@dataclass(frozen=True)
class WritesPixels(Constant):
    """A reward that normalizes its pixels in place, through numpy, which torch does not notice."""

    def score(self, pixels, prompts, metadata) -> Tensor:
        scores = pixels.mean((1, 2, 3, 4))
        pixels.numpy()[:] *= 0.5
        return scores


class FirstRankRows(Dataset):
    """A dataset where every rank reads the rows of the first rank."""

    def __init__(self, rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, step: int, batch_size: int, rank: int, world_size: int):
        return self.rows.batch(step, batch_size, 0, world_size)

    def first_prompts(self, count: int):
        return self.rows.first_prompts(count)


@dataclass(frozen=True)
class SameRowsOnAllRanks:
    prompts: tuple[str, ...] = ("a red", "a green", "a blue", "a yellow")
    batch_type: ClassVar[type] = PromptBatch

    def load(self, seed: int):
        return FirstRankRows(InlinePrompts(self.prompts).load(seed))
