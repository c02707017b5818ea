"""The sections of a configuration as frozen dataclasses; validate.py reads them, build.py makes a run of them."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, WithJsonSchema

from ..autoencoders.lpips import VGG16
from ..core.autoencoder import AutoencoderSpec
from ..core.model_spec import ModelSpec
from ..core.objective import Objective
from ..core.policy import Guidance, Process
from ..core.reward import RewardNormalization, RewardSpec
from ..core.weights import Tuning
from ..data.dataset import DataSpec
from ..preferences.preference_model import FeatureLayer

Decay = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule."""

    lr: NonNegativeFloat = 1e-5
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 1e-4
    max_grad_norm: NonNegativeFloat = 1.0  # 0: no clipping
    warmup_steps: NonNegativeInt = 0
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"  # after warm-up, to 0 at the last step
    state_dtype: Literal["fp32", "bf16", "int8"] = "fp32"  # AdamW moments; bf16 and int8 round stochastically


@dataclass(frozen=True)
class BatchConfig:
    """Batch sizes of a step."""

    prompts: PositiveInt = 8  # prompts, images or pairs per step, over all ranks
    minibatches: PositiveInt = 1  # optimizer updates per pass over the experience
    epochs: PositiveInt = 1  # passes over the experience
    rollout_batch_size: PositiveInt | None = None  # samples generated at once per rank; default: all
    micro_batch_size: PositiveInt | None = None  # samples per backward pass and rank; default: the minibatch


@dataclass(frozen=True)
class EngineConfig:
    """Device, parallelism, precision and memory."""

    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    strategy: Literal["replicated", "sdp", "fsdp", "hsdp"] = "replicated"
    hsdp_replicas: PositiveInt = 2  # hsdp only: groups of ranks that each hold all weights
    context_parallel: PositiveInt = 1  # ranks that share the tokens of a sample; FLUX, Qwen-Image, Wan and LTX only
    precision: Literal["auto", "fp32", "tf32", "fp16", "bf16"] = "auto"  # auto: the best for the device
    base_precision: Literal["same", "fp8", "int8"] = "same"  # in which adapters keep the frozen weights below them
    rollout_precision: Literal["same", "bf16", "fp8", "int8"] = "same"  # of large layers, in rollouts
    reduce_dtype: Literal["fp32", "fp16", "bf16"] = "fp32"  # of gradients between ranks
    param_dtype: Literal["fp32", "bf16"] = "fp32"  # of trained weights; bf16 rounds stochastically
    activation_memory: Literal["keep", "checkpoint", "offload", "auto"] = "keep"  # auto: as few checkpoints as fit
    checkpointed_blocks: PositiveInt | None = None  # activation_memory=checkpoint only: the first ones; default: all
    cpu_offload: bool = False  # fsdp and hsdp only: keep weights, gradients and optimizer state in host memory
    attention_backend: Literal["auto", "sdpa", "flash", "cudnn", "xformers"] = "auto"
    compile: bool = False  # torch.compile, block by block for large networks: slow start, then faster
    cuda_graphs: bool = False  # capture and replay calls without gradient; faster for small networks
    overlap_rewards: Literal["auto", "always", "never"] = "auto"  # score while sampling; auto: if on other devices
    deterministic: bool = False  # PyTorch's deterministic kernels, where it has them; on a GPU some are slower


@dataclass(frozen=True)
class CheckpointConfig:
    """How often checkpoints are saved, and how many are kept."""

    every: PositiveInt = 100  # steps; the last step is always saved
    keep_last: NonNegativeInt = 2  # number of checkpoints; 0: all
    format: Literal["consolidated", "sharded"] = "consolidated"
    asynchronous: bool = False  # write in a thread while training goes on; needs host memory for a copy of all tensors


@dataclass(frozen=True)
class SampleConfig:
    """Samples that are generated while training, and the settings with which the trained model is used.

    `generate`, `evaluate` and exported workflows take size, steps and guidance from here.
    """

    every: NonNegativeInt = 50  # steps; 0 never
    prompts: tuple[str, ...] = ()  # default: the first of the data
    count: PositiveInt = 8
    weights: Literal["live", "ema"] = "live"
    height: PositiveInt | None = None  # this and the following: as in training by default
    width: PositiveInt | None = None
    num_steps: PositiveInt | None = None
    guidance_scale: NonNegativeFloat | None = None  # distilled guidance for models that have it, such as FLUX

    def inference_settings(self) -> dict[str, float]:
        """Size, steps and guidance that differ from those of training, by name."""
        settings = {name: getattr(self, name) for name in ("height", "width", "num_steps", "guidance_scale")}
        return {name: value for name, value in settings.items() if value is not None}


@dataclass(frozen=True)
class GuardConfig:
    """Detection of reward hacking: held-out rewards, diversity and feature drift on fixed prompts."""

    every: NonNegativeInt | None = None  # steps; a twelfth of the run, at most 50, if not given; 0 never
    prompts: Annotated[int, Field(ge=4)] = 64  # with fewer, only a large fall is beyond the noise
    samples_per_prompt: Annotated[int, Field(ge=2)] = 4
    patience: PositiveInt = 2  # checks that a drop must last
    stop_on_warning: bool = False  # end the run at a warning

    def interval(self, steps: int) -> int:
        """Training steps between checks in a run of `steps` steps; 0 if there are none."""
        return min(50, math.ceil(steps / 12)) if self.every is None else self.every


@dataclass(frozen=True)
class LoggerConfig:
    """A logger beside metrics.jsonl and the progress display; without settings, its name is enough."""

    type: Literal["tensorboard", "trackio", "wandb"]  # wandb is offline unless WANDB_MODE is set
    project: str | None = None  # of wandb and trackio; by default "tastemaker"

    def __post_init__(self) -> None:
        if self.type == "tensorboard" and self.project is not None:
            raise ValueError(
                "'project' works with wandb and trackio only, because TensorBoard writes into the run directory; "
                "remove 'project' [TM047]"
            )


DEVICE = re.compile(r"^(cpu|mps|cuda(:[0-9]{1,2})?)$")
SERVER = re.compile(r"^https?://\S+$")
DEVICE_SCHEMA = [
    {"type": "string", "pattern": f"{DEVICE.pattern}|{SERVER.pattern}"},
    {"type": "array", "items": {"type": "string", "pattern": SERVER.pattern}, "minItems": 1},
    {"type": "null"},
]


def check_reward_device(value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    """Return a device or addresses of servers as they are; raise ValueError about anything else."""
    names = (value,) if isinstance(value, str) else value
    is_device = isinstance(value, str) and DEVICE.fullmatch(value)
    if names is None or is_device or (names and all(SERVER.fullmatch(name) for name in names)):
        return value
    raise ValueError(
        f"expected cpu, mps, cuda, cuda:1, or addresses of reward servers such as http://node1:8800, got "
        f"'{', '.join(names):.60}'; write one of these, or remove the setting [TM2059]"
    )


RewardDevice = Annotated[
    str | tuple[str, ...] | None, AfterValidator(check_reward_device), WithJsonSchema({"anyOf": DEVICE_SCHEMA})
]


@dataclass(frozen=True)
class RewardConfig:
    """A reward and its weight in the sum. A reward of weight 0 is only logged."""

    spec: RewardSpec
    weight: float = 1.0
    normalize: RewardNormalization | None = None  # of the score, before the weight; logged scores are raw
    clip: tuple[float, float] | None = None  # bounds of the normalized score; the gradient is zero outside
    held_out: bool = False  # scored by the guard and on displayed samples, not at training steps; needs weight 0
    device: RewardDevice = None  # cpu, cuda:1 …, or http://… of reward servers: where it scores beside the sampler

    @property
    def servers(self) -> tuple[str, ...]:
        """Addresses of the reward servers that `device` names."""
        if isinstance(self.device, tuple):
            return self.device
        return (self.device,) if self.device and "://" in self.device else ()

    def __post_init__(self) -> None:
        if self.held_out and self.weight:
            raise ValueError(
                f"'held_out' is true but 'weight' is {self.weight}; set weight to 0, or set held_out to false [TM048]"
            )
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise ValueError(
                f"'clip': expected a lower and a higher bound, got {list(self.clip)}; write for example clip: [0, 1] "
                "[TM049]"
            )


@dataclass(frozen=True, kw_only=True)
class CommonConfig:
    """Settings of a run of any kind."""

    optim: OptimConfig = OptimConfig()
    engine: EngineConfig = EngineConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    loggers: tuple[LoggerConfig, ...] = ()  # [tensorboard, {type: wandb, project: mine}]
    ema_decay: Decay = 0.0  # 0: no EMA
    steps: PositiveInt = 100
    seed: int = 0
    output_dir: Path = Path("runs")
    name: str | None = None  # of the run's directory; default: the recipe's

    def __post_init__(self) -> None:
        if self.name in ("", ".", "..") or any(mark in (self.name or "") for mark in "/\\\0"):
            raise ValueError(
                f"'name': expected a directory name without slashes, got {self.name!r:.60}; choose another name [TM050]"
            )

    @property
    def directory(self) -> Path:
        """The directory of the run."""
        return self.output_dir / (self.name or "run")


def ordered_fields(cls: Any) -> list[dataclasses.Field[Any]]:
    """The fields of a dataclass, with those that runs of all kinds have last."""
    common = CommonConfig.__dataclass_fields__ if issubclass(cls, CommonConfig) else {}
    return sorted(fields(cls), key=lambda f: f.name in common)


@dataclass(frozen=True, kw_only=True)
class RunConfig(CommonConfig):
    """A run that trains a generator."""

    model: ModelSpec
    process: Process
    objective: Objective  # type: ignore[type-arg]  # any of them
    data: DataSpec
    tuning: Tuning
    rewards: dict[str, RewardConfig] = field(default_factory=dict)
    guidance: Guidance | None = None
    batch: BatchConfig = BatchConfig()
    sample: SampleConfig = SampleConfig()
    guard: GuardConfig = GuardConfig()


@dataclass(frozen=True)
class ReconstructionLossConfig:
    """Weights of the terms of the reconstruction loss; pixels are in [-1, 1]."""

    l1: NonNegativeFloat = 1.0
    mse: NonNegativeFloat = 2.0
    gradient: NonNegativeFloat = 0.5  # L1 of differences between neighboring pixels
    lpips: NonNegativeFloat = 0.0  # perceptual distance
    vgg_weights: str = VGG16.hub  # VGG16 of torchvision or timm, or a complete LPIPS
    lpips_weights: str = ""  # path of the linear heads; default: those of the installed package lpips


@dataclass(frozen=True)
class DiscriminatorConfig:
    """PatchGAN discriminator of an autoencoder."""

    weight: NonNegativeFloat = 0.5
    start_step: NonNegativeInt = 20000  # step from which it is used
    adaptive_weight: bool = False  # match its gradient at the last layer to the reconstruction's (VQGAN)
    loss: Literal["hinge", "vanilla", "least_squares"] = "hinge"
    generator_loss: Literal["mean", "non_saturating", "least_squares"] = "mean"  # adversarial loss of the autoencoder
    width: Annotated[int, Field(ge=1, le=1024)] = 64  # channels of the first layer
    num_layers: Annotated[int, Field(ge=1, le=8)] = 3  # with stride 2
    extra_layer: bool = True  # one more with stride 1, as in LlamaGen but not in explainingai
    weights: Path | None = None  # initial weights
    optim: OptimConfig | None = None  # default: the autoencoder's
    seed: int = 0


@dataclass(frozen=True)
class ValidationConfig:
    """Evaluation on images that are not trained on."""

    every: NonNegativeInt = 0  # steps; 0 never
    num_samples: PositiveInt = 256  # over all ranks
    data: DataSpec | None = None  # default: a split of the training data
    split: Annotated[float, Field(gt=0, lt=1)] = 0.02  # fraction of the training data that is held out
    inception_weights: Path | None = None  # for reconstruction FID at the end


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig(CommonConfig):
    """Settings of a run that trains an autoencoder or a judge."""

    data: DataSpec
    validation: ValidationConfig = ValidationConfig()
    batch_size: PositiveInt = 64  # images or answers per step, over all ranks
    micro_batch_size: PositiveInt | None = None  # samples per backward pass and rank; default: all


@dataclass(frozen=True, kw_only=True)
class AutoencoderRunConfig(SupervisedConfig):
    """A run that trains an autoencoder."""

    autoencoder: AutoencoderSpec
    loss: ReconstructionLossConfig = ReconstructionLossConfig()
    discriminator: DiscriminatorConfig | None = None
    sample: SampleConfig = SampleConfig()


@dataclass(frozen=True)
class JudgeModelConfig:
    """The vision-language model that is fine-tuned as a judge."""

    weights: str = "llava-hf/llava-onevision-qwen2-7b-ov-hf"  # or a folder of transformers or LLaVA-NeXT
    model: ModelSpec | None = None  # instead, a generator that answers questions, such as Show-o


@dataclass(frozen=True, kw_only=True)
class JudgeRunConfig(SupervisedConfig):
    """A run that fine-tunes a judge on questions with answers."""

    judge: JudgeModelConfig
    tuning: Tuning


@dataclass(frozen=True)
class PreferenceConfig:
    """The preference model: a Bradley-Terry head on the features of an image-text network, frozen or with LoRA."""

    tower: RewardSpec  # a reward with such a network: clip (also SigLIP), pickscore, hps or playground_match
    features: FeatureLayer = "all"  # pooled: the embedding; spatial: maps, which know sizes, colors and places
    folds: Annotated[int, Field(ge=2, le=20)] = 5  # parts of the prompts, each predicted from votes on the others
    lora_rank: Annotated[int, Field(ge=0, le=256)] = 0  # of adapters on the tower's image layers; 0 keeps it frozen
    lora_steps: PositiveInt = 60  # optimizer steps, each on batch_size votes
    lora_lr: PositiveFloat = 5e-4


@dataclass(frozen=True, kw_only=True)
class PreferenceRunConfig(CommonConfig):
    """A run that learns from votes what people prefer. `steps` are the points of its learning curve."""

    preference: PreferenceConfig
    data: DataSpec
    batch_size: PositiveInt = 32  # pairs whose images are encoded at once


AnyConfig = RunConfig | AutoencoderRunConfig | JudgeRunConfig | PreferenceRunConfig
