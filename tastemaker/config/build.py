"""From a configuration to a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..autoencoders.discriminator import DiscriminatorTrainer
from ..autoencoders.lpips import TINY, LPIPSDistance, load_lpips
from ..autoencoders.patchgan import PatchGANDiscriminator, load_discriminator
from ..autoencoders.training import AutoencoderRun
from ..core.policy import Policy
from ..core.registry import ConfigError
from ..core.reward import Rubric, WeightedReward, load_shared_reward
from ..core.trainable_text_encoder import wrap_trainable_text_encoder
from ..core.types import Placement
from ..data.prompts import InlinePrompts
from ..data.spec import Dataset
from ..data.split import split_dataset
from ..evaluation.reconstruction_metrics import ReconstructionEvaluator
from ..training import checkpoint
from ..training.engine import Engine
from ..training.run import Run
from ..vlm.finetuning import JudgeRun
from ..vlm.generator_judge import load_generator_judge
from .check import require_valid
from .config_warnings import emit_config_warnings, warn_bf16_emulation
from .schema import AnyConfig, AutoencoderRunConfig, JudgeModelConfig, JudgeRunConfig, RewardConfig, RunConfig

TINY_BATCH_SIZE = 64  # of data, and samples of it, a step at small size
TINY_MICRO_BATCH_SIZE = (
    4  # of them at least are computed at once, for a small model takes no longer over four than over one
)


def make_tiny(config: RunConfig) -> RunConfig:
    """A copy of the run with tiny random models and a small batch, for `--tiny`."""
    rewards = {name: replace(reward, spec=reward.spec.tiny()) for name, reward in config.rewards.items()}
    return replace(
        config,
        model=config.model.tiny(),
        rewards=rewards,
        batch=replace(
            config.batch,
            prompts=tiny_prompt_count(config),
            rollout=config.batch.rollout and max(config.batch.rollout, TINY_MICRO_BATCH_SIZE),
            microbatch=config.batch.microbatch and max(config.batch.microbatch, TINY_MICRO_BATCH_SIZE),
        ),
        engine=replace(config.engine, compile=False),  # which takes longer than everything a small model does
        sample=replace(config.sample, height=None, width=None),
    )


def tiny_prompt_count(config: RunConfig) -> int:
    """Rows of data that make no more samples than a small model needs, for two ranks and all updates to share."""
    share = 2 * config.batch.updates
    most = max(share, TINY_BATCH_SIZE // config.objective.group)
    return config.batch.prompts if config.batch.prompts % share else min(config.batch.prompts, most - most % share)


def make_tiny_any(config: AnyConfig) -> AnyConfig:
    if isinstance(config, AutoencoderRunConfig):
        engine, rows = replace(config.engine, compile=False), min(TINY_BATCH_SIZE, config.rows)
        small = replace(config, autoencoder=config.autoencoder.tiny(), engine=engine, rows=rows)
        critic = config.critic and replace(config.critic, width=8, weights=None)
        validation = replace(config.validation, inception=None)
        return replace(small, loss=replace(config.loss, vgg=TINY), critic=critic, validation=validation)
    if isinstance(config, JudgeRunConfig):
        engine, rows = replace(config.engine, compile=False), min(TINY_BATCH_SIZE, config.rows)
        judge = replace(config.judge, weights=TINY, model=config.judge.model and config.judge.model.tiny())
        return replace(config, judge=judge, engine=engine, rows=rows)
    return make_tiny(config)


def build_policy(config: RunConfig, placement: Placement, init_from: Path | None = None) -> Policy[Any]:
    """The model under its process, with the weights its objective will ask for."""
    asked = [*config.objective.snapshots(), *(["ema"] if config.ema else [])]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)  # what begins at random, such as adapters, begins alike in every process
        model = config.model.load(placement)
        weights = config.tuning.apply(model, asked)
    model = wrap_trainable_text_encoder(model, weights)
    if init_from is not None:
        checkpoint.initialize_weights(init_from, weights)
    guided = config.guidance is not None and config.guidance.scale != 1
    return Policy(
        config.process.guide(model, config.guidance) if guided and config.guidance else model, config.process, weights
    )


def build_rubric(rewards: Mapping[str, RewardConfig], placement: Placement) -> Rubric:
    """The rewards, each model loaded once however often it is asked for."""
    return Rubric(
        {
            name: WeightedReward(
                each.spec,
                load_shared_reward(each.spec, placement),
                each.weight,
                each.normalize,
                each.clip,
                each.held_out,
            )
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
    config = require_valid(make_tiny(config) if tiny else config, fed=fed)
    emit_config_warnings(config)
    engine = Engine(config.engine, config.optim, config.steps, config.seed)
    warn_bf16_emulation(engine)
    placement = engine.placement(adapts=config.tuning.adapts)
    return Run(
        policy=build_policy(config, placement, init_from),
        objective=config.objective,
        rubric=build_rubric(config.rewards, engine.placement()),
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
    config: AutoencoderRunConfig, directory: Path | None = None, *, init_from: Path | None = None
) -> AutoencoderRun:
    """An autoencoder placed and ready to train."""
    config = require_valid(config)
    engine = Engine(config.engine, config.optim, config.steps, config.seed)
    warn_bf16_emulation(engine)
    data, held = load_train_and_validation_data(config)
    run = AutoencoderRun(
        net=config.autoencoder.load(engine.placement()),
        data=data,
        engine=engine,
        directory=directory or config.output / (config.name or "run"),
        steps=config.steps,
        loss=config.loss,
        lpips=build_lpips(config, engine),
        critic=build_discriminator(config, engine),
        held=held,
        measure=build_reconstruction_metrics(config, engine) if held is not None else None,
        validation=config.validation,
        rows=config.rows,
        microbatch=config.microbatch,
        seed=config.seed,
        ema=config.ema,
        checkpoint=config.checkpoint,
        sample=config.sample,
    )
    if init_from is not None:
        checkpoint.initialize_weights(init_from, run.weights)
    return run


def build_judge(config: JudgeRunConfig, directory: Path | None = None, *, init_from: Path | None = None) -> JudgeRun:
    """A chat model placed and ready to learn its answers."""
    config = require_valid(config)
    engine = Engine(config.engine, config.optim, config.steps, config.seed)
    warn_bf16_emulation(engine)
    placement = engine.placement(adapts=config.tuning.adapts)
    data, held = load_train_and_validation_data(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)  # what begins at random, such as adapters, begins alike in every process
        weights = config.tuning.apply(
            NetHolder(build_judge_model(config.judge, placement)), ["ema"] if config.ema else []
        )
    if init_from is not None:
        checkpoint.initialize_weights(init_from, weights)
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


def build_judge_model(source: JudgeModelConfig, placement: Placement) -> nn.Module:
    """Who learns to answer."""
    from ..vlm.chat_model import load_chat_model
    from ..vlm.judge_finetuning import ChatModelForFinetuning

    if source.model is not None:
        return load_generator_judge(source.model, placement)
    dtype = placement.trained or placement.dtype
    return ChatModelForFinetuning(load_chat_model(source.weights, replace(placement, dtype=dtype), judges=False))


@dataclass
class NetHolder:
    """A network that weights are made of."""

    net: nn.Module


def load_train_and_validation_data(config: AutoencoderRunConfig | JudgeRunConfig) -> tuple[Dataset, Dataset | None]:
    """What to learn from, and what is held out."""
    data, validation = config.data.load(config.seed), config.validation
    if not validation.every:
        return data, None
    if validation.data is not None:
        return data, validation.data.load(config.seed)
    return split_dataset(data, validation.share, config.seed)


def build_lpips(config: AutoencoderRunConfig, engine: Engine) -> LPIPSDistance | None:
    # In full precision under autocast, as the network itself: its units of length are small.
    placement = Placement(engine.device)
    try:
        return load_lpips(config.loss.vgg, config.loss.heads, placement) if config.loss.lpips else None
    except ConfigError as error:
        raise ConfigError(f"loss.lpips: {error}; without LPIPS, set loss.lpips=0") from error


def build_reconstruction_metrics(config: AutoencoderRunConfig, engine: Engine) -> ReconstructionEvaluator:
    """What copies are measured by in the end; what is missing is said then, and stops no run."""
    placement = Placement(engine.device)
    return ReconstructionEvaluator.by(config.loss.vgg, config.loss.heads, config.validation.inception, placement)


def build_discriminator(config: AutoencoderRunConfig, engine: Engine) -> DiscriminatorTrainer | None:
    if config.critic is None:
        return None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.critic.seed)
        net = PatchGANDiscriminator(config.critic.width, config.critic.layers, tail=config.critic.tail)
    if config.critic.weights is not None:
        load_discriminator(net, config.critic.weights)
    return DiscriminatorTrainer(net.to(engine.device), config.critic, engine.config, config.steps, config.optim)
