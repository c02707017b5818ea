"""The interface of a training algorithm: collect experience without gradients, then compute its loss part by part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from .group_selection import PoolSelection, rank_correlation
from .interruption import Interrupted, current_stop
from .policy import P, Policy, Process
from .randomness import Purpose, Randomness
from .reward import PendingScores, Rubric, Scores
from .rollout_scope import ROLLOUTS
from .types import Condition, Loss, PromptBatch, Trajectory, concatenate, select_rows

B = TypeVar("B")  # a batch of data
E = TypeVar("E")  # experience, a tree of tensors
T = TypeVar("T")  # what is scored
Q = TypeVar("Q")  # names a part of the experience whose loss is computed by itself

MAX_PENDING_BATCHES = 2  # rollout batches that wait for their scores while the next one is sampled; bounds host memory


class Comm(Protocol):
    """Collective operations between ranks; the identity on a single process."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def gather(self, x: Tensor) -> Tensor:
        """Concatenate the rows of all ranks, in rank order."""

    def gather_objects(self, items: Sequence[Any]) -> list[Any]: ...
    def barrier(self) -> None: ...
    def mean(self, x: Tensor) -> Tensor: ...
    def any(self, flag: bool) -> bool:
        """Whether the flag is true on any rank."""


@dataclass(frozen=True)
class SingleProcess:
    """The collective operations of a run on one process."""

    rank: int = 0
    world_size: int = 1

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

    def sum(self, x: Tensor) -> Tensor:
        return x


class ObjectiveState(Protocol):
    """What an objective keeps from step to step; its state dict goes into the checkpoint."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class NoState:
    """The state of an objective that keeps nothing between steps."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        return None


@dataclass(frozen=True)
class WeightSource:
    """Weights outside of the run."""

    path: Path  # a run, a checkpoint, a file or an export
    key: str  # the setting that names them, for messages
    ema: bool = False  # of a run or a checkpoint: the EMA instead of the weights themselves


def _no_timer(phase: str) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class Context(Generic[P]):
    """Everything an objective works with at one training step, on one rank."""

    policy: Policy[P]
    rubric: Rubric
    rng: Randomness  # one row for each row of this rank's batch
    comm: Comm
    state: ObjectiveState
    epoch: int = 0  # passes over the same experience so far; each draws new random numbers
    rollout_batch_size: int | None = None  # samples generated at a time; all at once if not given
    first_row: int | None = None  # number of the first row, if the others follow in order
    measure_time: Callable[[str], AbstractContextManager[None]] = _no_timer  # adds the time of a block to a phase
    overlap_rewards: bool = True  # score a rollout batch in threads while the next one is sampled

    def host_rng(self) -> Randomness:
        """The random stream of this batch with row numbers on the host, without a GPU synchronization."""
        count = len(self.rng)
        rows = self.rng.rows.cpu() if self.first_row is None else torch.arange(self.first_row, self.first_row + count)
        return replace(self.rng, rows=rows)

    def chunks(self, rows: int, group_size: int = 1) -> Sequence[Tensor]:
        """Row numbers of each rollout batch. Random numbers depend on the row, so that samples do not on the split.

        A batch holds whole groups of adjacent rows, or is a part of one group if groups are larger than a batch.
        """
        size = self.rollout_batch_size or max(rows, 1)
        if group_size <= size:
            return torch.split(torch.arange(rows), size // group_size * group_size)
        return [part for group in torch.split(torch.arange(rows), group_size) for part in torch.split(group, size)]

    def sample(self, cond: Condition, rng: Randomness) -> Trajectory:
        """Sample without gradients, one rollout batch after the other."""
        return concatenate(
            [self.policy.sample(select_rows(cond, r), select_rows(rng, r)) for r in self.chunks(len(cond))]
        )


def require_settings(objective: object, names: str, valid: bool, expected: str) -> None:
    """Raise ValueError with the values of the named settings, and what is expected of them, unless they are valid."""
    if not valid:
        values = [(name, getattr(objective, name)) for name in names.split()]
        settings = ", ".join(f"{name} {list(value) if isinstance(value, tuple) else value}" for name, value in values)
        raise ValueError(f"found {settings}; expected {expected} [TM088]")


class Objective(ABC, Generic[P, B, E, Q]):
    """A training algorithm: a frozen dataclass of hyperparameters with `collect` and `loss`.

    A step calls `collect` once. Then, for every minibatch of the experience, it back-propagates the loss of each part.
    """

    needs: ClassVar[type] = Process  # the generation process it works on
    needs_gradient: ClassVar[bool] = False  # of the rewards
    needs_reward: ClassVar[bool] = True  # to train on its own samples
    # Whether it weighs tokens of 8-bit rollouts by their probability in the training precision
    corrects_rollout_precision: ClassVar[bool] = False
    needs_stochastic: ClassVar[bool] = False  # a stochastic sampler: a deterministic one has no actions
    consumes: ClassVar[type]  # the type of batch it trains on: PromptBatch, ImageBatch, PreferenceBatch …
    also_consumes: ClassVar[tuple[type, ...]] = ()  # other types of batches it accepts
    group_size: int = 1  # samples per prompt
    keep: PoolSelection | None = None  # the best and worst samples of a larger pool, which make the group

    def experience_per_prompt(self) -> int:
        """Rows of experience per row of the batch."""
        return self.group_size

    def samples_per_row(self) -> int:
        """Samples in one row of experience."""
        return 1

    def rows_per_prompt(self) -> int:
        """Random rows of each prompt in a rollout: of its samples, or of the pool that they are selected from."""
        return self.keep.pool_size if self.keep else self.group_size

    def samples_per_prompt(self) -> int:
        """Samples generated per prompt, with those of a pool; 0 for objectives that train on data."""
        pool_size = self.keep.pool_size if self.keep else 0
        return self.group_size + pool_size if self.consumes is PromptBatch else 0

    def rollout_network_calls(self, each: int) -> int:
        """Network calls of a rollout per prompt, given the calls of one sample; a sample of a pool takes fewer."""
        if self.keep is None:
            return self.samples_per_prompt() * each
        return self.keep.pool_size * self.keep.pool_num_steps + self.group_size * each

    def needs_log_probs(self) -> bool:
        """Whether the samples need the log-probabilities of their actions."""
        return True

    def uses_rollout_ratios(self) -> bool:
        """Whether it divides by the probabilities of the network that sampled, so that the first ratio should be 1."""
        return bool(self.samples_per_prompt()) and self.needs_log_probs()

    def snapshots(self) -> tuple[str, ...]:
        """Names of the weight snapshots it uses, such as `reference`."""
        return ()

    def snapshot_sources(self) -> Mapping[str, WeightSource]:
        """Snapshots that hold other weights than those the run starts from, and where these come from, by name."""
        return {}

    def tiny(self) -> Self:
        """A copy for tiny random models, which cannot load the weights of trained ones."""
        return self

    def find_problem(self, process: Process, shape: tuple[int, ...]) -> str | None:
        """Why these settings do not work with a process and the shape of one sample; None if they do."""
        return None

    def without_kl(self) -> Self | None:
        """A copy of the objective without its KL penalty, or None if it has none."""
        return None

    def make_state(self) -> ObjectiveState:
        """The state at the start of training."""
        return NoState()

    @abstractmethod
    def collect(self, ctx: Context[P], batch: B) -> E:
        """Make the experience of one step, without gradients: sample, score, encode."""

    def metrics(self, experience: E) -> dict[str, Tensor]:
        """Metrics of the collected experience before the update: [B] or scalars."""
        return {}

    @abstractmethod
    def parts(self, experience: E) -> Sequence[Q]:
        """Parts of the loss, such as denoising steps; each is back-propagated before the graph of the next is built."""

    @abstractmethod
    def loss(self, ctx: Context[P], experience: E, part: Q) -> Loss:
        """The loss of one part: one value per row of the experience. The losses of all parts add up."""

    def after_update(self, ctx: Context[P]) -> None:
        """Update weight snapshots, once per training step."""
        return None


@dataclass(frozen=True)
class ScoredRollout:
    """Trajectories with rewards and advantages."""

    trajectory: Trajectory
    rng: Randomness
    reward: Tensor  # [B] weighted sum
    advantage: Tensor  # [B]
    rewards: dict[str, Tensor]  # [B] of each reward, unweighted
    weight: Tensor | None = None  # [B] of the sample's loss: 0 in groups that are filtered out; 1 if not given
    pool: dict[str, Tensor] = field(default_factory=dict)  # [B] metrics of the pool that samples were selected from

    def __len__(self) -> int:
        return len(self.trajectory)

    def weighted(self, rows: Tensor) -> Tensor:
        """Losses [B] of the samples, such that their mean is that over the samples of groups that are not filtered."""
        return rows if self.weight is None else rows * self.weight

    def metrics(self, group_size: int) -> dict[str, Tensor]:
        """Rewards, and the share of groups whose rewards are all equal: their advantages are 0."""
        groups = self.reward.view(-1, group_size)
        zero_std = (groups.amax(1) - groups.amin(1) < 1e-8).float().mean()
        rewards = {f"rewards/{name}": reward for name, reward in self.rewards.items()}
        kept = {} if self.weight is None else {"kept_groups": (self.weight > 0).float()}
        return {"reward/mean": self.reward, "zero_std_groups": zero_std, **kept, **self.pool, **rewards}


@torch.no_grad()
def rollout_and_score(
    ctx: Context[Process], batch: PromptBatch, group_size: int, keep: PoolSelection | None = None, branches: int = 1
) -> tuple[Trajectory, Randomness, Scores]:
    """Sample `group_size` images or videos per prompt and score them with the rubric.

    The samples of a prompt are adjacent: row i is sample i % group_size of prompt i // group_size. With `keep` they are
    those of a larger pool with the highest and lowest rewards. `branches` adjacent samples have the same initial noise:
    they differ from the first random step on.
    """
    cond, size = ctx.policy.embed(batch.prompts, batch.metadata), keep.pool_size if keep else group_size
    rng, prompt = ctx.rng.repeat(size), torch.arange(len(cond)).repeat_interleave(size)
    if keep is None:
        trajectory, scores = concatenate(_sample_and_score(ctx, cond, prompt, rng, size, branches))
        return trajectory, rng, scores
    # A sample depends on its random row only, so that few steps preview the sample that all steps make of that row.
    process = ctx.policy.process.with_num_steps(keep.pool_num_steps)
    pool_ctx = replace(ctx, policy=replace(ctx.policy, process=process))
    preview = concatenate([scores.total for _, scores in _sample_and_score(pool_ctx, cond, prompt, rng, size)])
    rows = keep.pick(preview)
    rng = select_rows(rng, rows)
    with ROLLOUTS.exact():
        trajectory, scores = concatenate(_sample_and_score(ctx, cond, prompt[rows.cpu()], rng, group_size))
    correlation = rank_correlation(*(x.view(-1, group_size) for x in (preview[rows], scores.total)))
    pool = {"pool/rank_correlation": correlation, "pool/reward": preview.view(-1, size).mean(1)}
    return trajectory, rng, replace(scores, pool={k: x.repeat_interleave(group_size) for k, x in pool.items()})


def _sample_and_score(
    ctx: Context[Process], cond: Condition, prompt: Tensor, rng: Randomness, group_size: int, branches: int = 1
) -> list[tuple[Trajectory, Scores]]:
    """Samples and their scores by rollout batch; `prompt` is the row of `cond` of each sample."""
    with ctx.rubric.prioritize_sampling(rng.rows.device) if ctx.overlap_rewards else nullcontext():
        return list(_scored_batches(ctx, cond, prompt, rng, group_size, branches))


def _scored_batches(
    ctx: Context[Process], cond: Condition, prompt: Tensor, rng: Randomness, group_size: int, branches: int
) -> Iterator[tuple[Trajectory, Scores]]:
    """Yield samples and their scores, one rollout batch after the other; `prompt` is the row of `cond` of each sample.

    If a reward compares the samples of a prompt, they wait for the rollout batch that completes their group.
    """
    unit = group_size if ctx.rubric.needs_groups else 1

    def start_batches() -> Iterator[tuple[Trajectory, PendingScores]]:
        waiting: list[tuple[Trajectory, Tensor]] = []
        for rows in ctx.chunks(len(prompt), unit):
            sampled = _sample_branches(ctx.policy, select_rows(cond, prompt[rows]), select_rows(rng, rows), branches)
            waiting.append((sampled, ctx.policy.decode(sampled.final)))
            if len(rows) and (int(rows[-1]) + 1) % unit:
                continue
            trajectory, pixels = concatenate(waiting)
            waiting = []
            scores = start_scoring(ctx, pixels, trajectory.cond, group_size)
            del pixels  # not kept while the next batch is sampled
            yield trajectory, scores

    return finish_in_order(ctx, start_batches())


def finish_in_order(ctx: Context[Any], started: Iterable[tuple[T, PendingScores]]) -> Iterator[tuple[T, Scores]]:
    """Yield items with their scores. While rewards in threads score some, `started` may make the next ones."""
    max_pending = MAX_PENDING_BATCHES if ctx.overlap_rewards and ctx.rubric.uses_threads else 0
    pending: deque[tuple[T, PendingScores]] = deque()
    try:
        for each in started:
            pending.append(each)
            while len(pending) > max_pending:
                yield pending[0][0], finish_scoring(ctx, pending[0][1])
                pending.popleft()
        while pending:
            yield pending[0][0], finish_scoring(ctx, pending[0][1])
            pending.popleft()
    finally:
        for _, scores in pending:
            scores.cancel()


def _sample_branches(policy: Policy[Process], cond: Condition, rng: Randomness, branches: int) -> Trajectory:
    """Sample without gradients; adjacent samples have the same initial noise if there are several branches."""
    if branches == 1:
        return policy.sample(cond, rng)
    rollout, shared = policy.rollout(cond, rng), replace(rng, rows=rng.rows // branches)
    rollout.set_start(shared.normal(Purpose.INITIAL_NOISE, *policy.model.shape))
    return rollout.finish()


def start_scoring(ctx: Context[Process], pixels: Tensor, cond: Condition, group_size: int) -> PendingScores:
    """Score samples by the rewards on their device, and start the rewards that run in threads."""
    with ctx.measure_time("reward"):
        return ctx.rubric.start(pixels, [cond.prompts], cond.metadata, group_size)


def finish_scoring(ctx: Context[Process], pending: PendingScores) -> Scores:
    """Wait for the scores. If the run is asked to stop and a reward of one rank hangs, all ranks give up together."""
    stop = current_stop()
    with ctx.measure_time("reward"), ctx.measure_time("reward_wait") if pending.futures else nullcontext():
        if not (stop.ranks_can_agree and ctx.rubric.uses_threads):
            return pending.wait()[0]
        scores, stop.may_abandon = None, True
        try:
            scores = pending.wait()[0]
        except Interrupted:
            pass  # the other ranks have to know first
        finally:
            stop.may_abandon = False
        if ctx.comm.any(scores is None) or scores is None:
            raise Interrupted(on_all_ranks=True)
        return scores


def drop_prompts(prompts: Sequence[str], dropped: Tensor) -> list[str]:
    """Replace the prompts where `dropped` [B] is true by the empty prompt, for classifier-free guidance."""
    return ["" if drop else prompt for prompt, drop in zip(prompts, dropped.tolist(), strict=True)]
