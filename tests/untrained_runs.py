"""Small runs whose weights are perturbed instead of trained, for tests of exports."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from tiny_pipelines import sample_latents
from torch import Tensor

from tastemaker.config.load import load
from tastemaker.config.schema import RunConfig
from tastemaker.models.pipeline_components import dynamic_shift
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import RectifiedFlow
from tastemaker.training.run import Run
from tastemaker.training.run_directory import write_run_config

PROMPTS = ["a red cat", "two dogs"]
PLAIN = GaussianProcess(RectifiedFlow(dynamic_shift(tokens=4)), num_steps=3)


@dataclass(frozen=True)
class UntrainedRun:
    """A saved run with perturbed weights."""

    run: Run
    config: RunConfig

    def noise(self) -> Tensor:
        shape = self.run.policy.model.shape
        return torch.randn(len(PROMPTS), *shape, generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def pixels(self, process: GaussianProcess = PLAIN) -> Tensor:
        model = self.run.policy.model
        return model.decode(sample_latents(model, process, PROMPTS, self.noise()))[:, 0]


def save_perturbed_run(config: RunConfig, scale: float = 0.05) -> Run:
    """Build a run, add noise to its trainable weights, and write its checkpoint, configuration and metrics."""
    from tastemaker.config.build import build

    run, generator = build(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in run.policy.weights.trainable().values():
            p.add_(scale * torch.randn(p.shape, generator=generator))
    run.save(1)
    write_run_config(config, run.directory)
    rows = [{"step": 1, "reward/mean": 0.25, "loss": 1.0}, {"step": 2, "reward/mean": 0.5, "loss": 0.5}]
    (run.directory / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return run


def make_untrained_run(folder: Path, recipe: str, *overrides: str) -> UntrainedRun:
    small = [
        "engine={device: cpu, precision: fp32, param_dtype: fp32, activation_memory: keep, compile: false}",
        "batch={prompts: 2}",
    ]
    rewards = ["rewards=null", "rewards={color: {type: color}}", "data={type: prompts, prompts: [a red, a blue]}"]
    config = load(recipe, [*small, *rewards, f"output_dir={folder}", "name=run", *overrides])
    return UntrainedRun(save_perturbed_run(config), config)
