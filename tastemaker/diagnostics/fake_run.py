"""Run the real `collect` and `loss` of a configuration on fake tensors, and measure memory and FLOPs.

Only what depends on the network's numbers is fake. Everything that the host computes (schedules, drawn steps, indices)
is real, so that objectives may branch on it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from ..config.schema import EngineConfig, RunConfig
from ..core.lora import LoraWeights
from ..core.objective import Context, SingleProcess
from ..core.policy import Policy
from ..core.quantization import TokenNetwork
from ..core.randomness import Randomness
from ..core.reward import PendingScores, Rubric, Scores, WeightedReward
from ..core.types import (
    ImageBatch,
    JointBatch,
    LatentBatch,
    LikeBatch,
    Metadata,
    PreferenceBatch,
    PromptBatch,
    Prompts,
    TokenBatch,
    select_rows,
)
from ..core.weights import FrozenCopyWeights, Weights
from ..data.joint import JointData
from ..models.nets.gpt import GPT
from ..models.sequential_offload import max_device_bytes
from ..models.showo.model import ShowoSpec
from ..objectives.distill import Distillation
from ..objectives.reward_gradient import RewardGradient
from ..objectives.srpo import SRPO
from ..training import activation_memory, precision, quantized_base
from ..training.context_parallel import emulate_context_parallel
from ..training.low_precision_linear import QuantizedLinear
from ..training.merged_rollouts import merged_copy_bytes
from ..training.rollout_precision import rollout_layers
from .fake_backbones import PLANNED_AUTOENCODER, held_modules, lent_encoders, load_fake_backbone
from .fake_memory import count_flops, trace_peak_bytes
from .fake_token_backbones import FakeDecoderPool, FakeJanusBackbone, FakeLlamagenBackbone, block_matrices, fake_mode_of

CPU_DEVICE = torch.device("cpu")
CLIP_VISION_CONFIG = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
}  # of HPS and PickScore
ENCODE = "encode"
MAX_REAL_DRAWS = 4096  # random numbers per sample that are drawn for real


@dataclass(frozen=True)
class Measurement:
    """What one step of a run takes on one rank; bytes beside weights, gradients and whatever else is always there."""

    parameters: int
    quantized: int  # of them in 8 bits
    rollout_copy_bytes: float  # of weights in fewer bits, which rollouts multiply
    trainable: int
    block_parameters: tuple[int, ...]  # of each block that FSDP gathers by itself
    num_checkpoints: int  # of blocks that activation checkpointing can recompute
    frozen_bytes: float  # autoencoder, and text encoders that train
    encoder_bytes: float  # most of an encoder that is on the GPU at once while it embeds prompts
    kv_cache_bytes: float  # with weights copied for decoding; stays while the network learns
    collect_bytes: float  # peak of `collect`
    update_bytes: float  # peak of `loss` and backward
    collect_flops: float  # of the network, and of encoding the data, per step
    update_flops: float
    collect_bytes_read: float  # of decoding token by token, which waits for memory
    collect_batch: int  # samples per call of the network, those without a prompt (guidance) included
    update_batch: int


def measure(config: RunConfig, world: int = 1) -> Measurement:
    """Measure a step on one of `world` ranks."""
    context_parallel = min(config.engine.context_parallel, world)  # ranks that share the tokens of a sample
    share = -(-config.batch.prompts // (world // context_parallel))
    with ExitStack() as stack:
        backbone = stack.enter_context(load_fake_backbone(config, world))
        weights = config.tuning.apply(backbone, config.objective.snapshots())
        quantized = prepare_network(weights, config.engine)
        rubric = FakeRubric(config)
        frozen = _frozen_parameters(backbone, weights)
        encoders = lent_encoders(config.model, backbone, frozen_dtype(config), [*weights.text_encoders.values()])
        stack.enter_context(unset_fake_temporarily())
        recorder = stack.enter_context(NetworkRecorder(weights, backbone, config.engine).installed())
        existing = [*_resident_tensors(weights), *frozen, *rubric.parameters()]
        guidance = config.guidance
        model = config.process.wrap_guidance(backbone, guidance) if guidance and guidance.scale != 1 else backbone
        policy = Policy(model, config.process, weights)
        step = FakeStep(config, policy, rubric, _prompts(config, share), _micro_batch(config, share))
        with emulate_context_parallel(weights.net, context_parallel):
            collect_bytes = trace_peak_bytes(step.collect, existing)
        collected = recorder.take()
        pool = backbone.fake_pool if isinstance(backbone, FakeLlamagenBackbone | FakeJanusBackbone) else None
        cache = pool.kept if pool else []
        with emulate_context_parallel(weights.net, context_parallel):
            update_bytes = trace_peak_bytes(step.update, [*existing, *cache])
        updated = recorder.take()
        if context_parallel > 1:  # FLOPs are counted over all tokens and divided, for attention is over all of them
            trace_peak_bytes(step.collect, existing)
            collected = recorder.take()
            trace_peak_bytes(step.update, existing)
            updated = recorder.take()
        scale = share / step.rows / context_parallel
        collect_flops = scale * (sum(call.flops(recorder) for call in collected) + _decode_flops(pool, weights.net))
        # Backward costs twice the forward pass, or once if the weights need no gradient; checkpointing one more.
        backward = (1 if config.tuning.is_adapter else 2) + _recomputed_share(weights.net, config.engine)
        each = sum(call.flops(recorder) * (1 + backward * call.grad) for call in updated)
        update_flops = scale * len(step.experience) / step.micro_batch * step.num_calls * config.batch.epochs * each
        return Measurement(
            parameters=_count_parameters(weights.net),
            quantized=sum(layer.weight.numel() for layer in quantized),
            rollout_copy_bytes=_rollout_copy_bytes(weights, config.engine),
            trainable=sum(p.numel() for p in weights.trainable().values()),
            block_parameters=tuple(map(_count_parameters, activation_memory.repeated_blocks(weights.net))),
            num_checkpoints=len(activation_memory.checkpoint_units(weights.net)),
            frozen_bytes=count_bytes(frozen),
            encoder_bytes=max(map(max_device_bytes, encoders), default=0),
            kv_cache_bytes=count_bytes(cache),
            collect_bytes=collect_bytes - count_bytes(cache),
            update_bytes=update_bytes,
            collect_flops=collect_flops,
            update_flops=update_flops,
            collect_bytes_read=scale * pool.bytes_read if pool else 0.0,
            collect_batch=max([call.rows for call in collected] + [pool.rows if pool else 0]),
            update_batch=max((call.rows for call in updated if call.grad), default=0),
        )


def _resident_tensors(weights: Weights) -> list[Tensor]:
    """The network, its gradients and the snapshots of its weights."""
    gradients = [p.grad for p in weights.trainable().values() if p.grad is not None]
    snapshots = [x for snapshot in weights.snapshot_tensors().values() for x in snapshot.values()]
    return [*weights.net.parameters(), *weights.net.buffers(), *gradients, *snapshots]


def prepare_network(weights: Weights, engine: EngineConfig) -> list[nn.Linear]:
    """Change the network as the engine would, with gradients; return the layers whose weights are in 8 bits."""
    net, quantized = weights.net, list[nn.Linear]()
    if engine.base_precision != "same":
        quantized = quantized_base.quantize_frozen_layers(net, engine.base_precision)
    if engine.activation_memory == "checkpoint":
        activation_memory.checkpoint_activations(net, engine.checkpointed_blocks)
    if isinstance(net, TokenNetwork) and engine.rollout_precision in ("fp8", "int8"):
        net.rollout_kind = engine.rollout_precision
    for p in weights.trainable().values():
        p.grad = torch.empty_like(p)
    return quantized


def count_bytes(tensors: Iterable[Tensor]) -> float:
    return float(sum(x.numel() * x.itemsize for x in tensors))


def _recomputed_share(net: nn.Module, engine: EngineConfig) -> float:
    """Part of the forward pass that the backward pass computes again, by the parameters of blocks."""
    sizes = [_count_parameters(block) for block in activation_memory.checkpoint_units(net)]
    if engine.activation_memory != "checkpoint":
        return 0.0
    return sum(sizes[: engine.checkpointed_blocks]) / sum(sizes)


def _rollout_copy_bytes(weights: Weights, engine: EngineConfig) -> float:
    """Bytes of the copies for rollouts: 8-bit weights with an fp32 scale per row, bf16 weights, or merged adapters."""
    kind = "same" if engine.rollout_precision == engine.precision else engine.rollout_precision
    merge = isinstance(weights, LoraWeights) and weights.merge_rollouts
    merged = merged_copy_bytes(weights.net, kind) if merge else 0.0
    if kind == "same":
        return merged
    if isinstance(weights.net, GPT):
        return merged + sum(rows * columns + 4 * rows for rows, columns in block_matrices(weights.net))
    nets = [weights.net, *(weights.copies.values() if isinstance(weights, FrozenCopyWeights) else ())]
    layers = [layer for net in nets for layer in rollout_layers(net, merge=merge)]
    copied = [layer.weight for layer in layers if not isinstance(layer, QuantizedLinear)]  # others have 8 bits already
    return merged + sum(2 * x.numel() if kind == "bf16" else x.numel() + 4 * len(x) for x in copied)


def _count_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _micro_batch(config: RunConfig, share: int) -> int:
    """Samples of a backward pass on one rank."""
    minibatch = -(-share * config.objective.experience_per_prompt() // config.batch.minibatches)
    return min(minibatch, config.batch.micro_batch_size or minibatch)


def _prompts(config: RunConfig, share: int) -> int:
    """Prompts that fill a micro-batch of the rollout and one of the update; all of a rank's if nothing is sampled."""
    chunk, objective = config.batch.rollout_batch_size, config.objective
    if objective.consumes is not PromptBatch or chunk is None:
        return share
    micro_batch = _micro_batch(config, share)
    return min(share, max(-(-chunk // objective.group_size), -(-micro_batch // objective.experience_per_prompt())))


def _frozen_parameters(backbone: Any, weights: Weights) -> list[nn.Parameter]:
    """Parameters of the networks that stay on the GPU beside the one that trains, each once.

    Encoders of transformers, such as the CLIP that reads source images, stay on the CPU and are lent to the GPU for a
    call at the start of a rollout, when no activations are there. Text encoders with adapters stay on the GPU.
    """
    from transformers import PreTrainedModel

    modules = [m for m in held_modules(backbone) if m is not weights.net and not isinstance(m, PreTrainedModel)]
    modules += weights.text_encoders.values()
    trained = {id(p) for p in weights.trainable().values()}
    parameters = {id(p): p for module in modules for p in module.parameters() if id(p) not in trained}
    return list(parameters.values())


def _decode_flops(pool: FakeDecoderPool | None, net: nn.Module) -> float:
    if pool is None or not pool.sequence_tokens:
        return 0.0
    autocast = torch.autocast("cpu", pool.dtype, enabled=pool.dtype != torch.float32)  # adapters are in fp32
    with fake_mode_of(net), torch.no_grad(), autocast:
        one = count_flops(lambda: pool.decode_token(1, pool.net.config.prefix_length + pool.length // 2, pool.dtype))
    return pool.sequence_tokens * one


def run_under_autocast(engine: EngineConfig, work: Callable[[], Any]) -> Any:
    with ExitStack() as stack, warnings.catch_warnings():
        # Mochi's network asks for float32 autocast, which the CPU does not offer and the planned GPU does.
        warnings.filterwarnings("ignore", "In CPU autocast", UserWarning)
        stack.enter_context(precision.compute_settings(engine, CPU_DEVICE))
        stack.enter_context(precision.autocast(engine, CPU_DEVICE))
        return work()


class FakeStep:
    """One training step: `collect` for some prompts, then `loss` and backward for one micro-batch of one part."""

    def __init__(self, config: RunConfig, policy: Policy[Any], rubric: Rubric, rows: int, micro_batch: int) -> None:
        self.config, self.policy, self.rows, self.micro_batch = config, policy, rows, micro_batch
        self.objective: Any = config.objective
        if isinstance(self.objective, RewardGradient | SRPO) and self.objective.frames == "random":
            self.objective = replace(self.objective, frames="last")  # whose decoding takes most latents
        if isinstance(self.objective, Distillation):
            self.objective = replace(self.objective, assign="round_robin")  # fake prompts have no task
        rng = fake_randomness(rows, fake_mode_of(policy.weights.net))
        held = (SingleProcess(), self.objective.make_state())
        self.context: Context[Any] = Context(
            policy, rubric, rng, *held, rollout_batch_size=config.batch.rollout_batch_size, first_row=0
        )
        self.experience: Any = None
        self.num_calls = 0.0  # like that of the first part, for one micro-batch

    def collect(self) -> None:
        batch = self._batch()
        with torch.no_grad():
            self.experience = run_under_autocast(
                self.config.engine, lambda: self.objective.collect(self.context, batch)
            )

    def update(self) -> None:
        """Back-propagate the first part of the first micro-batch."""
        mini = self.experience
        if self.micro_batch < len(mini):
            mini = select_rows(self.experience, torch.arange(self.micro_batch))
        parts = self.objective.parts(mini)
        engine = self.config.engine
        loss = run_under_autocast(engine, lambda: self.objective.loss(self.context, mini, parts[0]))
        # The first group of timesteps is the largest.
        self.num_calls = len(mini.trajectory.segments) / loss.steps if loss.steps > 1 else len(parts)
        with precision.compute_settings(engine, CPU_DEVICE):
            loss.rows.sum().backward()

    def _batch(self) -> Any:
        """Data of the kind that the run reads, without content."""
        prompts, model, kind = ("",) * self.rows, self.policy.model, self.config.data.batch_type
        with fake_mode_of(self.policy.weights.net):
            if kind is ImageBatch:
                return ImageBatch(prompts, torch.empty(self.rows, *model.pixels))
            if kind is PreferenceBatch:
                return PreferenceBatch(prompts, *(torch.empty(self.rows, *model.pixels) for _ in range(2)))
            if kind is LikeBatch:
                liked = torch.zeros(self.rows, dtype=torch.bool)
                return LikeBatch(prompts, torch.empty(self.rows, *model.pixels), liked)
            if kind is TokenBatch:
                return TokenBatch(prompts, torch.empty(self.rows, *model.shape, dtype=torch.long))
            if kind is LatentBatch:
                spec: Any = self.config.model
                latents = torch.empty(self.rows, *model.shape[1:])
                return LatentBatch(prompts, latents, PLANNED_AUTOENCODER, 1 / spec.scaling_factor)
            if kind is JointBatch:
                pixels = torch.empty(self.rows, *model.pixels)
                return JointBatch(prompts, pixels, pixels[:, 0], self._conversations(), torch.ones(self.rows))
        return PromptBatch(prompts, ({},) * self.rows)

    def _conversations(self) -> tuple[Metadata, ...]:
        """Of joint data: texts that are truncated to the longest possible, and dialogues as long as a caption."""
        data, spec = self.config.data, self.config.model
        assert isinstance(data, JointData) and isinstance(spec, ShowoSpec)
        dialogue = {"turns": ("x" * (spec.max_text_tokens // 2),), "answer": "x" * (spec.max_text_tokens // 2)}
        kinds: tuple[Metadata, ...] = ({}, {"text": "x" * (spec.max_text_tokens + spec.shape[0])}, dialogue)
        cycle = [kind for kind, count in zip(kinds, data.counts, strict=True) for _ in range(count)]
        return tuple(cycle[i % len(cycle)] for i in range(self.rows))


def fake_randomness(rows: int, mode: FakeTensorMode) -> Randomness:
    """Random draws of which those of latent size are fake; small ones, such as levels and steps, are real."""

    def draw_fake(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def drawn(self: Randomness, purpose: str, *shape: int, **settings: Any) -> Tensor:
            if torch.Size(shape).numel() <= MAX_REAL_DRAWS:
                return draw(self, purpose, *shape, **settings)
            with mode:
                return torch.empty(len(self), *shape)

        return drawn

    class FakeRandomness(Randomness):
        uniform = draw_fake(Randomness.uniform)
        normal = draw_fake(Randomness.normal)

    return FakeRandomness(0, 0, torch.arange(rows))


class FakeRubric(Rubric):
    """Constant scores; if the objective needs the rewards' gradient, of a CLIP ViT-H for any reward of gigabytes."""

    def __init__(self, config: RunConfig) -> None:
        nothing: Any = None  # no reward is loaded
        super().__init__(
            {
                name: WeightedReward(each.spec, nothing, each.weight, each.normalize, each.clip)
                for name, each in config.rewards.items()
                if not each.held_out
            }
        )
        self.config, self.tower = config, None
        self.dtype = frozen_dtype(config)
        if any("GB" in each.spec.card.memory and not each.servers for each in config.rewards.values()):
            self.tower = _load_tower(self.dtype)

    def parameters(self) -> list[nn.Parameter]:
        return [] if self.tower is None else list(self.tower.parameters())

    def start(
        self, pixels: Tensor, prompt_sets: Sequence[Prompts], metadata: Sequence[Metadata] = (), group_size: int = 1
    ) -> PendingScores:
        score = self._score(pixels)
        scores = Scores(score, dict.fromkeys(self.rewards, score))
        return PendingScores((), len(prompt_sets), {}, {}, lambda rewards: scores)

    def _score(self, pixels: Tensor) -> Tensor:
        if not self.config.objective.needs_gradient:
            return torch.zeros(len(pixels))
        if self.tower is None:
            return pixels.flatten(1).mean(1)
        small = functional.interpolate(pixels[:, 0], (224, 224)).to(self.dtype)
        with torch.autocast("cpu", enabled=False):
            features: Tensor = self.tower(small).pooler_output
        return features.float().mean(1)


def frozen_dtype(config: RunConfig) -> torch.dtype:
    """The dtype of frozen networks."""
    return torch.bfloat16 if config.engine.precision in ("bf16", "fp16") else torch.float32


def _load_tower(dtype: torch.dtype) -> Any:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        tower: Any = CLIPVisionModel(CLIPVisionConfig(**CLIP_VISION_CONFIG, image_size=224, patch_size=14))  # type: ignore[arg-type]
    finally:
        torch.set_default_dtype(default)
    return tower.requires_grad_(False)


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of an argument or a result."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, tree: Any) -> Any:
        return tree_map_only(Tensor, lambda x: cls(x.shape, x.dtype), tree)


@dataclass(frozen=True)
class NetworkCall:
    """A recorded call of the network: which method, with tensors of which shapes, with or without gradient."""

    method: str
    arguments: Any  # with TensorSpec in place of tensors
    grad: bool
    rows: int

    def flops(self, recorder: NetworkRecorder) -> float:
        return recorder.flops(self)


@dataclass
class NetworkRecorder:
    """Records the calls of a network and of the backbone's `encode`; runs each shape without gradient only once.

    A rollout calls the network dozens of times with tensors of the same shapes. Memory and FLOPs are those of the first
    call, so that the others return empty tensors at once.
    """

    weights: Weights
    backbone: Any
    engine: EngineConfig
    calls: list[NetworkCall] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    counted: dict[str, float] = field(default_factory=dict)
    originals: dict[str, Callable[..., Any]] = field(default_factory=dict)
    depth: int = 0

    @property
    def net(self) -> nn.Module:
        return self.weights.net

    @contextmanager
    def installed(self) -> Iterator[NetworkRecorder]:
        """Record within the block; on the class, for a frozen copy of the network is called too."""
        cls, names = type(self.net), ("forward", *self.weights.traits.extra_forward_methods)
        methods: dict[str, Any] = {name: vars(cls).get(name) for name in names}
        for name in methods:
            self.originals[name] = getattr(cls, name)
            setattr(cls, name, self._recorded(name))
        self.originals[ENCODE] = lambda backbone, *args: type(backbone).encode(backbone, *args)
        self.backbone.encode = partial(self._recorded(ENCODE), self.backbone)
        try:
            yield self
        finally:
            del self.backbone.encode
            for name, own in methods.items():
                delattr(cls, name) if own is None else setattr(cls, name, own)

    def _recorded(self, name: str) -> Callable[..., Any]:
        def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if self.depth:  # one method of the network calls another
                return self.originals[name](owner, *args, **kwargs)
            grad = torch.is_grad_enabled()
            # Arguments before what is inside of them: Z-Image takes its latents in a list, one sample each.
            given = (*args, *kwargs.values(), *tree_leaves((args, kwargs)))
            rows = next((len(x) for x in given if isinstance(x, Tensor) and x.dim()), 0)
            record = NetworkCall(name, TensorSpec.of((args, kwargs)), grad, rows if name != ENCODE else 0)
            self.calls.append(record)
            key = repr(record)
            if not grad and key in self.results:
                with fake_mode_of(self.net):
                    return self._empty(self.results[key])
            self.depth += 1
            try:
                result = self.originals[name](owner, *args, **kwargs)
            finally:
                self.depth -= 1
            if not grad:
                self.results[key] = TensorSpec.of(result)
            return result

        return call

    def take(self) -> list[NetworkCall]:
        """The calls since the last time."""
        taken, self.calls = self.calls, []
        return taken

    def flops(self, call: NetworkCall) -> float:
        key = repr(replace(call, grad=False))
        if key not in self.counted:
            with fake_mode_of(self.net), torch.no_grad():
                args, kwargs = self._empty(call.arguments)
                self.depth += 1
                try:
                    owner = self.backbone if call.method == ENCODE else self.net
                    run = partial(self.originals[call.method], owner, *args, **kwargs)
                    self.counted[key] = count_flops(lambda: run_under_autocast(self.engine, run))
                finally:
                    self.depth -= 1
        return self.counted[key]

    def _empty(self, tree: Any) -> Any:
        return tree_map_only(TensorSpec, lambda x: torch.empty(x.shape, dtype=x.dtype), tree)
