"""Rules of groups of samples: rewards that compare them, and samples that are selected from a pool."""

from __future__ import annotations

from ..models.sana import SanaSpec
from .dump import registered_name
from .schema import RunConfig


def check_group_rewards(config: RunConfig, world_size: int) -> str | None:
    names = [key for key, reward in config.rewards.items() if reward.spec.needs_group]
    objective = config.objective
    if not names or (objective.samples_per_prompt() > 1 and not objective.needs_gradient):
        return None
    compare, name = "compares" if len(names) == 1 else "compare", registered_name(type(objective))
    found = "follows the gradient of single samples" if objective.needs_gradient else "has no groups of samples"
    keys = ", ".join(f"'{key:.60}'" for key in names)
    return (
        f"rewards: {keys} {compare} the samples of a prompt, but the objective '{name}' {found}; use an "
        "objective with a group_size of at least 2, such as grpo or nft, or the reward inside [TM1592]"
    )


def check_pairwise_rewards(config: RunConfig, world_size: int) -> str | None:
    names = [key for key, reward in config.rewards.items() if reward.spec.compares_pairs]
    if not names:
        return None
    return (
        f"rewards.{names[0]:.60}: a pairwise reward has no scores of single samples; write {{type: win_rate, reward: "
        "...} around it [TM1593]"
    )


def check_pool(config: RunConfig, world_size: int) -> str | None:
    keep, process = config.objective.keep, config.process
    if keep is None:
        return None
    if process.stochastic:
        return (
            "objective.keep: samples of the pool are generated again with more steps from the same noise, but this "
            "sampler is stochastic and would make other samples of it; set process.dynamics.type=ode, or remove "
            "objective.keep [TM1594]"
        )
    num_steps = process.network_calls_per_sample(config.model.shape)
    try:
        process.with_num_steps(keep.pool_num_steps)
    except ValueError as error:
        return f"objective.keep.pool_num_steps: {error}"
    if keep.pool_num_steps > num_steps:
        return (
            f"objective.keep.pool_num_steps: expected at most {num_steps}, the steps of the samples that train, got "
            f"{keep.pool_num_steps}; lower it, or raise process.num_steps [TM1595]"
        )
    return None


def check_shared_prompts(config: RunConfig, world_size: int) -> str | None:
    objective = config.objective
    if not isinstance(config.model, SanaSpec) or not config.model.share_prompts:
        return None
    if not objective.uses_rollout_ratios():
        return None
    return (
        f"model.share_prompts: {type(objective).__name__} divides by the probabilities of the network that sampled, "
        "which may round differently with fewer rows, so its first ratio need not be 1; remove it, or use an "
        "objective that needs only the samples, such as nft or elbo_grpo [TM2754]"
    )
