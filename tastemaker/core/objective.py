"""The interface of a training algorithm: collect experience without gradients, then compute its loss part by part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from .policy import P, Policy, Process
from .randomness import Randomness
from .reward import Rubric, Scores
from .types import Condition, Loss, PromptBatch, Trajectory, concatenate, select_rows

B = TypeVar("B")  # a batch of data
E = TypeVar("E")  # experience, a tree of tensors
Q = TypeVar("Q")  # a part of it, cheap to name


class Comm(Protocol):
    """Collective operations between ranks; the identity on a single process."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    def gather(self, x: Tensor) -> Tensor:
        """The rows of all ranks, in rank order."""

    def gather_objects(self, items: Sequence[Any]) -> list[Any]: ...
    def mean(self, x: Tensor) -> Tensor: ...
    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""


@dataclass(frozen=True)
class SingleProcess:
    """One process."""

    rank: int = 0
    world: int = 1

    def gather(self, x: Tensor) -> Tensor:
        return x

    def gather_objects(self, items: Sequence[Any]) -> list[Any]:
        return list(items)

    def mean(self, x: Tensor) -> Tensor:
        return x

    def any(self, flag: bool) -> bool:
        return flag

    def barrier(self) -> None:
        return None

    def total(self, x: Tensor) -> Tensor:
        return x


class ObjectiveState(Protocol):
    """What an objective remembers from step to step, as plain data that goes into the checkpoint."""

    def state(self) -> dict[str, Any]: ...
    def restore(self, state: Mapping[str, Any]) -> None: ...


class NoState:
    """The memory of an objective that has none."""

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        return None


@dataclass(frozen=True)
class Context(Generic[P]):
    policy: Policy[P]
    rubric: Rubric
    rng: Randomness  # one row for each row of this rank's batch
    comm: Comm
    memory: ObjectiveState
    epoch: int = 0  # how often this experience was passed over before: names fresh draws
    chunk: int | None = None  # rows to sample at a time; all at once if not given
    first: int | None = None  # the number of the first row, where all after it follow in order

    def here(self) -> Randomness:
        """The random stream of this batch with row numbers on the host, without a GPU synchronization."""
        count = len(self.rng)
        rows = self.rng.rows.cpu() if self.first is None else torch.arange(self.first, self.first + count)
        return replace(self.rng, rows=rows)

    def chunks(self, rows: int) -> Sequence[Tensor]:
        """Row numbers to sample at a time. Draws belong to rows, so the samples are the same however they are cut."""
        return torch.split(torch.arange(rows), self.chunk or max(rows, 1))

    def sample(self, cond: Condition, rng: Randomness) -> Trajectory:
        """Run rollouts to their ends, without gradients."""
        return concatenate(
            [self.policy.sample(select_rows(cond, r), select_rows(rng, r)) for r in self.chunks(len(cond))]
        )


class Objective(ABC, Generic[P, B, E, Q]):
    """A frozen dataclass of hyperparameters that knows how to learn from experience."""

    needs: ClassVar[type] = Process  # what it can be used on
    needs_gradient: ClassVar[bool] = False  # of the rewards
    needs_chance: ClassVar[bool] = False  # of the sampler: a deterministic one decides nothing
    consumes: ClassVar[type]  # PromptBatch, Pictures or Pairs
    also: ClassVar[tuple[type, ...]] = ()  # what else it can learn from
    group: int = 1  # samples made of each row of the batch

    def kept_rows(self) -> int:
        """Rows of experience that each row of the batch leaves."""
        return self.group

    def samples(self) -> int:
        """Number of samples generated per prompt."""
        return self.group if self.consumes is PromptBatch else 0

    def calls(self, each: int) -> int:
        """Network calls per prompt in a rollout, given the calls of one sample."""
        return self.samples() * each

    def replays(self) -> bool:
        """Whether it wants samples with the log-probabilities that they will be scored by."""
        return True

    def gradients(self, decisions: int) -> int:
        """Passes of the network with a gradient that a row of experience costs, of samples with so many decisions."""
        return 1

    def rows_at_once(self) -> int:
        """Samples per forward pass for each sample of experience."""
        return 1

    def snapshots(self) -> tuple[str, ...]:
        """The named weights it will borrow."""
        return ()

    def untied(self) -> Self | None:
        """A copy of the objective without its KL penalty, or None if it has none."""
        return None

    def memory(self) -> ObjectiveState:
        return NoState()

    @abstractmethod
    def collect(self, ctx: Context[P], batch: B) -> E: ...
    def watch(self, experience: E) -> dict[str, Tensor]:
        """Metrics of the collected experience before the update: [B] or scalars."""
        return {}

    @abstractmethod
    def parts(self, experience: E) -> Sequence[Q]:
        """What to back-propagate one after the other, each graph freed before the next is built."""

    @abstractmethod
    def loss(self, ctx: Context[P], experience: E, part: Q) -> Loss: ...
    def after_update(self, ctx: Context[P]) -> None:
        """Move weights that trail the live ones, once a step."""
        return None


@dataclass(frozen=True)
class ScoredRollout:
    """A scored rollout: trajectories, rewards and advantages."""

    trajectory: Trajectory
    rng: Randomness
    reward: Tensor  # [B]
    advantage: Tensor  # [B]
    parts: dict[str, Tensor]  # [B] each reward by itself

    def __len__(self) -> int:
        return len(self.trajectory)

    def watched(self, group: int) -> dict[str, Tensor]:
        """Rewards, and the share of groups that earned all the same, from which nothing can be learned."""
        spans = self.reward.view(-1, group)
        flat = (spans.amax(1) - spans.amin(1) < 1e-8).float().mean()
        parts = {f"reward/{name}": part for name, part in self.parts.items()}
        return {"reward": self.reward, "flat_groups": flat, **parts}


@torch.no_grad()
def rollout_and_score(ctx: Context[Process], batch: PromptBatch, group: int) -> tuple[Trajectory, Randomness, Scores]:
    """Sample `group_size` images or videos per prompt and score them with the rubric."""
    rng, cond = ctx.rng.repeat(group), ctx.policy.embed(batch.prompts, batch.facts).repeat(group)
    made: list[tuple[Trajectory, Scores]] = []
    for rows in ctx.chunks(len(cond)):
        part = ctx.policy.sample(select_rows(cond, rows), select_rows(rng, rows))
        pixels = ctx.policy.decode(part.final)
        made.append((part, ctx.rubric.score(pixels, part.cond.prompts, part.cond.facts)))
    trajectory, scores = concatenate(made)
    return trajectory, rng, scores
