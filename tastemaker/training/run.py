"""A run: everything the training loop needs, built from a configuration or by hand."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config.schema import BatchConfig, CheckpointConfig, GuardConfig, RunConfig, SampleConfig
from ..core.checkpoint_files import SealedModel
from ..core.errors import CheckpointError
from ..core.objective import Context, Objective, ObjectiveState
from ..core.policy import Policy
from ..core.randomness import Randomness
from ..core.reward import Rubric
from ..core.types import ImageBatch, PromptBatch
from ..data.dataset import Dataset
from ..data.image_io import resize_area
from . import checkpoint, distributed
from .async_checkpoint import AsyncCheckpointWriter
from .checkpoint import StagedCheckpoint
from .drift_statistics import GuardHistory
from .engine import Engine

AnyObjective = Objective[Any, Any, Any, Any]
SAMPLE_STEP, GUARD_STEP = -1, -2  # step numbers of the noise of samples, the same at every call, and of the guard


class GuardState(SealedModel):
    """A measurement of the guard in a checkpoint."""

    step: checkpoint.Step
    rows: dict[str, list[float]]
    spread: dict[str, float]


class GeneratorState(checkpoint.ExtraState):
    """What a generator's run keeps in state.json."""

    step: checkpoint.Step
    memory: dict[str, Any]
    guard: list[GuardState] = []


@dataclass
class Run:
    """A generator, its objective, rewards and data, and the settings of the loop."""

    policy: Policy[Any]
    objective: AnyObjective
    rubric: Rubric
    data: Dataset
    engine: Engine
    directory: Path
    steps: int
    seed: int = 0
    batch: BatchConfig = BatchConfig()
    ema_decay: float = 0.0
    checkpoint: CheckpointConfig = CheckpointConfig()
    sample: SampleConfig = SampleConfig()
    guard: GuardConfig = GuardConfig()
    start_step: int = 0  # steps completed before, of a resumed run
    checkpoint_metadata: Mapping[str, Any] = field(default_factory=dict)  # written into every checkpoint
    config: RunConfig | None = field(init=False, default=None)  # that it was built from; None if built by hand
    step_complete: bool = field(init=False, default=True)  # False while a step updates the weights
    objective_state: ObjectiveState = field(init=False)
    guard_history: GuardHistory = field(init=False)
    checkpoint_writer: AsyncCheckpointWriter = field(init=False)

    def __post_init__(self) -> None:
        held_out = [name for name, reward in self.rubric.pointwise().rewards.items() if not reward.weight]
        self.guard_history = GuardHistory(held_out, self.guard.patience)
        self.objective_state = self.objective.make_state()
        self.engine.prepare(self.policy.weights, same_kernels=self.objective.uses_rollout_ratios())
        comm = distributed.separate_comm(self.engine.comm) if self.checkpoint.asynchronous else self.engine.comm
        self.checkpoint_writer = AsyncCheckpointWriter(comm)

    def context(self, step: int, samples: int) -> Context[Any]:
        """Return what an objective needs in a step with `samples` samples on this rank.

        Random numbers depend on the step and the index of a sample over all ranks.
        """
        first = self.engine.data_parallel.rank * samples
        indices = torch.arange(first, first + samples, device=self.engine.device)
        return Context(
            policy=self.policy,
            rubric=self.rubric.for_training(),
            rng=Randomness(self.seed, step, indices),
            comm=self.engine.data_parallel,
            state=self.objective_state,
            rollout_batch_size=self.batch.rollout_batch_size,
            first_row=first,
            overlap_rewards=self.engine.config.overlap_rewards != "never",
        )

    def fixed_prompts(self, count: int) -> PromptBatch:
        """Return the prompts of samples and guard, the same at every call.

        With an image dataset and rewards, the metadata hold the dataset's image as `target`.
        """
        if self.objective.consumes is not ImageBatch or not self.rubric.rewards:
            return self.data.first_prompts(count)
        batch = self.data.batch(0, count, 0, 1)
        if not isinstance(batch, ImageBatch):
            return self.data.first_prompts(count)
        pixels = resize_area(batch.pixels, *self.policy.model.pixels[2:])
        metadata = batch.metadata or ({},) * len(batch)
        return PromptBatch(
            batch.prompts, tuple({**entry, "target": image} for entry, image in zip(metadata, pixels, strict=True))
        )

    def save(self, step: int) -> Path:
        """Write a checkpoint of the first `step` steps and return its directory. Every rank must call this."""
        self.finish_saving()
        return checkpoint.write(self._stage_checkpoint(step), self.engine.comm)

    def start_saving(self, step: int) -> None:
        """Start to write a checkpoint of the first `step` steps in a thread. Every rank must call this.

        `finish_saving` waits for it.
        """
        self.finish_saving()
        self.checkpoint_writer.start(self._stage_checkpoint(step))

    def finish_saving(self) -> Path | None:
        """Wait for a checkpoint that is being written and return its directory."""
        return self.checkpoint_writer.finish()

    def _stage_checkpoint(self, step: int) -> StagedCheckpoint:
        states = {"memory": self.objective_state.state_dict(), "guard": self.guard_history.state_dict()}
        extra = {**self.checkpoint_metadata, "step": step, "seed": self.seed, **states}
        best = self.guard_history.best_step == step
        weights = self.policy.weights
        return checkpoint.stage(self.directory, step, self.engine, weights, extra, self.checkpoint, best=best)

    def resume(self, path: Path) -> None:
        """Restore weights, optimizer, objective and guard state from a checkpoint."""
        extra = checkpoint.load(path, self.engine, self.policy.weights, GeneratorState)
        try:
            self.objective_state.load_state_dict(extra["memory"]) if extra["memory"] else None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{path} holds the state of another objective ({type(error).__name__}: {error!s:.100}); resume with "
                "the objective of the checkpoint, or start from its weights only (--init-from) [TM1120]"
            ) from error
        self.guard_history.load_state_dict(extra.get("guard", ()))
        self.start_step = int(extra["step"])

    def use_sample_weights(self) -> AbstractContextManager[None]:
        """Use the EMA weights within the block if `sample.weights` is ema."""
        averaged = self.sample.weights == "ema" and self.ema_decay
        return self.policy.weights.use("ema") if averaged else nullcontext()


@torch.no_grad()
def initialize_from_trainer(
    run: Run, weights: Mapping[str, Tensor], optimizer_state: Mapping[str, Tensor], step: int, source: str
) -> None:
    """Continue another trainer's run from its full weights, optimizer state and step; each rank copies its shard.

    The EMA starts from these weights. The reference stays what the run was built with, for which `model.weights`
    should name the other trainer's initial weights. `source` is named in errors.
    """
    _copy_shards(dict(run.policy.weights.trainable()), weights, source)
    _copy_shards(run.engine.optimizer.state_dict(), optimizer_state, source)
    for name in {*run.policy.weights.snapshot_tensors()} - {"reference"}:
        run.policy.weights.update_snapshot(name)
    run.start_step = step


def _copy_shards(targets: Mapping[str, Tensor], values: Mapping[str, Tensor], source: str) -> None:
    missing = [key for key, x in targets.items() if key not in values or values[key].shape != x.shape]
    if missing:
        raise CheckpointError(
            f"{source} does not match this run: '{missing[0]}' and {len(missing) - 1} more tensors are missing or "
            "have another shape; use full fine-tuning and optim.state_dtype=fp32, or start from its weights "
            "only, with model.weights [TM290]"
        )
    for key, x in targets.items():
        shard, offset = distributed.local_shard(x), distributed.shard_offset(x)
        shard.copy_(values[key][offset : offset + len(shard)] if shard.ndim else values[key])
