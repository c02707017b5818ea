"""A small network and helpers for tests of the engine, on one process or several."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn

from tastemaker.config.schema import EngineConfig, OptimConfig
from tastemaker.core.weights import FullWeights, Weights
from tastemaker.training import distributed
from tastemaker.training.engine import Engine

ROWS = 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class ResidualMLP(nn.Module):
    """A network whose widths two and four ranks cannot split evenly."""

    def __init__(self, width: int = 5, depth: int = 3) -> None:
        super().__init__()
        self.proj_in = nn.Linear(3, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.proj_out = nn.Linear(width, 3)
        self.register_buffer("shift", torch.ones(1))
        self.register_buffer("mask", torch.tensor([True]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj_in(x) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.proj_out(x)


class Recorder:
    """An optimizer that records gradients and updates nothing."""

    def __init__(self, engine: Engine) -> None:
        self.parameters, self.gradients = engine.parameters, {}
        engine.optimizer = self

    def update(self, lr: float) -> None:
        self.gradients = {
            name: distributed.full_tensor(p.grad).clone() for name, p in self.parameters.items() if p.grad is not None
        }

    def state_dict(self) -> dict[str, Tensor]:
        return {}


def subprocess_environment() -> dict[str, str]:
    """Return the environment of a subprocess that imports these files and the package."""
    here = Path(__file__).parent
    paths = [str(here.parents[1]), str(here), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def build_network(seed: int = 0) -> ResidualMLP:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return ResidualMLP()


def make_inputs() -> Tensor:
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(7))


def local_rows(engine: Engine) -> Tensor:
    count = ROWS // engine.comm.world_size
    return make_inputs().to(engine.device)[engine.comm.rank * count : (engine.comm.rank + 1) * count]


def build_engine(
    weights: Weights, optim: OptimConfig = OptimConfig(lr=1e-2), steps: int = 100, **settings: object
) -> Engine:
    """Return an engine with prepared weights; the strategy "cpu_offload" is fsdp with its setting of that name."""
    if settings.get("strategy") == "cpu_offload":
        settings |= {"strategy": "fsdp", "cpu_offload": True}
    engine = Engine(EngineConfig(device="cpu", **settings), optim, steps, seed=3)  # type: ignore[arg-type]
    engine.prepare(weights)
    return engine


def full_weights(*snapshots: str, seed: int = 0) -> FullWeights:
    return FullWeights(build_network(seed), snapshots)


def local_loss(engine: Engine, weights: Weights, x: Tensor) -> Tensor:
    """Return this rank's share of the mean loss over all samples."""
    with engine.autocast(), engine.offload_activations():
        return (weights.net(x).float() - x).square().mean(1).sum() / ROWS


def train_step(engine: Engine, weights: Weights, step: int, num_micro_batches: int = 2) -> float:
    """Update on micro-batches of this rank's samples; return the loss over all ranks."""
    micro_batches = local_rows(engine).chunk(num_micro_batches)
    total = torch.zeros(())
    for i, micro_batch in enumerate(micro_batches):
        loss = local_loss(engine, weights, micro_batch)
        engine.backward(loss, last=i == len(micro_batches) - 1)
        total += loss.detach()
    engine.step(step)
    return float(engine.comm.sum(total))


def full_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: distributed.full_tensor(x).detach().clone() for name, x in tensors.items()}


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor], **tolerance: float) -> None:
    assert a.keys() == b.keys(), (a.keys(), b.keys())
    for name in a:
        torch.testing.assert_close(a[name], b[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert_close(a, b, rtol=0, atol=0)
