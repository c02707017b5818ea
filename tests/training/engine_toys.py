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


class Net(nn.Module):
    """A network whose widths two and four ranks cannot split evenly."""

    def __init__(self, width: int = 5, depth: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(3, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.leave = nn.Linear(width, 3)
        self.register_buffer("shift", torch.ones(1))
        self.register_buffer("mask", torch.tensor([True]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


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


def environment() -> dict[str, str]:
    """Return the environment of a subprocess that imports these files and the package."""
    here = Path(__file__).parent
    paths = [str(here.parents[1]), str(here), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def network(seed: int = 0) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net()


def data() -> Tensor:
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(7))


def rows_of(engine: Engine) -> Tensor:
    count = ROWS // engine.comm.world_size
    return data().to(engine.device)[engine.comm.rank * count : (engine.comm.rank + 1) * count]


def ready(weights: Weights, optim: OptimConfig = OptimConfig(lr=1e-2), steps: int = 100, **settings: object) -> Engine:
    engine = Engine(EngineConfig(device="cpu", **settings), optim, steps, seed=3)  # type: ignore[arg-type]
    engine.prepare(weights)
    return engine


def full_weights(*snapshots: str, seed: int = 0) -> FullWeights:
    return FullWeights(network(seed), snapshots)


def share(engine: Engine, weights: Weights, x: Tensor) -> Tensor:
    """Return this rank's share of the mean loss over all samples."""
    with engine.autocast(), engine.offload_activations():
        return (weights.net(x).float() - x).square().mean(1).sum() / ROWS


def learn(engine: Engine, weights: Weights, step: int, parts: int = 2) -> float:
    """Update on micro-batches of this rank's samples; return the loss over all ranks."""
    pieces = rows_of(engine).chunk(parts)
    total = torch.zeros(())
    for i, piece in enumerate(pieces):
        value = share(engine, weights, piece)
        engine.backward(value, last=i == len(pieces) - 1)
        total += value.detach()
    engine.step(step)
    return float(engine.comm.sum(total))


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: distributed.full_tensor(x).detach().clone() for name, x in tensors.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor], **tolerance: float) -> None:
    assert a.keys() == b.keys(), (a.keys(), b.keys())
    for name in a:
        torch.testing.assert_close(a[name], b[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    same(a, b, rtol=0, atol=0)
