"""The sections of a run's configuration: frozen data, validated by pydantic, that the builder turns into a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from ..autoencoders.lpips import VGG16
from ..core.autoencoder import AutoencoderSpec
from ..core.objective import Objective
from ..core.policy import Guidance, ModelSpec, Process
from ..core.reward import RewardNormalization, RewardSpec
from ..core.weights import Tuning
from ..data.spec import DataSpec

Decay = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule."""

    lr: NonNegativeFloat = 1e-5
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 1e-4
    clip: NonNegativeFloat = 1.0  # gradient norm; 0 does not clip
    warmup: NonNegativeInt = 0  # steps
    schedule: Literal["constant", "cosine", "linear"] = "constant"  # after the warm-up, to zero at the last step
    moments: Literal["fp32", "bf16", "int8"] = "fp32"  # what AdamW remembers, rounded at random if not in fp32


@dataclass(frozen=True)
class BatchConfig:
    """The arithmetic of a step."""

    prompts: PositiveInt = 8  # rows of data a step, over all ranks
    updates: PositiveInt = 1  # optimizer updates a pass over the experience
    epochs: PositiveInt = 1  # passes over the experience
    rollout: PositiveInt | None = None  # rows sampled at a time on one rank; all at once if not given
    microbatch: PositiveInt | None = None  # rows a backward pass on one rank; gradients accumulate over them


@dataclass(frozen=True)
class EngineConfig:
    """Ranks, precision and memory."""

    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    strategy: Literal["replicated", "sdp", "fsdp", "hsdp"] = "replicated"
    replicas: PositiveInt = 2  # hsdp only: groups of ranks that each hold the whole network
    context: PositiveInt = 1  # ranks that share the tokens of the same rows, for large pictures; FLUX and Qwen-Image
    precision: Literal["auto", "fp32", "tf32", "fp16", "bf16"] = "auto"  # auto: what fits the device
    reduce: Literal["fp32", "fp16", "bf16"] = "fp32"  # gradients between ranks
    trainable: Literal["fp32", "bf16"] = "fp32"  # bf16 rounds stochastically
    memory: Literal["keep", "recompute", "offload"] = "keep"  # activations for the backward pass
    attention: Literal["auto", "sdpa", "flash", "cudnn", "xformers"] = "auto"
    compile: bool = False  # with torch.compile, a large network block by block: slow to start, then faster
    graphs: bool = False  # on a GPU: record a network's calls without a gradient and play them again; small ones gain


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept of a run."""

    every: PositiveInt = 100  # steps; the last step is always saved
    keep: NonNegativeInt = 2  # the newest so many; 0 keeps all
    form: Literal["consolidated", "sharded"] = "consolidated"


@dataclass(frozen=True)
class SampleConfig:
    """Pictures to look at while training."""

    every: NonNegativeInt = 50  # steps; 0 never
    prompts: tuple[str, ...] = ()  # the first of the data if none are given
    count: PositiveInt = 8
    use: Literal["live", "ema"] = "live"
    height: PositiveInt | None = None  # likewise below: as trained if not given
    width: PositiveInt | None = None
    steps: PositiveInt | None = None
    guidance: NonNegativeFloat | None = None  # told to networks that read it, such as FLUX; of two predictions else


@dataclass(frozen=True)
class GuardConfig:
    """Looks for reward hacking: rewards of weight zero, diversity and the pictures' features on fixed prompts."""

    every: NonNegativeInt = 50  # steps; 0 never
    prompts: Annotated[int, Field(ge=4)] = 16  # fewer would not tell a change from noise
    per_prompt: Annotated[int, Field(ge=2)] = 4
    patience: PositiveInt = 2  # looks a fall must last
    stop: bool = False  # end the run when the guard warns


@dataclass(frozen=True)
class LoggersConfig:
    """Who watches the run beside metrics.jsonl and the progress display."""

    tensorboard: bool = False
    wandb: str | None = None  # a project name; offline unless WANDB_MODE says otherwise


@dataclass(frozen=True)
class RewardConfig:
    """A reward and its weight in the sum; of weight zero, it is only watched."""

    spec: RewardSpec
    weight: float = 1.0
    normalize: RewardNormalization | None = None  # of the score, before its weight; what is watched stays as it is
    clip: tuple[float, float] | None = None  # bounds of what is normalised; outside, its gradient is zero
    held_out: bool = False  # scored by the guard and on displayed samples, not at training steps; needs weight 0

    def __post_init__(self) -> None:
        if self.held_out and self.weight:
            raise ValueError(f"'held_out' is true but 'weight' is {self.weight}; set weight to 0 or held_out to false")
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise ValueError(f"'clip' is {list(self.clip)}; expected a lower and a higher bound")


@dataclass(frozen=True)
class RunConfig:
    """All of a run."""

    model: ModelSpec
    process: Process
    objective: Objective  # type: ignore[type-arg]  # any of them
    data: DataSpec
    tuning: Tuning
    rewards: dict[str, RewardConfig] = field(default_factory=dict)
    guidance: Guidance | None = None
    optim: OptimConfig = OptimConfig()
    batch: BatchConfig = BatchConfig()
    engine: EngineConfig = EngineConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    sample: SampleConfig = SampleConfig()
    guard: GuardConfig = GuardConfig()
    watch: LoggersConfig = LoggersConfig()
    ema: Decay = 0.0  # decay; 0 keeps no average
    steps: PositiveInt = 100
    seed: int = 0
    output: Path = Path("runs")
    name: str | None = None  # of the run's directory; the recipe's if not given

    def __post_init__(self) -> None:
        validate_run_name(self.name)


@dataclass(frozen=True)
class ReconstructionLossConfig:
    """What a reconstruction is compared by, each term with its weight; pixels count from -1 to 1."""

    l1: NonNegativeFloat = 1.0
    mse: NonNegativeFloat = 2.0
    edge: NonNegativeFloat = 0.5  # differences between neighbouring pixels
    lpips: NonNegativeFloat = 0.0  # what VGG16 sees of the difference
    vgg: str = VGG16.hub  # VGG16 of torchvision or timm, or an LPIPS whole
    heads: str = ""  # of LPIPS, a path; those of the installed package lpips if empty


@dataclass(frozen=True)
class DiscriminatorConfig:
    """A PatchGAN that learns to tell reconstructions from pictures, and that they learn to deceive."""

    weight: NonNegativeFloat = 0.5
    start: NonNegativeInt = 20000  # steps before it plays a part, counted from the beginning of the run
    adaptive: bool = False  # weigh it so that the last layer feels it as much as the reconstruction (VQGAN)
    loss: Literal["hinge", "vanilla", "least_squares"] = "hinge"
    deceive: Literal["mean", "non_saturating", "least_squares"] = "mean"  # how far it is from being deceived
    width: Annotated[int, Field(ge=1, le=1024)] = 64  # of the first layer
    layers: Annotated[int, Field(ge=1, le=8)] = 3  # that halve
    tail: bool = True  # one more that does not, as LlamaGen's has and explainingai's has not
    weights: Path | None = None  # to start from
    optim: OptimConfig | None = None  # the autoencoder's if not given
    seed: int = 0


@dataclass(frozen=True)
class ValidationConfig:
    """How well pictures are copied that nothing was learned from."""

    every: NonNegativeInt = 0  # steps; 0 never
    rows: PositiveInt = 256  # of them, over all ranks
    data: DataSpec | None = None  # if not given, a share of the run's own, which is then not trained on
    share: Annotated[float, Field(gt=0, lt=1)] = 0.02
    inception: Path | None = None  # FID's network, for how far copies are from pictures when all steps are done


@dataclass(frozen=True)
class AutoencoderRunConfig:
    """All of a run that trains an autoencoder."""

    autoencoder: AutoencoderSpec
    data: DataSpec
    loss: ReconstructionLossConfig = ReconstructionLossConfig()
    critic: DiscriminatorConfig | None = None
    validation: ValidationConfig = ValidationConfig()
    rows: PositiveInt = 64  # of data a step, over all ranks
    microbatch: PositiveInt | None = None  # rows a backward pass on one rank; gradients accumulate over them
    optim: OptimConfig = OptimConfig()
    engine: EngineConfig = EngineConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    sample: SampleConfig = SampleConfig()
    watch: LoggersConfig = LoggersConfig()
    ema: Decay = 0.0
    steps: PositiveInt = 100
    seed: int = 0
    output: Path = Path("runs")
    name: str | None = None

    def __post_init__(self) -> None:
        validate_run_name(self.name)


@dataclass(frozen=True)
class JudgeModelConfig:
    """The chat model that sees which is to become a judge."""

    weights: str = "llava-hf/llava-onevision-qwen2-7b-ov-hf"  # or a folder as transformers or LLaVA-NeXT write it
    model: ModelSpec | None = None  # or, instead, a generator that tells of pictures too


@dataclass(frozen=True)
class JudgeRunConfig:
    """All of a run that teaches a judge its answers."""

    judge: JudgeModelConfig
    data: DataSpec
    tuning: Tuning
    validation: ValidationConfig = ValidationConfig()
    rows: PositiveInt = 64  # answers a step, over all ranks
    microbatch: PositiveInt | None = None  # rows a backward pass on one rank; gradients accumulate over them
    optim: OptimConfig = OptimConfig()
    engine: EngineConfig = EngineConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    watch: LoggersConfig = LoggersConfig()
    ema: Decay = 0.0
    steps: PositiveInt = 100
    seed: int = 0
    output: Path = Path("runs")
    name: str | None = None

    def __post_init__(self) -> None:
        validate_run_name(self.name)


AnyConfig = RunConfig | AutoencoderRunConfig | JudgeRunConfig


def validate_run_name(name: str | None) -> None:
    """Refuse a name that no directory can have."""
    if name in ("", ".", "..") or any(mark in (name or "") for mark in "/\\\0"):
        raise ValueError(f"'name' is {name!r:.60}; expected the name of a directory, without slashes")
