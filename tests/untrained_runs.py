"""Small runs as training leaves them, to be exported, and the pictures that they paint."""

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
from tastemaker.training.resume import write_run_config
from tastemaker.training.run import Run

PROMPTS = ["a red cat", "two dogs"]
PLAIN = GaussianProcess(RectifiedFlow(dynamic_shift(tokens=4)), steps=3)


@dataclass(frozen=True)
class UntrainedRun:
    """A run that was trained for a moment, by making its numbers up."""

    run: Run
    config: RunConfig

    def noise(self) -> Tensor:
        shape = self.run.policy.model.shape
        return torch.randn(len(PROMPTS), *shape, generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def pixels(self, process: GaussianProcess = PLAIN) -> Tensor:
        model = self.run.policy.model
        return model.decode(sample_latents(model, process, PROMPTS, self.noise()))[:, 0]


def make_untrained_run(folder: Path, recipe: str, *settings: str) -> UntrainedRun:
    from tastemaker.config.build import build

    small = [
        "engine={device: cpu, precision: fp32, trainable: fp32, memory: keep, compile: false}",
        "batch={prompts: 2}",
    ]
    rewards = ["rewards=null", "rewards={color: {type: color}}", "data={type: prompts, prompts: [a red, a blue]}"]
    config = load(recipe, [*small, *rewards, f"output={folder}", "name=run", *settings])
    run = build(config)
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in run.policy.weights.trainable().values():
            p.add_(0.05 * torch.randn(p.shape, generator=chance))
    run.save(1)
    write_run_config(config, run.directory)
    rows = [{"step": 1, "reward": 0.25, "loss": 1.0}, {"step": 2, "reward": 0.5, "loss": 0.5}]
    (run.directory / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return UntrainedRun(run, config)
