"""From a configuration to a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..data.prompts import InlinePrompts
from ..data.spec import Dataset
from ..data.split import split
from ..eval.copies import Copies
from ..patchgan import PatchGan, published
from ..perceptual import TINY, Perceptual, perceptual
from ..policy import Policy
from ..registry import ConfigError
from ..rereading import reread
from ..reward import Graded, Rubric, shared
from ..train import checkpoint
from ..train.autoencoder import AutoencoderRun
from ..train.critic import Critic
from ..train.engine import Engine
from ..train.judge import JudgeRun
from ..train.narrator import narrator
from ..train.run import Run
from ..types import Placement
from .cautions import warn, warn_of_emulation
from .check import require
from .run import AnyConfig, AutoencoderConfig, JudgeConfig, JudgeSource, RewardConfig, RunConfig

ROWS = 64  # of data, and samples of it, a step at small size
TOGETHER = 4  # of them at least are computed at once, for a small model takes no longer over four than over one


def shrunk(config: RunConfig) -> RunConfig:
    """The same run with every model at random small size, and no more rows a step than such a model needs."""
    rewards = {name: replace(reward, spec=reward.spec.tiny()) for name, reward in config.rewards.items()}
    return replace(
        config,
        model=config.model.tiny(),
        rewards=rewards,
        batch=replace(
            config.batch,
            prompts=fewer(config),
            rollout=config.batch.rollout and max(config.batch.rollout, TOGETHER),
            microbatch=config.batch.microbatch and max(config.batch.microbatch, TOGETHER),
        ),
        engine=replace(config.engine, compile=False),  # which takes longer than everything a small model does
        sample=replace(config.sample, height=None, width=None),
    )


def fewer(config: RunConfig) -> int:
    """Rows of data that make no more samples than a small model needs, for two ranks and all updates to share."""
    share = 2 * config.batch.updates
    most = max(share, ROWS // config.objective.group)
    return config.batch.prompts if config.batch.prompts % share else min(config.batch.prompts, most - most % share)


def shrunk_any(config: AnyConfig) -> AnyConfig:
    if isinstance(config, AutoencoderConfig):
        engine, rows = replace(config.engine, compile=False), min(ROWS, config.rows)
        small = replace(config, autoencoder=config.autoencoder.tiny(), engine=engine, rows=rows)
        critic = config.critic and replace(config.critic, width=8, weights=None)
        validation = replace(config.validation, inception=None)
        return replace(small, loss=replace(config.loss, vgg=TINY), critic=critic, validation=validation)
    if isinstance(config, JudgeConfig):
        engine, rows = replace(config.engine, compile=False), min(ROWS, config.rows)
        judge = replace(config.judge, weights=TINY, model=config.judge.model and config.judge.model.tiny())
        return replace(config, judge=judge, engine=engine, rows=rows)
    return shrunk(config)


def generator(config: RunConfig, placement: Placement, init_from: Path | None = None) -> Policy[Any]:
    """The model under its process, with the weights its objective will ask for."""
    asked = [*config.objective.snapshots(), *(["ema"] if config.ema else [])]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)  # what begins at random, such as adapters, begins alike in every process
        model = config.model.load(placement)
        weights = config.tuning.apply(model, asked)
    model = reread(model, weights)
    if init_from is not None:
        checkpoint.initialise(init_from, weights)
    guided = config.guidance is not None and config.guidance.scale != 1
    return Policy(
        config.process.guide(model, config.guidance) if guided and config.guidance else model, config.process, weights
    )


def judges(rewards: Mapping[str, RewardConfig], placement: Placement) -> Rubric:
    """The rewards, each model loaded once however often it is asked for."""
    return Rubric(
        {
            name: Graded(each.spec, shared(each.spec, placement), each.weight, each.normalize, each.clip, each.held_out)
            for name, each in rewards.items()
        }
    )


def build(
    config: RunConfig,
    directory: Path | None = None,
    *,
    tiny: bool = False,
    init_from: Path | None = None,
    fed: bool = True,
) -> Run:
    """Everything loaded, placed and ready to train; its data only if it is to be `fed`, for it may be gone since."""
    config = require(shrunk(config) if tiny else config, fed=fed)
    warn(config)
    engine = Engine(config.engine, config.optim, config.steps, config.seed)
    warn_of_emulation(engine)
    placement = engine.placement(adapts=config.tuning.adapts)
    return Run(
        policy=generator(config, placement, init_from),
        objective=config.objective,
        rubric=judges(config.rewards, engine.placement()),
        data=(config.data if fed else InlinePrompts(("",))).load(config.seed),
        engine=engine,
        directory=directory or config.output / (config.name or "run"),
        steps=config.steps,
        seed=config.seed,
        batch=config.batch,
        ema=config.ema,
        checkpoint=config.checkpoint,
        sample=config.sample,
        guard=config.guard,
    )


def build_autoencoder(
    config: AutoencoderConfig, directory: Path | None = None, *, init_from: Path | None = None
) -> AutoencoderRun:
    """An autoencoder placed and ready to train."""
    config = require(config)
    engine = Engine(config.engine, config.optim, config.steps, config.seed)
    warn_of_emulation(engine)
    data, held = pictures(config)
    run = AutoencoderRun(
        net=config.autoencoder.load(engine.placement()),
        data=data,
        engine=engine,
        directory=directory or config.output / (config.name or "run"),
        steps=config.steps,
        loss=config.loss,
        lpips=lpips(config, engine),
        critic=critic(config, engine),
        held=held,
        measure=copies(config, engine) if held is not None else None,
        validation=config.validation,
        rows=config.rows,
        microbatch=config.microbatch,
        seed=config.seed,
        ema=config.ema,
        checkpoint=config.checkpoint,
        sample=config.sample,
    )
    if init_from is not None:
        checkpoint.initialise(init_from, run.weights)
    return run


def build_judge(config: JudgeConfig, directory: Path | None = None, *, init_from: Path | None = None) -> JudgeRun:
    """A chat model placed and ready to learn its answers."""
    config = require(config)
    engine = Engine(config.engine, config.optim, config.steps, config.seed)
    warn_of_emulation(engine)
    placement = engine.placement(adapts=config.tuning.adapts)
    data, held = pictures(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)  # what begins at random, such as adapters, begins alike in every process
        weights = config.tuning.apply(Held(pupil(config.judge, placement)), ["ema"] if config.ema else [])
    if init_from is not None:
        checkpoint.initialise(init_from, weights)
    return JudgeRun(
        weights=weights,
        data=data,
        engine=engine,
        directory=directory or config.output / (config.name or "run"),
        steps=config.steps,
        held=held,
        validation=config.validation,
        rows=config.rows,
        microbatch=config.microbatch,
        seed=config.seed,
        ema=config.ema,
        checkpoint=config.checkpoint,
    )


def pupil(source: JudgeSource, placement: Placement) -> nn.Module:
    """Who learns to answer."""
    from ..rewards.nets.chat import chat
    from ..rewards.nets.pupil import Pupil

    if source.model is not None:
        return narrator(source.model, placement)
    dtype = placement.trained or placement.dtype
    return Pupil(chat(source.weights, replace(placement, dtype=dtype), judges=False))


@dataclass
class Held:
    """A network that weights are made of."""

    net: nn.Module


def pictures(config: AutoencoderConfig | JudgeConfig) -> tuple[Dataset, Dataset | None]:
    """What to learn from, and what is held out."""
    data, validation = config.data.load(config.seed), config.validation
    if not validation.every:
        return data, None
    if validation.data is not None:
        return data, validation.data.load(config.seed)
    return split(data, validation.share, config.seed)


def lpips(config: AutoencoderConfig, engine: Engine) -> Perceptual | None:
    # In full precision under autocast, as the network itself: its units of length are small.
    placement = Placement(engine.device)
    try:
        return perceptual(config.loss.vgg, config.loss.heads, placement) if config.loss.lpips else None
    except ConfigError as error:
        raise ConfigError(f"loss.lpips: {error}; without LPIPS, set loss.lpips=0") from error


def copies(config: AutoencoderConfig, engine: Engine) -> Copies:
    """What copies are measured by in the end; what is missing is said then, and stops no run."""
    placement = Placement(engine.device)
    return Copies.by(config.loss.vgg, config.loss.heads, config.validation.inception, placement)


def critic(config: AutoencoderConfig, engine: Engine) -> Critic | None:
    if config.critic is None:
        return None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.critic.seed)
        net = PatchGan(config.critic.width, config.critic.layers, tail=config.critic.tail)
    if config.critic.weights is not None:
        published(net, config.critic.weights)
    return Critic(net.to(engine.device), config.critic, engine.config, config.steps, config.optim)
