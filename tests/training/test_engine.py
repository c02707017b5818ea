"""The engine on one process: precision, memory, updates and refused settings."""

from __future__ import annotations

import errno

import pytest
import torch
from engine_toys import Recorder, data, equal, full_weights, learn, network, ready, rows_of, same, share, whole
from torch import nn

from tastemaker.config.schema import EngineConfig, OptimConfig
from tastemaker.core.weights import FullWeights
from tastemaker.models.flux import FluxSpec
from tastemaker.training import activation_memory
from tastemaker.training.engine import Engine, TrainingError, explain_error
from tastemaker.training.optimizer import TorchAdamW
from tastemaker.training.precision import MAX_SKIPPED_UPDATES, LossScaler


def gradients(**settings: object) -> dict[str, torch.Tensor]:
    weights = full_weights()
    engine = ready(weights, OptimConfig(max_grad_norm=0), **settings)
    recorder = Recorder(engine)
    learn(engine, weights, 0)
    return recorder.gradients


def test_gradient_equals_that_of_the_mean_loss() -> None:
    net = network()
    (net(data()) - data()).square().mean().backward()
    same(gradients(), {name: p.grad for name, p in net.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("kept", ["checkpoint", "offload"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activation_checkpointing_and_offloading_keep_the_gradient(kept: str, precision: str) -> None:
    equal(gradients(activation_memory=kept, precision=precision), gradients(precision=precision))


def test_checkpointing_frees_the_activations_of_blocks() -> None:
    weights = full_weights()
    engine = ready(weights, activation_memory="checkpoint")
    calls: list[int] = []
    weights.net.blocks[0].up.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        weights.net(data())
    assert len(calls) == 1
    engine.backward(share(engine, weights, data()), last=True)
    assert len(calls) == 3


def test_network_without_blocks_is_checkpointed_as_a_whole() -> None:
    weights = FullWeights(nn.Linear(3, 3))
    engine = ready(weights, activation_memory="checkpoint")
    learn(engine, weights, 0)


def test_repeated_blocks_are_the_elements_of_the_outermost_lists() -> None:
    inner = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]), nn.Linear(2, 2))
    net = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([inner, nn.Identity(), nn.ModuleList([nn.Linear(2, 2)])]))
    assert activation_memory.repeated_blocks(net) == [inner, net[1][2][0]]


def test_fp32_precision_is_restored_after_autocast() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    engine = ready(full_weights(), precision="tf32")
    with engine.autocast():
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == before


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_autocast_does_not_cache_swapped_weights(precision: str) -> None:
    weights = full_weights("old")
    engine = ready(weights, precision=precision)
    with engine.autocast(), torch.no_grad():
        start = weights.net(data())
        for p in weights.trainable().values():
            p.add_(0.5)
    with engine.autocast():
        before = weights.net(data())
        with weights.use("old"):
            old = weights.net(data())
        live = weights.net(data())
        assert torch.equal(old, start)
        assert torch.equal(live, before)
        live.sum().backward()
    assert all(p.grad is not None for p in weights.trainable().values())


def test_loss_scale_does_not_change_the_update() -> None:
    weights = full_weights()
    engine = ready(weights, OptimConfig(max_grad_norm=0), precision="fp16")
    assert engine.scaler is not None
    engine.scaler.scale = 1024.0
    recorder = Recorder(engine)
    learn(engine, weights, 0)
    same(recorder.gradients, gradients(), rtol=0.02, atol=0.005)


def test_fp16_overflow_skips_the_update_and_halves_the_scale() -> None:
    weights = full_weights()
    engine = ready(weights, precision="fp16")
    assert engine.scaler is not None
    before = whole(weights.trainable())
    engine.scaler.scale = 1e30
    engine.backward(share(engine, weights, data()), last=True)
    assert engine.step(0).skipped
    assert engine.scaler.scale == 5e29
    equal(whole(weights.trainable()), before)
    engine.scaler.scale = 1024.0
    engine.backward(share(engine, weights, data()), last=True)
    assert not engine.step(0).skipped
    assert engine.scaler.skipped == 0


def test_twenty_skipped_updates_stop_the_run() -> None:
    weights = full_weights()
    engine = ready(weights, precision="fp16")
    for _ in range(MAX_SKIPPED_UPDATES - 1):
        engine.backward(share(engine, weights, data()) * float("inf"), last=True)
        assert engine.step(0).skipped
    engine.backward(share(engine, weights, data()) * float("inf"), last=True)
    with pytest.raises(TrainingError, match="20 updates"):
        engine.step(0)


def test_loss_scale_doubles_after_patience() -> None:
    scaler = LossScaler(scale=2.0, patience=3)
    for _ in range(3):
        scaler.on_success()
    assert scaler.state_dict() == {"scale": 4.0, "good": 0, "skipped": 0}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_loss_is_refused_before_the_update(value: float) -> None:
    weights = full_weights()
    engine = ready(weights)
    learn(engine, weights, 0)
    before = whole(weights.trainable()) | whole(engine.optimizer.state_dict())
    engine.backward(share(engine, weights, rows_of(engine)) * value, last=True)
    with pytest.raises(TrainingError, match="step 7 "):
        engine.step(7)
    equal(whole(weights.trainable()) | whole(engine.optimizer.state_dict()), before)


def test_non_finite_gradient_is_refused() -> None:
    weights = full_weights()
    engine = ready(weights)
    # The square root has an infinite slope at zero.
    engine.backward((weights.net(data()) * 0).sum().sqrt(), last=True)
    with pytest.raises(TrainingError, match="the gradient norm of step 0"):
        engine.step(0)


def fused(engine: Engine, *, waits: bool) -> TorchAdamW:
    """Use the fused AdamW of GPUs; with `waits`, the host decides about the update as without it."""
    engine.optimizer = TorchAdamW(engine.parameters, engine.optim, fused=True)
    engine.optimizer.fused = not waits
    return engine.optimizer


@pytest.mark.parametrize("clip", [0.0, 0.01, 100.0])
def test_update_decided_on_the_device_is_bit_identical(clip: float) -> None:
    ends = []
    for waits in (True, False):
        weights = full_weights()
        engine = ready(weights, OptimConfig(lr=1e-2, max_grad_norm=clip))
        fused(engine, waits=waits)
        norms = [learn(engine, weights, step) for step in range(3)]
        ends.append((norms, whole(weights.trainable()) | whole(engine.optimizer.state_dict())))
    assert ends[0][0] == ends[1][0]
    equal(ends[0][1], ends[1][1])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_update_refused_on_the_device_raises_when_its_result_is_read(value: float) -> None:
    weights = full_weights()
    engine = ready(weights)
    fused(engine, waits=False)
    learn(engine, weights, 0)
    before = whole(weights.trainable()) | whole(engine.optimizer.state_dict())
    engine.backward(share(engine, weights, rows_of(engine)) * value, last=True)
    launched = engine.launch_step(7)
    equal(whole(weights.trainable()) | whole(engine.optimizer.state_dict()), before)
    with pytest.raises(TrainingError, match="step 7 "):
        launched.result()
    learn(engine, weights, 8)
    assert not all(x.equal(before[key]) for key, x in whole(weights.trainable()).items())


def test_loss_without_gradient_is_refused() -> None:
    engine = ready(full_weights())
    with pytest.raises(TrainingError, match="no trainable weight"):
        engine.backward(torch.ones(()), last=True)


def test_gradient_clipping_bounds_the_norm() -> None:
    weights = full_weights()
    engine = ready(weights, OptimConfig(lr=0.5, max_grad_norm=0.01, warmup_steps=2))
    recorder = Recorder(engine)
    engine.backward(share(engine, weights, data()), last=True)
    update = engine.step(0)
    assert update.grad_norm > 0.01
    assert update.lr == 0.25
    assert torch.stack([g.norm() for g in recorder.gradients.values()]).norm().item() == pytest.approx(0.01, rel=1e-3)


def test_frozen_parameters_keep_their_dtype_and_have_no_optimizer_state() -> None:
    net = network().to(torch.bfloat16)
    weights = FullWeights(net)
    engine = ready(weights)
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert engine.placement().dtype == torch.float32
    assert set(engine.parameters) == {name for name, _ in net.named_parameters()}


def test_network_is_loaded_in_its_param_dtype() -> None:
    for trainable, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        engine = Engine(EngineConfig(device="cpu", precision="bf16", param_dtype=trainable), OptimConfig(), 1, 0)  # type: ignore[arg-type]
        for adapts, expected in ((False, dtype), (True, torch.bfloat16)):
            placement = engine.placement(is_adapter=adapts)
            model = FluxSpec().tiny().load(placement)
            assert {p.dtype for p in model.net.parameters()} == {expected}
            assert {p.dtype for p in model.autoencoder.net.parameters()} == {torch.bfloat16}


def test_ema_is_fp32_if_weights_are_bf16() -> None:
    weights = full_weights("reference", "ema")
    ready(weights, precision="bf16", param_dtype="bf16")
    assert weights.snapshot_tensors()["ema"]["enter.weight"].dtype == torch.float32
    assert weights.snapshot_tensors()["reference"]["enter.weight"].dtype == torch.bfloat16
    with torch.no_grad():
        weights.net.enter.weight.fill_(1.0)
    start = weights.snapshot_tensors()["ema"]["enter.weight"].clone()
    weights.update_snapshot("ema", 0.999)
    assert torch.allclose(weights.snapshot_tensors()["ema"]["enter.weight"] - start, (1 - start) * 1e-3, atol=1e-6)


def test_snapshots_on_the_cpu_are_copies() -> None:
    weights = FullWeights(network(), ("old",), True)
    ready(weights)
    with torch.no_grad():
        weights.net.enter.weight.fill_(1.0)
    assert not torch.equal(weights.snapshot_tensors()["old"]["enter.weight"], weights.net.enter.weight)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"device": "mps"}, "engine.device is mps, but PyTorch .* sees no such device here; use --device (cpu|cuda)"),
        (
            {"attention_backend": "xformers"},
            "xformers, which is not installed; run `pip install xformers` or set it to auto",
        ),
        ({"attention_backend": "flash", "precision": "bf16"}, "flash, which this PyTorch does not offer on cpu"),
        ({"attention_backend": "cudnn", "precision": "bf16"}, "cudnn, which this PyTorch does not offer on cpu"),
        ({"param_dtype": "bf16", "precision": "fp32"}, "engine.param_dtype is bf16 but engine.precision is fp32"),
    ],
)
def test_unsupported_engine_settings_are_refused(settings: dict[str, str], sentence: str) -> None:
    with pytest.raises(TrainingError, match=sentence):
        Engine(EngineConfig(**{"device": "cpu"} | settings), OptimConfig(), 1, 0)  # type: ignore[arg-type]


def test_out_of_memory_and_full_disk_are_explained() -> None:
    memory_ = explain_error(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert memory_ is not None
    assert "lower batch.micro_batch_size" in memory_
    disk = explain_error(OSError(errno.ENOSPC, "No space left on device", "runs/a"))
    assert disk is not None
    assert "the disk is full while writing runs/a: free some space" in disk
    assert explain_error(ValueError("other")) is None
