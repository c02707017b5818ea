"""The batch arithmetic of a training step."""

from __future__ import annotations

from dataclasses import dataclass

from .check import data_parallel_size
from .schema import AnyConfig, AutoencoderRunConfig, JudgeRunConfig, PreferenceRunConfig


@dataclass(frozen=True)
class StepCounts:
    """The batch arithmetic of one training step, over all ranks unless a field says otherwise."""

    prompts: int  # or images, or pairs
    samples: int = 0
    network_calls_per_sample: int = 0
    rollout_network_calls: int = 0
    updates: int = 1
    minibatch_size: int = 0  # samples per update
    micro_batch_size: int = 0  # samples per backward pass on one GPU
    timesteps_per_call: int = 1  # sampling steps of each of them in one backward pass
    total_updates: int = 0


def compute_step_counts(config: AnyConfig, world_size: int = 1) -> StepCounts:
    """Compute the batch arithmetic of a step, before anything is loaded."""
    if isinstance(config, AutoencoderRunConfig | JudgeRunConfig):
        share = min(-(-config.batch_size // world_size), config.micro_batch_size or config.batch_size)
        return StepCounts(
            config.batch_size, minibatch_size=config.batch_size, micro_batch_size=share, total_updates=config.steps
        )
    if isinstance(config, PreferenceRunConfig):  # every step fits a head to as many votes as there are at that point
        return StepCounts(config.batch_size, minibatch_size=config.batch_size, total_updates=config.steps)
    batch, objective = config.batch, config.objective
    guided = 2 if config.guidance is not None and config.guidance.scale != 1 else 1
    samples = objective.samples_per_prompt()
    calls = guided * objective.rollout_network_calls(config.process.network_calls_per_sample(config.model.shape))
    experience = batch.prompts * objective.experience_per_prompt()
    share = -(-experience // (data_parallel_size(config, world_size) * batch.minibatches))
    return StepCounts(
        prompts=batch.prompts,
        samples=batch.prompts * samples,
        network_calls_per_sample=-(-calls // max(1, samples)),
        rollout_network_calls=batch.prompts * calls,
        updates=batch.minibatches * batch.epochs,
        minibatch_size=experience * objective.samples_per_row() // batch.minibatches,
        micro_batch_size=min(share, batch.micro_batch_size or share) * objective.samples_per_row(),
        timesteps_per_call=getattr(objective, "timesteps_per_call", 1),
        total_updates=config.steps * batch.minibatches * batch.epochs,
    )
