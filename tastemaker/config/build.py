"""Build runs, policies and rubrics from a configuration, at full size or with tiny random models."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..autoencoders.discriminator import DiscriminatorTrainer
from ..autoencoders.lpips import TINY, LPIPSDistance, load_lpips
from ..autoencoders.patchgan import PatchGANDiscriminator, load_discriminator
from ..autoencoders.training import AutoencoderRun
from ..core.policy import Policy
from ..core.registry import ConfigError
from ..core.reward import Rubric, WeightedReward, load_shared_reward
from ..core.trainable_text_encoder import wrap_trainable_text_encoder
from ..core.types import Placement
from ..core.weights import FullWeights, NetworkTraits, TrainableModel
from ..data.dataset import Dataset, split_dataset
from ..data.images import ClassImages, ImageCollection
from ..data.joint import JointData
from ..data.prompts import InlinePrompts
from ..data.votes import VoteData
from ..evaluation.reconstruction_metrics import ReconstructionEvaluator
from ..preferences.preference_model import PreferenceHead
from ..preferences.training import PreferenceRun, feature_width
from ..rewards.preference import load_tower
from ..training import checkpoint
from ..training.engine import Engine
from ..training.run import Run
from ..vlm.finetuning import JudgeRun
from ..vlm.judge_models import GeneratorJudge, load_generator_judge
from .check import C, require_valid
from .config_warnings import emit_config_warnings, warn_bf16_emulation
from .dump import config_to_dict
from .frame_rates import share_frame_rate
from .load import apply_overrides
from .reward_servers import place_on_servers
from .schema import (
    AnyConfig,
    AutoencoderRunConfig,
    EngineConfig,
    JudgeModelConfig,
    JudgeRunConfig,
    PreferenceRunConfig,
    RewardConfig,
    RunConfig,
)
from .shared_tokenizers import share_clip_tokenizer
from .teachers import load_snapshots

if TYPE_CHECKING:
    from ..vlm.judge_models import ChatModelForFinetuning

Keys = tuple[str, ...]
ChooseMemory = Callable[[Engine], EngineConfig]  # the settings of an engine whose `activation_memory` is auto
InitialWeights = Path | dict[str, Tensor]  # a run, a checkpoint or a file; or the tensors of the network

TINY_BATCH_SIZE = 64  # samples per step at most
TINY_MICRO_BATCH_SIZE = 4  # samples at once at least: a tiny model takes as long for one
MAX_OVERRIDE_LENGTH = 60  # characters of an override in a warning


def make_tiny(config: RunConfig) -> RunConfig:
    """Return a copy of the configuration with tiny random models and a small batch, for `--tiny`."""
    rewards = {
        name: replace(reward, spec=reward.spec.tiny(), device=None if reward.servers else reward.device)
        for name, reward in config.rewards.items()
    }
    return replace(
        config,
        model=config.model.tiny(),
        objective=config.objective.tiny(),
        rewards=rewards,
        batch=replace(
            config.batch,
            prompts=tiny_prompt_count(config),
            rollout_batch_size=config.batch.rollout_batch_size
            and max(config.batch.rollout_batch_size, TINY_MICRO_BATCH_SIZE),
            micro_batch_size=config.batch.micro_batch_size
            and max(config.batch.micro_batch_size, TINY_MICRO_BATCH_SIZE),
        ),
        engine=replace(config.engine, compile=False),  # compiling takes longer than all steps of a tiny model
        sample=replace(config.sample, height=None, width=None),
    )


def tiny_prompt_count(config: RunConfig) -> int:
    """Prompts per step of a tiny run: divisible by two ranks and all minibatches if the original is.

    Of joint data, one cycle of its kinds.
    """
    if isinstance(config.data, JointData):
        return min(config.batch.prompts, sum(config.data.counts))
    share = 2 * config.batch.minibatches
    samples = max(config.objective.group_size, config.objective.samples_per_prompt())
    limit = max(share, TINY_BATCH_SIZE // samples)
    return config.batch.prompts if config.batch.prompts % share else min(config.batch.prompts, limit - limit % share)


def make_tiny_any(config: AnyConfig) -> AnyConfig:
    """Return a tiny copy of the configuration of a run of any kind."""
    if isinstance(config, RunConfig):
        return make_tiny(config)
    engine, batch_size = replace(config.engine, compile=False), min(TINY_BATCH_SIZE, config.batch_size)
    if isinstance(config, PreferenceRunConfig):
        preference = replace(config.preference, tower=config.preference.tower.tiny())
        return replace(config, preference=preference, engine=engine, batch_size=batch_size)
    if isinstance(config, JudgeRunConfig):
        judge = replace(config.judge, weights=TINY, model=config.judge.model and config.judge.model.tiny())
        return replace(config, judge=judge, engine=engine, batch_size=batch_size)
    return replace(
        config,
        autoencoder=config.autoencoder.tiny(),
        engine=engine,
        batch_size=batch_size,
        loss=replace(config.loss, vgg_weights=TINY),
        discriminator=config.discriminator and replace(config.discriminator, width=8, weights=None),
        validation=replace(config.validation, inception_weights=None),
    )


def find_ignored_overrides(config: AnyConfig, overrides: Sequence[str]) -> list[str]:
    """List the overrides whose value is another one in the tiny configuration, such as model.frames=9."""
    full, tiny = config_to_dict(config), config_to_dict(make_tiny_any(config))
    values = {
        keys: value for override in overrides for keys, value in _iterate_settings(apply_overrides({}, [override]))
    }
    ignored = {keys: value for keys, value in values.items() if _get_setting(full, keys) != _get_setting(tiny, keys)}
    return [f"{'.'.join(keys)}={_format_override(value)}"[:MAX_OVERRIDE_LENGTH] for keys, value in ignored.items()]


def warn_ignored_overrides(config: AnyConfig, overrides: Sequence[str]) -> None:
    """Warn about overrides that `--tiny` ignores."""
    ignored = find_ignored_overrides(config, overrides)
    if ignored:
        are = "are" if ignored[1:] else "is"
        warnings.warn(
            f"--tiny: {', '.join(ignored)} {are} ignored, because tiny models have fixed sizes; remove --tiny to "
            "use these settings [TM020]",
            stacklevel=2,
        )


def _iterate_settings(data: Mapping[str, Any], parents: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield every value in nested sections, with its keys."""
    for key, value in data.items():
        keys = (*parents, str(key))
        if isinstance(value, Mapping):
            yield from _iterate_settings(value, keys)
        else:
            yield keys, value


def _get_setting(data: Any, keys: Keys) -> Any:
    """The value at nested keys; None if there is none, or if it is a section."""
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    return None if isinstance(data, Mapping) else data


def _format_override(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def build_policy(config: RunConfig, placement: Placement, init_from: InitialWeights | None = None) -> Policy[Any]:
    """Load the model and add its process, guidance and the weight snapshots that the objective needs."""
    snapshots = [*config.objective.snapshots(), *(["ema"] if config.ema_decay else [])]
    if init_from is not None and placement.trainable_device == torch.device("meta"):
        # The weights in `init_from` are copied below, so the network needs memory now.
        placement = replace(placement, trainable_device=torch.device("cpu"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)  # adapters and other random weights are the same on every rank
        model = config.model.load(placement)
        weights = config.tuning.apply(model, snapshots)
    model = wrap_trainable_text_encoder(model, weights)
    if init_from is not None:
        checkpoint.initialize_weights(init_from, weights)
    guided = config.guidance is not None and config.guidance.scale != 1
    return Policy(
        config.process.wrap_guidance(model, config.guidance) if guided and config.guidance else model,
        config.process,
        weights,
    )


def adopt_class_names(config: C) -> C:
    """Let a class-conditional model name its classes as the data set does, where it does not know these names."""
    if not isinstance(config, RunConfig) or not isinstance(config.data, ClassImages | ImageCollection):
        return config
    names = config.data.class_prompts()
    model = config.model.with_class_names(names)
    if model == config.model:
        return config
    warnings.warn(
        f"model.class_names: the data names its {len(names)} classes itself, from '{names[0]:.40}' to "
        f"'{names[-1]:.40}'; class ids of the model are labels of the data [TM862]",
        stacklevel=2,
    )
    return replace(config, model=model)


def build_rubric(
    rewards: Mapping[str, RewardConfig], placement: Placement, *, overlap_on_device: bool = False
) -> Rubric:
    """Load the rewards; rewards with the same model share it.

    A reward with a `device` is loaded there, or computed by servers, and scores in a thread. With `overlap_on_device`
    all of them do.
    """
    weighted = {}
    for name, each in rewards.items():
        spec, device = place_on_servers(name, each), _reward_device(name, each)
        if overlap_on_device and not each.servers:
            device = device or placement.device
        reward = load_shared_reward(spec, replace(placement, device=device) if device else placement)
        weighted[name] = WeightedReward(
            spec, reward, each.weight, each.normalize, each.clip, each.held_out, device=device
        )
    return Rubric(weighted)


def _reward_device(name: str, reward: RewardConfig) -> torch.device | None:
    """The device that a reward names, if this machine has it. None for servers."""
    text = reward.device
    if not isinstance(text, str) or reward.servers:
        return None
    device = torch.device(text)
    count = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}[device.type]
    if (device.index or 0) < count:
        return device
    raise ConfigError(
        f"rewards.{name}.device: '{text}' is not on this machine, which has {count} devices of type {device.type}; "
        f"name another device, or remove rewards.{name}.device [TM2050]"
    )


def build(
    config: RunConfig,
    directory: Path | None = None,
    *,
    tiny: bool = False,
    init_from: InitialWeights | None = None,
    exports: Mapping[Path, dict[str, Tensor]] | None = None,
    load_data: bool = True,
    choose_memory: ChooseMemory | None = None,
) -> Run:
    """Load everything and return a run that is ready to train.

    `exports` are the tensors of exported folders that the objective names as teachers. Without `load_data` the run can
    only generate: its data may no longer exist. `choose_memory` resolves `engine.activation_memory: auto`.
    """
    config = require_valid(make_tiny(config) if tiny else config, load_data=load_data)
    config = adopt_class_names(config) if load_data else config
    emit_config_warnings(config)
    engine = start_engine(config, choose_memory)
    placement = engine.placement(is_adapter=config.tuning.is_adapter, is_prepared=True)
    run = Run(
        policy=build_policy(config, placement, init_from),
        objective=config.objective,
        rubric=build_rubric(
            share_frame_rate(share_clip_tokenizer(config)).rewards,
            engine.placement(),
            overlap_on_device=config.engine.overlap_rewards == "always",
        ),
        data=(config.data if load_data else InlinePrompts(("",))).load(config.seed),
        engine=engine,
        directory=directory or config.directory,
        steps=config.steps,
        seed=config.seed,
        batch=config.batch,
        ema_decay=config.ema_decay,
        checkpoint=config.checkpoint,
        sample=config.sample,
        guard=config.guard,
    )
    if load_data:  # after the engine has sharded the network; a run that only generates has no use for teachers
        load_snapshots(run.policy.weights, config, exports or {})
    return run


def start_engine(config: AnyConfig, choose_memory: ChooseMemory | None = None) -> Engine:
    """Return the engine of a run. Warn if the device emulates its precision."""
    engine = Engine(config.engine, config.optim, config.steps, config.seed)
    if choose_memory is not None and engine.config.activation_memory == "auto":
        engine.config = choose_memory(engine)
    warn_bf16_emulation(engine)
    return engine


def build_autoencoder(
    config: AutoencoderRunConfig,
    directory: Path | None = None,
    *,
    init_from: InitialWeights | None = None,
    choose_memory: ChooseMemory | None = None,
) -> AutoencoderRun:
    """Build a run that trains an autoencoder."""
    config = require_valid(config)
    engine = start_engine(config, choose_memory)
    data, validation_data = load_train_and_validation_data(config)
    run = AutoencoderRun(
        net=config.autoencoder.load(engine.placement()),
        data=data,
        engine=engine,
        directory=directory or config.directory,
        steps=config.steps,
        loss=config.loss,
        lpips=build_lpips(config, engine),
        discriminator=build_discriminator(config, engine),
        validation_data=validation_data,
        reconstruction_metrics=build_reconstruction_metrics(config, engine) if validation_data is not None else None,
        validation=config.validation,
        batch_size=config.batch_size,
        micro_batch_size=config.micro_batch_size,
        seed=config.seed,
        ema_decay=config.ema_decay,
        checkpoint=config.checkpoint,
        sample=config.sample,
    )
    if init_from is not None:
        checkpoint.initialize_weights(init_from, run.weights)
    return run


def build_judge(
    config: JudgeRunConfig, directory: Path | None = None, *, init_from: InitialWeights | None = None
) -> JudgeRun:
    """Build a run that fine-tunes a judge."""
    config = require_valid(config)
    engine = start_engine(config)
    placement = engine.placement(is_adapter=config.tuning.is_adapter)
    data, validation_data = load_train_and_validation_data(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)  # adapters and other random weights are the same on every rank
        judge = build_judge_model(config.judge, placement)
        holder = NetHolder(judge, NetworkTraits(lora_targets=judge.lora_targets))
        weights = config.tuning.apply(holder, ["ema"] if config.ema_decay else [])
    if init_from is not None:
        checkpoint.initialize_weights(init_from, weights)
    return JudgeRun(
        weights=weights,
        data=data,
        engine=engine,
        directory=directory or config.directory,
        steps=config.steps,
        validation_data=validation_data,
        validation=config.validation,
        batch_size=config.batch_size,
        micro_batch_size=config.micro_batch_size,
        seed=config.seed,
        ema_decay=config.ema_decay,
        checkpoint=config.checkpoint,
    )


def build_preference(config: PreferenceRunConfig, directory: Path | None = None) -> PreferenceRun:
    """Build a run that trains a preference model: its head, and the tower that encodes the votes' samples."""
    config = require_valid(config)
    engine = start_engine(config)
    tower = load_tower(config.preference.tower, engine.placement())
    spec = replace(config.data, ties=True) if isinstance(config.data, VoteData) else config.data
    data = spec.load(config.seed)
    width = feature_width(tower, config.preference.features, data, engine.device)
    return PreferenceRun(
        weights=FullWeights(PreferenceHead(width)),
        tower=tower,
        data=data,
        engine=engine,
        directory=directory or config.directory,
        settings=config.preference,
        steps=config.steps,
        batch_size=config.batch_size,
        seed=config.seed,
        checkpoint=config.checkpoint,
    )


def build_judge_model(source: JudgeModelConfig, placement: Placement) -> ChatModelForFinetuning | GeneratorJudge:
    """Load the vision-language model that is fine-tuned, or a generator that answers questions."""
    from ..vlm.chat_model import load_chat_model
    from ..vlm.judge_models import ChatModelForFinetuning

    if source.model is not None:
        return load_generator_judge(source.model, placement)
    dtype = placement.trainable_dtype or placement.dtype
    return ChatModelForFinetuning(load_chat_model(source.weights, replace(placement, dtype=dtype), needs_yes_no=False))


@dataclass
class NetHolder(TrainableModel):
    """Owner of a network, as `Tuning.apply` expects it."""

    net: nn.Module
    traits: NetworkTraits = NetworkTraits()


def load_train_and_validation_data(config: AutoencoderRunConfig | JudgeRunConfig) -> tuple[Dataset, Dataset | None]:
    """Load the training data and, if validation is on, the validation data."""
    data, validation = config.data.load(config.seed), config.validation
    if not validation.every:
        return data, None
    if validation.data is not None:
        return data, validation.data.load(config.seed)
    return split_dataset(data, validation.split, config.seed)


def build_lpips(config: AutoencoderRunConfig, engine: Engine) -> LPIPSDistance | None:
    # In float32 even under autocast: differences of normalized features are small.
    placement = Placement(engine.device)
    try:
        return load_lpips(config.loss.vgg_weights, config.loss.lpips_weights, placement) if config.loss.lpips else None
    except ConfigError as error:
        raise ConfigError(f"loss.lpips: {error}; or train without LPIPS: loss.lpips=0 [TM021]") from error


def build_reconstruction_metrics(config: AutoencoderRunConfig, engine: Engine) -> ReconstructionEvaluator:
    """Load the metrics of reconstructions; missing weights are reported at the end and do not stop the run."""
    placement = Placement(engine.device)
    return ReconstructionEvaluator.from_weights(
        config.loss.vgg_weights, config.loss.lpips_weights, config.validation.inception_weights, placement
    )


def build_discriminator(config: AutoencoderRunConfig, engine: Engine) -> DiscriminatorTrainer | None:
    if config.discriminator is None:
        return None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.discriminator.seed)
        net = PatchGANDiscriminator(
            config.discriminator.width, config.discriminator.num_layers, extra_layer=config.discriminator.extra_layer
        )
    if config.discriminator.weights is not None:
        load_discriminator(net, config.discriminator.weights)
    return DiscriminatorTrainer(net.to(engine.device), config.discriminator, engine.config, config.steps, config.optim)
