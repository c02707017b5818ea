"""The rules between sections, one function each: a sentence where one is broken, nothing where it holds."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

import torch

from ..core.policy import ModelSpec
from ..core.randomness import Randomness
from ..core.registry import ConfigError
from ..core.types import PromptBatch
from ..data.captioned_images import ToyPictures
from ..data.pairs import ToyPairs
from ..objectives.forced_grpo import TeacherForcedGRPO
from ..objectives.frame_selection import is_single_frame
from ..objectives.reward_gradient import RewardGradient
from ..processes.autoregressive import AutoregressiveProcess
from ..processes.gaussian import GaussianProcess
from .check_autoencoder import AUTOENCODER_RULES, CONTENTS, JUDGE_RULES, SOURCES, HasInitialImage, component_name
from .dump import registered_name, to_plain
from .schema import AnyConfig, AutoencoderRunConfig, JudgeRunConfig, RunConfig
from .validate import build_component

Rule = Callable[[RunConfig, int], str | None]
Common = Callable[[AnyConfig, int], str | None]
C = TypeVar("C", bound=AnyConfig)


def model_and_process(config: RunConfig, world: int) -> str | None:
    model, process = config.model, config.process
    if isinstance(process, model.suits):
        return None
    wanted = registered_name(model.suits)
    found = f"process: {component_name(process)} cannot drive the model {component_name(model)}"
    return f"{found}; set process.type to {wanted}"


def objective_and_process(config: RunConfig, world: int) -> str | None:
    objective, process = config.objective, config.process
    if isinstance(process, objective.needs):
        return None
    wanted = registered_name(objective.needs)
    found = f"objective: {component_name(objective)} needs the process {wanted}, found {component_name(process)}"
    return f"{found}; choose another objective"


def objective_and_stochastic_sampler(config: RunConfig, world: int) -> str | None:
    if not config.objective.needs_chance or config.process.chance:
        return None
    advice = "set process.dynamics to one with noise, such as flow_sde, or ddim with eta above 0"
    return f"process: the sampler is deterministic, so there is nothing to reinforce; {advice}"


def objective_and_data(config: RunConfig, world: int) -> str | None:
    found, wanted = config.data.yields, config.objective.consumes
    if found is wanted or found in config.objective.also:
        return None
    learns, holds = (CONTENTS.get(kind, kind.__name__) for kind in (wanted, found))
    advice = f"set data.type to {SOURCES.get(wanted, 'another')}"
    names = component_name(config.objective), component_name(config.data)
    return f"data: {names[0]} learns from {learns}, but {names[1]} holds {holds}; {advice}"


def objective_and_gradient(config: RunConfig, world: int) -> str | None:
    # A reward of weight zero is only watched, so nothing flows back through it.
    blind = [key for key, reward in config.rewards.items() if reward.weight and not reward.spec.differentiable]
    if not config.objective.needs_gradient or not blind:
        return None
    has, their = ("has", "its") if len(blind) == 1 else ("have", "their")
    start = f"rewards: {component_name(config.objective)} back-propagates through rewards, but {quoted(blind)}"
    return f"{start} {has} no gradient; set {their} weight to 0, or use grpo"


def objective_and_rewards(config: RunConfig, world: int) -> str | None:
    if not config.objective.samples() or any(reward.weight for reward in config.rewards.values()):
        return None
    found = "all of them have weight 0" if config.rewards else "there are none"
    name = component_name(config.objective)
    return f"rewards: {name} learns from rewards, but {found}; add one, as in rewards.color.type=color"


def rewards_and_frames(config: RunConfig, world: int) -> str | None:
    moving = [key for key, reward in config.rewards.items() if reward.spec.reads == "clip"]
    if config.model.frames > 1 or not moving:
        return None
    read, them = ("reads", "it") if len(moving) == 1 else ("read", "them")
    name = component_name(config.model)
    return f"rewards: {quoted(moving)} {read} motion, but {name} makes stills of one frame; remove {them}"


def data_and_frames(config: RunConfig, world: int) -> str | None:
    data, wanted = config.data, config.model.frames
    if not isinstance(data, ToyPictures | ToyPairs) or data.frames == wanted:
        return None
    start = f"data.frames: {component_name(data)} has {data.frames}, but {component_name(config.model)} makes {wanted}"
    return f"{start}; set data.frames={wanted}"


def data_and_initial_image(config: RunConfig, world: int) -> str | None:
    model = config.model
    if not isinstance(model, HasInitialImage) or model.image is not None or files(config, world):
        return None
    first = config.data.load(config.seed).batch(0, 1, 0, 1)
    if isinstance(first, PromptBatch) and first.facts[0].get("image") is not None:
        return None
    advice = "set model.image, or give each prompt a fact `image`"
    return f"model: {component_name(model)} goes on from a picture, but found none for the first prompt; {advice}"


def gradient_steps_and_num_steps(config: RunConfig, world: int) -> str | None:
    objective, process = config.objective, config.process
    if not isinstance(objective, RewardGradient) or not isinstance(process, GaussianProcess):
        return None
    if objective.through == "tail" and objective.tail > process.steps:
        found = f"a tail of {objective.tail} steps of a sampler of {process.steps}"
        return f"objective: reward_gradient reaches for {found}; ask for at most {process.steps}"
    try:
        objective.first(Randomness(0, 0, torch.zeros(1, dtype=torch.int64)), process.steps)
    except ValueError as error:
        return f"objective: {error}"
    return None


def picked_frames(config: RunConfig, world: int) -> str | None:
    objective, count = config.objective, config.model.frames
    if not isinstance(objective, RewardGradient):
        return None
    try:
        lone = is_single_frame(objective.frames, count)
    except ValueError as error:
        return f"objective: {error}"
    moving = [key for key, reward in config.rewards.items() if reward.spec.reads == "clip"]
    if not lone or not moving:
        return None
    found = f"objective.frames: {objective.frames} is one frame a clip, but {quoted(moving)} needs several"
    return f"{found}; set objective.frames to all, alt or fml"


def truncation_and_log_probs(config: RunConfig, world: int) -> str | None:
    process = config.process
    if not isinstance(process, AutoregressiveProcess) or not config.objective.needs_chance:
        return None
    if process.top_k == 0 and process.top_p == 1:
        return None
    why = "a token that falls out of the kept ones has probability 0 when it is scored again"
    return f"process: top_k {process.top_k} and top_p {process.top_p} while log-probs are trained: {why}; set 0 and 1"


def dropout_and_ratio(config: RunConfig, world: int) -> str | None:
    objective, parts = config.objective, {"model": config.model, "tuning": config.tuning}
    named = ((name, part, f.name) for name, part in parts.items() for f in fields(part))  # type: ignore[arg-type]
    shares = {name: getattr(part, field) for name, part, field in named if field == "dropout"}
    found = next((name for name, share in shares.items() if share), None)
    meant = isinstance(objective, TeacherForcedGRPO) and "dropout" in objective.faults
    if found is None or not objective.needs_chance or meant:
        return None
    why = "samples are drawn by the whole network, and would be scored by one with parts left out"
    return f"{found}.dropout: {shares[found]} while log-probs are trained: {why}; set {found}.dropout=0"


def prompts_and_ranks(config: RunConfig, world: int) -> str | None:
    prompts, updates = config.batch.prompts, config.batch.updates
    world = max(1, world // config.engine.context)  # those that share a row's tokens have the same rows
    if prompts % world:
        return f"batch.prompts: {prompts} prompts do not divide among {world} ranks; choose a multiple of {world}"
    if prompts // world % updates:
        share, advice = prompts // world, f"choose batch.prompts a multiple of {world * updates}"
        return f"batch.updates: {share} prompts a rank do not divide by {updates} updates; {advice}"
    return None


def ranks_and_replicas(config: AnyConfig, world: int) -> str | None:
    replicas = config.engine.replicas
    if config.engine.strategy != "hsdp" or world % replicas == 0:
        return None
    advice = f"start a multiple of {replicas} with torchrun"
    return f"engine.replicas: {world} ranks do not divide into {replicas} replicas; {advice}"


def ranks_and_context(config: AnyConfig, world: int) -> str | None:
    context = config.engine.context
    if world == 1 or world % context == 0:
        return None
    advice = f"start a multiple of {context} with torchrun, or change it"
    return f"engine.context: {world} ranks do not divide into groups of {context}; {advice}"


def graphs_and_engine(config: AnyConfig, world: int) -> str | None:
    engine = config.engine
    others = {"compile": engine.compile, "strategy": engine.strategy != "replicated", "context": engine.context > 1}
    found = [name for name, there in others.items() if there]
    if not engine.graphs or not found:
        return None
    return f"engine.graphs: calls cannot be recorded with engine.{found[0]} as it is; leave one of the two out"


def sample_weights_and_ema(config: RunConfig | AutoencoderRunConfig, world: int) -> str | None:
    if config.sample.use == "ema" and config.ema == 0:
        return "sample.use: ema is asked for, but none is kept; set ema, as in ema=0.99, or sample.use=live"
    return None


def samples_and_model(config: RunConfig, world: int) -> str | None:
    sample, model = config.sample, config.model
    size = {key: side for key, side in (("height", sample.height), ("width", sample.width)) if side}
    if not {*size} <= {f.name for f in fields(model)}:  # type: ignore[arg-type]  # as above
        return f"sample.{next(iter(size))}: {component_name(model)} makes pictures of one size alone; leave it out"
    try:
        build_component(ModelSpec, {**to_plain(model, None), **size}, "sample") if size else None
    except ConfigError as error:
        return str(error)
    return None


def samples_and_process(config: RunConfig, world: int) -> str | None:
    try:
        config.process.in_steps(config.sample.steps) if config.sample.steps else None
    except ValueError as error:
        return f"sample.steps: {error}"
    return None


def files(config: AnyConfig, world: int) -> str | None:
    for f in fields(config.data):  # type: ignore[arg-type]  # every spec is a dataclass: validation refuses others
        path = getattr(config.data, f.name)
        if isinstance(path, Path) and not os.path.exists(path):
            return f"data.{f.name}: there is nothing at {str(path)!r:.200}; paths begin where the command is run"
    return None


COMMON: tuple[Common, ...] = (ranks_and_replicas, ranks_and_context, graphs_and_engine, files)
RULES: tuple[Rule, ...] = (
    model_and_process,
    objective_and_process,
    objective_and_stochastic_sampler,
    objective_and_data,
    objective_and_gradient,
    objective_and_rewards,
    rewards_and_frames,
    picked_frames,
    data_and_frames,
    data_and_initial_image,
    gradient_steps_and_num_steps,
    truncation_and_log_probs,
    dropout_and_ratio,
    prompts_and_ranks,
    samples_and_model,
    samples_and_process,
    sample_weights_and_ema,
)
# What is sampled alone may break them.
LEARNING = (
    data_and_initial_image,
    gradient_steps_and_num_steps,
    truncation_and_log_probs,
    dropout_and_ratio,
    prompts_and_ranks,
)


def find_problems(config: AnyConfig, world: int | None = None, *, fed: bool = True) -> list[str]:
    """Every rule that is broken, on as many ranks as torchrun has if none are given; of learning only if it is fed."""
    ranks = torchrun_world_size() if world is None else world
    if isinstance(config, AutoencoderRunConfig):
        found = [*(rule(config, ranks) for rule in AUTOENCODER_RULES), sample_weights_and_ema(config, ranks)]
    elif isinstance(config, JudgeRunConfig):
        found = [rule(config, ranks) for rule in JUDGE_RULES]
    else:
        found = [rule(config, ranks) for rule in RULES if fed or rule not in LEARNING]
    found += [rule(config, ranks) for rule in COMMON if fed or rule is not files]
    return [sentence for sentence in found if sentence]


def require_valid(config: C, world: int | None = None, *, fed: bool = True) -> C:
    """The configuration, if nothing speaks against it."""
    found = find_problems(config, world, fed=fed)
    if found:
        raise ConfigError("\n".join(found))
    return config


def torchrun_world_size() -> int:
    """How many ranks torchrun has started."""
    found = os.environ.get("WORLD_SIZE", "1")
    if not found.isdecimal() or int(found) < 1:
        raise ConfigError(f"the environment variable WORLD_SIZE is '{found}'; expected the number of ranks")
    return int(found)


def quoted(names: list[str]) -> str:
    return ", ".join(f"'{each:.60}'" for each in names)
