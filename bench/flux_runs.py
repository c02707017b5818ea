"""What the bench of FLUX and SD3.5 trains: each section's run, at full size and random weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from reward_setup import PROMPTS, assembled

from tastemaker.config.schema import EngineConfig, OptimConfig, RewardConfig, RunConfig
from tastemaker.core.lora import Lora
from tastemaker.core.policy import Guidance
from tastemaker.core.weights import FullFinetuning
from tastemaker.data.embedding_store import ShardedEmbeddingStore
from tastemaker.data.prompts import InlinePrompts
from tastemaker.models.flux import Flux
from tastemaker.models.sd3 import Sd3
from tastemaker.objectives.grpo import GRPO
from tastemaker.objectives.srpo import SRPO
from tastemaker.processes.dynamics import FlowSDE
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import RectifiedFlow
from tastemaker.rewards.hps import Hps
from tastemaker.training.run import Run


def shelf(folder: Path, words: tuple[int, int], pooled: int) -> Path:
    """Random embeddings of the prompts, as `tastemaker embed` would write them: no text encoder is loaded."""
    texts = [*PROMPTS, ""]
    draw = torch.Generator().manual_seed(0)
    tensors = {
        "words": torch.randn(len(texts), *words, generator=draw).bfloat16(),
        "pooled": torch.randn(len(texts), pooled, generator=draw).bfloat16(),
    }
    ShardedEmbeddingStore(folder, {}).add(texts, tensors)
    return folder


def flux(folder: Path, side: int, tiny: bool) -> Flux:
    spec = Flux(weights="random", height=side, width=side, guidance=3.5, rollout_guidance=1.0, truncate=True)
    return spec.tiny() if tiny else replace(spec, embeddings=shelf(folder, (512, 4096), 768))


def sd35(folder: Path, side: int, tiny: bool) -> Sd3:
    spec = Sd3(weights="random", height=side, width=side)
    return spec.tiny() if tiny else replace(spec, embeddings=shelf(folder, (333, 4096), 2048))


@dataclass(frozen=True)
class Options:
    tiny: bool
    attention: str
    compile: bool
    every: bool  # batch, not only the first that fits
    deadline: float  # of time.monotonic()
    folder: Path


def settings(options: Options, section: str) -> RunConfig:
    """The run of a section, as a recipe would describe it."""
    engine = EngineConfig(
        precision="bf16",
        trainable="bf16" if section in ("full", "parts") else "fp32",
        memory="recompute",
        attention=options.attention,  # type: ignore[arg-type]
        compile=options.compile,
    )
    steps = 4 if options.tiny else 25
    base = RunConfig(
        model=flux(options.folder, 720, options.tiny),
        process=GaussianProcess(RectifiedFlow(shift=3.0), steps=steps),
        objective=SRPO(grid=50),
        data=InlinePrompts(PROMPTS),
        tuning=Lora(rank=16) if section != "full" else FullFinetuning(),
        rewards={"hps": RewardConfig(Hps())},
        optim=OptimConfig(lr=1e-6, clip=0.1, moments="int8" if section in ("full", "parts") else "fp32"),
        engine=engine,
        steps=1000,
    )
    if section in ("full", "lora"):
        return base
    if section == "parts":
        return replace(base, tuning=FullFinetuning())
    process = GaussianProcess(RectifiedFlow(shift=3.0), FlowSDE(0.7), 4 if options.tiny else 10)
    chosen = replace(base, process=process, objective=GRPO(group=4 if options.tiny else 8, clip=1e-4))
    if section == "grpo-flux":
        told = flux(options.folder, 512, options.tiny)
        return replace(chosen, model=replace(told, rollout_guidance=None, truncate=False))
    return replace(chosen, model=sd35(options.folder, 512, options.tiny), guidance=Guidance(4.5))


def built(options: Options, section: str) -> Run:
    return assembled(settings(options, section), section, options.folder, options.tiny)
