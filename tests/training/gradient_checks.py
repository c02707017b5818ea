"""Checks of gradients and updates on several ranks, run by engine_ranks.py."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from engine_toys import Recorder, equal, full_weights, learn, ready, rows_of, same, share, whole
from safetensors.torch import load_file

from tastemaker.config.schema import OptimConfig
from tastemaker.training import optimizer


def gradient(folder: Path, strategy: str) -> None:
    """Loss and gradient equal those of one process, also with activation checkpointing and offloading."""
    expected = load_file(folder / "gradient.safetensors")
    loss = expected.pop("loss")
    for memory in ("keep", "checkpoint", "offload"):
        # Every rank starts from weights of its own: the first rank's must win.
        weights = full_weights(seed=dist.get_rank())
        engine = ready(weights, OptimConfig(max_grad_norm=0), strategy=strategy, activation_memory=memory)
        recorder = Recorder(engine)
        torch.testing.assert_close(learn(engine, weights, 0), loss.item())
        same(recorder.gradients, expected)


def norm(folder: Path, strategy: str) -> None:
    """The gradient norm and clipping equal those of one process."""
    expected = load_file(folder / "gradient.safetensors")
    del expected["loss"]
    length = torch.stack([g.norm() for g in expected.values()]).norm().item()
    weights = full_weights()
    engine = ready(weights, OptimConfig(max_grad_norm=length / 2), strategy=strategy)
    recorder = Recorder(engine)
    engine.backward(share(engine, weights, rows_of(engine)), last=True)
    assert abs(engine.step(0).grad_norm - length) < 1e-5 * length
    same(recorder.gradients, {name: g / 2 for name, g in expected.items()}, rtol=1e-4, atol=1e-7)


def held_back(folder: Path, strategy: str) -> None:
    """Synchronizing gradients at the last micro-batch only equals synchronizing at each, up to rounding."""
    result = []
    for always in (False, True):
        weights = full_weights()
        engine = ready(weights, strategy=strategy)
        recorder = Recorder(engine)
        for i, row in enumerate(rows_of(engine).split(1)):
            engine.backward(share(engine, weights, row), last=always or i == len(rows_of(engine)) - 1)
        engine.step(0)
        result.append(recorder.gradients)
    same(*result, rtol=1e-5, atol=1e-7)


def repeated(folder: Path, strategy: str) -> None:
    """Backward through several sequential and parallel calls of the network."""
    expected = load_file(folder / "repeated.safetensors")
    weights = full_weights()
    engine = ready(weights, OptimConfig(max_grad_norm=0), strategy=strategy, activation_memory="checkpoint")
    recorder = Recorder(engine)
    x = rows_of(engine)
    engine.backward((weights.net(weights.net(x)) + weights.net(2 * x)).sum(), last=True)
    engine.step(0)
    same(recorder.gradients, expected)


def low_precision(folder: Path, strategy: str) -> None:
    """fp16 with loss scaling, and bf16 weights, are close to the fp32 run."""
    exact = load_file(folder / "trained.safetensors")
    for settings in ({"precision": "fp16"}, {"precision": "bf16"}, {"precision": "bf16", "param_dtype": "bf16"}):
        weights = full_weights("ema")
        engine = ready(weights, strategy=strategy, **settings)
        if engine.scaler:
            engine.scaler.scale = 1024.0
        for step in range(3):
            learn(engine, weights, step)
            weights.update_snapshot("ema", 0.9)
        close = 0.05 if settings.get("trainable") else 0.02
        same({name: x.float() for name, x in whole(weights.trainable()).items()}, exact, rtol=close, atol=close)


def few_bits(folder: Path, strategy: str) -> None:
    """bf16 weights and int8 states are updated as on one process, however they are sharded."""
    optimizer.MIN_BLOCK = 1  # so that the small network's tensors count as large
    expected = load_file(folder / "few_bits.safetensors")
    weights = full_weights()
    engine = ready(
        weights, OptimConfig(lr=1e-2, state_dtype="int8"), strategy=strategy, precision="bf16", param_dtype="bf16"
    )
    for step in range(3):
        for p in engine.parameters.values():
            p.grad = torch.ones_like(p)
        engine.optimizer.update(1e-2 / (step + 1))
    equal(whole(weights.trainable()) | whole(engine.optimizer.state_dict()), expected)


def reduced(folder: Path, strategy: str) -> None:
    """Gradients are reduced in `engine.reduce_dtype`."""
    expected = load_file(folder / "gradient.safetensors")
    del expected["loss"]
    weights = full_weights()
    engine = ready(weights, OptimConfig(max_grad_norm=0), strategy=strategy, reduce_dtype="bf16")
    recorder = Recorder(engine)
    learn(engine, weights, 0)
    same(recorder.gradients, expected, rtol=0.05, atol=0.02)
    assert all(torch.equal(g, g.bfloat16().float()) for g in recorder.gradients.values())


def frozen_unused(folder: Path, strategy: str) -> None:
    """A parameter that no rank uses gets no gradient, and so no weight decay."""
    weights = full_weights()
    engine = ready(weights, strategy="replicated")
    x = rows_of(engine)
    value = weights.net.enter(x).sum() if engine.comm.rank else weights.net.leave(weights.net.enter(x)).sum()
    engine.backward(value, last=True)
    recorder = Recorder(engine)
    engine.step(0)
    assert set(recorder.gradients) == {"enter.weight", "enter.bias", "leave.weight", "leave.bias"}
