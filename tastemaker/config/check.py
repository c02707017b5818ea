"""Check that the sections of a configuration fit together, and compute the batch arithmetic of a step.

Each rule is a function that returns a message, or None if the rule holds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..core.model_spec import ModelSpec
from ..core.randomness import Randomness
from ..core.registry import ConfigError
from ..core.types import (
    ImageBatch,
    PreferenceBatch,
    PromptBatch,
    QuestionAnswerBatch,
)
from ..data.toy import ToyImages, ToyLikes, ToyPairs
from ..objectives.crd import CRD
from ..objectives.dgpo import DGPO
from ..objectives.reward_gradient import RewardGradient
from ..objectives.scored_frames import is_single_frame
from ..objectives.srpo import SRPO
from ..objectives.teacher_forced_grpo import TeacherForcedGRPO
from ..processes.autoregressive import AutoregressiveProcess
from ..processes.gaussian import GaussianProcess
from ..rewards.preference import tower_settings
from .data_checks import BATCH_NAMES, DATA_TYPES, check_editor_path, check_joint_batch, check_objective_data
from .dump import registered_name, to_plain
from .engine_rules import ENGINE_RULES
from .group_rules import check_group_rewards, check_pairwise_rewards, check_pool, check_shared_prompts
from .reward_servers import check_reward_servers
from .schema import AnyConfig, AutoencoderRunConfig, JudgeRunConfig, PreferenceRunConfig, RunConfig
from .validate import build_component

Rule = Callable[[RunConfig, int], str | None]
CommonRule = Callable[[AnyConfig, int], str | None]
C = TypeVar("C", bound=AnyConfig)


def check_model_process(config: RunConfig, world_size: int) -> str | None:
    model, process = config.model, config.process
    if isinstance(process, model.process_type):
        return None
    expected = registered_name(model.process_type)
    names = component_name(process), component_name(model)
    return f"process.type: '{names[0]}' does not work with the model '{names[1]}'; set process.type={expected} [TM780]"


def check_objective_process(config: RunConfig, world_size: int) -> str | None:
    objective, process = config.objective, config.process
    if isinstance(process, objective.needs):
        return None
    names = component_name(objective), registered_name(objective.needs), component_name(process)
    return (
        f"objective.type: '{names[0]}' needs the process '{names[1]}', but process.type is '{names[2]}'; choose "
        f"another objective, or a model that uses the process '{names[1]}' [TM781]"
    )


def check_stochastic_sampler(config: RunConfig, world_size: int) -> str | None:
    name, process = component_name(config.objective), config.process
    if not config.objective.needs_stochastic:
        return None
    if not process.stochastic:
        return (
            f"process.dynamics: the objective '{name}' needs a stochastic sampler, but this sampler is deterministic; "
            "set process.dynamics.type to flow_sde, or ddim with eta above 0 [TM782]"
        )
    if isinstance(process, GaussianProcess) and process.num_steps == 1:
        return (
            f"process.num_steps: the objective '{name}' trains the noise that sampling steps add, but the last step "
            "adds none and there is only one; set process.num_steps to at least 2, or use the objective "
            "reward_gradient [TM2462]"
        )
    return None


def check_reward_gradients(config: RunConfig, world_size: int) -> str | None:
    # A reward of weight zero is only logged, so that nothing flows back through it.
    blocked = [key for key, reward in config.rewards.items() if reward.weight and not reward.spec.differentiable]
    if not config.objective.needs_gradient or not blocked:
        return None
    name, are = component_name(config.objective), "is" if len(blocked) == 1 else "are"
    return (
        f"rewards: the objective '{name}' needs differentiable rewards, but {quote(blocked)} {are} not "
        f"differentiable; set the weight of {quote(blocked)} to 0, or use the objective grpo [TM784]"
    )


def check_rewards_exist(config: RunConfig, world_size: int) -> str | None:
    if not (config.objective.samples_per_prompt() and config.objective.needs_reward) or any(
        reward.weight for reward in config.rewards.values()
    ):
        return None
    state = "all rewards have weight 0" if config.rewards else "no rewards are set"
    name = component_name(config.objective)
    return (
        f"rewards: the objective '{name}' trains on rewards, but {state}; add a reward, for example "
        "rewards.color.type=color, or set a weight above 0 [TM785]"
    )


def check_video_rewards(config: RunConfig, world_size: int) -> str | None:
    rewards = video_rewards(config)
    if config.model.frames > 1 or not rewards:
        return None
    read, name = "scores" if len(rewards) == 1 else "score", component_name(config.model)
    return (
        f"rewards: {quote(rewards)} {read} videos, but the model '{name}' generates images; remove {quote(rewards)} "
        "from rewards, or use a video model [TM786]"
    )


def check_num_frames(config: RunConfig, world_size: int) -> str | None:
    data, frames = config.data, config.model.frames
    if not isinstance(data, ToyImages | ToyPairs | ToyLikes) or data.num_frames == frames:
        return None
    names = component_name(data), component_name(config.model)
    return (
        f"data.num_frames: the data '{names[0]}' has {data.num_frames} frames per sample, but the model "
        f"'{names[1]}' generates {frames}; set data.num_frames={frames} [TM787]"
    )


def check_initial_image(config: RunConfig, world_size: int) -> str | None:
    model = config.model
    if not model.needs_initial_image or check_data_files(config, world_size):
        return None
    first = config.data.load(config.seed).batch(0, 1, 0, 1)
    if isinstance(first, PromptBatch) and first.metadata[0].get("image") is not None:
        return None
    name = component_name(model)
    return (
        f"model.image: the model '{name}' starts from an image, but the first prompt has no image; set "
        "model.image, or add an `image` to each prompt's metadata [TM788]"
    )


def check_gradient_steps(config: RunConfig, world_size: int) -> str | None:
    objective, process = config.objective, config.process
    if not isinstance(objective, RewardGradient) or not isinstance(process, GaussianProcess):
        return None
    steps = process.num_steps
    if objective.gradient_mode == "last_steps" and objective.last_steps > steps:
        return (
            f"objective.last_steps: expected at most {steps}, the number of sampling steps, got "
            f"{objective.last_steps}; lower objective.last_steps, or raise process.num_steps [TM789]"
        )
    if objective.gradient_mode == "leap" and config.guidance is not None and config.guidance.rollouts_only:
        return (
            "guidance.rollouts_only: gradient_mode leap follows the guided trajectory, so its network calls must be "
            "guided too; set guidance.rollouts_only=false, or choose another objective.gradient_mode [TM1561]"
        )
    try:
        objective.first_step(Randomness(0, 0, torch.zeros(1, dtype=torch.int64)), steps)
    except ValueError as error:
        return f"objective: {error}"
    return None


def check_group_levels(config: RunConfig, world_size: int) -> str | None:
    """The noise levels of DGPO and CRD are among those of the sampler; a guided reference needs a guided model."""
    objective, process, guidance = config.objective, config.process, config.guidance
    if not isinstance(objective, DGPO | CRD) or not isinstance(process, GaussianProcess):
        return None
    scale = objective.reference_guidance_scale
    if scale != 1 and (guidance is None or guidance.scale == 1):
        return (
            f"objective.reference_guidance_scale: {scale} needs the unconditional prompt of a guided model; set "
            "guidance.scale above 1, or objective.reference_guidance_scale=1 [TM1567]"
        )
    return objective.find_level_problem(process)


def check_scored_frames(config: RunConfig, world_size: int) -> str | None:
    objective, frames = config.objective, config.model.frames
    if not isinstance(objective, RewardGradient | SRPO):
        return None
    try:
        single = is_single_frame(objective.frames, frames)
    except ValueError as error:
        return f"objective: {error}"
    rewards = video_rewards(config)
    if not single or not rewards:
        return None
    return (
        f"objective.frames: '{objective.frames}' decodes one frame per video, but {quote(rewards)} needs several "
        "frames; set objective.frames to all, alt or fml [TM790]"
    )


def check_truncated_sampling(config: RunConfig, world_size: int) -> str | None:
    process = config.process
    if not isinstance(process, AutoregressiveProcess) or not config.objective.needs_stochastic:
        return None
    if process.top_k == 0 and process.top_p == 1:
        return None
    return (
        f"process: top_k is {process.top_k} and top_p is {process.top_p}, but this objective needs the "
        "log-probabilities of all tokens. After an update, a sampled token outside top_k or top_p would have "
        "probability 0. Set process.top_k=0 and process.top_p=1 [TM791]"
    )


def check_dropout(config: RunConfig, world_size: int) -> str | None:
    objective, sections = config.objective, {"model": config.model, "tuning": config.tuning}
    rates = {name: float(settings_of(section).get("dropout", 0.0)) for name, section in sections.items()}
    section = next((name for name, rate in rates.items() if rate), None)
    wanted = isinstance(objective, TeacherForcedGRPO) and "dropout" in objective.emulate_bugs
    compares = objective.needs_stochastic or isinstance(objective, DGPO | CRD)
    if section is None or not compares or wanted:
        return None
    return (
        f"{section}.dropout: {rates[section]} is not supported by this objective, because it compares the network "
        f"with older weights, which run without dropout; set {section}.dropout=0 [TM792]"
    )


def check_prompts_per_rank(config: RunConfig, world_size: int) -> str | None:
    prompts, minibatches = config.batch.prompts, config.batch.minibatches
    ranks = data_parallel_size(config, world_size)
    if prompts % ranks:
        return (
            f"batch.prompts: {prompts} is not divisible by {ranks} ranks; set batch.prompts to a multiple of {ranks} "
            "[TM793]"
        )
    per_prompt = config.objective.experience_per_prompt()
    if prompts // ranks * per_prompt % minibatches:
        advice = f"choose batch.prompts as a multiple of {ranks * minibatches // math.gcd(minibatches, per_prompt)}"
        samples = f"{prompts // ranks} prompts" + (f" with {per_prompt} samples each" if per_prompt > 1 else "")
        return f"batch.minibatches: {samples} per rank are not divisible by {minibatches} minibatches; {advice} [TM794]"
    return None


def check_objective(config: RunConfig, world_size: int) -> str | None:
    return config.objective.find_problem(config.process, config.model.shape)


def check_sample_weights(config: RunConfig | AutoencoderRunConfig, world_size: int) -> str | None:
    if config.sample.weights == "ema" and config.ema_decay == 0:
        return (
            "sample.weights: expected an EMA for the value 'ema', but ema_decay is 0; set ema_decay, for example "
            "ema_decay=0.99, or sample.weights=live [TM798]"
        )
    return None


def check_sample_size(config: RunConfig, world_size: int) -> str | None:
    sample, model = config.sample, config.model
    size = {key: side for key, side in (("height", sample.height), ("width", sample.width)) if side}
    if not {*size} <= settings_of(model).keys():
        return (
            f"sample.{next(iter(size))}: the model '{component_name(model)}' generates images of one size only; "
            f"remove sample.{next(iter(size))} [TM799]"
        )
    try:
        build_component(ModelSpec, {**to_plain(model, None), **size}, "sample") if size else None
    except ConfigError as error:
        return str(error)
    return None


def check_sample_steps(config: RunConfig, world_size: int) -> str | None:
    try:
        config.process.with_num_steps(config.sample.num_steps) if config.sample.num_steps else None
    except ValueError as error:
        return f"sample.num_steps: {error}"
    return None


def check_data_files(config: AnyConfig, world_size: int) -> str | None:
    for key, path in settings_of(config.data).items():
        if isinstance(path, Path) and not os.path.exists(path):
            return (
                f"data.{key}: the path {str(path)!r:.200} does not exist; correct data.{key} (paths are relative to "
                "the current directory) [TM800]"
            )
    return None


def check_autoencoder_samples(config: AutoencoderRunConfig, world_size: int) -> str | None:
    sample = config.sample
    if any(x is not None for x in (sample.height, sample.width, sample.num_steps, sample.guidance_scale)):
        return (
            "sample: the samples of an autoencoder are reconstructions of its data; remove height, width, "
            "num_steps and guidance_scale from sample [TM801]"
        )
    return None


def check_batch_size(config: AutoencoderRunConfig | JudgeRunConfig, world_size: int) -> str | None:
    if config.batch_size % world_size:
        advice = f"choose a multiple of {world_size}"
        return f"batch_size: {config.batch_size} is not divisible by {world_size} ranks; {advice} [TM802]"
    return None


def check_autoencoder_data(config: AutoencoderRunConfig, world_size: int) -> str | None:
    for key, data in (("data", config.data), ("validation.data", config.validation.data)):
        if data is not None and data.batch_type is not ImageBatch:
            yields = BATCH_NAMES.get(data.batch_type, data.batch_type.__name__)
            advice = f"set {key}.type to {DATA_TYPES[ImageBatch]}"
            return (
                f"{key}.type: an autoencoder trains on images, but '{component_name(data)}' yields {yields}; "
                f"{advice} [TM803]"
            )
    return None


def check_judge_data(config: JudgeRunConfig, world_size: int) -> str | None:
    for key, data in (("data", config.data), ("validation.data", config.validation.data)):
        if data is not None and data.batch_type is not QuestionAnswerBatch:
            yields = BATCH_NAMES.get(data.batch_type, data.batch_type.__name__)
            name = component_name(data)
            return (
                f"{key}.type: a judge trains on questions with answers, but '{name}' yields {yields}; set "
                f"{key}.type to vqa_file [TM804]"
            )
    return None


def check_preference_data(config: PreferenceRunConfig, world_size: int) -> str | None:
    if config.data.batch_type is not PreferenceBatch:
        yields = BATCH_NAMES.get(config.data.batch_type, config.data.batch_type.__name__)
        return (
            f"data.type: a preference model trains on preference pairs, but '{component_name(config.data)}' yields "
            f"{yields}; set data.type to votes, pair_file or pair_folder [TM1304]"
        )
    return None


def check_preference_tower(config: PreferenceRunConfig, world_size: int) -> str | None:
    try:
        tower_settings(config.preference.tower)
    except ConfigError as error:
        return str(error)
    return None


COMMON_RULES: tuple[CommonRule, ...] = (
    *ENGINE_RULES,
    check_data_files,
)
RUN_RULES: tuple[Rule, ...] = (
    check_model_process,
    check_objective_process,
    check_stochastic_sampler,
    check_objective_data,
    check_reward_gradients,
    check_reward_servers,
    check_joint_batch,
    check_rewards_exist,
    check_video_rewards,
    check_group_rewards,
    check_pairwise_rewards,
    check_pool,
    check_shared_prompts,
    check_scored_frames,
    check_num_frames,
    check_initial_image,
    check_editor_path,
    check_gradient_steps,
    check_group_levels,
    check_truncated_sampling,
    check_dropout,
    check_prompts_per_rank,
    check_objective,
    check_sample_size,
    check_sample_steps,
    check_sample_weights,
)
# Rules that a run may break if it only generates samples.
TRAINING_RULES = (
    check_initial_image,
    check_gradient_steps,
    check_group_levels,
    check_truncated_sampling,
    check_dropout,
    check_prompts_per_rank,
    check_objective,
    check_group_rewards,
    check_pool,
    check_shared_prompts,
)
AUTOENCODER_RULES: tuple[Callable[[AutoencoderRunConfig, int], str | None], ...] = (
    check_autoencoder_data,
    check_batch_size,
    check_autoencoder_samples,
    check_sample_weights,
)
JUDGE_RULES: tuple[Callable[[JudgeRunConfig, int], str | None], ...] = (check_judge_data, check_batch_size)
PREFERENCE_RULES: tuple[Callable[[PreferenceRunConfig, int], str | None], ...] = (
    check_preference_data,
    check_preference_tower,
)


def find_problems(config: AnyConfig, world_size: int | None = None, *, load_data: bool = True) -> list[str]:
    """Return a message for every broken rule.

    The default world size is torchrun's. Without `load_data` the run only generates: rules of training do not apply.
    """
    ranks = torchrun_world_size() if world_size is None else world_size
    if isinstance(config, AutoencoderRunConfig):
        messages = [rule(config, ranks) for rule in AUTOENCODER_RULES]
    elif isinstance(config, JudgeRunConfig):
        messages = [rule(config, ranks) for rule in JUDGE_RULES]
    elif isinstance(config, PreferenceRunConfig):
        messages = [rule(config, ranks) for rule in PREFERENCE_RULES]
    else:
        messages = [rule(config, ranks) for rule in RUN_RULES if load_data or rule not in TRAINING_RULES]
    messages += [rule(config, ranks) for rule in COMMON_RULES if load_data or rule is not check_data_files]
    return [message for message in messages if message]


def require_valid(config: C, world_size: int | None = None, *, load_data: bool = True) -> C:
    """Return the configuration, or raise ConfigError with all problems."""
    problems = find_problems(config, world_size, load_data=load_data)
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def torchrun_world_size() -> int:
    """The number of ranks that torchrun started; 1 without torchrun."""
    size = os.environ.get("WORLD_SIZE", "1")
    if not size.isdecimal() or int(size) < 1:
        raise ConfigError(
            f"WORLD_SIZE: expected the number of ranks in this environment variable, got '{size}'; unset WORLD_SIZE, "
            "or start the command with torchrun [TM023]"
        )
    return int(size)


def data_parallel_size(config: AnyConfig, world_size: int) -> int:
    """The number of ranks with different samples: ranks of a context-parallel group share theirs."""
    return max(1, world_size // config.engine.context_parallel)


def component_name(component: object) -> str:
    """The `type` under which the class of a component is registered."""
    return registered_name(type(component))


def settings_of(component: Any) -> dict[str, Any]:
    """The fields of a component, which is always a dataclass, by name."""
    return {f.name: getattr(component, f.name) for f in fields(component)}


def video_rewards(config: RunConfig) -> list[str]:
    return [key for key, reward in config.rewards.items() if reward.spec.modality == "video"]


def quote(names: list[str]) -> str:
    return ", ".join(f"'{name:.60}'" for name in names)
