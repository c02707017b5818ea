"""Checks of gradients and updates on several ranks, run by engine_ranks.py."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from engine_toys import (
    Recorder,
    assert_close,
    assert_equal,
    build_engine,
    full_tensors,
    full_weights,
    local_loss,
    local_rows,
    train_step,
)
from safetensors.torch import load_file

from tastemaker.config.schema import OptimConfig
from tastemaker.training import optimizer


def gradient(directory: Path, strategy: str) -> None:
    """Loss and gradient equal those of one process, also with activation checkpointing and offloading."""
    expected = load_file(directory / "gradient.safetensors")
    loss = expected.pop("loss")
    for activation_memory in ("keep", "checkpoint", "offload"):
        # Every rank starts from weights of its own: the first rank's must win.
        weights = full_weights(seed=dist.get_rank())
        engine = build_engine(
            weights, OptimConfig(max_grad_norm=0), strategy=strategy, activation_memory=activation_memory
        )
        recorder = Recorder(engine)
        torch.testing.assert_close(train_step(engine, weights, 0), loss.item())
        assert_close(recorder.gradients, expected)


def norm(directory: Path, strategy: str) -> None:
    """The gradient norm and clipping equal those of one process."""
    expected = load_file(directory / "gradient.safetensors")
    del expected["loss"]
    grad_norm = torch.stack([g.norm() for g in expected.values()]).norm().item()
    weights = full_weights()
    engine = build_engine(weights, OptimConfig(max_grad_norm=grad_norm / 2), strategy=strategy)
    recorder = Recorder(engine)
    engine.backward(local_loss(engine, weights, local_rows(engine)), last=True)
    assert abs(engine.step(0).grad_norm - grad_norm) < 1e-5 * grad_norm
    assert_close(recorder.gradients, {name: g / 2 for name, g in expected.items()}, rtol=1e-4, atol=1e-7)


def last_micro_batch_sync(directory: Path, strategy: str) -> None:
    """Synchronizing gradients at the last micro-batch only equals synchronizing at each, up to rounding."""
    gradients = []
    for every_micro_batch in (False, True):
        weights = full_weights()
        engine = build_engine(weights, strategy=strategy)
        recorder = Recorder(engine)
        for i, row in enumerate(local_rows(engine).split(1)):
            engine.backward(
                local_loss(engine, weights, row), last=every_micro_batch or i == len(local_rows(engine)) - 1
            )
        engine.step(0)
        gradients.append(recorder.gradients)
    assert_close(*gradients, rtol=1e-5, atol=1e-7)


def repeated_calls(directory: Path, strategy: str) -> None:
    """Backward through several sequential and parallel calls of the network."""
    expected = load_file(directory / "repeated_calls.safetensors")
    weights = full_weights()
    engine = build_engine(weights, OptimConfig(max_grad_norm=0), strategy=strategy, activation_memory="checkpoint")
    recorder = Recorder(engine)
    x = local_rows(engine)
    engine.backward((weights.net(weights.net(x)) + weights.net(2 * x)).sum(), last=True)
    engine.step(0)
    assert_close(recorder.gradients, expected)


def low_precision(directory: Path, strategy: str) -> None:
    """fp16 with loss scaling, and bf16 weights, are close to the fp32 run."""
    expected = load_file(directory / "trained.safetensors")
    for settings in ({"precision": "fp16"}, {"precision": "bf16"}, {"precision": "bf16", "param_dtype": "bf16"}):
        weights = full_weights("ema")
        engine = build_engine(weights, strategy=strategy, **settings)
        if engine.scaler:
            engine.scaler.scale = 1024.0
        for step in range(3):
            train_step(engine, weights, step)
            weights.update_snapshot("ema", 0.9)
        assert_close(
            {name: x.float() for name, x in full_tensors(weights.trainable()).items()}, expected, rtol=0.02, atol=0.02
        )


def low_bit_states(directory: Path, strategy: str) -> None:
    """bf16 weights and int8 states are updated as on one process, however they are sharded."""
    optimizer.MIN_BLOCK = 1  # so that the small network's tensors count as large
    expected = load_file(directory / "low_bit_states.safetensors")
    weights = full_weights()
    engine = build_engine(
        weights, OptimConfig(lr=1e-2, state_dtype="int8"), strategy=strategy, precision="bf16", param_dtype="bf16"
    )
    for step in range(3):
        for p in engine.parameters.values():
            p.grad = torch.ones_like(p)
        engine.optimizer.update(1e-2 / (step + 1))
    assert_equal(full_tensors(weights.trainable()) | full_tensors(engine.optimizer.state_dict()), expected)


def offload_equals_fsdp(directory: Path, strategy: str) -> None:
    """With parameters in host memory, updates and the EMA equal those without, to the bit."""
    results = []
    for each in ("fsdp", strategy):
        weights = full_weights("ema")
        engine = build_engine(weights, OptimConfig(lr=1e-2, weight_decay=0.1), strategy=each)
        for step in range(2):
            train_step(engine, weights, step, num_micro_batches=1)
            weights.update_snapshot("ema", 0.9)
        state = full_tensors(engine.optimizer.state_dict())
        results.append(full_tensors(weights.trainable()) | full_tensors(weights.snapshot_tensors()["ema"]) | state)
    assert_equal(*results)


def reduce_dtype(directory: Path, strategy: str) -> None:
    """Gradients are reduced in `engine.reduce_dtype`."""
    expected = load_file(directory / "gradient.safetensors")
    del expected["loss"]
    weights = full_weights()
    engine = build_engine(weights, OptimConfig(max_grad_norm=0), strategy=strategy, reduce_dtype="bf16")
    recorder = Recorder(engine)
    train_step(engine, weights, 0)
    assert_close(recorder.gradients, expected, rtol=0.05, atol=0.02)
    assert all(torch.equal(g, g.bfloat16().float()) for g in recorder.gradients.values())


def unused_parameters(directory: Path, strategy: str) -> None:
    """A parameter that no rank uses gets no gradient, and so no weight decay."""
    weights = full_weights()
    engine = build_engine(weights, strategy="replicated")
    x = local_rows(engine)
    loss = weights.net.proj_in(x).sum() if engine.comm.rank else weights.net.proj_out(weights.net.proj_in(x)).sum()
    engine.backward(loss, last=True)
    recorder = Recorder(engine)
    engine.step(0)
    assert set(recorder.gradients) == {"proj_in.weight", "proj_in.bias", "proj_out.weight", "proj_out.bias"}
