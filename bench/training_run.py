"""Training runs of full-size generators with random weights and an HPS v2.1 reward, and where their step time goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from device import CUDA, allocated_gib, peak_gib, synchronize  # beside this file, in no package
from sections import log
from torch import Tensor

from tastemaker.config.build import build_policy
from tastemaker.config.schema import BatchConfig, RunConfig
from tastemaker.core.reward import Rubric, WeightedReward
from tastemaker.core.types import Placement
from tastemaker.data.embedding_store import ShardedEmbeddingStore
from tastemaker.rewards.backbones.dual_encoder import CosineHead, DualEncoderScorer, ImagePreprocessing
from tastemaker.rewards.backbones.frozen_models import freeze_network
from tastemaker.rewards.backbones.preprocessing import Preprocessing
from tastemaker.rewards.backbones.tokenizers import FixedLengthTokenizer, tiny_clip_tokenizer
from tastemaker.rewards.hps import HpsReward
from tastemaker.training import low_precision_linear
from tastemaker.training.engine import Engine
from tastemaker.training.loop import train_step
from tastemaker.training.run import Run

PROMPTS = tuple(f"a photo of {i} dogs on a boat" for i in range(32))
VIT_H = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16}
TEXT_H = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}


def write_random_embeddings(folder: Path, **shapes: tuple[int, ...]) -> Path:
    """Write random embeddings of the prompts as `tastemaker embed` does, so that no text encoder is loaded."""
    texts, generator = [*PROMPTS, ""], torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(len(texts), *shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    ShardedEmbeddingStore(folder, {}).add(texts, tensors)
    return folder


def build_reward(placement: Placement, tiny: bool) -> DualEncoderScorer:
    """HPS v2.1 with random weights: CLIP ViT-H/14 with the preprocessing of SRPO."""
    from transformers import CLIPConfig, CLIPModel

    if tiny:
        scorer = replace(HpsReward(), resize_mode="crop").tiny().load(placement)
        assert isinstance(scorer, DualEncoderScorer)
        return scorer
    text = TEXT_H | {"vocab_size": 49408, "bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513}
    vision = VIT_H | {"image_size": 224, "patch_size": 14, "hidden_act": "gelu"}
    config = CLIPConfig(text_config=text | {"hidden_act": "gelu"}, vision_config=vision, projection_dim=1024)
    with torch.device(placement.device):
        net = freeze_network(CLIPModel(config), placement)
    preprocessing = ImagePreprocessing(Preprocessing(224, "crop", "bicubic", overshoot="keep", crop_rounding="round"))
    tokenizer = FixedLengthTokenizer(tiny_clip_tokenizer(), 77, attention_mask=False)
    return DualEncoderScorer(net, preprocessing, tokenizer, CosineHead())


def build_run(config: RunConfig, section: str, folder: Path, tiny: bool) -> Run:
    """Build a run as `build` does, except for the reward, whose weights are random too."""
    start = time.perf_counter()
    if tiny:  # or none of its layers would be large enough for 8 bits
        low_precision_linear.MIN_WEIGHTS, low_precision_linear.MIN_TOKENS = 256, 1
    engine = Engine(config.engine, config.optim, config.steps, 0)
    policy = build_policy(config, engine.placement(is_adapter=config.tuning.is_adapter, is_prepared=True))
    rubric = Rubric({"hps": WeightedReward(HpsReward(), build_reward(engine.placement(), tiny))})
    run = Run(policy, config.objective, rubric, config.data.load(0), engine, folder, config.steps)
    synchronize()
    billions = sum(p.numel() for p in policy.weights.net.parameters()) / 1e9
    seconds = time.perf_counter() - start
    layers = num_8bit_layers(run)
    built = f"{billions:.2f} billion weights built in {seconds:.0f} s, {allocated_gib():.1f} GiB"
    log(section, f"{built}, {layers} layers for 8 bits")
    if not layers and {config.engine.base_precision, config.engine.rollout_precision} & {"fp8", "int8"}:
        raise SystemExit(f"{section}: no layer of this network is large enough for 8 bits")
    return run


def num_8bit_layers(run: Run) -> int:
    """Count the linear layers with weights or rollouts in 8 bits."""
    kinds = (low_precision_linear.RolloutLinear, low_precision_linear.QuantizedLinear)
    return sum(isinstance(module, kinds) for module in run.policy.weights.net.modules())


def override(config: RunConfig, settings: Sequence[str]) -> RunConfig:
    """Return a configuration with settings such as `engine.rollout_precision=fp8` replaced."""
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator:
            raise SystemExit(f"--set: expected KEY=VALUE, got '{setting}'")
        config = _replace_key(config, key.split("."), yaml.safe_load(value), key)
    return config


def _replace_key(node: Any, path: Sequence[str], value: Any, key: str) -> Any:
    if not hasattr(node, path[0]):
        raise SystemExit(f"--set: a run has no setting '{key}'")
    inner = _replace_key(getattr(node, path[0]), path[1:], value, key) if path[1:] else value
    return replace(node, **{path[0]: inner})


class Timeline:
    """Records what the device works on: each mark starts another phase."""

    def __init__(self) -> None:
        self.marks: list[tuple[str, Any]] = []
        self.has_reward_gradient = False  # the graph ends in a reward, so backward starts there

    def mark(self, phase: str) -> None:
        if CUDA:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self.marks.append((phase, event if CUDA else time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call."""
        self.mark("end")
        synchronize()
        seconds: dict[str, float] = defaultdict(float)
        for (phase, start), (_, end) in zip(self.marks, self.marks[1:], strict=False):
            seconds[phase] += start.elapsed_time(end) / 1000 if CUDA else end - start
        self.marks = []
        return dict(seconds)


def trace_phases(run: Run) -> Timeline:
    """Wrap network, decoder, reward, backward and optimizer of a run, so that each marks its phase."""
    timeline, engine, rubric = Timeline(), run.engine, run.rubric
    model: Any = run.policy.model.unguided
    decode, backward, launch_step, start_scoring = model.decode, engine.backward, engine.launch_step, rubric.start

    def traced_decode(x: Tensor, frames: Any = None) -> Tensor:
        timeline.mark("vae")
        pixels: Tensor = decode(x, frames)
        timeline.mark("other")
        if pixels.requires_grad:
            timeline.has_reward_gradient = True
            x.register_hook(lambda _: timeline.mark("network with gradient"))
            pixels.register_hook(lambda _: timeline.mark("vae"))
        return pixels

    def traced_score(*args: Any, **kwargs: Any) -> Any:
        timeline.mark("reward")
        pending = start_scoring(*args, **kwargs)
        timeline.mark("other")
        return pending

    def traced_backward(loss: Tensor, *, last: bool) -> None:
        timeline.mark("reward" if timeline.has_reward_gradient else "network with gradient")
        backward(loss, last=last)
        timeline.mark("other")
        timeline.has_reward_gradient = False

    def traced_step(number: int) -> Any:
        timeline.mark("optimizer")
        result = launch_step(number)
        timeline.mark("other")
        return result

    net = run.policy.weights.net
    net.register_forward_pre_hook(
        lambda *_: timeline.mark("network with gradient" if torch.is_grad_enabled() else "rollout")
    )
    net.register_forward_hook(lambda *_: timeline.mark("other"))
    model.decode, engine.backward, engine.launch_step = traced_decode, traced_backward, traced_step  # type: ignore[method-assign]
    rubric.start = traced_score  # type: ignore[method-assign]  # which all other ways to score call
    return timeline


def num_compiled_graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def warm_up(run: Run, num_steps: int | None = None) -> None:
    """Train one step with few sampling steps, which compiles and allocates everything."""
    policy = run.policy
    num_steps = num_steps or (4 if policy.process.stochastic else 2)
    run.policy = replace(policy, process=replace(policy.process, num_steps=num_steps))
    train_step(run, 0).to_event()
    run.policy = policy
    synchronize()


def time_steps(
    run: Run,
    timeline: Timeline,
    section: str,
    batch: BatchConfig,
    deadline: float,
    num_steps: int = 2,
    warmup_steps: int | None = None,
) -> dict[str, Any]:
    """Return seconds per prompt, the share of each phase, and peak memory of training steps after a warm-up.

    `num_steps` are training steps, `warmup_steps` the sampling steps of the warm-up.
    """
    run.batch = batch
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    warm_up(run, warmup_steps)
    name, num_graphs = describe_batch(batch), num_compiled_graphs()
    log(section, f"{name}: warm after {time.perf_counter() - start:.0f} s, {num_graphs} graphs")
    times: list[float] = []
    timeline.seconds()
    for step in range(1, num_steps + 1):
        if times and time.monotonic() + 1.3 * times[0] > deadline:
            break
        synchronize()
        start = time.perf_counter()
        event = train_step(run, step).to_event()
        synchronize()
        times.append(time.perf_counter() - start)
        metrics = " ".join(f"{key} {value:.4g}" for key, value in event.metrics.items())
        log(section, f"{name}: step of {times[-1]:.2f} s; {metrics}")
    phases = timeline.seconds()
    result = {
        "section": section,
        "batch": name,
        "seconds per step": min(times),
        "seconds per prompt": min(times) / batch.prompts,
        "seconds per sample": min(times) / (batch.prompts * run.objective.group_size),
        "peak GiB": peak_gib(),
        "shares": {key: value / sum(phases.values()) for key, value in sorted(phases.items()) if key != "end"},
        "8-bit layers": num_8bit_layers(run),
        "graphs": num_graphs,
        "recompiled": num_compiled_graphs() - num_graphs,
    }
    shares = ", ".join(f"{key} {share:.1%}" for key, share in result["shares"].items())
    log(section, f"{name}: {result['seconds per prompt']:.3f} s per prompt, {result['peak GiB']:.1f} GiB; {shares}")
    return result


def describe_batch(batch: BatchConfig) -> str:
    return f"{batch.prompts} prompts, rollout {batch.rollout_batch_size}, micro-batch {batch.micro_batch_size}"


def free_gradients(run: Run) -> None:
    """Free gradients and cached memory after an out-of-memory error."""
    for p in run.engine.parameters.values():
        p.grad = None
    if CUDA:
        torch.cuda.empty_cache()
